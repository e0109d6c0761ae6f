"""What a run starts from, and what it carries along.

A `TrainState` is all that changes while a run goes on: model, optimiser, schedule and
how far it got. It is what a checkpoint holds, so a run that goes on from one is the
same run. Before its first step the ranks compare what they are about to do
(`fingerprint`).
"""

import hashlib
import json
import platform
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler

import ddp_lab
from ddp_lab.config import TrainConfig
from ddp_lab.datasets import ImageSet, ImagesOnDisk
from ddp_lab.errors import BadInput
from ddp_lab.model import check_model, wrap_model
from ddp_lab.world import World

__all__ = [
    "TrainState",
    "check_batches",
    "check_fits",
    "check_resumable",
    "fingerprint",
    "start_training",
]


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
    sizes = _last_batch(config, num_train, world_size)
    if config.norm == "batch" and any(1 in ranks for ranks in sizes):
        raise BadInput(
            f"drop_last off: the last batch of an epoch has {sum(map(sum, sizes))} "
            "images, which leaves a rank with one, and BatchNorm needs two; use --norm "
            f"group{' or sync' if min(map(sum, sizes)) > 1 else ''}, or --drop-last"
        )


def check_batches(config: TrainConfig, data: ImageSet, world_size: int) -> None:
    """Try the model on a rank's micro-batch, and on a last batch of one image.

    Raises:
        BadInput: it cannot take them; see `check_model`.
    """
    micro, _ = config.batches(world_size)
    check_model(config, len(data.classes), micro, world_size)
    sizes = _last_batch(config, len(data.train), world_size)
    if config.norm == "sync" and any(sum(ranks) == 1 for ranks in sizes):
        try:
            check_model(config, len(data.classes), 1)
        except BadInput as error:
            raise BadInput(
                f"drop_last off: the last batch of an epoch leaves all ranks together "
                f"with one image, and {error}; or use --norm group, or --drop-last"
            ) from error


def _last_batch(
    config: TrainConfig, num_train: int, world_size: int
) -> list[list[int]]:
    """How many images each rank holds at once in a last, smaller batch, in order."""
    rest = num_train % config.global_batch_size
    if config.drop_last or not rest:
        return []
    micro, _ = config.batches(world_size)
    shares = [len(range(rank, rest, world_size)) for rank in range(world_size)]
    return [
        [min(micro, max(0, share - done)) for share in shares]
        for done in range(0, shares[0], micro)
    ]


@dataclass
class TrainState:
    """What changes while a run goes on, and what a checkpoint therefore holds."""

    model: DistributedDataParallel
    optimizer: torch.optim.Optimizer
    schedule: lr_scheduler.LRScheduler
    epoch: int = 0  # epochs done
    step: int = 0  # optimiser steps done
    samples: int = 0  # images trained on, repeated ones too
    tally: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    """Of the epoch under way: sum of losses, correct predictions, images so far."""
    time_s: float = 0.0  # seconds of training and evaluating
    train_s: float = 0.0  # seconds of training alone
    lr: float = 0.0  # of the step that was done last

    def state(self, config: TrainConfig, data_fingerprint: str) -> dict[str, Any]:
        """Everything that `checkpoint.save` wants.

        Args:
            config: the settings of the run.
            data_fingerprint: of the training images.
        """
        return {
            "model": self.model.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "progress": {name: getattr(self, name) for name in _PROGRESS},
            "config": config.to_json(),
            "data": data_fingerprint,
        }

    def load(self, state: dict[str, Any], config: TrainConfig, num_train: int) -> None:
        """Go back to what `state` returned.

        Args:
            state: of a checkpoint.
            config: the settings to go on with, as `check_resumable` let them pass.
            num_train: training images, on all ranks together.

        Raises:
            BadInput: the checkpoint's weights are of another model.
        """
        try:
            self.model.module.load_state_dict(state["model"])
        except RuntimeError as error:  # torch lists all that differs, one a line
            first = str(error).splitlines()[1:2] or [str(error)]
            raise BadInput(
                f"the checkpoint's weights do not fit model {config.model}: "
                f"{first[0].strip().rstrip('.')}; start a new run"
            ) from error
        fresh = [{**group} for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict(state["optimizer"])
        for name in _PROGRESS:
            setattr(self, name, state["progress"][name])
        if not _differing(config, state):
            self.schedule.load_state_dict(state["schedule"])
            return
        # insisted on: the new settings' schedule, as far along as the run is
        for group, settings in zip(self.optimizer.param_groups, fresh, strict=True):
            group.update(settings)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # no optimiser step comes before these
            for _ in range(self.steps_in_all(config, num_train)):
                self.schedule.step()

    def steps_into_epoch(self, config: TrainConfig) -> int:
        """Optimiser steps done in the epoch under way."""
        return int(self.tally[2]) // config.global_batch_size

    def steps_in_all(self, config: TrainConfig, num_train: int) -> int:
        """How many optimiser steps of these settings come as far as this run."""
        whole = self.epoch * config.steps_per_epoch(num_train)
        return whole + self.steps_into_epoch(config)


_PROGRESS = ("epoch", "step", "samples", "tally", "time_s", "train_s")


def start_training(
    config: TrainConfig, model: nn.Module, world: World, num_train: int
) -> TrainState:
    """Wrap the model, and make its optimiser and its schedule.

    Args:
        config: the settings of the run.
        model: the same on every rank.
        world: this rank.
        num_train: training images, on all ranks together; the schedule counts steps.

    **Collective**: all ranks must call it.
    """
    model = model.to(getattr(torch, config.precision))
    wrapped = wrap_model(model, world, config.norm)
    optimizer = torch.optim.SGD(
        wrapped.parameters(),
        lr=config.scaled_lr,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        nesterov=config.nesterov,
    )
    schedule = _schedule(config, optimizer, config.steps_per_epoch(num_train))
    return TrainState(wrapped, optimizer, schedule)


def _schedule(
    config: TrainConfig, optimizer: torch.optim.Optimizer, steps_per_epoch: int
) -> lr_scheduler.LRScheduler:
    """Learning rate over the run, stepped after each optimiser step."""
    num_steps = config.epochs * steps_per_epoch
    if config.schedule == "onecycle":
        return lr_scheduler.OneCycleLR(
            optimizer,
            max_lr=config.scaled_lr,
            total_steps=num_steps + 1,  # it is stepped once more
            cycle_momentum=False,  # the momentum is a setting of its own
        )
    num_warm = round(config.warmup_epochs * steps_per_epoch)
    main: lr_scheduler.LRScheduler
    if config.schedule == "cosine":
        main = lr_scheduler.CosineAnnealingLR(optimizer, max(1, num_steps - num_warm))
    else:
        main = lr_scheduler.ConstantLR(optimizer, factor=1.0)
    if not num_warm:
        return main
    # Goyal et al. 2017, section 2.2: from the rate that suits the unscaled batch
    start = config.lr / config.scaled_lr
    if start >= 1:
        start = 1 / num_warm
    warm = lr_scheduler.LinearLR(optimizer, start, total_iters=num_warm)
    return lr_scheduler.SequentialLR(optimizer, [warm, main], milestones=[num_warm])


def check_resumable(
    config: TrainConfig, state: dict[str, Any], data: ImageSet | None = None
) -> list[str]:
    """Refuse to go on with what would be another run.

    Args:
        config: the settings to go on with.
        state: the checkpoint.
        data: the data set to go on with, if it has been loaded yet.

    Returns:
        What differs all the same, because ``config.resume_anyway`` insists.

    Raises:
        BadInput: settings or data differ; names them, and how to insist.
    """
    differing = _differing(config, state)
    if data is not None and data.train.fingerprint() != state["data"]:
        differing.append(
            f"training set, of {data.train.fingerprint()} (it has {state['data']})"
        )
    if differing and not config.resume_anyway:
        raise BadInput(
            f"resume {config.resume or config.out}: cannot go on with another "
            f"{', another '.join(differing)}; drop these options, start a new run, or "
            "insist with --resume-anyway"
        )
    return differing


def _differing(config: TrainConfig, state: dict[str, Any]) -> list[str]:
    """Settings that make this another run than the checkpoint's, with both values."""
    saved = TrainConfig.from_json(state["config"])
    return [
        f"{name} {getattr(config, name)!r} (it has {getattr(saved, name)!r})"
        for name in config.differing(saved)
    ]


def fingerprint(
    config: TrainConfig, data: ImageSet, model: nn.Module, num_batches: int
) -> dict[str, str]:
    """What must be equal on all ranks before the first step, by name."""
    settings = {
        f"setting {name} =": json.dumps(value)
        for name, value in config.for_all_ranks().items()
    }
    parameters = {
        f"parameter {name} of shape": str(tuple(p.shape))
        for name, p in model.named_parameters()
    }
    sizes = {
        f"sizes of {name} files:": split.fingerprint_sizes()
        for name, split in (("training", data.train), ("test", data.test))
        if isinstance(split, ImagesOnDisk)
    }
    return {
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "torch": torch.__version__,
        "ddp_lab of sha256:": _code(),
        **settings,
        "training data:": data.train.fingerprint(),
        "test data:": data.test.fingerprint(),
        **sizes,
        "classes": ", ".join(data.classes),
        "batches an epoch:": str(num_batches),
        **parameters,
    }


def _code() -> str:
    """What the source of this package adds up to, shortened."""
    digest = hashlib.sha256()
    root = Path(ddp_lab.__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:16]
