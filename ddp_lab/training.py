"""What a run starts from, and what it carries along.

A `Training` is all that changes while a run goes on: model, optimiser, schedule and how
far it got. It is what a checkpoint holds, so a run that goes on from one is the same
run. Before its first step the ranks compare what they are about to do (`fingerprint`).
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_lab import checkpoint
from ddp_lab.config import TrainConfig
from ddp_lab.datasets import ImageSet
from ddp_lab.errors import BadInput
from ddp_lab.model import wrap_model
from ddp_lab.record import Run, describe_environment
from ddp_lab.world import World

__all__ = ["Training", "check_fits", "fingerprint", "open_run", "start_training"]

_PROGRESS = ("epoch", "step", "time_s", "train_s")


def check_fits(config: TrainConfig, data: ImageSet, world_size: int) -> None:
    """Check, before anything starts, that this many ranks can train this data set.

    Raises:
        BadInput: the batch does not divide, or there are too few images.
    """
    config.batches(world_size)
    num_train = len(data.train)
    if num_train < world_size:
        raise BadInput(
            f"{num_train} training images are too few for {world_size} ranks: each "
            "needs one at least"
        )
    if num_train < config.global_batch_size:
        raise BadInput(
            f"global_batch_size {config.global_batch_size} is more than the "
            f"{num_train} training images: choose {num_train} or less"
        )


@dataclass
class Training:
    """What changes while a run goes on, and what a checkpoint therefore holds."""

    model: DistributedDataParallel
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    epoch: int = 0  # epochs done
    step: int = 0  # optimiser steps done
    time_s: float = 0.0  # seconds of training and evaluating
    train_s: float = 0.0  # seconds of training alone

    def state(self, config: TrainConfig) -> dict[str, Any]:
        """Everything that `checkpoint.save` wants."""
        return {
            "model": self.model.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "progress": {name: getattr(self, name) for name in _PROGRESS},
            "config": config.to_json(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go back to what `state` returned."""
        self.model.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        for name in _PROGRESS:
            setattr(self, name, state["progress"][name])


def start_training(
    config: TrainConfig, model: nn.Module, world: World, steps_per_epoch: int
) -> Training:
    """Wrap the model, make optimiser and schedule, and go on where a run stopped."""
    wrapped = wrap_model(model, world, config.norm)
    optimizer = torch.optim.SGD(
        wrapped.parameters(),
        lr=config.lr,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        nesterov=config.nesterov,
    )
    schedule: torch.optim.lr_scheduler.LRScheduler
    if config.schedule == "onecycle":
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer,
            max_lr=config.lr,
            total_steps=config.epochs * steps_per_epoch + 1,  # it is stepped once more
            cycle_momentum=False,  # the momentum is a setting of its own
        )
    else:
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    training = Training(wrapped, optimizer, schedule)
    if config.resume is not None:
        training.load(checkpoint.load(Run(config.resume).checkpoint_file))
    return training


def fingerprint(
    config: TrainConfig, data: ImageSet, model: nn.Module, steps_per_epoch: int
) -> dict[str, str]:
    """What must be equal on all ranks before the first step, by name."""
    # these may differ: where a rank finds things, and with how many helpers it works
    own = {"data_dir", "download", "num_ranks", "num_threads", "num_workers", "out"}
    settings = {
        f"setting {name} =": json.dumps(value)
        for name, value in config.to_json().items()
        if name not in own | {"device", "resume"}
    }
    parameters = {
        f"parameter {name} of shape": str(tuple(p.shape))
        for name, p in model.named_parameters()
    }
    return {
        **settings,
        "training data:": data.train.fingerprint(),
        "test data:": data.test.fingerprint(),
        "classes": ", ".join(data.classes),
        "batches an epoch:": str(steps_per_epoch),
        **parameters,
    }


def open_run(
    config: TrainConfig, world: World, folder: Path | None, step: int
) -> Run | None:
    """Create or continue the run's folder on rank 0; elsewhere None."""
    if world.rank or folder is None:
        return None
    if config.resume is not None:
        run = Run.open(folder)
        run.cut_history(step)
        return run
    environment = describe_environment(
        device=str(world.device.type),
        device_name=torch.cuda.get_device_name() if world.backend == "nccl" else None,
        backend=world.backend,
        world_size=world.world_size,
        num_threads=torch.get_num_threads(),
    )
    return Run.create(folder, config, environment)
