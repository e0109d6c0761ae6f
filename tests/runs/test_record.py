import json

import pytest

from ddp_lab.config import TrainConfig
from ddp_lab.errors import BadInput
from ddp_lab.runs.record import Run, describe_environment, write_atomically

STEP = {"kind": "step", "epoch": 1, "step": 1, "loss": 2.5}
EVAL = {"kind": "eval", "epoch": 1, "step": 2, "loss": 1.5}


def make(folder):
    return Run.create(folder, TrainConfig(lr=0.3), {"device": "cpu"})


def test_what_is_written_is_read(tmp_path):
    run = make(tmp_path / "runs" / "a")
    run.append(STEP)
    run.append(EVAL)
    again = Run.open(tmp_path / "runs" / "a")
    assert again.config == TrainConfig(lr=0.3)
    assert again.environment == {"device": "cpu"}
    assert (again.history.steps, again.history.evals) == ([STEP], [EVAL])


def test_torn_last_line_is_left_out(tmp_path):
    run = make(tmp_path / "a")
    run.append(STEP)
    with run.history_file.open("a") as file:
        file.write('{"kind": "st')
    assert run.history.lines == [STEP]


def test_going_on_forgets_what_comes_again(tmp_path):
    run = make(tmp_path / "a")
    for line in (STEP, EVAL, {**STEP, "step": 3}):
        run.append(line)
    first = run.environment
    run.go_on(2, run.read_history(), {"world_size": 4})
    assert run.environment == {**first, "resumed": [{"step": 2, "world_size": 4}]}
    assert run.history.lines == [STEP, EVAL]
    run.append({**STEP, "step": 3, "loss": 1.0})
    assert [line["step"] for line in run.history.lines] == [1, 2, 3]


def test_no_run_there(tmp_path):
    with pytest.raises(BadInput, match=r"no run in .*config\.json"):
        Run.open(tmp_path)


def test_unreadable_config(tmp_path):
    run = make(tmp_path / "a")
    run.config_file.write_text('{"lr": ')
    with pytest.raises(BadInput, match=r"config\.json cannot be read"):
        assert run.config


def test_folder_that_holds_a_run(tmp_path):
    run = make(tmp_path / "a")
    before = run.config_file.read_bytes()
    with pytest.raises(BadInput, match="holds a run already: choose another --out"):
        make(tmp_path / "a")
    assert run.config_file.read_bytes() == before


def test_folder_below_a_file(tmp_path):
    (tmp_path / "file").write_text("mine")
    for folder in (tmp_path / "file", tmp_path / "file" / "deep" / "er"):
        with pytest.raises(BadInput, match="file is a file; choose a folder"):
            make(folder)
    assert (tmp_path / "file").read_text() == "mine"


def test_folder_that_cannot_be_made(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.mkdir", refuse)
    with pytest.raises(BadInput, match="Permission denied; choose another"):
        make(tmp_path / "a")


def test_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_atomically(path, "old")

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_environment_is_plain():
    environment = describe_environment(device="cpu", world_size=2)
    assert environment["world_size"] == 2
    assert {"torch", "torchvision", "python", "git_revision", "num_cores"} <= set(
        environment
    )
    assert json.loads(json.dumps(environment)) == environment
