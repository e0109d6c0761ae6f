"""A whole run on all ranks: epochs of steps, evaluations, files, and how it may end.

Every number reported here is the run's, not a rank's: tallies (see step.py) summed over
all ranks, divided once at the end.
"""

import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ddp_lab import checkpoint
from ddp_lab.config import TrainConfig, mix_seed
from ddp_lab.data import Batches, eval_loader, train_loader
from ddp_lab.datasets import ImageSet, load_dataset_together
from ddp_lab.errors import BadInput, Diverged, Stopped
from ddp_lab.inside import send_record
from ddp_lab.model import build_model
from ddp_lab.preempt import StopRequest, name_signal
from ddp_lab.progress import Progress, ProgressStyle
from ddp_lab.record import Run
from ddp_lab.resume import Found, find_newest, open_run
from ddp_lab.step import evaluate, share_buffers, train_step
from ddp_lab.training import (
    Training,
    check_fits,
    check_resumable,
    fingerprint,
    start_training,
)
from ddp_lab.world import (
    World,
    check_same,
    gather_over_ranks,
    join_world,
)

__all__ = [
    "count_steps",
    "evaluate",
    "fit",
    "fit_on_rank",
    "train_epoch",
    "train_step",
]


def fit_on_rank(
    config: TrainConfig,
    folder: Path | None,
    data: ImageSet | None = None,
    stop_flag: torch.Tensor | None = None,
    *,
    progress: ProgressStyle = "none",
) -> dict[str, Any]:
    """Join the other ranks, load the data unless given, and `fit`.

    Args:
        stop_flag: see `StopRequest`: the parent's, in shared memory.

    **Collective**: all ranks must call it.
    """
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    request = StopRequest(stop_flag)
    with (
        request.on_signals(),
        join_world(device=config.device, timeout_s=config.timeout_s) as world,
    ):
        if data is None:
            data = load_dataset_together(config, world)
        return fit(config, data, world, folder, progress=progress, request=request)


def fit(
    config: TrainConfig,
    data: ImageSet,
    world: World,
    folder: Path | None = None,
    *,
    progress: ProgressStyle = "none",
    request: StopRequest | None = None,
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
    micro, num_micro_batches = config.batches(world.world_size)
    train = train_loader(data, config, world, micro)
    test = eval_loader(data, config, world, micro)
    steps_per_epoch = count_steps(config, len(data.train))
    model = build_model(config, len(data.classes))
    check_same(fingerprint(config, data, model, len(train)), world.device)
    check_fits(config, data, world.world_size)  # so the answer is all ranks' answer
    training = start_training(config, model, world, steps_per_epoch)
    found = None
    if folder is not None and (config.resume is not None or config.auto_resume):
        found = find_newest(folder, world)
        if found is None and config.resume is not None:
            raise BadInput(f"resume {folder}: there is no checkpoint in it yet")
    if found is not None:
        insisted = check_resumable(config, found.state, data)
        training.load(found.state, config, steps_per_epoch)
    run, writers = open_run(config, world, folder, found)

    done = training.epoch * steps_per_epoch + training.steps_into_epoch(config)
    report = Progress(
        "none" if world.rank else progress, config.epochs, steps_per_epoch, done
    )
    report.say(_opening(config, world, micro, num_micro_batches, steps_per_epoch))
    if found is not None:
        for text in found.skipped if world.rank == 0 else ():
            if progress == "none":
                warnings.warn(text, stacklevel=2)
            report.say(text)
        report.say(_going_on(training, insisted, found))
    if len(writers) > 1:
        report.say(f"the run's files are on {', '.join(writers)}, each by itself")
    result = None
    try:
        for epoch in range(training.epoch + 1, config.epochs + 1):
            for line in train_epoch(
                training, train, config, data, run=run, request=request
            ):
                report.step(line)
            started = time.perf_counter()
            result = evaluate(training.model.module, test, world.device)
            means = _means(training.tally)
            training.epoch, training.tally = epoch, [0.0, 0.0, 0.0]
            training.time_s += time.perf_counter() - started
            eval_line = {
                "kind": "eval",
                "epoch": epoch,
                "step": training.step,
                **result,
            }
            _record(eval_line, run)
            _save(training, config, data, run)
            rate = training.samples / training.train_s
            report.epoch(means, eval_line, rate)
            if epoch < config.epochs:
                _stop_if_asked(_asked(request, world), training, epoch, run)
    finally:
        report.close()
    if result is None:  # resumed at the end of its last epoch
        result = evaluate(training.model.module, test, world.device)
    return {
        **result,
        "epochs": training.epoch,
        "time_s": training.time_s,
        "images_per_s": training.samples / training.train_s,
    }


def count_steps(config: TrainConfig, num_train: int) -> int:
    """Optimiser steps of an epoch, the same for every number of ranks."""
    whole, rest = divmod(num_train, config.global_batch_size)
    return whole if config.drop_last or not rest else whole + 1


def train_epoch(
    training: Training,
    train: Batches,
    config: TrainConfig,
    data: ImageSet,
    *,
    run: Run | None = None,
    request: StopRequest | None = None,
) -> Iterator[dict[str, Any]]:
    """Train to the end of the epoch under way, from wherever it is in it.

    Yields a line of the history at each log point. There, and only there, the ranks
    exchange what they counted and whether they were asked to stop: one all-gather.

    Args:
        training: goes on, and is brought up to date before each line.
        train: this rank's batches.
        config: the settings of the run.
        data: the data set.
        run: rank 0's, None elsewhere.
        request: whether to stop early.

    Raises:
        Diverged, Stopped: on all ranks together, see `fit`.

    **Collective**: all ranks must exhaust it, or stop after the same line.
    """
    epoch = training.epoch + 1
    num_samples = len(data.train)
    steps_per_epoch = count_steps(config, num_samples)
    _, num_micro_batches = config.batches(dist.get_world_size())
    first = training.steps_into_epoch(config)
    train.set_epoch(epoch - 1, skip=first * num_micro_batches)
    batches = iter(train)
    tallies: list[torch.Tensor] = []  # this rank's, of the steps since the last line
    lap = time.perf_counter()
    for k in range(first + 1, steps_per_epoch + 1):
        lr = training.schedule.get_last_lr()[0]
        # dropout: other units on each rank, the same again in a resumed run
        torch.manual_seed(mix_seed(config.seed, training.step, dist.get_rank()))
        done = (k - 1) * config.global_batch_size
        left = len(train) - (k - 1) * num_micro_batches
        tallies.append(
            train_step(
                training.model,
                batches,
                training.optimizer,
                min(config.global_batch_size, num_samples - done),
                num_micro_batches=min(num_micro_batches, left),
                clip_grad_norm=config.clip_grad_norm,
            )
        )
        training.schedule.step()
        training.step += 1
        save = bool(config.checkpoint_every) and not (
            training.step % (config.checkpoint_every or 1)
        )
        if k % config.log_every and not save and k < steps_per_epoch:
            continue
        rows, asked = _exchange(tallies, request)
        _check_finite(rows, training.step, epoch, run)
        now = time.perf_counter()
        total = rows.sum((0, 1))
        training.time_s += now - lap
        training.train_s += now - lap
        training.samples += int(total[2].item())
        training.tally = (torch.tensor(training.tally).double() + total).tolist()
        line = {
            "kind": "step",
            "epoch": epoch,
            "step": training.step,
            **_means(total.tolist()),
            "lr": lr,
            "images_per_s": total[2].item() / (now - lap),
            "time_s": training.time_s,
            "local": [_means(row) for row in rows.sum(1).tolist()],
        }
        _record(line, run)
        if (save or asked) and k < steps_per_epoch:
            share_buffers(training.model.module)  # whoever saves, saves the same
            _save(training, config, data, run)
        yield line
        if k < steps_per_epoch:  # else the epoch is over, and about to be saved anyway
            _stop_if_asked(asked, training, epoch, run)
        tallies.clear()
        lap = time.perf_counter()


def _exchange(
    tallies: list[torch.Tensor], request: StopRequest | None
) -> tuple[torch.Tensor, int]:
    """Every rank's tallies (W, steps, 3), and the number of the signal to stop by."""
    asked = torch.zeros_like(tallies[0])
    asked[0] = request.signal_number if request else 0
    rows = gather_over_ranks(torch.stack([*tallies, asked])).cpu()
    return rows[:, :-1], int(rows[:, -1].max().item())


def _asked(request: StopRequest | None, world: World) -> int:
    """The number of the signal that some rank was told to stop by, or 0."""
    number = request.signal_number if request else 0
    votes = gather_over_ranks(torch.tensor([number], device=world.device))
    return int(votes.max().item())


def _stop_if_asked(asked: int, training: Training, epoch: int, run: Run | None) -> None:
    """Stop all ranks, which know from each other that one was asked to."""
    if not asked:
        return
    dist.barrier()  # nobody leaves before all have saved
    where = f"; go on with --resume {run.folder}" if run else ""
    raise Stopped(
        f"stopped by {name_signal(asked)} after step {training.step}, in epoch "
        f"{epoch}{where}"
    )


def _save(
    training: Training, config: TrainConfig, data: ImageSet, run: Run | None
) -> None:
    if run:
        run.flush_history()  # a checkpoint counts on it
        checkpoint.save(
            run.folder, training.state(config, data), keep=config.keep_checkpoints
        )


def _record(line: dict[str, Any], run: Run | None) -> None:
    """Add a line to the history; rank 0 shows it to a notebook that looks on."""
    if run:
        run.append(line)
    if dist.get_rank() == 0:
        send_record(**line)


def _means(tally: list[float]) -> dict[str, float]:
    """Loss and accuracy a sample; 0 where a rank had none in a last, small batch."""
    loss_sum, num_correct, num_samples = tally
    num_samples = max(num_samples, 1)
    return {"loss": loss_sum / num_samples, "accuracy": num_correct / num_samples}


def _check_finite(rows: torch.Tensor, step: int, epoch: int, run: Run | None) -> None:
    """Stop all ranks at the first step whose loss is no number; they all see it."""
    losses = rows[..., 0].sum(0)  # (steps,)
    bad = (~losses.isfinite()).nonzero().flatten().tolist()
    if not bad:
        return
    where = step - len(losses) + 1 + bad[0]
    kept = ""
    if run and (steps := checkpoint.saved_steps(run.folder)):
        kept = f"; {run.checkpoint_file} is from before, after step {steps[0]}"
    raise Diverged(
        f"the loss became {losses[bad[0]].item()} at step {where}, in epoch {epoch}: "
        f"try a lower --lr{kept}"
    )


def _opening(
    config: TrainConfig,
    world: World,
    micro: int,
    num_micro_batches: int,
    steps_per_epoch: int,
) -> str:
    accumulated = f" x {num_micro_batches} accumulated" if num_micro_batches > 1 else ""
    return (
        f"{config.model} on {config.dataset}: {world.world_size} "
        f"{'rank' if world.world_size == 1 else 'ranks'} on {world.device.type} "
        f"({world.backend}), {micro} images a rank{accumulated} = global batch "
        f"{config.global_batch_size}, {steps_per_epoch} steps an epoch"
    )


def _going_on(training: Training, insisted: list[str], found: Found) -> str:
    also = f", with another {', another '.join(insisted)}" if insisted else ""
    source = f", from {found.host}" if found.host else ""
    return (
        f"going on after step {training.step}, in epoch {training.epoch + 1}"
        f"{source}{also}"
    )
