"""The training step, the evaluation, and the run around them.

Every number reported here is the run's, not a rank's: sums over all ranks' samples,
divided once at the end. A *tally* is such a sum before the division, a float64 tensor
of three: loss summed over samples, correct predictions, samples.

Letters in shapes: n samples in a micro-batch, K classes, W ranks.
"""

import contextlib
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_lab import checkpoint
from ddp_lab.config import TrainConfig, mix_seed
from ddp_lab.data import Batches, eval_loader, train_loader
from ddp_lab.datasets import ImageSet, load_dataset_together
from ddp_lab.errors import Diverged
from ddp_lab.inside import send_record
from ddp_lab.model import build_model
from ddp_lab.progress import Progress, ProgressStyle
from ddp_lab.record import Run
from ddp_lab.training import (
    Training,
    check_fits,
    fingerprint,
    open_run,
    start_training,
)
from ddp_lab.world import (
    World,
    check_same,
    gather_over_ranks,
    join_world,
    sum_over_ranks,
)

__all__ = ["evaluate", "fit", "fit_on_rank", "train_step"]

Batch = tuple[torch.Tensor, torch.Tensor]


def train_step(
    model: DistributedDataParallel,
    batches: Iterator[Batch],
    optimizer: torch.optim.Optimizer,
    num_micro_batches: int = 1,
) -> torch.Tensor:
    """Do one optimiser step on one global batch.

    Args:
        model: the wrapped model. Its backward pass averages the gradients over ranks.
        batches: this rank's micro-batches, images (n, C, H, W) and labels (n,).
        optimizer: of the model's parameters.
        num_micro_batches: how many of them to accumulate gradients over.

    Returns:
        This rank's tally of the step.

    **Collective**: all ranks must call it. **Cost**: one all-reduce of the gradients,
    whatever ``num_micro_batches`` is.
    """
    optimizer.zero_grad()
    tallies = []
    for k in range(1, num_micro_batches + 1):
        images, labels = next(batches)
        # gradients travel with the last micro-batch only; the flag is read in forward
        last = k == num_micro_batches
        with contextlib.nullcontext() if last else model.no_sync():
            scores = model(images)  # (n, K)
            loss = F.cross_entropy(scores, labels)
            (loss / num_micro_batches).backward()
        tallies.append(_tally(scores, labels, loss))
    optimizer.step()
    return torch.stack(tallies).sum(0)


@torch.no_grad()
def evaluate(
    model: nn.Module, batches: Iterable[Batch], device: torch.device
) -> dict[str, Any]:
    """Evaluate a model on all ranks' samples, each counted exactly once.

    Args:
        model: the plain model, not the wrapped one: ranks may have different numbers
            of batches, and the wrapper's forward can be a collective.
        batches: this rank's share, possibly empty.
        device: the world's device.

    Returns:
        ``loss`` and ``accuracy`` per sample, ``num_correct`` and ``num_samples`` of all
        ranks together, the same on all ranks.

    **Collective**: all ranks must call it. **Cost**: one all-reduce of 24 bytes, and
    one broadcast of the model's buffers.
    """
    if dist.get_world_size() > 1:
        for buffer in model.buffers():  # BatchNorm's statistics differ between ranks
            dist.broadcast(buffer, src=0)
    model.eval()
    tally = torch.zeros(3, dtype=torch.float64, device=device)
    for images, labels in batches:
        scores = model(images)
        tally += _tally(scores, labels, F.cross_entropy(scores, labels))
    model.train()
    loss_sum, num_correct, num_samples = sum_over_ranks(tally).tolist()
    return {
        "loss": loss_sum / num_samples,
        "accuracy": num_correct / num_samples,
        "num_correct": int(num_correct),
        "num_samples": int(num_samples),
    }


def _tally(
    scores: torch.Tensor, labels: torch.Tensor, mean_loss: torch.Tensor
) -> torch.Tensor:
    """Loss summed over samples, correct predictions, samples: float64 (3,)."""
    correct = (scores.detach().argmax(dim=1) == labels).sum()
    count = torch.tensor(len(labels), device=labels.device)
    return torch.stack([mean_loss.detach().double() * count, correct, count])


def fit_on_rank(
    config: TrainConfig,
    folder: Path | None,
    data: ImageSet | None = None,
    *,
    progress: ProgressStyle = "lines",
) -> dict[str, Any]:
    """Be one rank of a training run, from joining the world to leaving it.

    Args:
        config: the settings of the run.
        folder: where rank 0 writes the run's files (None: nowhere).
        data: the data set, if the parent has loaded it already.
        progress: how rank 0 reports.

    Returns:
        See `fit`.

    **Collective**: every rank of the run calls it, with the same arguments.
    """
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    with join_world(device=config.device) as world:
        if data is None:
            data = load_dataset_together(config, world)
        return fit(config, data, world, folder, progress=progress)


def fit(
    config: TrainConfig,
    data: ImageSet,
    world: World,
    folder: Path | None = None,
    *,
    progress: ProgressStyle = "none",
) -> dict[str, Any]:
    """Train a classifier on all ranks and evaluate it after each epoch.

    Args:
        config: the settings of the run; ``config.resume`` goes on with that folder.
        data: the data set, the same on all ranks.
        world: this rank.
        folder: where rank 0 writes the run's files (None: nowhere).
        progress: how rank 0 reports.

    Returns:
        ``loss``, ``accuracy``, ``num_correct`` and ``num_samples`` of the last
        evaluation, ``epochs``, ``time_s`` of training and evaluating, and
        ``images_per_s`` of training, all ranks together. Times are each rank's own.

    Raises:
        BadInput: the settings do not fit the data or the number of ranks.
        RanksDisagree: the ranks were given different models, data or settings.
        Diverged: the loss became NaN or infinite; the last checkpoint is from before.

    **Collective**: all ranks must call it.
    """
    check_fits(config, data, world.world_size)
    micro, num_micro_batches = config.batches(world.world_size)
    train = train_loader(data, config, world, micro)
    test = eval_loader(data, config, world, micro)
    steps_per_epoch = len(train) // num_micro_batches
    model = build_model(config, len(data.classes))
    check_same(fingerprint(config, data, model, steps_per_epoch), world.device)
    training = start_training(config, model, world, steps_per_epoch)
    run = open_run(config, world, folder, training.step)

    report = Progress(
        "none" if world.rank else progress,
        config.epochs,
        steps_per_epoch,
        training.step,
    )
    report.say(_opening(config, world, micro, num_micro_batches, steps_per_epoch))
    result = None
    try:
        for epoch in range(training.epoch + 1, config.epochs + 1):
            started = time.perf_counter()
            train.set_epoch(epoch - 1)
            tally = torch.zeros(3, dtype=torch.float64)
            for line, part in _train_epoch(
                training, train, epoch, steps_per_epoch, num_micro_batches, config, run
            ):
                tally += part
                report.step(line)
            training.train_s += time.perf_counter() - started
            result = evaluate(training.model.module, test, world.device)
            training.epoch = epoch
            training.time_s += time.perf_counter() - started
            eval_line = {
                "kind": "eval",
                "epoch": epoch,
                "step": training.step,
                **result,
            }
            _record(eval_line, run)
            if run:
                checkpoint.save(run.checkpoint_file, training.state(config))
            rate = training.step * config.global_batch_size / training.train_s
            report.epoch(_means(tally), eval_line, rate)
    finally:
        report.close()
    if result is None:  # resumed at the end of its last epoch
        result = evaluate(training.model.module, test, world.device)
    return {
        **result,
        "epochs": training.epoch,
        "time_s": training.time_s,
        "images_per_s": training.step * config.global_batch_size / training.train_s,
    }


def _train_epoch(
    training: Training,
    train: Batches,
    epoch: int,
    steps_per_epoch: int,
    num_micro_batches: int,
    config: TrainConfig,
    run: Run | None,
) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
    """Train for one epoch; yield a line of the history and its tally at each log point.

    The ranks exchange their tallies at log points only, one all-gather each.
    """
    batches = iter(train)
    tallies: list[torch.Tensor] = []  # this rank's, of the steps since the last line
    started = lap = time.perf_counter()
    for k in range(1, steps_per_epoch + 1):
        lr = training.schedule.get_last_lr()[0]
        # dropout: other units on each rank, the same again in a resumed run
        torch.manual_seed(mix_seed(config.seed, training.step, dist.get_rank()))
        tallies.append(
            train_step(training.model, batches, training.optimizer, num_micro_batches)
        )
        training.schedule.step()
        training.step += 1
        if k % config.log_every and k < steps_per_epoch:
            continue
        rows = gather_over_ranks(torch.stack(tallies)).cpu()  # (W, steps, 3)
        _check_finite(rows, training.step, epoch, run)
        now = time.perf_counter()
        total = rows.sum((0, 1))
        line = {
            "kind": "step",
            "epoch": epoch,
            "step": training.step,
            **_means(total),
            "lr": lr,
            "images_per_s": total[2].item() / (now - lap),
            "time_s": training.time_s + now - started,
            "local": [_means(row) for row in rows.sum(1)],
        }
        _record(line, run)
        yield line, total
        tallies.clear()
        lap = now


def _record(line: dict[str, Any], run: Run | None) -> None:
    """Add a line to the history, and show it to a notebook that looks on. Rank 0."""
    if run:
        run.append(line)
    if dist.get_rank() == 0:
        send_record(**line)


def _means(tally: torch.Tensor) -> dict[str, float]:
    loss_sum, num_correct, num_samples = tally.tolist()
    return {"loss": loss_sum / num_samples, "accuracy": num_correct / num_samples}


def _check_finite(rows: torch.Tensor, step: int, epoch: int, run: Run | None) -> None:
    """Stop all ranks at the first step whose loss is no number; they all see it."""
    losses = rows[..., 0].sum(0)  # (steps,)
    bad = (~losses.isfinite()).nonzero().flatten().tolist()
    if not bad:
        return
    where = step - len(losses) + 1 + bad[0]
    kept = ""
    if run and run.checkpoint_file.exists():
        kept = f"; {run.checkpoint_file} is from before, after epoch {epoch - 1}"
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
