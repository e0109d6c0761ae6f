"""What came out of training the same with several numbers of ranks, and why.

`compare_world_sizes` measures it; here are the numbers, their table, and the reason
for what is left between the runs.
"""

from dataclasses import dataclass
from typing import Any

import torch

from ddp_lab.config import TrainConfig

__all__ = ["Comparison", "Curve"]

_GROWN = 1000  # times the first difference: more than adding up explains
_JUMP = 1e6  # times the difference before: more than one step amplifies


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One training, and how far it was from the first one after each step."""

    world_size: int
    losses: tuple[float, ...]
    """Of each optimiser step, a mean over its global batch."""
    loss_differences: tuple[float, ...]
    """Absolute, after each step."""
    weight_differences: tuple[float, ...]
    """The largest of all parameters, absolute, after each step."""
    movements: tuple[float, ...]
    """How far the parameter that moved most is from where it began."""
    evals: tuple[dict[str, Any], ...]
    """What `evaluate` returned after each epoch, and after the last step."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What `compare_world_sizes` measured; `print` makes a table of it."""

    config: TrainConfig
    curves: tuple[Curve, ...]
    """One a world size; the others' differences are to the first one."""
    control: Curve
    """The first world size once more."""
    largest_weight: float
    """The largest absolute value of any parameter of the first run."""
    causes: tuple[str, ...]
    """Why world sizes must differ by more than rounding; by settings and model."""

    @property
    def num_steps(self) -> int:
        """Optimiser steps that were compared."""
        return len(self.curves[0].losses)

    @property
    def epsilon(self) -> float:
        """The spacing of floating point numbers at 1."""
        return float(torch.finfo(getattr(torch, self.config.precision)).eps)

    @property
    def is_rounding(self) -> bool:
        """Whether rounding can be all that differs.

        In float64 half of the digits must be right: of the first loss, and of what each
        step adds to the weights, unless the step before had amplified rounding already.
        In float32 a single ReLU that decides the other way changes a percent of a
        gradient, so only a wrong first step can be told from rounding.
        """
        num_steps = self.num_steps if self.config.precision == "float64" else 1
        return all(self._is_close(c, k) for c in self.curves for k in range(num_steps))

    def _is_close(self, curve: Curve, k: int) -> bool:
        before = curve.weight_differences[k - 1] if k else 0.0
        share = self.epsilon**0.5 if self.config.precision == "float64" else 0.1
        return (
            curve.loss_differences[0] <= self.epsilon**0.5 * max(curve.losses[0], 1)
            and curve.weight_differences[k]
            <= share * curve.movements[k]
            + 4 * self.epsilon * self.largest_weight
            + _JUMP * before
        )

    @property
    def what_is_left(self) -> str:
        """Why the runs are not equal to the bit, as far as it can be told."""
        reasons = []
        if again := _largest(self.control):
            reasons.append(
                f"two runs with {_ranks(self.control.world_size)} differ by "
                f"{again:.1e} already, so this device adds in no fixed order"
            )
        differing = [curve for curve in self.curves if _largest(curve)]
        if not differing:
            return "; ".join(reasons) or "nothing, these are the same bits"
        if self.causes:
            return "; ".join([*reasons, *self.causes])
        if not self.is_rounding:
            curve, k = next(
                (curve, k)
                for k in range(self.num_steps)
                for curve in self.curves
                if not self._is_close(curve, k)
            )
            reasons.append(
                f"no rounding: after step {k + 1} {_ranks(curve.world_size)} are "
                f"{curve.weight_differences[k]:.1e} away in weights that moved by "
                f"{curve.movements[k]:.1e}; the ranks compute something else"
            )
            return "; ".join(reasons)
        reasons.append(
            f"rounding: the ranks add the same numbers in another order, in "
            f"{self.config.precision} ({self.epsilon:.1e})"
        )
        worst = max(differing, key=_largest)
        first = next((d for d in worst.weight_differences if d), 0.0)
        last = max(worst.weight_differences)
        if last > _GROWN * first:
            reasons.append(
                f"training amplified it from {first:.1e} to {last:.1e} (a ReLU or a "
                "max-pooling can decide the other way over a rounding difference)"
            )
        if self.config.precision == "float32":
            reasons.append('precision="float64" shows whether that is all')
        return "; ".join(reasons)

    def __str__(self) -> str:
        config, first = self.config, self.curves[0]
        head = (
            f"{_count(self.num_steps, 'step')} of {config.model} on {config.dataset}, "
            f"global batch {config.global_batch_size}, norm {config.norm}, "
            f"{config.precision}, on {config.device}\n"
            f"largest difference to {_ranks(first.world_size)}, after any step:"
        )
        header = ["", "loss", "weights", "of the largest weight", "test images right"]
        rows = [header, [_ranks(first.world_size), "", "", "", _right(first)]]
        for curve in (self.control, *self.curves[1:]):
            weights = max(curve.weight_differences)
            again = ", again" if curve is self.control else ""
            rows.append(
                [
                    _ranks(curve.world_size) + again,
                    _number(max(curve.loss_differences)),
                    _number(weights),
                    _number(weights / self.largest_weight),
                    _right(curve),
                ]
            )
        widths = [max(len(row[k]) for row in rows) for k in range(len(header))]
        lines = [
            "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True))
            for row in rows
        ]
        left = f"what is left: {self.what_is_left}"
        return "\n".join([head, *(line.rstrip() for line in lines), left])


def _largest(curve: Curve) -> float:
    """The largest difference in losses or weights after any step."""
    return max(*curve.loss_differences, *curve.weight_differences)


def _number(difference: float) -> str:
    return f"{difference:.1e}" if difference else "0"


def _right(curve: Curve) -> str:
    counts = [str(result["num_correct"]) for result in curve.evals]
    return f"{', '.join(counts)} of {curve.evals[-1]['num_samples']}"


def _ranks(world_size: int) -> str:
    return _count(world_size, "rank")


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")
