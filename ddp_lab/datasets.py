"""Data sets: where the images come from, and what they look like once here.

A data set has two splits, for training and for testing. Small ones are held in memory
as one uint8 tensor, which the ranks of a machine share; ``folder`` keeps a list of
image files and decodes them when they are needed. Nothing here knows about shards:
that is step 3, in ``data.py``.

Letters in shapes: N samples, C channels (3), H and W height and width in pixels.
"""

import hashlib
import math
import os
import unicodedata
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import Dataset as TorchDataset

from ddp_lab.config import TrainConfig, Triple
from ddp_lab.errors import BadInput, LabError
from ddp_lab.world import World, gather_json

__all__ = [
    "ImageSet",
    "ImagesInMemory",
    "ImagesOnDisk",
    "load_dataset",
    "load_dataset_together",
]


@dataclass(frozen=True)
class ImagesInMemory:
    """Images as one uint8 tensor of shape (N, C, H, W), labels int64 of shape (N,)."""

    images: torch.Tensor
    labels: torch.Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def subset(self, indices: list[int]) -> "ImagesInMemory":
        """Keep only these samples."""
        return ImagesInMemory(self.images[indices], self.labels[indices])

    def fingerprint(self) -> str:
        """A short text that differs when any pixel or label does."""
        digest = hashlib.sha256(self.images.numpy().data)
        digest.update(self.labels.numpy().data)
        return f"{len(self)} images, sha256 {digest.hexdigest()[:16]}"


class ImagesOnDisk(TorchDataset[tuple[torch.Tensor, int, int]]):
    """Image files, decoded when they are needed, by DataLoader workers.

    The paths are kept as the bytes of one tensor: a list of a million would be copied,
    page by page, into every worker that looks at it.

    Args:
        samples: path and label of each image.
        image_size: the shorter side is resized to this, then the centre is cut out.
    """

    def __init__(self, samples: Sequence[tuple[str, int]], image_size: int) -> None:
        names = [os.fsencode(path) for path, _ in samples]
        self._bytes = torch.frombuffer(bytearray(b"".join(names)), dtype=torch.uint8)
        self._ends = torch.tensor([len(name) for name in names]).cumsum(0)
        self.labels = torch.tensor([label for _, label in samples])
        self.image_size = image_size
        self._fingerprint = ""

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def samples(self) -> list[tuple[str, int]]:
        """Path and label of each image, as ImageFolder has them; a new list."""
        return [(self.path(k), label) for k, label in enumerate(self.labels.tolist())]

    def path(self, index: int) -> str:
        """The file of a sample."""
        start = int(self._ends[index - 1]) if index else 0
        name = self._bytes[start : int(self._ends[index])]
        return os.fsdecode(name.numpy().tobytes())

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int, int]:
        """Image as uint8 (C, H, W), label, and the index itself.

        Raises:
            BadInput: the file is damaged or no image.
        """
        from torchvision.transforms import functional as transforms

        image = _read_image(self.path(index))
        image = transforms.resize(image, self.image_size, antialias=True)
        image = transforms.center_crop(image, self.image_size)
        return transforms.pil_to_tensor(image), int(self.labels[index]), index

    def subset(self, indices: list[int]) -> "ImagesOnDisk":
        """Keep only these samples."""
        samples = [(self.path(i), int(self.labels[i])) for i in indices]
        return ImagesOnDisk(samples, self.image_size)

    def fingerprint(self) -> str:
        """A short text that differs when the list of files or a label does."""
        if not self._fingerprint:
            digest = hashlib.sha256()
            for index, label in enumerate(self.labels.tolist()):
                # the folder itself may differ between hosts
                name = "/".join(self.path(index).split(os.sep)[-2:])
                digest.update(os.fsencode(f"{name}:{label}\n"))
            text = f"{len(self)} files, sha256 of names {digest.hexdigest()[:16]}"
            self._fingerprint = text
        return self._fingerprint

    def fingerprint_sizes(self, num_files: int = 1000) -> str:
        """A short text that differs when a file is cut short or another version.

        Args:
            num_files: how many to look at, evenly spread: asking a file server for the
                sizes of a million takes minutes.
        """
        spread = range(0, len(self), math.ceil(len(self) / num_files) or 1)
        sizes = [os.path.getsize(self.path(index)) for index in spread]
        digest = hashlib.sha256(str(sizes).encode())
        return f"{len(sizes)} of them, sha256 {digest.hexdigest()[:16]}"


def _read_image(path: str) -> Any:
    """A file as an RGB image of PIL, the right way up.

    Raises:
        BadInput: it is damaged, no image, or its pixels are fractions or have 32 bits.
    """
    import numpy
    from PIL import Image, ImageOps

    try:
        with warnings.catch_warnings(), Image.open(path) as file:
            warnings.simplefilter("ignore")  # of large images, and odd palettes
            if file.mode == "F":
                raise ValueError("its pixels are fractions; save it with 8 or 16 bits")
            try:
                image = ImageOps.exif_transpose(file)  # as viewers show it
            except Exception:  # notes on a picture may be damaged, and the picture not
                image = file
            if image.mode.startswith("I"):  # 16 bits: PIL would cut them off at 255
                pixels = numpy.asarray(image)
                if pixels.min() < 0 or pixels.max() >= 2**16:
                    raise ValueError("its pixels have 32 bits; save it with 8 or 16")
                image = Image.fromarray((pixels // 256).astype(numpy.uint8))
            return image.convert("RGB")
    except Exception as error:  # what a reader of damaged bytes meets is anything
        reason = " ".join(str(error).split()) or type(error).__name__
        raise BadInput(
            f"image {path} cannot be read ({reason}): replace or delete it"
        ) from error


@dataclass(frozen=True, kw_only=True)
class ImageSet:
    """A data set ready for training: two splits, class names, colour statistics."""

    name: str
    classes: tuple[str, ...]
    mean: Triple
    std: Triple
    train: ImagesInMemory | ImagesOnDisk
    test: ImagesInMemory | ImagesOnDisk
    notes: tuple[str, ...] = ()
    """What its owner should know: files that are left out."""


def load_dataset(config: TrainConfig) -> ImageSet:
    """Load a data set, downloading it first if ``config.download`` says so.

    Args:
        config: uses dataset, data_dir, download, image_size, limits, mean and std.

    Returns:
        The data set; its tensors are in this process's memory, uint8.

    Raises:
        BadInput: it is not there (says where it looked and how to get it), damaged,
            empty, or has one class only.
    """
    if config.dataset == "digits":
        data = _load_digits(config.image_size)
    elif config.dataset == "folder":
        data = _load_folder(config.data_dir, config.image_size)
    else:
        data = _load_torchvision(config.dataset, config.data_dir, config.download)
    if len(data.classes) < 2:
        raise BadInput(
            f"dataset {data.name} has one class only ({data.classes[0]}): a classifier "
            "needs at least two class folders"
        )
    return replace(
        data,
        train=_limit(data.train, config.limit_train),
        test=_limit(data.test, config.limit_test),
        mean=config.mean or data.mean,
        std=config.std or data.std,
    )


def load_dataset_together(config: TrainConfig, world: World) -> ImageSet:
    """Load a data set on every rank, while at most one rank downloads.

    Rank 0 goes first; then one rank of every other machine, which finds the files if
    the disk is shared and fetches them if it is not; then everybody else reads.

    Raises:
        LabError: a rank could not load it; every rank raises, so none is left waiting.

    **Collective**: all ranks must call it.
    """
    data = None
    turn = 0 if world.rank == 0 else 1 if world.local_rank == 0 else 2
    for now in range(3):
        failure = None
        if turn == now:
            try:
                own = config if now < 2 else replace(config, download=False)
                data = load_dataset(own)
            except LabError as error:
                failure = f"rank {world.rank}: {error}"
        failures = [f for f in gather_json(failure, world.device) if f]
        if failures:
            raise BadInput(failures[0])
    assert data is not None
    return data


def _limit(
    split: ImagesInMemory | ImagesOnDisk, limit: int | None
) -> ImagesInMemory | ImagesOnDisk:
    """Keep ``limit`` samples, drawn over all classes, the same in every run."""
    if limit is None or limit >= len(split):
        return split
    order = torch.randperm(len(split), generator=torch.Generator().manual_seed(0))
    return split.subset(sorted(order[:limit].tolist()))


def _load_digits(image_size: int) -> ImageSet:
    """1,797 handwritten digits of 8 x 8 pixels, values 0 .. 16, from scikit-learn."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) * (255 / 16)
    size = (image_size, image_size)
    images = F.interpolate(images, size, mode="bilinear", align_corners=False)
    images = images.round().to(torch.uint8).expand(-1, 3, -1, -1)
    # one fixed split, whatever the run's seed: 1,437 to learn from, 360 to test on
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    whole = ImagesInMemory(images, torch.tensor(labels, dtype=torch.int64))
    train = whole.subset(order[360:].tolist())
    # whole numbers add up exactly, on any number of threads: the same bits everywhere
    grey = train.images[:, 0].long()
    mean = grey.sum().item() / grey.numel()
    std = math.sqrt(grey.square().sum().item() / grey.numel() - mean**2)
    return ImageSet(
        name="digits",
        classes=tuple("0123456789"),
        mean=(mean / 255,) * 3,
        std=(std / 255,) * 3,
        train=train,
        test=whole.subset(order[:360].tolist()),
    )


@dataclass(frozen=True)
class _Known:
    """A data set that torchvision reads: its class there, published statistics."""

    torchvision_name: str
    mean: Triple
    std: Triple


# Mean and standard deviation over all pixels of the training images.
_TORCHVISION = {
    "fashion-mnist": _Known("FashionMNIST", (0.2860,) * 3, (0.3530,) * 3),
    "cifar10": _Known("CIFAR10", (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": _Known("CIFAR100", (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
}


def _load_torchvision(name: str, data_dir: Path, download: bool) -> ImageSet:
    from torchvision import datasets

    known = _TORCHVISION[name]
    reader = getattr(datasets, known.torchvision_name)
    try:
        splits = [
            reader(data_dir, train=train, download=download) for train in (True, False)
        ]
    except Exception as error:
        # torchvision raises RuntimeError, ValueError, OSError, pickle's errors, ...
        where = data_dir / reader.__name__ / "raw"
        if known.torchvision_name != "FashionMNIST":
            where = data_dir / reader.base_folder
        if download:
            raise BadInput(
                f"dataset {name} could not be downloaded to {data_dir}: "
                f"{_first_line(error)}; check the network, or copy the files to {where}"
            ) from error
        found = where.exists() and any(where.iterdir())
        state = "is incomplete or damaged" if found else "is not on disk"
        cure = f"delete {where}, then " if found else ""
        raise BadInput(
            f"dataset {name} {state}: looked in {where}; {cure}either run once with "
            f"--download, or copy the original files there"
        ) from error
    train, test = (
        ImagesInMemory(_as_nchw(split.data), torch.as_tensor(split.targets))
        for split in splits
    )
    return ImageSet(
        name=name,
        classes=tuple(splits[0].classes),
        mean=known.mean,
        std=known.std,
        train=train,
        test=test,
    )


def _as_nchw(pixels: Any) -> torch.Tensor:
    """torchvision's (N, H, W, C) array or (N, H, W) tensor as uint8 (N, 3, H, W)."""
    images = torch.as_tensor(pixels)
    if images.dim() == 3:
        # 28 x 28 grey: two black pixels around give 32 x 32, three equal channels
        return F.pad(images, (2, 2, 2, 2)).unsqueeze(1).repeat(1, 3, 1, 1)
    return images.permute(0, 3, 1, 2).contiguous()


def _load_folder(data_dir: Path, image_size: int) -> ImageSet:
    test_dir = data_dir / "test"
    if not test_dir.is_dir():
        test_dir = data_dir / "val"
    left_out: Counter[str] = Counter()
    splits = []
    for split_dir in (data_dir / "train", test_dir):
        if not split_dir.is_dir():
            raise BadInput(
                f"dataset folder: {split_dir} is missing; images belong in "
                f"{data_dir}/train/CLASS/ and {data_dir}/test/CLASS/ (or val/): name "
                "another --data-dir, or move them there"
            )
        splits.append(_list_images(split_dir, left_out))
    (train_classes, train), (test_classes, test) = splits
    if train_classes != test_classes:
        odd = sorted(set(train_classes) ^ set(test_classes))
        forms = {unicodedata.normalize("NFC", name) for name in odd}
        alike = " (letters of two Unicode forms)" if len(forms) < len(odd) else ""
        raise BadInput(
            f"dataset folder: {test_dir.name}/ and train/ hold different classes, "
            f"differing in {', '.join(odd)}{alike}; give both the same class folders"
        )
    images = [ImagesOnDisk(samples, image_size) for samples in (train, test)]
    for split in images:  # open one image a class, before anything starts
        seen: set[int] = set()
        for index, label in enumerate(split.labels.tolist()):
            if label not in seen:
                seen.add(label)
                split[index]
    kinds = ", ".join(f"{n} {suffix}" for suffix, n in left_out.most_common(5))
    note = f"{sum(left_out.values())} files of kinds that are not read: {kinds}"
    return ImageSet(
        name="folder",
        classes=tuple(train_classes),
        mean=(0.485, 0.456, 0.406),  # ImageNet's, as torchvision's recipes use them
        std=(0.229, 0.224, 0.225),
        train=images[0],
        test=images[1],
        notes=(note,) if left_out else (),
    )


# What systems and programs leave in folders, beside names that begin with a dot.
_NO_CLASSES = ("__MACOSX", "@eaDir", "lost+found", "$RECYCLE.BIN")


def _list_images(
    folder: Path, left_out: Counter[str]
) -> tuple[list[str], list[tuple[str, int]]]:
    """Class names in order, and path and label of each image, as ImageFolder has them.

    Hidden files and folders are none of them.
    """
    from torchvision.datasets import ImageFolder
    from torchvision.datasets.folder import IMG_EXTENSIONS

    root = str(folder)

    def is_shown(name: str) -> bool:
        return not name.startswith(".") and name not in _NO_CLASSES

    def is_image(path: str) -> bool:
        if not all(map(is_shown, os.path.relpath(path, root).split(os.sep))):
            return False
        suffix = os.path.splitext(path)[1].lower()
        if suffix not in IMG_EXTENSIONS:
            left_out[suffix or os.path.basename(path)] += 1
        return suffix in IMG_EXTENSIONS

    class Shown(ImageFolder):  # type: ignore[misc]
        def find_classes(self, directory: Any) -> tuple[list[str], dict[str, int]]:
            names, _ = super().find_classes(directory)
            names = [name for name in names if is_shown(name)]
            return names, {name: label for label, name in enumerate(names)}

    try:
        found = Shown(root, is_valid_file=is_image)
    except FileNotFoundError as error:
        reason = _first_line(error).rstrip(". ")
        raise BadInput(
            f"dataset folder {folder}: {reason}; remove the empty class folder or put "
            f"images into it ({' '.join(IMG_EXTENSIONS)})"
        ) from error
    except OSError as error:
        raise BadInput(
            f"dataset folder {folder}: {error.filename}: {error.strerror}"
        ) from error
    return found.classes, found.samples


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
