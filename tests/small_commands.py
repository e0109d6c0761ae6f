"""Commands: run to their end; or with a small model, and wait where they are told to.

The second are those of small_model/.
"""

import os
import subprocess
import time
from pathlib import Path

import pytest

from ddp_lab.loop import fit_on_rank
from ddp_lab.ranks.launch import launch
from ddp_lab.runs.record import Run
from ddp_lab.train import parse_arguments

SMALL_MODEL = str(Path(__file__).parent / "small_model")
ENVIRON = {"PYTHONPATH": SMALL_MODEL, "OMP_NUM_THREADS": "1"}
LIMIT_S = 240.0  # for a hang: nothing takes as long, even on a busy machine


def run(command, folder, **environ):
    """Run a command in a folder; its status, and what it said, as lines."""
    ended = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=False,
    )
    return ended.returncode, ended.stdout.splitlines(), ended.stderr.splitlines()


def hold(folder, place):
    """Let the ranks of a command in this working folder wait there from now on."""
    new = folder / "hold.new"
    new.write_text(place)
    new.replace(folder / "hold")  # at any moment the file is whole


def let_go(folder):
    """Let them go on, and never wait again."""
    hold(folder, "nowhere")


def num_held(folder, place):
    """How many processes of this folder wait there, or did when it was asked last."""
    return sum(file.read_text() == place for file in folder.glob("held-*"))


def forget_held(folder):
    """Before another process may come to the same place."""
    for file in folder.glob("held-*"):
        file.unlink()


def wait_for(condition, process=None, told=lambda: ""):
    """Wait until something is so, while the process that makes it so is alive."""
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert process is None or process.poll() is None, told()
        assert time.monotonic() < end, told()
        time.sleep(0.01)


def train_uninterrupted(arguments, folder):
    """What this command line trains on two ranks of one thread, without its start."""
    config = parse_arguments(arguments)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", SMALL_MODEL)
        launch(fit_on_rank, config, folder, num_ranks=2, num_threads=1)
    return Run(folder)
