"""A handful of random interrupts; benchmarks/interrupt_storm.py does a hundred."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "interrupt_storm.py"


def test_nothing_is_left_behind():
    done = subprocess.run(
        [sys.executable, SCRIPT, "5", "--seed", "1"],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "'processes': 0, 'ports': 0, 'shared memory': 0" in done.stdout
    assert "'interrupted': 0" not in done.stdout
