"""A whole run on all ranks: epochs of steps, and an evaluation after each.

    data set -> batches of this rank -> optimiser steps -> what came of it
    datasets.py  data.py                step.py            runs/session.py

Every loss and accuracy is the run's, unless it is under ``local``: tallies (see
step.py) summed over all ranks, divided once at the end. Times are each rank's own.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ddp_lab.config import TrainConfig, mix_seed
from ddp_lab.data import Batches, eval_loader, train_loader
from ddp_lab.datasets import ImageSet, load_dataset_together
from ddp_lab.model import build_model
from ddp_lab.runs.progress import ProgressStyle
from ddp_lab.runs.session import OnLine, open_session
from ddp_lab.runs.state import (
    TrainState,
    check_batches,
    check_fits,
    fingerprint,
    start_training,
)
from ddp_lab.runs.stop import StopRequest
from ddp_lab.step import deterministic_algorithms, evaluate, train_step
from ddp_lab.world import World, check_same, join_world

__all__ = ["fit", "fit_on_rank", "train_epoch"]


def fit(
    config: TrainConfig,
    data: ImageSet,
    world: World,
    folder: Path | None = None,
    *,
    progress: ProgressStyle = "none",
    request: StopRequest | None = None,
    on_line: OnLine | None = None,
) -> dict[str, Any]:
    """Train a classifier on all ranks and evaluate it after each epoch.

    Args:
        config: the settings of the run; ``resume`` goes on with what is in the folder,
            ``auto_resume`` does if there is something.
        data: the data set, the same on all ranks.
        world: this rank.
        folder: where rank 0 writes the run's files (None: nowhere), and the first rank
            of each other machine whose disk is its own.
        progress: how rank 0 reports.
        request: whether to stop early; one rank's is enough.
        on_line: called on rank 0 with the fields of each line of the history, like
            `send_record`.

    Returns:
        ``loss``, ``accuracy``, ``num_correct`` and ``num_samples`` of the last
        evaluation, ``epochs``, ``time_s`` of training and evaluating, and
        ``images_per_s`` of training, all ranks together. Times are each rank's own.

    Raises:
        BadInput: the settings do not fit the data, the number of ranks or the
            checkpoint; or the disk is full.
        RanksDisagree: the ranks were given different models, data or settings.
        Diverged: the loss became NaN or infinite; the last checkpoint is from before.
        Stopped: ``request`` asked for it; there is a checkpoint of this step.

    **Collective**: all ranks must call it.
    """
    micro, _ = config.batches(world.world_size)
    train = train_loader(data, config, world, micro)
    test = eval_loader(data, config, world, micro)
    model = build_model(config, len(data.classes))
    check_same(fingerprint(config, data, model, len(train)), world.device)
    check_fits(config, data, world.world_size)  # so the answer is all ranks' answer

    state = start_training(config, model, world, len(data.train))
    result = None
    with open_session(
        config,
        data,
        world,
        state,
        folder,
        progress=progress,
        request=request,
        on_line=on_line,
    ) as session:
        for _ in range(state.epoch, config.epochs):
            for tally in train_epoch(state, train, config):
                session.after_step(tally)
            result = evaluate(state.model.module, test, world.device)
            session.after_epoch(result)
    if result is None:  # resumed at the end of its last epoch
        result = evaluate(state.model.module, test, world.device)
    return {
        **result,
        "epochs": state.epoch,
        "time_s": state.time_s,
        "images_per_s": state.samples / state.train_s,
    }


def train_epoch(
    state: TrainState, train: Batches, config: TrainConfig
) -> Iterator[torch.Tensor]:
    """Train to the end of the epoch under way, from wherever it is in it.

    Args:
        state: goes on with each step.
        train: this rank's batches.
        config: the settings of the run.

    Yields:
        After each optimiser step this rank's tally of it, see step.py.

    **Collective**: all ranks must exhaust it, or stop after the same step.
    """
    _, num_micro_batches = config.batches(dist.get_world_size())
    first = state.steps_into_epoch(config)
    train.set_epoch(state.epoch, skip=first * num_micro_batches)
    batches = iter(train)
    for k in range(first, config.steps_per_epoch(train.num_samples)):
        # dropout: other units on each rank, the same again in a resumed run
        torch.manual_seed(mix_seed(config.seed, state.step, dist.get_rank()))
        # the last global batch of an epoch may be smaller, see drop_last
        num_left = train.num_samples - k * config.global_batch_size
        tally = train_step(
            state.model,
            batches,
            state.optimizer,
            min(config.global_batch_size, num_left),
            num_micro_batches=min(
                num_micro_batches, len(train) - k * num_micro_batches
            ),
            clip_grad_norm=config.clip_grad_norm,
        )
        state.lr = float(state.schedule.get_last_lr()[0])
        state.schedule.step()
        state.step += 1
        yield tally


def fit_on_rank(
    config: TrainConfig,
    folder: Path | None,
    data: ImageSet | None = None,
    stop_flag: torch.Tensor | None = None,
    *,
    progress: ProgressStyle = "none",
    on_line: OnLine | None = None,
) -> dict[str, Any]:
    """Join the other ranks, load the data unless given, and `fit`.

    Args:
        config, folder, progress, on_line: see `fit`.
        data: None to load it on every rank, where at most one downloads.
        stop_flag: see `StopRequest`: the parent's, in shared memory.

    **Collective**: all ranks must call it.
    """
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    request = StopRequest(stop_flag)
    with (
        request.on_signals(),
        deterministic_algorithms(config.deterministic),
        join_world(device=config.device, timeout_s=config.timeout_s) as world,
    ):
        if data is None:
            data = load_dataset_together(config, world)
            check_batches(config, data, world.world_size)
        return fit(
            config,
            data,
            world,
            folder,
            progress=progress,
            request=request,
            on_line=on_line,
        )
