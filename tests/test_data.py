"""Step 3, without processes: a `World` is only a few numbers."""

import dataclasses

import pytest
import torch

from ddp_lab.config import TrainConfig
from ddp_lab.data import (
    augment,
    draw_augmentation,
    eval_loader,
    shard_indices,
    train_loader,
)
from ddp_lab.datasets import ImageSet, ImagesInMemory
from worlds import cpu_world


def numbered(num_train=103, num_test=101, size=8):
    """Images whose label is their index, so that batches tell which they hold."""
    generator = torch.Generator().manual_seed(1)

    def split(n):
        images = torch.randint(
            0, 256, (n, 3, size, size), dtype=torch.uint8, generator=generator
        )
        return ImagesInMemory(images, torch.arange(n))

    return ImageSet(
        name="numbered",
        classes=("a", "b"),
        mean=(0.5, 0.5, 0.5),
        std=(0.25, 0.25, 0.25),
        train=split(num_train),
        test=split(num_test),
    )


CONFIG = TrainConfig(image_size=8, crop_padding=2, flip=True, global_batch_size=12)


@pytest.mark.parametrize("num_samples", [0, 1, 2, 101])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_evaluation_shards_cover_all_once(num_samples, world_size):
    shards = [shard_indices(num_samples, r, world_size) for r in range(world_size)]
    assert sorted(i for shard in shards for i in shard) == list(range(num_samples))
    lengths = [len(shard) for shard in shards]
    assert max(lengths) - min(lengths) <= 1


def labels_of(batches):
    return [labels.tolist() for _, labels in batches]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_eval_loader_counts_the_tail(world_size):
    data = numbered()
    seen = []
    for rank in range(world_size):
        loader = eval_loader(data, CONFIG, cpu_world(rank, world_size), 16)
        batches = labels_of(loader)
        assert len(loader) == len(batches)
        seen += [label for batch in batches for label in batch]
    assert sorted(seen) == list(range(101))


def global_batches(world_size, epoch, seed=0):
    """The sets of samples that the optimiser steps of an epoch see."""
    config = dataclasses.replace(CONFIG, seed=seed)
    data, per_rank = numbered(), config.global_batch_size // world_size
    steps = None
    for rank in range(world_size):
        loader = train_loader(data, config, cpu_world(rank, world_size), per_rank)
        loader.set_epoch(epoch)
        own = labels_of(loader)
        assert len(own) == len(loader) == 103 // 12
        steps = (
            own if steps is None else [a + b for a, b in zip(steps, own, strict=True)]
        )
    return [sorted(step) for step in steps]


def test_global_batches_do_not_depend_on_the_world_size():
    alone = global_batches(1, epoch=0)
    assert len({i for step in alone for i in step}) == 8 * 12  # no sample twice
    for world_size in (2, 3, 4):
        assert global_batches(world_size, epoch=0) == alone


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_nothing_is_left_out_or_repeated_without_drop_last(world_size):
    """103 samples: eight global batches of 12 and one of 7, in micro-batches of 1."""
    config = dataclasses.replace(CONFIG, drop_last=False)
    whole = global_batches(1, epoch=0)
    seen, batches = [], []
    for rank in range(world_size):
        world = cpu_world(rank, world_size)
        loader = train_loader(numbered(), config, world, 1)
        loader.set_epoch(0)
        own = labels_of(loader)
        batches.append(len(own))
        assert len(own) == len(loader)
        seen.append(own)
    assert len(set(batches)) == 1  # a rank whose share is used up has empty ones
    assert sorted(i for own in seen for batch in own for i in batch) == list(range(103))
    share = 12 // world_size
    for k, step in enumerate(whole):
        mine = [own[k * share : (k + 1) * share] for own in seen]
        assert sorted(i for part in mine for b in part for i in b) == step
    images, labels = list(loader)[-1]
    assert images.shape == (len(labels), 3, 8, 8)
    assert len(labels) == (1 if world_size == 1 else 0)


@pytest.mark.parametrize("drop_last", [True, False])
def test_the_rest_of_an_epoch(drop_last):
    """What is skipped is what was done: the other batches are the same ones."""
    config = dataclasses.replace(CONFIG, drop_last=drop_last)
    loader = train_loader(numbered(), config, cpu_world(1, 2), 2)
    loader.set_epoch(2)
    whole = [(images.clone(), labels.tolist()) for images, labels in loader]
    for skip in (0, 5, len(whole) - 1, len(whole)):
        loader.set_epoch(2, skip=skip)
        rest = list(loader)
        assert len(rest) == len(whole) - skip
        for (images, labels), (same, names) in zip(rest, whole[skip:], strict=True):
            assert labels.tolist() == names
            assert torch.equal(images, same)


def test_epochs_and_seeds_differ():
    first = global_batches(2, epoch=0)
    assert global_batches(2, epoch=1) != first
    assert global_batches(2, epoch=0, seed=1) != first
    assert global_batches(2, epoch=0) == first


def test_a_sample_looks_alike_on_any_rank():
    data = numbered()
    looks = []
    for world_size in (1, 2, 3):
        pictures = {}
        for rank in range(world_size):
            loader = train_loader(data, CONFIG, cpu_world(rank, world_size), 4)
            loader.set_epoch(3)
            for images, labels in loader:
                pictures |= dict(zip(labels.tolist(), images, strict=True))
        looks.append(pictures)
    common = set.intersection(*(set(pictures) for pictures in looks))
    assert len(common) > 80
    for index in common:
        assert torch.equal(looks[0][index], looks[1][index])
        assert torch.equal(looks[0][index], looks[2][index])


def test_draws_are_in_range_and_differ_by_epoch():
    draws = draw_augmentation(1000, 4, True, seed=0, epoch=0)
    assert draws.shape == (1000, 3)
    assert [draws[:, k].unique().tolist() for k in range(3)] == [
        list(range(9)),
        list(range(9)),
        [0, 1],
    ]
    assert not torch.equal(draws, draw_augmentation(1000, 4, True, seed=0, epoch=1))
    assert not torch.equal(draws, draw_augmentation(1000, 4, True, seed=1, epoch=0))
    # seed + epoch alone would make (0, 1) and (1, 0) the same
    one, other = (draw_augmentation(1000, 4, True, s, e) for s, e in ((0, 1), (1, 0)))
    assert not torch.equal(one, other)
    assert draw_augmentation(1000, 4, False, 0, 0)[:, 2].sum() == 0


def test_augment_equals_cropping_one_by_one():
    images = numbered(20).train.images
    draws = draw_augmentation(20, 2, True, 0, 0)
    batch = augment(images, draws, 2)
    for image, (row, column, mirrored), got in zip(images, draws, batch, strict=True):
        padded = torch.zeros(3, 12, 12, dtype=torch.uint8)
        padded[:, 2:10, 2:10] = image
        crop = padded[:, row : row + 8, column : column + 8]
        assert torch.equal(got, crop.flip(2) if mirrored else crop)


def test_normalised_as_torchvision_does():
    from torchvision.transforms import v2

    data = numbered()
    config = dataclasses.replace(CONFIG, crop_padding=0, flip=False)
    (images, labels), *_ = eval_loader(data, config, cpu_world(), 10)
    transform = v2.Compose(
        [v2.ToDtype(torch.float32, scale=True), v2.Normalize(data.mean, data.std)]
    )
    expected = transform(data.test.images[labels])
    # float32 has 24 bits: values up to 4 agree to a few units in the 7th digit
    torch.testing.assert_close(images, expected, rtol=0, atol=2e-6)
    assert images.dtype == torch.float32


def test_other_image_size():
    config = dataclasses.replace(CONFIG, image_size=20)
    images, _ = next(iter(eval_loader(numbered(), config, cpu_world(), 5)))
    assert images.shape == (5, 3, 20, 20)
    assert images.min() >= -2
    assert images.max() <= 2


def test_memory_is_not_copied():
    """On the CPU the ranks index the one shared tensor."""
    data = numbered()
    loader = train_loader(data, CONFIG, cpu_world(), 4)
    assert loader._images.data_ptr() == data.train.images.data_ptr()
    before = data.train.images.clone()
    labels_of(loader)
    assert torch.equal(data.train.images, before)
