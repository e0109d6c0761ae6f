"""One training step and one evaluation, on all ranks.

A *tally* is what one rank counted, a float64 tensor of three: loss summed over samples,
correct predictions, samples. Tallies are added up over ranks and steps, and divided
once at the end: so every number is the run's, not a rank's.

Letters in shapes: n samples in a micro-batch, K classes, W ranks.
"""

import contextlib
import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_lab.world import sum_over_ranks

__all__ = ["deterministic_algorithms", "evaluate", "share_buffers", "train_step"]

Batch = tuple[torch.Tensor, torch.Tensor]


@contextlib.contextmanager
def deterministic_algorithms(on: bool) -> Iterator[None]:
    """Let torch use only algorithms that give the same bits each time.

    On the CPU all that this package computes is so by itself, at the same number of
    threads. On a GPU some sums come in another order each time, and cuDNN may choose
    another algorithm. TF32 is switched off too: it gives the same bits each time, but
    rounds the factors of a product to 10 bits, and only some GPUs have it. (Read in
    PyTorch's notes, not run.) CUBLAS_WORKSPACE_CONFIG stays set afterwards.

    Args:
        on: False leaves everything as it is.

    Raises:
        RuntimeError: of torch, inside the block, from an operation that has no
            deterministic algorithm.
    """
    if not on:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA starts
    before = torch.are_deterministic_algorithms_enabled()
    settings: list[tuple[Any, str, bool]] = [
        (torch.backends.cudnn, "benchmark", False),
        (torch.backends.cudnn, "allow_tf32", False),
        (torch.backends.cuda.matmul, "allow_tf32", False),
    ]
    kept = [(place, name, getattr(place, name)) for place, name, _ in settings]
    torch.use_deterministic_algorithms(True)
    for place, name, value in settings:
        setattr(place, name, value)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        for place, name, value in kept:
            setattr(place, name, value)


def train_step(
    model: DistributedDataParallel,
    batches: Iterator[Batch],
    optimizer: torch.optim.Optimizer,
    num_samples: int,
    *,
    num_micro_batches: int = 1,
    clip_grad_norm: float | None = None,
) -> torch.Tensor:
    """Do one optimiser step on one global batch.

    Args:
        model: the wrapped model. Its backward pass averages the gradients over ranks.
        batches: this rank's micro-batches, images (n, C, H, W) and labels (n,); n may
            differ between ranks, and be 0.
        optimizer: of the model's parameters.
        num_samples: how many the global batch has, on all ranks together.
        num_micro_batches: how many of them to accumulate gradients over; the same on
            all ranks.
        clip_grad_norm: the largest norm that the averaged gradient may have.

    Returns:
        This rank's tally of the step.

    **Collective**: all ranks must call it. **Cost**: one all-reduce of the gradients,
    whatever ``num_micro_batches`` is.
    """
    optimizer.zero_grad()
    # The loss to minimise is the mean over the global batch. DDP takes the mean over
    # ranks, so each rank's part is its sum, times ranks, over samples of all ranks.
    weight = dist.get_world_size() / num_samples
    tallies = []
    for k in range(1, num_micro_batches + 1):
        images, labels = next(batches)
        # gradients travel with the last micro-batch only; the flag is read in forward
        last = k == num_micro_batches
        with contextlib.nullcontext() if last else model.no_sync():
            scores = model(images)  # (n, K)
            loss_sum = F.cross_entropy(scores, labels, reduction="sum")
            (loss_sum * weight).backward()
        tallies.append(_tally(scores, labels, loss_sum))
    if clip_grad_norm is not None:  # of the run's gradient, the same on all ranks
        nn.utils.clip_grad_norm_(model.parameters(), clip_grad_norm)
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
    share_buffers(model)
    model.eval()
    tally = torch.zeros(3, dtype=torch.float64, device=device)
    for images, labels in batches:
        scores = model(images)
        tally += _tally(
            scores, labels, F.cross_entropy(scores, labels, reduction="sum")
        )
    model.train()
    loss_sum, num_correct, num_samples = sum_over_ranks(tally).tolist()
    return {
        "loss": loss_sum / num_samples,
        "accuracy": num_correct / num_samples,
        "num_correct": int(num_correct),
        "num_samples": int(num_samples),
    }


@torch.no_grad()
def share_buffers(model: nn.Module) -> None:
    """Give all ranks the buffers of rank 0: BatchNorm's statistics differ by rank.

    DDP does the same before each forward pass in training, so this changes no run.

    **Collective**: all ranks must call it. **Cost**: one broadcast a buffer.
    """
    if dist.get_world_size() > 1:
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)


def _tally(
    scores: torch.Tensor, labels: torch.Tensor, loss_sum: torch.Tensor
) -> torch.Tensor:
    """Loss summed over samples, correct predictions, samples: float64 (3,)."""
    correct = (scores.detach().argmax(dim=1) == labels).sum()
    count = torch.tensor(len(labels), device=labels.device)
    return torch.stack([loss_sum.detach().double(), correct, count])
