"""One training, and the loss of each of its steps: what is compared in a proof.

    with Workers(4) as workers:
        losses_of(workers, 1, config)       # as `fit` trains, on one rank
        losses_of(workers, 4, config)       # on four
    losses_by_seed(config, seeds=(0, 1, 2)) # a small net, in this process, in a second

The first is for questions about ranks, the second for questions about a global batch
and its learning rate: those do not depend on ranks, and one process is quicker.
"""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from ddp_lab.config import TrainConfig
from ddp_lab.data import train_loader
from ddp_lab.datasets import ImageSet, load_dataset
from ddp_lab.errors import BadInput
from ddp_lab.loop import fit_on_rank, train_epoch
from ddp_lab.ranks.launch import send_record, shared
from ddp_lab.ranks.workers import Workers
from ddp_lab.runs.state import check_fits, start_training
from ddp_lab.world import join_world

__all__ = ["in_world_of", "losses_by_seed", "losses_of", "small_net"]

T = TypeVar("T")


def losses_of(workers: Workers, world_size: int, config: TrainConfig) -> list[float]:
    """Train on the first ranks of a set that is warm, and note what each step says.

    Args:
        workers: as many ranks or more, each without a process group; the others idle.
        world_size: ranks that train; it divides the global batch.
        config: the settings.

    Returns:
        The loss of each optimiser step, a mean over its global batch, of all ranks.

    Raises:
        BadInput: there are not so many ranks, or the settings do not fit them.
        RankFailed: a rank failed, or the loss diverged.
    """
    if not 1 <= world_size <= workers.num_ranks:
        raise BadInput(
            f"world_size {world_size} must be 1 to {workers.num_ranks}, the ranks that "
            "these workers have"
        )
    config = replace(config, log_every=1)
    data = load_dataset(config)
    check_fits(config, data, world_size)
    losses: list[float] = []

    def keep(rank: int, line: dict[str, Any]) -> None:
        if line["kind"] == "step":
            losses.append(line["loss"])

    workers.run(
        in_world_of,
        world_size,
        _fit,
        config,
        shared(data),
        only=range(world_size),
        on_record=keep,
    )
    return losses


def in_world_of(
    world_size: int, fn: Callable[..., T], *arguments: Any, **options: Any
) -> T:
    """Call a function on one of the first ranks of `Workers`, as if they were all.

    Several world sizes then share one start, which takes seconds a rank.

    Args:
        world_size: how many of the ranks do this, the first ones.
        fn: joins their process group by itself, like `fit_on_rank`.
        arguments, options: of ``fn``.
    """
    os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(world_size)
    return fn(*arguments, **options)


def _fit(config: TrainConfig, data: ImageSet) -> None:
    fit_on_rank(config, None, data, on_line=send_record)


# ------------------------------------------------------------------- in this process


def losses_by_seed(
    config: TrainConfig, seeds: Sequence[int] = (0, 1, 2)
) -> list[list[float]]:
    """Train a small net, `small_net`, once with each seed, in this process.

    Args:
        config: batch, rate, schedule and epochs; its model, norm and seed are not used.
        seeds: each decides initial weights and the order of the images.

    Returns:
        For each seed the loss of each optimiser step. A training whose loss becomes
        infinite or NaN ends there; its other steps count as infinite.

    Raises:
        BadInput: the settings do not fit the data.

    **Cost**: about a second a seed for 500 steps on digits of 8 x 8 pixels. One thread
    computes, whatever the process has.
    """
    data = load_dataset(config)
    check_fits(config, data, 1)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [_train_small(replace(config, seed=seed), data) for seed in seeds]
    finally:
        torch.set_num_threads(num_threads)


def _train_small(config: TrainConfig, data: ImageSet) -> list[float]:
    num_steps = config.epochs * config.steps_per_epoch(len(data.train))
    net = small_net(len(data.classes), config.image_size, config.seed)
    losses: list[float] = []
    with join_world(device="cpu") as world:
        micro, _ = config.batches(1)
        state = start_training(config, net, world, len(data.train))
        train = train_loader(data, config, world, micro)
        while state.epoch < config.epochs:
            for loss_sum, _, num_samples in train_epoch(state, train, config):
                losses.append((loss_sum / num_samples).item())
                if not math.isfinite(losses[-1]):
                    return losses[:-1] + [math.inf] * (num_steps - len(losses) + 1)
            state.epoch += 1
    return losses


class _Block(nn.Module):
    """Two layers beside a short cut, as in a ResNet, and nothing normalised."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.second(F.relu(self.first(x)))
        return F.relu(x + y)


def small_net(num_classes: int, image_size: int, seed: int) -> nn.Module:
    """Three residual blocks of two linear layers, without any normalisation.

    Its signal grows from block to block, so at new weights the loss is steep: a net
    that bears a high rate only after some short steps.

    Args:
        num_classes: outputs of the last layer.
        image_size: height and width of its images, in pixels.
        seed: of the initial weights, which keep the variance through ReLUs (He et al.
            2015, https://arxiv.org/abs/1502.01852).

    Returns:
        A module: float32 (n, 3, H, W) to scores (n, num_classes).
    """
    width = 64
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = nn.Sequential(
            nn.Flatten(),
            nn.Linear(3 * image_size**2, width),
            nn.ReLU(),
            *(_Block(width) for _ in range(3)),
            nn.Linear(width, num_classes),
        )
        for layer in net.modules():
            if isinstance(layer, nn.Linear):
                nn.init.kaiming_normal_(layer.weight)
                nn.init.zeros_(layer.bias)
    return net
