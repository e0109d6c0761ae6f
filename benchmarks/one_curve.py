"""By how much does the number of ranks change a training?

    python benchmarks/one_curve.py

ResNet-18 is trained on 1, 2 and 4 CPU ranks with the same seed and the same global
batches, once in each precision and with each way of normalising or splitting a batch.
After every step the losses and the weights are compared with those of one rank; the
largest difference of all steps is told, absolute. One rank runs once more as the
control, and each run evaluates its model on the same test images.
Writes benchmarks/results/one_curve.json.
"""

import argparse
import itertools
import sys
import time
from typing import Any

from common import describe_machine, table, write_results

from ddp_lab.config import TrainConfig
from ddp_lab.proofs.world_sizes import compare_world_sizes

WORLD_SIZES = (1, 2, 4)
BASE: dict[str, Any] = {
    "image_size": 16,
    "global_batch_size": 24,
    "limit_train": 240,
    "limit_test": 101,  # does not divide: ranks evaluate different numbers of images
    "epochs": 1,
    "lr": 0.002,
    "device": "cpu",
}
SETTINGS: dict[str, dict[str, Any]] = {
    "GroupNorm": {"norm": "group"},
    "GroupNorm, 3 images at once": {"norm": "group", "micro_batch_size": 3},
    "GroupNorm, last batch uneven": {
        "norm": "group",
        "limit_train": 225,
        "drop_last": False,
    },
    "GroupNorm, gradient clipped": {"norm": "group", "clip_grad_norm": 0.5},
    "SyncBatchNorm": {"norm": "sync"},
    "BatchNorm": {"norm": "batch"},
}


def measure(settings: dict[str, Any], precision: str) -> dict[str, Any]:
    """Compare the world sizes; the largest differences of all steps."""
    config = TrainConfig(**{**BASE, **settings}, precision=precision)
    same = compare_world_sizes(WORLD_SIZES, config)
    runs = {"1 again": same.control}
    runs |= {str(curve.world_size): curve for curve in same.curves[1:]}
    return {
        "steps": same.num_steps,
        "loss": {name: max(run.loss_differences) for name, run in runs.items()},
        "weights": {name: max(run.weight_differences) for name, run in runs.items()},
        "largest_weight": same.largest_weight,
        "correct": [curve.evals[-1]["num_correct"] for curve in same.curves],
        "test_images": [curve.evals[-1]["num_samples"] for curve in same.curves],
        "what_is_left": same.what_is_left,
    }


def row(name: str, precision: str, found: dict[str, Any]) -> list[str]:
    def largest(run: str) -> str:
        pair = [found[what][run] for what in ("loss", "weights")]
        return " / ".join(f"{number:.0e}" if number else "0" for number in pair)

    counts = ", ".join(str(count) for count in found["correct"])
    cells = [largest(run) for run in ("1 again", "2", "4")]
    return [name, precision, *cells, f"{counts} of {found['test_images'][0]}"]


def main() -> int:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    before = time.monotonic()
    results: dict[str, dict[str, Any]] = {}
    rows = []
    for name, precision in itertools.product(SETTINGS, ("float64", "float32")):
        found = measure(SETTINGS[name], precision)
        results.setdefault(name, {})[precision] = found
        rows.append(row(name, precision, found))
        print(f"{name}, {precision}: {found['what_is_left']}", file=sys.stderr)
    header = ["setting", "precision", "1 again", "2 ranks", "4 ranks", "right"]
    print(table(header, rows))
    facts = {"world_sizes": WORLD_SIZES, "base": BASE, "settings": SETTINGS}
    seconds = round(time.monotonic() - before)
    machine = describe_machine()
    write_results(
        "one_curve", {"machine": machine, **facts, "seconds": seconds, "found": results}
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
