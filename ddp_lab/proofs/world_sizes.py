"""Does the number of ranks change what is trained? Train with several, and measure.

    same = compare_world_sizes([1, 2, 4], TrainConfig(norm="group"), num_steps=20)
    print(same)                          # a table, and what is left and why
    plot_comparison(same)

The ranks are started once, and the first of them make each smaller world. Each world
size runs the functions that `ddp_lab.loop.fit` runs, on the same settings, seed and
global batches. After every step its loss and its
weights are compared with those of the first world size. That one runs once more as the
control: what differs between two equal runs is not the number of ranks.

Sums of floating point numbers depend on their order, and ranks are another order. So
the curves agree to rounding, not to the bit; ``precision="float64"`` makes that small.
"""

import math
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from ddp_lab.config import TrainConfig
from ddp_lab.data import eval_loader, train_loader
from ddp_lab.datasets import ImageSet, load_dataset
from ddp_lab.errors import BadInput, Diverged
from ddp_lab.loop import train_epoch
from ddp_lab.model import build_model, check_model
from ddp_lab.proofs.comparison import Comparison, Curve
from ddp_lab.proofs.trainings import in_world_of
from ddp_lab.ranks.launch import shared
from ddp_lab.ranks.workers import Workers
from ddp_lab.runs.state import TrainState, check_fits, start_training
from ddp_lab.step import evaluate
from ddp_lab.world import join_world, pick_device, sum_over_ranks

__all__ = ["compare_world_sizes"]

_MOST_BYTES = 4 * 2**30  # of weights in the temporary folder


def compare_world_sizes(
    world_sizes: Sequence[int],
    config: TrainConfig,
    *,
    num_steps: int | None = None,
    workers: Workers | None = None,
) -> Comparison:
    """Train the same with several numbers of ranks, and compare step by step.

    Args:
        world_sizes: two or more; each divides the global batch. The others are compared
            with the first one.
        config: the settings. All ranks compute on one kind of device, with
            ``num_threads`` threads each (None: 1; another number is another order).
        num_steps: stop after this many optimiser steps, as if the run were interrupted
            (None: train to the end).
        workers: ranks that are warm, without a process group, as many as the largest
            world size or more; their threads are taken as they are (None: start some).

    Returns:
        The measured differences; print it, or draw it with `plot_comparison`.

    Raises:
        BadInput: the settings cannot work with one of the world sizes, or there is not
            enough disk; no process was started.
        RankFailed: a rank failed, or the loss diverged.

    **Cost**: one start of the largest number of ranks, unless they are there. The first
    world size leaves its parameters of each step in a temporary folder, 44 MB a step
    for ResNet-18 in float32; it is gone when this returns or raises. More than 4 GB are
    refused.
    """
    config = _check(world_sizes, config, num_steps, workers)
    data = load_dataset(config)
    for world_size in world_sizes:
        check_fits(config, data, world_size)
        micro, _ = config.batches(world_size)
        check_model(config, len(data.classes), micro, world_size)
    with torch.device("meta"):  # no memory, no numbers
        model = build_model(config, len(data.classes))
    steps_of_run = config.epochs * config.steps_per_epoch(len(data.train))
    num_steps = min(num_steps or steps_of_run, steps_of_run)
    _check_disk(model, config, num_steps)

    data_for_all = shared(data)
    curves: list[Curve] = []
    with (
        tempfile.TemporaryDirectory(prefix="ddp_lab-compare-") as folder,
        nullcontext(workers)
        if workers is not None
        else Workers(max(world_sizes), num_threads=config.num_threads) as ranks,
    ):
        first, *others = world_sizes
        for world_size in (first, first, *others):
            found = ranks.run(
                in_world_of,
                world_size,
                _train_on_rank,
                config,
                data_for_all,
                num_steps,
                Path(folder, "weights"),
                is_first=not curves,
                only=range(world_size),
            )[0]
            losses = found["losses"]
            pairs = zip(losses, curves[0].losses if curves else losses, strict=True)
            curves.append(
                Curve(
                    world_size=world_size,
                    losses=tuple(losses),
                    loss_differences=tuple(abs(one - other) for one, other in pairs),
                    weight_differences=tuple(found["differences"]),
                    movements=tuple(found["movements"]),
                    evals=tuple(found["evals"]),
                )
            )
            if len(curves) == 1:
                largest_weight = found["largest_weight"]
    return Comparison(
        config=config,
        curves=(curves[0], *curves[2:]),
        control=curves[1],
        largest_weight=largest_weight,
        causes=_causes(config, model, world_sizes),
    )


def _check(
    world_sizes: Sequence[int],
    config: TrainConfig,
    num_steps: int | None,
    workers: Workers | None,
) -> TrainConfig:
    """Refuse what cannot be compared; return the settings that all ranks share."""
    if len(set(world_sizes)) < 2 or len(set(world_sizes)) < len(world_sizes):
        raise BadInput(
            f"world_sizes {list(world_sizes)} must be two or more, each another one, "
            "like [1, 2, 4]"
        )
    for world_size in world_sizes:
        if world_size < 1:
            raise BadInput(f"world_sizes: {world_size} must be 1 or more")
        config.batches(world_size)
    if workers is not None and max(world_sizes) > workers.num_ranks:
        raise BadInput(
            f"world_sizes {list(world_sizes)} need {max(world_sizes)} ranks, and these "
            f"workers have {workers.num_ranks}"
        )
    if num_steps is not None and num_steps < 1:
        raise BadInput(f"num_steps {num_steps} must be 1 or more")
    where = pick_device(config.device, local_world_size=max(world_sizes))
    return replace(
        config,
        device="cuda" if where.type == "cuda" else "cpu",
        num_threads=config.num_threads or 1,
        log_every=1,
    )


def _check_disk(model: nn.Module, config: TrainConfig, num_steps: int) -> None:
    """Refuse to fill the disk with weights."""
    item = getattr(torch, config.precision).itemsize
    bytes_per_step = item * sum(p.numel() for p in model.parameters())
    free = shutil.disk_usage(tempfile.gettempdir()).free
    if num_steps * bytes_per_step > min(_MOST_BYTES, free):
        limit = min(_MOST_BYTES, free)
        raise BadInput(
            f"the weights of {num_steps} steps are "
            f"{num_steps * bytes_per_step / 2**30:.1f} GB in a temporary folder, and "
            f"{limit / 2**30:.1f} GB is the most: use num_steps="
            f"{limit // bytes_per_step} or less, or a smaller model"
        )


def _causes(
    config: TrainConfig, model: nn.Module, world_sizes: Sequence[int]
) -> tuple[str, ...]:
    """Why these settings train something else with another number of ranks."""
    layers = list(model.modules())
    causes = []
    if any(isinstance(layer, _BatchNorm) for layer in layers):
        held = [config.batches(world_size)[0] for world_size in world_sizes]
        if config.norm == "batch":
            causes.append(
                "BatchNorm: each rank normalises with the statistics of its own "
                f"{_listed(held)} images (norm group or sync do not)"
            )
        together = [w * micro for w, micro in zip(world_sizes, held, strict=True)]
        if config.norm == "sync" and len(set(together)) > 1:
            causes.append(
                "BatchNorm: all ranks together normalise with the statistics of "
                f"{_listed(together)} images at a time (no micro_batch_size: all of "
                "the global batch)"
            )
    if any(_drops(layer) for layer in layers):
        causes.append("dropout: each rank drops by numbers of its own")
    return tuple(causes)


def _drops(layer: nn.Module) -> bool:
    """Whether a layer leaves out something at random in training."""
    if isinstance(layer, _DropoutNd) or type(layer).__name__ == "StochasticDepth":
        return float(getattr(layer, "p", 0)) > 0
    return isinstance(layer, nn.MultiheadAttention) and layer.dropout > 0


def _listed(numbers: Sequence[int]) -> str:
    """``64, 32 or 16``; one number if all are the same."""
    *rest, last = list(dict.fromkeys(map(str, numbers)))
    return f"{', '.join(rest)} or {last}" if rest else last


# ------------------------------------------------------------------- on each rank


def _train_on_rank(
    config: TrainConfig,
    data: ImageSet,
    num_steps: int,
    file: Path,
    *,
    is_first: bool,
) -> dict[str, Any]:
    """Train as `fit` does; rank 0 keeps its weights, or compares with those kept."""
    with join_world(device=config.device) as world:
        micro, _ = config.batches(world.world_size)
        train = train_loader(data, config, world, micro)
        test = eval_loader(data, config, world, micro)
        model = build_model(config, len(data.classes))
        state = start_training(config, model, world, len(data.train))
        begin = _weights(state)
        found: dict[str, Any] = {"largest_weight": 0.0}
        found |= {"losses": [], "differences": [], "movements": [], "evals": []}
        with _open_on_rank_0(world.rank, file, "wb" if is_first else "rb") as kept:
            while state.step < num_steps:
                left = num_steps - state.step
                for tally in islice(train_epoch(state, train, config), left):
                    found["losses"].append(_loss(tally, state.step))
                    if kept is None:
                        continue
                    weights = _weights(state)
                    if is_first:
                        weights.tofile(kept)
                        theirs = weights
                    else:
                        theirs = np.fromfile(kept, weights.dtype, len(weights))
                    found["differences"].append(_furthest(weights, theirs))
                    found["movements"].append(_furthest(weights, begin))
                    size = float(np.abs(weights).max())
                    found["largest_weight"] = max(found["largest_weight"], size)
                found["evals"].append(evaluate(state.model.module, test, world.device))
                state.epoch += 1
    return found


@contextmanager
def _open_on_rank_0(rank: int, file: Path, mode: str) -> Iterator[Any]:
    if rank:
        yield None
        return
    with file.open(mode) as kept:
        yield kept


def _loss(tally: torch.Tensor, step: int) -> float:
    """The run's loss of a step, from each rank's tally. Collective."""
    loss_sum, _, num_samples = sum_over_ranks(tally).tolist()
    if not math.isfinite(loss_sum):
        raise Diverged(f"the loss became {loss_sum} at step {step}: try a lower lr")
    return float(loss_sum / num_samples)


def _weights(state: TrainState) -> np.ndarray[Any, Any]:
    """All parameters in one row."""
    rows = [p.detach().flatten() for p in state.model.parameters()]
    return torch.cat(rows).cpu().numpy()


def _furthest(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> float:
    return float(np.abs(one - other).max())
