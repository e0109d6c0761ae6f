"""Step 3: which rank sees which sample?

Every rank holds (or shares) the whole data set and picks its own part by *index*:

- training: `DistributedSampler` shuffles 0 .. N-1 alike on all ranks and gives rank r
  every W-th index from r on. The last few that do not fill a global batch are dropped,
  so the k-th global batch is the same set of samples for every W that divides it.
- evaluation: `shard_indices`, every W-th index and no padding, so that each sample is
  counted exactly once.

Images stay uint8 until they become a batch on the device: gather, crop, flip and
normalise, each for the whole batch at once. Crops and flips are drawn from (seed,
epoch, sample index), so a sample looks alike whichever rank meets it.

Letters in shapes: N samples, W ranks, n images in a batch, C channels (3), H and W
height and width in pixels.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler

from ddp_lab.config import TrainConfig, Triple, mix_seed
from ddp_lab.datasets import ImageSet, ImagesInMemory, ImagesOnDisk
from ddp_lab.errors import BadInput
from ddp_lab.world import World

__all__ = [
    "Batches",
    "augment",
    "draw_augmentation",
    "eval_loader",
    "shard_indices",
    "train_loader",
]


def shard_indices(num_samples: int, rank: int, world_size: int) -> range:
    """List the samples that a rank evaluates: every W-th, none twice, none left out.

    Args:
        num_samples: N, 0 or more; need not divide by the world size.
        rank: 0 .. world_size - 1.
        world_size: number of ranks.

    Returns:
        Indices below N. Lengths differ by at most 1 between ranks; some may be empty.
    """
    return range(rank, num_samples, world_size)


class Batches:
    """This rank's batches of one epoch, ready on its device.

    Iterating yields pairs of images, float32 (n, C, H, W), normalised, and labels,
    int64 (n,), with n the micro-batch size (less in an evaluation's last batch).
    """

    def __init__(
        self,
        split: ImagesInMemory | ImagesOnDisk,
        indices: "DistributedSampler[Any] | range",
        batch_size: int,
        finish: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor],
        *,
        device: torch.device,
        num_workers: int,
        drop_last: bool,
    ) -> None:
        self.epoch = 0
        self.device = device
        self.batch_size = batch_size
        self.indices = indices
        self.drop_last = drop_last
        self._finish = finish  # (uint8 images, sample indices, epoch) -> float images
        self._loader: DataLoader[Any] | None = None
        if isinstance(split, ImagesInMemory):
            self._images = split.images.to(device)  # on the CPU: the same memory
            self._labels = split.labels.to(device)
        else:
            self._loader = DataLoader(
                split,
                batch_size=batch_size,
                sampler=indices,
                num_workers=num_workers,
                drop_last=drop_last,
                pin_memory=device.type == "cuda",
                persistent_workers=num_workers > 0,
            )

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, 0 or more, whose order and augmentation come next."""
        self.epoch = epoch
        if isinstance(self.indices, DistributedSampler):
            self.indices.set_epoch(epoch)

    def __len__(self) -> int:
        whole, rest = divmod(len(self.indices), self.batch_size)
        return whole if self.drop_last or not rest else whole + 1

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for images, labels, samples in self._raw():
            yield self._finish(images, samples, self.epoch), labels

    def _raw(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """uint8 images (n, C, H, W) and labels (n,) on the device, sample indices."""
        if self._loader is None:
            order = torch.tensor(list(self.indices), dtype=torch.int64)
            for k in range(len(self)):
                samples = order[k * self.batch_size : (k + 1) * self.batch_size]
                here = samples.to(self.device)
                yield self._images[here], self._labels[here], samples
            return
        try:
            for images, labels, samples in self._loader:
                yield (
                    images.to(self.device, non_blocking=True),
                    labels.to(self.device, non_blocking=True),
                    samples,
                )
        except BadInput as error:
            # a DataLoader worker wraps the message in its traceback: keep its last line
            message = str(error).strip().splitlines()[-1]
            raise BadInput(message.split("BadInput: ")[-1]) from None


def train_loader(
    data: ImageSet, config: TrainConfig, world: World, batch_size: int
) -> Batches:
    """Make this rank's training batches: shuffled, augmented, whole ones only.

    Args:
        data: the data set, the same on all ranks.
        config: uses seed, augmentation, image size, number of workers.
        world: decides the shard and the device.
        batch_size: images in each batch of this rank, the micro-batch size.
    """

    @functools.lru_cache(maxsize=1)
    def draws_of(epoch: int) -> torch.Tensor:
        return draw_augmentation(
            len(data.train), config.crop_padding, config.flip, config.seed, epoch
        )

    def finish(images: torch.Tensor, samples: torch.Tensor, epoch: int) -> torch.Tensor:
        if config.crop_padding or config.flip:
            images = augment(images, draws_of(epoch)[samples], config.crop_padding)
        return _normalise(images, data.mean, data.std, config.image_size)

    sampler: DistributedSampler[Any] = DistributedSampler(
        data.train,  # type: ignore[arg-type]  # only its length is used
        num_replicas=world.world_size,
        rank=world.rank,
        shuffle=True,
        seed=config.seed,
        drop_last=True,
    )
    return Batches(
        data.train,
        sampler,
        batch_size,
        finish,
        device=world.device,
        num_workers=config.num_workers,
        drop_last=True,
    )


def eval_loader(
    data: ImageSet, config: TrainConfig, world: World, batch_size: int
) -> Batches:
    """Make this rank's evaluation batches: each test image is on exactly one rank.

    Ranks may have different numbers of batches, some none: use no collective in the
    loop over them.
    """

    def finish(images: torch.Tensor, _: torch.Tensor, __: int) -> torch.Tensor:
        return _normalise(images, data.mean, data.std, config.image_size)

    return Batches(
        data.test,
        shard_indices(len(data.test), world.rank, world.world_size),
        batch_size,
        finish,
        device=world.device,
        num_workers=config.num_workers,
        drop_last=False,
    )


# ------------------------------------------------------------------ augmentation


def draw_augmentation(
    num_samples: int, crop_padding: int, flip: bool, seed: int, epoch: int
) -> torch.Tensor:
    """Draw crop and flip for every sample of an epoch, alike on all ranks.

    Returns:
        int64 of shape (N, 3): row and column offset, 0 .. 2 crop_padding, and 0 or 1
        for mirrored.
    """
    generator = torch.Generator().manual_seed(mix_seed(seed, epoch))
    offsets = torch.randint(
        0, 2 * crop_padding + 1, (num_samples, 2), generator=generator
    )
    mirrored = torch.randint(0, 2, (num_samples, 1), generator=generator)
    return torch.cat([offsets, mirrored * int(flip)], dim=1)


def augment(
    images: torch.Tensor, draws: torch.Tensor, crop_padding: int
) -> torch.Tensor:
    """Crop and mirror a batch, each image by its own draw.

    Args:
        images: (n, C, H, W), any dtype and device.
        draws: (n, 3) int64 of `draw_augmentation`.
        crop_padding: black pixels added on each side before cropping back to H x W.

    Returns:
        (n, C, H, W), a new tensor.
    """
    height, width = images.shape[-2:]
    padded = F.pad(images, (crop_padding,) * 4)
    # every possible crop as a view: (n, C, 2p + 1, 2p + 1, H, W)
    crops = padded.unfold(2, height, 1).unfold(3, width, 1)
    draws = draws.to(images.device, non_blocking=True)
    each = torch.arange(len(images), device=images.device)
    cropped = crops[each, :, draws[:, 0], draws[:, 1]]  # (n, C, H, W)
    mirrored = draws[:, 2].bool().view(-1, 1, 1, 1)
    return torch.where(mirrored, cropped.flip(3), cropped)


def _normalise(
    images: torch.Tensor, mean: Triple, std: Triple, image_size: int
) -> torch.Tensor:
    """uint8 0 .. 255 to float32 with about mean 0 and variance 1 a channel."""
    floats = images.to(torch.float32)
    if images.shape[-1] != image_size:
        size = (image_size, image_size)
        floats = F.interpolate(floats, size, mode="bilinear", antialias=True)
    offset = torch.tensor(mean, device=images.device).view(3, 1, 1) * 255
    scale = torch.tensor(std, device=images.device).view(3, 1, 1) * 255
    return floats.sub_(offset).div_(scale)
