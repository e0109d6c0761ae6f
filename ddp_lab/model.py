"""Step 2: how do N copies of a model stay one model?

Every rank builds the same model from the same seed; `wrap_model` puts it into
`DistributedDataParallel`, which

1. copies rank 0's parameters and buffers to all ranks, once, at construction, and
2. averages the gradients over the ranks during each backward pass.

Equal weights plus equal gradients give equal optimiser steps, so the copies stay one.

Source: Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel
Training", VLDB (https://arxiv.org/abs/2006.15704).
"""

import difflib
import math

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_lab.by_hand.sync_batch_norm import SyncBatchNorm
from ddp_lab.config import TrainConfig
from ddp_lab.errors import BadInput
from ddp_lab.world import World

__all__ = ["build_model", "check_model", "wrap_model"]


def build_model(config: TrainConfig, num_classes: int) -> nn.Module:
    """Build an untrained classifier of torchvision on the CPU.

    Args:
        config: uses model, norm, image_size and seed; torch's own random state is left
            as it was.
        num_classes: outputs of the last layer.

    Returns:
        A module: float32 (n, 3, H, W) to scores (n, num_classes). The same weights in
        every process with the same config.

    Raises:
        BadInput: torchvision has no such classifier.
    """
    from torchvision import models

    names = models.list_models(module=models)
    if config.model not in names:
        close = difflib.get_close_matches(config.model, names, n=3)
        guess = f" did you mean {' or '.join(close)}?" if close else ""
        raise BadInput(
            f"model {config.model!r} is no classifier of torchvision.models:{guess} "
            f"choose one of {', '.join(names)}"
        )
    options: dict[str, object] = {"num_classes": num_classes}
    if config.model in ("googlenet", "inception_v3"):
        options.update(aux_logits=False, init_weights=True)
    if config.model.startswith("vit_"):
        options["image_size"] = config.image_size
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model: nn.Module = models.get_model(config.model, weights=None, **options)
    if config.norm == "group":
        _to_group_norm(model)
    return model


def check_model(
    config: TrainConfig, num_classes: int, micro_batch_size: int, world_size: int = 1
) -> None:
    """Try one training step's shapes, without data or memory, before anything starts.

    Args:
        config: uses what `build_model` uses.
        num_classes: outputs of the last layer.
        micro_batch_size: images a rank holds at once.
        world_size: ranks; with norm sync, BatchNorm sees the images of all of them.

    Raises:
        BadInput: the model does not exist, or cannot take such images or batches.
    """
    try:
        with torch.device("meta"):
            try:
                model = build_model(config, num_classes)
            except NotImplementedError:  # RegNet computes its widths with tensors
                with torch.device("cpu"):
                    model = build_model(config, num_classes).to("meta")
            seen = micro_batch_size * (world_size if config.norm == "sync" else 1)
            model(torch.empty(seen, 3, config.image_size, config.image_size))
    except BadInput:
        raise
    except (RuntimeError, ValueError, AssertionError, TypeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error) else repr(error)
        raise BadInput(
            f"model {config.model} cannot take {micro_batch_size} images of "
            f"{config.image_size} x {config.image_size} pixels a rank ({reason}): try "
            "a larger --image-size or --micro-batch-size, or another --model"
        ) from error


def wrap_model(
    model: nn.Module, world: World, norm: str = "batch"
) -> DistributedDataParallel:
    """Move a model to this rank's device and wrap it in `DistributedDataParallel`.

    Args:
        model: the same on every rank; its weights become rank 0's on all ranks.
        world: this rank.
        norm: ``sync`` turns BatchNorm into SyncBatchNorm: torch's own on a GPU, and on
            the CPU, where that one refuses to work, the lab's.

    Returns:
        The wrapped model; the plain one is its ``.module``. Call the wrapped one in
        training, or the gradients stay local.

    **Collective**: all ranks must call it. **Cost**: one broadcast of the model; then,
    in each backward pass, one all-reduce of all gradients, in buckets of 25 MB.
    """
    on_gpu = world.device.type == "cuda"
    if norm == "sync":
        kind = nn.SyncBatchNorm if on_gpu else SyncBatchNorm
        model = kind.convert_sync_batchnorm(model)
    return DistributedDataParallel(
        model.to(world.device),
        device_ids=[world.device] if on_gpu else None,
        gradient_as_bucket_view=True,  # gradients live in the buckets: no second copy
    )


def _to_group_norm(module: nn.Module) -> None:
    """Replace each BatchNorm2d below a module by GroupNorm of (up to) 32 groups."""
    for name, child in module.named_children():
        if isinstance(child, nn.BatchNorm2d):
            groups = math.gcd(32, child.num_features)
            norm = nn.GroupNorm(groups, child.num_features, eps=child.eps)
            norm.to(child.weight.device)
            setattr(module, name, norm)
        else:
            _to_group_norm(child)
