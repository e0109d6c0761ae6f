import pytest
import torch

from ddp_lab import checkpoint
from ddp_lab.errors import BadInput

STATE = {
    "model": {"weight": torch.arange(6.0).view(2, 3)},
    "optimizer": {"state": {}, "param_groups": [{"lr": 0.1}]},
    "schedule": {"last_epoch": 3},
    "progress": {"epoch": 1, "step": 3},
    "config": {"lr": 0.1, "mean": [0.1, 0.2, 0.3]},
}


def test_saved_is_loaded(tmp_path):
    path = tmp_path / "checkpoint.pt"
    checkpoint.save(path, STATE)
    state = checkpoint.load(path)
    assert torch.equal(state["model"]["weight"], STATE["model"]["weight"])
    assert {k: state[k] for k in STATE if k != "model"} == {
        k: STATE[k] for k in STATE if k != "model"
    }
    assert list(tmp_path.iterdir()) == [path]


def test_plain_torch_reads_it_without_the_lab(tmp_path):
    path = tmp_path / "checkpoint.pt"
    checkpoint.save(path, STATE)
    state = torch.load(path, weights_only=True)
    assert state["format"] == 1
    assert list(state["model"]) == ["weight"]


def test_missing(tmp_path):
    with pytest.raises(BadInput, match="no checkpoint at"):
        checkpoint.load(tmp_path / "checkpoint.pt")


@pytest.mark.parametrize("keep", [0, 10, 500, -1])
def test_torn(tmp_path, keep):
    path = tmp_path / "checkpoint.pt"
    checkpoint.save(path, STATE)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(BadInput, match="is damaged or none of ours"):
        checkpoint.load(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"epoch": 3, "state_dict": {}}, "was not written by ddp_lab"),
        (torch.zeros(3), "was not written by ddp_lab"),
        ({"format": 2}, "format 2, this version reads up to 1: update ddp_lab"),
        ({"format": 1, "model": {}}, "lacks \\['config', 'optimizer'"),
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
    path = tmp_path / "checkpoint.pt"
    checkpoint.save(path, STATE)

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        checkpoint.save(path, {**STATE, "progress": {"epoch": 2}})
    assert checkpoint.load(path)["progress"] == STATE["progress"]
