"""Step 3: which rank sees which sample?

Every rank holds (or shares) the whole data set and picks its own part by *index*:

- training: `DistributedSampler` shuffles 0 .. N-1 alike on all ranks and gives rank r
  every W-th index from r on. The k-th global batch is then the same set of samples for
  every W that divides it. The last few, which do not fill one, are left out, or with
  ``drop_last`` off make a smaller one, in which ranks can have different numbers.
- evaluation: `shard_indices`, every W-th index and no padding, so that each sample is
  counted exactly once.

Images stay uint8 until they become a batch on the device: gather, crop, flip and
normalise, each for the whole batch at once. Crops and flips are drawn from (seed,
epoch, sample index), so a sample looks alike whichever rank meets it.

Letters in shapes: N samples, W ranks, n images in a batch, C channels (3), H and W
height and width in pixels.
"""

import functools
import itertools
import math
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from ddp_lab.config import TrainConfig, mix_seed
from ddp_lab.datasets import ImageSet, ImagesInMemory, ImagesOnDisk
from ddp_lab.errors import STOP_SIGNALS, BadInput
from ddp_lab.world import World

__all__ = [
    "Batches",
    "TrainSampler",
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
    int64 (n,), with n the micro-batch size. The last ones may be smaller, or empty when
    ``num_batches`` is more than there are: all ranks must do the same number.
    """

    def __init__(
        self,
        split: ImagesInMemory | ImagesOnDisk,
        indices: "TrainSampler | range",
        batch_size: int,
        finish: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor],
        *,
        device: torch.device,
        num_workers: int,
        num_batches: int,
    ) -> None:
        self.epoch = 0
        self.device = device
        self.batch_size = batch_size
        self.indices = indices
        self.num_batches = num_batches
        self.num_samples = len(split)  # of all ranks together
        self._skip = 0
        self._finish = finish  # (uint8 images, sample indices, epoch) -> float images
        self._loader: DataLoader[Any] | None = None
        if isinstance(split, ImagesInMemory):
            self._images = split.images.to(device)  # on the CPU: the same memory
            self._labels = split.labels.to(device)
        else:
            _check_sockets(num_workers)
            self._loader = DataLoader(
                split,
                batch_size=batch_size,
                sampler=indices,
                num_workers=num_workers,
                drop_last=num_batches * batch_size <= len(indices),
                pin_memory=device.type == "cuda",
                persistent_workers=num_workers > 0,
                worker_init_fn=_outlive_signals,
                generator=torch.Generator(),  # starting it draws no number of dropout's
            )

    def set_epoch(self, epoch: int, skip: int = 0) -> None:
        """Choose the epoch, 0 or more, whose order and augmentation come next.

        Args:
            epoch: 0 or more.
            skip: batches at its beginning that are done already; they are not loaded.
        """
        self.epoch = epoch
        self._skip = skip
        if isinstance(self.indices, TrainSampler):
            self.indices.set_epoch(epoch)
            self.indices.skip = skip * self.batch_size

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        left = self.num_batches - self._skip
        for images, labels, samples in itertools.islice(self._raw(), left):
            yield self._finish(images, samples, self.epoch), labels
            left -= 1
        for _ in range(left):  # our share is used up, another rank's is not
            none = torch.empty(0, dtype=torch.int64, device=self.device)
            images = torch.empty(0, 3, 1, 1, dtype=torch.uint8, device=self.device)
            yield self._finish(images, none.cpu(), self.epoch), none

    def _raw(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """uint8 images (n, C, H, W) and labels (n,) on the device, sample indices."""
        if self._loader is None:
            order = torch.tensor(list(self.indices), dtype=torch.int64)
            for samples in order.split(self.batch_size) if len(order) else ():
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


_SOCKET_BYTES = 107 - len("/pymp-12345678/listener-12345678")


def _check_sockets(num_workers: int) -> None:
    """Refuse a folder in which a rank would wait for ever for its workers.

    They hand over tensors through a socket in a folder of multiprocessing's. Linux
    allows its name 107 bytes; if it is longer, a worker's thread prints an error and
    drops the batch.
    """
    folder = tempfile.gettempdir()
    if num_workers and len(os.fsencode(folder)) > _SOCKET_BYTES:
        raise BadInput(
            f"the folder for temporary files, {folder}, has too long a name for the "
            f"sockets of DataLoader workers: set TMPDIR to one of at most "
            f"{_SOCKET_BYTES} bytes, such as /tmp, or use --num-workers 0"
        )


def _outlive_signals(worker: int) -> None:
    """Leave it to the rank to stop when asked: it needs its workers to end the step.

    Some clusters send SIGTERM to all processes of a job, and a worker would die of it
    first. The one that its own rank sends still ends it. (Not on macOS.)
    """
    if hasattr(signal, "sigwaitinfo"):  # not on macOS
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        threading.Thread(target=_heed_the_rank, daemon=True).start()


def _heed_the_rank() -> None:
    while signal.sigwaitinfo(STOP_SIGNALS).si_pid != os.getppid():
        pass
    os._exit(0)


class TrainSampler(DistributedSampler[Any]):
    """`DistributedSampler`, without its padding, and able to begin in mid-epoch.

    With ``drop_last`` off torch's sampler repeats a few samples, so that all ranks have
    the same number. Here nobody sees a sample twice, and ranks may differ by one.
    """

    skip = 0  # samples of this rank at the epoch's beginning that are done already

    def __iter__(self) -> Iterator[Any]:
        order = list(super().__iter__())
        return iter(order[self.skip : self._num_real])

    def __len__(self) -> int:
        return self._num_real - self.skip

    @property
    def _num_real(self) -> int:
        """How many samples of this rank are no repetitions."""
        if self.drop_last:
            return self.num_samples
        num_samples = len(self.dataset)  # type: ignore[arg-type]
        return len(shard_indices(num_samples, self.rank, self.num_replicas))


def _check_has_length(split: Any) -> None:
    """Refuse a stream: a rank's share is a set of indices, and its samples have none.

    torch hands every rank, and every worker of its loader, the whole stream.
    """
    if isinstance(split, IterableDataset) or not hasattr(split, "__len__"):
        raise BadInput(
            f"{type(split).__name__} is a stream (an IterableDataset): every rank "
            "would get all of it. Let its __iter__ take this rank's part, "
            "itertools.islice(stream, rank, None, world_size), and of that each "
            "worker's, by torch.utils.data.get_worker_info(); then use your own "
            "DataLoader and loop"
        )


def train_loader(
    data: ImageSet, config: TrainConfig, world: World, batch_size: int
) -> Batches:
    """Make this rank's training batches: shuffled and augmented.

    Args:
        data: the data set, the same on all ranks.
        config: uses seed, augmentation, image size, number of workers.
        world: decides the shard and the device.
        batch_size: images in each batch of this rank, the micro-batch size.

    Raises:
        BadInput: the data set is a stream.
    """
    _check_has_length(data.train)

    @functools.lru_cache(maxsize=1)
    def draws_of(epoch: int) -> torch.Tensor:
        return draw_augmentation(
            len(data.train), config.crop_padding, config.flip, config.seed, epoch
        )

    def finish(images: torch.Tensor, samples: torch.Tensor, epoch: int) -> torch.Tensor:
        if config.crop_padding or config.flip:
            images = augment(images, draws_of(epoch)[samples], config.crop_padding)
        return _normalise(images, data, config)

    sampler = TrainSampler(
        data.train,  # type: ignore[arg-type]  # only its length is used
        num_replicas=world.world_size,
        rank=world.rank,
        shuffle=True,
        seed=config.seed,
        drop_last=config.drop_last,
    )
    return Batches(
        data.train,
        sampler,
        batch_size,
        finish,
        device=world.device,
        num_workers=config.num_workers,
        num_batches=(
            len(sampler) // batch_size
            if config.drop_last
            else math.ceil(math.ceil(len(data.train) / world.world_size) / batch_size)
        ),
    )


def eval_loader(
    data: ImageSet, config: TrainConfig, world: World, batch_size: int
) -> Batches:
    """Make this rank's evaluation batches: each test image is on exactly one rank.

    Ranks may have different numbers of batches, some none: use no collective in the
    loop over them.
    """

    _check_has_length(data.test)

    def finish(images: torch.Tensor, _: torch.Tensor, __: int) -> torch.Tensor:
        return _normalise(images, data, config)

    shard = shard_indices(len(data.test), world.rank, world.world_size)
    return Batches(
        data.test,
        shard,
        batch_size,
        finish,
        device=world.device,
        num_workers=config.num_workers,
        num_batches=math.ceil(len(shard) / batch_size),
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
    images: torch.Tensor, data: ImageSet, config: TrainConfig
) -> torch.Tensor:
    """uint8 0 .. 255 to floats with about mean 0 and variance 1 a channel."""
    size = (config.image_size, config.image_size)
    floats = images.to(torch.float32)
    if not len(images):
        floats = floats.new_empty(0, 3, *size)
    elif images.shape[-2:] != size:
        floats = F.interpolate(floats, size, mode="bilinear", antialias=True)
    offset = torch.tensor(data.mean, device=images.device).view(3, 1, 1) * 255
    scale = torch.tensor(data.std, device=images.device).view(3, 1, 1) * 255
    return floats.sub_(offset).div_(scale).to(getattr(torch, config.precision))
