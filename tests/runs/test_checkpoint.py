import pytest
import torch

from ddp_lab.errors import BadInput
from ddp_lab.runs import checkpoint

STATE = {
    "model": {"weight": torch.arange(6.0).view(2, 3)},
    "optimizer": {"state": {}, "param_groups": [{"lr": 0.1}]},
    "schedule": {"last_epoch": 3},
    "progress": {"epoch": 1, "step": 3},
    "config": {"lr": 0.1, "mean": [0.1, 0.2, 0.3]},
    "data": "70 images, sha256 0123456789abcdef",
}


def at(step):
    return {**STATE, "progress": {"epoch": 1, "step": step}}


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_saved_is_loaded(tmp_path):
    path = checkpoint.save(tmp_path, STATE)
    state = checkpoint.load(path)
    assert torch.equal(state["model"]["weight"], STATE["model"]["weight"])
    assert {k: state[k] for k in STATE if k != "model"} == {
        k: STATE[k] for k in STATE if k != "model"
    }
    assert names(tmp_path) == ["checkpoint-00000003.pt", "checkpoint.pt"]
    assert (tmp_path / "checkpoint.pt").samefile(path)


def test_plain_torch_reads_it_without_the_lab(tmp_path):
    checkpoint.save(tmp_path, STATE)
    path = tmp_path / "checkpoint.pt"
    state = torch.load(path, weights_only=True)
    assert state["format"] == 1
    assert list(state["model"]) == ["weight"]


def test_missing(tmp_path):
    with pytest.raises(BadInput, match="no checkpoint at"):
        checkpoint.load(tmp_path / "checkpoint.pt")


@pytest.mark.parametrize("keep", [0, 10, 500, -1])
def test_torn(tmp_path, keep):
    path = checkpoint.save(tmp_path, STATE)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(BadInput, match="is damaged or none of ours"):
        checkpoint.load(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"epoch": 3, "state_dict": {}}, "was not written by ddp_lab"),
        (torch.zeros(3), "was not written by ddp_lab"),
        ({"format": 2}, "format 2, this version reads up to 1: update ddp_lab"),
        ({"format": 1, "model": {}}, "lacks \\['config', 'data', 'optimizer'"),
    ],
)
def test_foreign(tmp_path, content, message):
    path = tmp_path / "checkpoint.pt"
    torch.save(content, path)
    with pytest.raises(BadInput, match=message):
        checkpoint.load(path)


class Attack:
    def __reduce__(self):
        return (print, ("code from a checkpoint was run",))


def test_code_in_a_checkpoint_is_not_run(tmp_path, capsys):
    path = tmp_path / "checkpoint.pt"
    torch.save({"format": 1, "model": Attack()}, path)
    with pytest.raises(BadInput, match="damaged or none of ours"):
        checkpoint.load(path)
    assert "was run" not in capsys.readouterr().out


def test_full_disk_keeps_the_old_one(tmp_path, monkeypatch):
    checkpoint.save(tmp_path, STATE)
    before = names(tmp_path)

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    message = "No space left on device; the one after step 3 is still there; make room"
    with pytest.raises(BadInput, match=message):
        checkpoint.save(tmp_path, at(5))
    assert names(tmp_path) == before
    assert checkpoint.load_latest(tmp_path)["progress"] == STATE["progress"]


def test_the_last_ones_are_kept(tmp_path):
    for step in (3, 6, 9, 12):
        checkpoint.save(tmp_path, at(step), keep=3)
    assert checkpoint.saved_steps(tmp_path) == [12, 9, 6]
    assert checkpoint.load(tmp_path / "checkpoint.pt")["progress"]["step"] == 12
    # a run that goes on from 6 has left its old future
    checkpoint.save(tmp_path, at(8), keep=3)
    assert checkpoint.saved_steps(tmp_path) == [8, 6]


def test_what_a_killed_process_left_half_written_is_removed(tmp_path):
    (tmp_path / "checkpoint-00000002.pt.tmp").write_bytes(b"half")
    checkpoint.save(tmp_path, STATE)
    assert names(tmp_path) == ["checkpoint-00000003.pt", "checkpoint.pt"]


@pytest.mark.parametrize("damage", [b"", b"half", None])
def test_the_one_before_a_damaged_one(tmp_path, damage):
    checkpoint.save(tmp_path, at(3))
    newest = checkpoint.save(tmp_path, at(6))
    if damage is None:
        torch.save({"state_dict": {}}, newest)
    else:
        newest.write_bytes(damage)
    with pytest.warns(UserWarning, match="00000006.pt .*; trying the one before"):
        state = checkpoint.load_latest(tmp_path)
    assert state["progress"]["step"] == 3


def test_none_and_none_that_can_be_read(tmp_path):
    assert checkpoint.load_latest(tmp_path / "nowhere") is None
    assert checkpoint.load_latest(tmp_path) is None
    checkpoint.save(tmp_path, STATE).write_bytes(b"")
    with pytest.raises(BadInput, match="is damaged or none of ours"):
        checkpoint.load_latest(tmp_path)


def test_a_newer_version_is_not_passed_over(tmp_path):
    checkpoint.save(tmp_path, at(3))
    torch.save({"format": 2}, checkpoint.save(tmp_path, at(6)))
    with pytest.raises(BadInput, match="update ddp_lab"):
        checkpoint.load_latest(tmp_path)


def test_copied_under_its_fixed_name_alone(tmp_path):
    content = checkpoint.save(tmp_path, STATE).read_bytes()
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "checkpoint.pt").write_bytes(content)
    assert checkpoint.load_latest(tmp_path / "copy")["progress"]["step"] == 3


def test_file_system_without_links(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr("os.link", refuse)
    checkpoint.save(tmp_path, STATE)
    assert checkpoint.load(tmp_path / "checkpoint.pt")["progress"]["step"] == 3
