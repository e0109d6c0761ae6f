"""The settings of a training run: one frozen dataclass, its checks and its recipes.

The command line of ``python -m ddp_lab.train`` is made from the fields below; each
docstring is that option's help text. A field's type also says whose setting it is:

    lr: float                 decides what is computed: a resumed run must keep it,
                              unless resume_anyway insists
    log_every: Free[int]      a resumed run may change it; all ranks have the same
    out: Local[Path]          each rank may have its own
"""

import dataclasses
import functools
import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_type_hints

from ddp_lab.errors import BadInput

__all__ = ["RECIPES", "Dataset", "Free", "Local", "TrainConfig", "Triple", "mix_seed"]

T = TypeVar("T")
Free = Annotated[T, "a resumed run may change it"]
Local = Annotated[T, "each rank may have its own"]

Dataset = Literal["digits", "fashion-mnist", "cifar10", "cifar100", "folder"]
Triple = tuple[float, float, float]


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """All settings of a training run.

    A recipe is a set of values for the other settings: ``default``, digits in under a
    minute on two CPU cores; ``article``, the CIFAR-10 settings of the article this lab
    grew from, its low learning rate included; ``fast``, the article's accuracy in a
    small part of its time.
    """

    recipe: Free[Literal["default", "article", "fast"]] = "default"
    """Where the settings below start from; any of them given here wins."""

    dataset: Dataset = "digits"
    """What to learn; folder reads DATA_DIR/train/CLASS/*.jpg, and test/ or val/."""
    data_dir: Local[Path] = Path("data")
    """Folder that holds the data set (digits ships with scikit-learn)."""
    download: Local[bool] = False
    """Download a torchvision data set into DATA_DIR if it is not there."""
    limit_train: int | None = None
    """Train on this many images only, for a first look (None: all)."""
    limit_test: Free[int | None] = None
    """Evaluate on this many images only, for a first look (None: all)."""
    image_size: int = 32
    """Height and width, in pixels, at which the model sees the images."""
    crop_padding: int = 0
    """Augmentation: pad by this many pixels, crop back at random (0: off)."""
    flip: bool = False
    """Augmentation: mirror left-right, every other image at random."""
    mean: Triple | None = None
    """Subtracted from each colour channel, 0..1 (None: the data set's mean)."""
    std: Triple | None = None
    """Divides each colour channel, 0..1 (None: the data set's deviation)."""

    model: str = "resnet18"
    """Any classifier of torchvision.models by name, untrained."""
    norm: Literal["batch", "sync", "group"] = "batch"
    """Batch statistics of a rank, of all ranks, or GroupNorm."""

    epochs: Free[int] = 8
    """Passes over the training images."""
    global_batch_size: int = 64
    """Images that one optimiser step sees, summed over all ranks."""
    micro_batch_size: int | None = None
    """Images a rank holds at once; accumulates up to its share (None: all of it)."""
    drop_last: bool = True
    """Leave out an epoch's last images, which do not fill a global batch."""
    lr: float = 0.02
    """Learning rate; under onecycle its peak."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """Multiply lr by GLOBAL_BATCH_SIZE / LR_BATCH_SIZE, or by its square root."""
    lr_batch_size: int = 64
    """The global batch size that lr was chosen for; lr_scaling starts from it."""
    warmup_epochs: float = 0.0
    """Epochs over which the rate rises to its full value, from the unscaled lr."""
    momentum: float = 0.9
    """Momentum of SGD, from 0 to below 1."""
    weight_decay: float = 5e-4
    """L2 penalty on all parameters, as SGD applies it."""
    nesterov: bool = True
    """Nesterov momentum instead of the classical one."""
    clip_grad_norm: float | None = None
    """Largest norm of the averaged gradient; a longer one is shortened (None: off)."""
    schedule: Literal["constant", "cosine", "onecycle"] = "onecycle"
    """Rate over the run; cosine: down to 0; onecycle: up for 30 %, then to 0."""
    precision: Literal["float32", "float64"] = "float32"
    """Of weights and arithmetic; float64 is slow, and for proofs."""
    deterministic: bool = False
    """Only algorithms that give the same bits again, and no TF32; slower on GPUs."""
    seed: int = 0
    """Decides initial weights, order of the images and augmentation."""

    num_ranks: Local[int | None] = None
    """Processes to start (None: one a GPU, or 2 on the CPU); not under torchrun."""
    device: Local[Literal["auto", "cpu", "cuda"]] = "auto"
    """Where to compute; auto: one GPU a rank if there are enough, else the CPU."""
    num_threads: Local[int | None] = None
    """CPU threads a rank (None: cores / ranks; torchrun: OMP_NUM_THREADS)."""
    num_workers: Local[int] = 2
    """DataLoader processes a rank, for dataset folder (the others need none)."""
    timeout_s: Free[float] = 600.0
    """Seconds that ranks wait for one that is cut off before they give up."""

    out: Local[Path | None] = None
    """Folder for this run's files (None: runs/DATASET-MODEL-TIME)."""
    resume: Local[Path | None] = None
    """Folder of a run to go on with, from its checkpoint and with its settings."""
    auto_resume: Free[bool] = False
    """Go on with the run in OUT if there is one; implied when a launcher restarts."""
    resume_anyway: Free[bool] = False
    """Insist on going on, although settings differ from the checkpoint's."""
    checkpoint_every: Free[int | None] = None
    """Optimiser steps between checkpoints (None: only one after each epoch)."""
    keep_checkpoints: Free[int] = 2
    """How many checkpoints to keep: the newest, and those before it."""
    log_every: Free[int] = 1
    """Optimiser steps between lines of history.jsonl, which average over them."""

    def __post_init__(self) -> None:
        for name in ("data_dir", "out", "resume"):
            if (path := getattr(self, name)) is not None:  # a shell keeps the ~ of =~
                object.__setattr__(self, name, Path(path).expanduser())
        for name, kind in get_type_hints(TrainConfig).items():
            allowed = get_args(kind)
            value = getattr(self, name)
            if allowed and isinstance(allowed[0], str) and value not in allowed:
                raise BadInput(
                    f"{name} {value!r} is unknown: choose {_one_of(allowed)}"
                )
        for name in (
            "epochs",
            "global_batch_size",
            "image_size",
            "keep_checkpoints",
            "log_every",
            "lr_batch_size",
        ):
            self._check(name, getattr(self, name) >= 1, "1 or more")
        for name in (
            "limit_train",
            "limit_test",
            "checkpoint_every",
            "micro_batch_size",
            "num_ranks",
            "num_threads",
        ):
            value = getattr(self, name)
            self._check(name, value is None or value >= 1, "1 or more")
        self._check(
            "timeout_s",
            math.isfinite(self.timeout_s) and self.timeout_s > 0,
            "a positive number of seconds",
        )
        for name in ("crop_padding", "num_workers", "seed"):
            self._check(name, getattr(self, name) >= 0, "0 or more")
        self._check("lr", math.isfinite(self.lr) and self.lr > 0, "a positive number")
        self._check("momentum", 0 <= self.momentum < 1, "at least 0 and below 1")
        for name in ("weight_decay", "warmup_epochs"):
            value = getattr(self, name)
            self._check(
                name, math.isfinite(value) and value >= 0, "0 or a positive number"
            )
        if self.clip_grad_norm is not None:
            self._check("clip_grad_norm", self.clip_grad_norm > 0, "a positive number")
        self._check(
            "warmup_epochs", self.warmup_epochs <= self.epochs, "at most the epochs"
        )
        if self.schedule == "onecycle" and self.warmup_epochs:
            raise BadInput(
                "warmup_epochs: the schedule onecycle warms up by itself; use "
                "--schedule cosine or constant"
            )
        if self.nesterov and self.momentum == 0:
            raise BadInput("nesterov needs a momentum above 0: use --no-nesterov")
        if self.std is not None:
            self._check("std", all(s > 0 for s in self.std), "above 0 in each channel")

    def _check(self, name: str, fine: bool, legal: str) -> None:
        if not fine:
            raise BadInput(f"{name} {getattr(self, name)} must be {legal}")

    def batches(self, world_size: int) -> tuple[int, int]:
        """Split the global batch.

        Args:
            world_size: number of ranks that share it.

        Returns:
            Images a rank holds at once, and over how many such micro-batches it
            accumulates gradients: world_size x micro x accumulation = global.

        Raises:
            BadInput: it does not come out even; names the nearest sizes that do.
        """
        total = self.global_batch_size
        micro = self.micro_batch_size
        unit = world_size * (micro or 1)
        if total % unit:
            below, above = total - total % unit, total - total % unit + unit
            nearest = f"{below} or {above}" if below else f"{above}"
            rank_word = "rank" if world_size == 1 else "ranks"
            parts = f"{world_size} {rank_word}" + (f" x {micro}" if micro else "")
            raise BadInput(
                f"global_batch_size {total} does not divide into {parts}: "
                f"the nearest that does is {nearest}"
            )
        micro = micro or total // world_size
        return micro, total // (world_size * micro)

    def steps_per_epoch(self, num_train: int) -> int:
        """Optimiser steps of an epoch, the same for every number of ranks.

        Args:
            num_train: training images, on all ranks together.
        """
        whole, rest = divmod(num_train, self.global_batch_size)
        return whole if self.drop_last or not rest else whole + 1

    @property
    def scaled_lr(self) -> float:
        """The learning rate for this global batch, by the rule of ``lr_scaling``.

        Source: linear: Goyal et al. 2017, "Accurate, Large Minibatch SGD: Training
        ImageNet in 1 Hour" (https://arxiv.org/abs/1706.02677), section 2.1; square
        root: Krizhevsky 2014, "One weird trick for parallelizing convolutional neural
        networks" (https://arxiv.org/abs/1404.5997).
        """
        ratio = self.global_batch_size / self.lr_batch_size
        power = {"none": 0.0, "linear": 1.0, "sqrt": 0.5}[self.lr_scaling]
        return float(self.lr * ratio**power)

    def to_json(self) -> dict[str, Any]:
        """Plain strings, numbers and lists, as ``config.json`` holds them."""
        plain = dataclasses.asdict(self)
        return {
            key: str(value)
            if isinstance(value, Path)
            else list(value)
            if isinstance(value, tuple)
            else value
            for key, value in plain.items()
        }

    @classmethod
    def from_json(cls, plain: dict[str, Any]) -> "TrainConfig":
        """The inverse of `to_json`.

        Raises:
            BadInput: an unknown setting, or a value that is not legal.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(plain) - known)
        if unknown:
            raise BadInput(f"settings that this version does not know: {unknown}")
        values = dict(plain)
        for name, kind in get_type_hints(cls).items():
            if values.get(name) is None:
                continue
            if Path in (kind, *get_args(kind)):
                values[name] = Path(values[name])
            elif isinstance(values[name], list):
                values[name] = tuple(values[name])
        return cls(**values)

    def for_all_ranks(self) -> dict[str, Any]:
        """The settings that every rank must have alike, as `to_json` has them."""
        own = _marked(Local)
        return {name: v for name, v in self.to_json().items() if name not in own}

    def differing(self, other: "TrainConfig") -> list[str]:
        """Names of the settings by which this is another run than ``other``."""
        free = _marked(Local) | _marked(Free)
        if self.schedule != "constant":
            free -= {"epochs"}  # the schedule is laid out for this many
        return [
            field.name
            for field in dataclasses.fields(self)
            if field.name not in free
            and getattr(self, field.name) != getattr(other, field.name)
        ]


@functools.cache
def _marked(kind: Any) -> frozenset[str]:
    """Names of the fields whose type is ``Free[...]``, or ``Local[...]``."""
    (mark,) = kind.__metadata__
    hints = get_type_hints(TrainConfig, include_extras=True)
    return frozenset(
        n for n, h in hints.items() if mark in getattr(h, "__metadata__", ())
    )


def mix_seed(*numbers: int) -> int:
    """Make one seed of several numbers, such that (0, 1) and (1, 0) differ."""
    digest = hashlib.sha256(" ".join(map(str, numbers)).encode()).digest()
    return int.from_bytes(digest[:7], "little")


def _one_of(names: tuple[str, ...]) -> str:
    return ", ".join(names[:-1]) + " or " + names[-1]


RECIPES: dict[str, TrainConfig] = {
    "default": TrainConfig(),
    # The article's own values: data, augmentation, mean and std, epochs, global batch,
    # SGD and its rate, momentum and weight decay. The rate, 0.001 times a fixed 2, is
    # among the slips of notebook 05 and stays: another one would be another training.
    # The program around them is the lab's: as many outputs as classes, shares computed
    # from the number of ranks, the run's loss, and a test of each image once.
    "article": TrainConfig(
        recipe="article",
        dataset="cifar10",
        crop_padding=4,
        flip=True,
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2023, 0.1994, 0.2010),
        epochs=20,
        global_batch_size=1024,
        lr=0.002,
        lr_batch_size=1024,
        momentum=0.9,
        weight_decay=1e-4,
        nesterov=True,
        schedule="constant",
    ),
    "fast": TrainConfig(
        recipe="fast",
        dataset="cifar10",
        crop_padding=4,
        flip=True,
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2023, 0.1994, 0.2010),
        epochs=3,
        global_batch_size=128,
        lr=0.05,
        lr_batch_size=128,
        momentum=0.9,
        weight_decay=5e-4,
        nesterov=True,
        schedule="onecycle",
    ),
}
