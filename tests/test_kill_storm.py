"""A handful of random kills; benchmarks/kill_storm.py does two hundred."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "kill_storm.py"


@pytest.mark.timeout(900)
def test_no_run_is_lost():
    done = subprocess.run(
        [sys.executable, SCRIPT, "5", "--seed", "2", "--no-results"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    counts, _ = json.JSONDecoder().raw_decode(done.stdout)
    assert counts["kills"] == sum(counts["kills_of_a_run"]) == 5
    for name in ("runs_lost", "runs_that_differ", "processes_left"):
        assert counts[name] == 0
