"""The default run, written down: ``python -m tests.golden_run`` makes golden/*.json.

It holds the loss of every step and the evaluation after every epoch of ResNet-18 on
digits with the default settings, on two CPU ranks of one thread each; and the first
steps once more in float64, which other processors can reproduce (see test_golden.py).
Make it anew only when the training is meant to change, and say so in the commit.
"""

import hashlib
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ddp_lab.config import TrainConfig
from ddp_lab.errors import RankFailed, Stopped
from ddp_lab.model import build_model
from ddp_lab.runs.record import Run
from ddp_lab.runs.stop import StopRequest
from ddp_lab.train import train

GOLDEN_FILE = Path(__file__).parent / "golden" / "default.json"
CONFIG = TrainConfig(num_ranks=2, num_threads=1, device="cpu")
DOUBLE = replace(CONFIG, precision="float64")


def initial_weights() -> str:
    """A short text that is the same where the run starts from the same bits."""
    model = build_model(CONFIG, 10)
    row = torch.cat([p.detach().flatten() for p in model.parameters()])
    return hashlib.sha256(row.numpy().tobytes()).hexdigest()[:16]


def describe_processor() -> dict[str, str]:
    """Its name, and the vector instructions that torch uses."""
    from benchmarks.common import describe_machine  # found from the top folder only

    return {
        "processor": describe_machine()["processor"],
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


def run_steps(config: TrainConfig, num_steps: int | None = None) -> dict[str, Any]:
    """Train, and stop after some optimiser steps as if told by a signal.

    The schedule stays that of the whole run.

    Returns:
        Losses of all steps, or of the first ``num_steps``; evaluations; environment.
    """
    request = StopRequest()

    def stop_after(_: int, line: dict[str, Any]) -> None:
        if line["step"] == num_steps:
            request.flag.fill_(15)  # as SIGTERM does; the ranks agree one step later

    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder, "run"))
        try:
            train(
                replace(config, out=run.folder),
                "none",
                on_record=stop_after,
                stop_flag=request.flag,
            )
        except RankFailed as error:
            if not all(isinstance(f.exception, Stopped) for f in error.failures):
                raise
        keys = "epoch", "step", "loss", "num_correct", "num_samples"
        return {
            "losses": [line["loss"] for line in run.history.steps][:num_steps],
            "evaluations": [{k: line[k] for k in keys} for line in run.history.evals],
            "environment": run.environment,
        }


def main() -> None:
    """Write golden/default.json."""
    whole, double = run_steps(CONFIG), run_steps(DOUBLE, 8)
    environment = whole.pop("environment")
    del environment["command"]
    golden = {
        "settings": CONFIG.to_json(),
        "environment": environment | describe_processor(),
        "initial weights": initial_weights(),
        **whole,
        "losses in float64": double["losses"],
    }
    GOLDEN_FILE.parent.mkdir(exist_ok=True)
    GOLDEN_FILE.write_text(json.dumps(golden, indent=1) + "\n")
    print(f"{len(whole['losses'])} losses in {GOLDEN_FILE.name}")


if __name__ == "__main__":
    main()
