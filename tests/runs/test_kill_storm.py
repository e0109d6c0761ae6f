"""Kills at chosen moments, one of each kind; benchmarks/kill_storm.py draws hundreds.

The model is small, and the ranks wait where they are to be killed: see small_model/.
"""

import importlib
import os
from pathlib import Path

import pytest

import small_commands
from small_commands import ENVIRON, forget_held, hold, let_go, num_held

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SETTINGS = ["--image-size", "16", "--checkpoint-every", "1"]
MOMENTS = [  # who is killed, where, how many wait there then, and what is going on
    ("parent", "", 0, "starting"),
    ("rank 0", "step 4", 2, "training"),
    ("all", "saving 8", 1, "saving"),
    ("rank 1", "evaluating 1", 2, "evaluating"),
    ("parent", "ending", 2, "ending"),
]


@pytest.fixture
def kill_storm(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("kill_storm")


@pytest.mark.timeout(900)
def test_no_run_is_lost(kill_storm, tmp_path):
    """Bit for bit the uninterrupted one, and nothing is left of who was killed."""
    shared_memory = kill_storm._segments()
    whole = small_commands.train_uninterrupted(
        [*kill_storm.COMMON, *SETTINGS], tmp_path / "whole"
    )
    whole.picture_file.touch()
    options = {"cwd": tmp_path, "env": {**os.environ, **ENVIRON}}
    for victim, place, num, phase in MOMENTS:
        hold(tmp_path, place)
        forget_held(tmp_path)
        attempt = kill_storm.Attempt(SETTINGS, tmp_path / "run", **options)
        if place:
            attempt.wait_until(lambda: num_held(tmp_path, place) == num)  # noqa: B023
        else:
            attempt.wait_until(lambda: len(attempt.ranks()) == 2)  # noqa: B023
        killed = kill_storm.kill_and_look(attempt, victim)
        assert killed == {"victim": victim, "phase": phase, "left": 0, "problem": ""}
    let_go(tmp_path)
    attempt = kill_storm.Attempt(SETTINGS, tmp_path / "run", **options)
    status, _, complaints = attempt.end()
    assert status == 0, complaints
    assert attempt.left() == 0
    assert kill_storm.differences(tmp_path / "run", whole.folder) == []
    assert not kill_storm._segments() - shared_memory
