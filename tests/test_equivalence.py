"""Any number of ranks trains what one process without DDP trains.

The reference is a loop of a dozen lines in this file: torch's SGD, cross-entropy as the
mean over the global batch, torch's sampler for one process; schedule, clipping and
augmentation are written out once more from their definitions. `fit` on 1, 2, 3 and 4
ranks must give its losses, weights, rates and evaluations, for each of the settings.
Four ranks are started once; the first of them do all that for each world size.

Tolerance: float64 rounds at 1e-16. Measured over the ten to twelve steps of all runs,
losses were at most 9e-16 apart and weights 4e-16 (both are of the order of 1); other
processors add in other orders. `TOLERANCE` of 1e-12 leaves room for that. It leaves
none for a fault: the smallest of those planted below is at 2e-3 in weights and losses.
"""

import math
from collections import defaultdict
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ddp_lab import loop
from ddp_lab.config import TrainConfig
from ddp_lab.data import draw_augmentation, shard_indices
from ddp_lab.datasets import load_dataset
from ddp_lab.proofs.trainings import in_world_of
from ddp_lab.ranks.launch import shared
from ddp_lab.ranks.workers import Workers
from ddp_lab.step import _tally
from ddp_lab.world import join_world

TOLERANCE = 1e-12
A_FAULT = 1e-3  # what the planted ones exceed
WORLD_SIZES = (1, 2, 3, 4)

PLAIN = TrainConfig(
    norm="group",
    precision="float64",
    image_size=10,
    epochs=2,
    global_batch_size=12,
    limit_train=70,
    limit_test=41,
    lr=0.05,
    momentum=0.0,
    nesterov=False,
    weight_decay=0.0,
    schedule="constant",
    device="cpu",
)
# 70 images are 5 global batches of 12, and 10 more, which 3 and 4 ranks cannot share
# evenly; of 61 images the last one is a batch of its own, and only rank 0 has it.
UNEVEN = replace(PLAIN, drop_last=False)
ONE_LEFT = replace(UNEVEN, limit_train=61)
EVERYTHING = replace(
    UNEVEN,
    crop_padding=2,
    flip=True,
    momentum=0.9,
    nesterov=True,
    weight_decay=0.05,
    clip_grad_norm=0.5,
    lr_scaling="linear",
    lr_batch_size=4,
    warmup_epochs=0.7,
    schedule="cosine",
)
SETTINGS = {
    "plain": PLAIN,
    "augmented": replace(PLAIN, crop_padding=2, flip=True),
    "weight decay": replace(PLAIN, weight_decay=0.05),
    "momentum": replace(PLAIN, momentum=0.9),
    "nesterov": replace(PLAIN, momentum=0.9, nesterov=True),
    "cosine": replace(PLAIN, schedule="cosine"),
    "onecycle": replace(PLAIN, schedule="onecycle"),
    "constant, warm-up": replace(PLAIN, warmup_epochs=0.5),
    "cosine, warm-up": replace(PLAIN, schedule="cosine", warmup_epochs=1.2),
    "scaled, warm-up": replace(
        PLAIN, lr_scaling="sqrt", lr_batch_size=3, warmup_epochs=1
    ),
    "clipped": replace(PLAIN, clip_grad_norm=0.3),
    "uneven": UNEVEN,
    "uneven, momentum": replace(UNEVEN, momentum=0.9),
    "uneven, clipped": replace(UNEVEN, clip_grad_norm=0.3),
    "one left": ONE_LEFT,
    "one left, clipped": replace(ONE_LEFT, clip_grad_norm=0.3),
    "sync": replace(PLAIN, norm="sync"),
    "sync, uneven": replace(UNEVEN, norm="sync"),
    "sync, one left": replace(ONE_LEFT, norm="sync"),
    "everything": EVERYTHING,
}
# each of these in micro-batches of every size that fits
SPLIT = ("plain", "uneven", "one left, clipped", "everything")
BATCH_NORM = replace(PLAIN, norm="batch")
FLOAT32 = replace(PLAIN, precision="float32")


def build_model(config, num_classes):
    """A small model in place of torchvision's."""
    norm = partial(nn.GroupNorm, 4) if config.norm == "group" else nn.BatchNorm2d
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2),  # 10 x 10 pixels -> 4 x 4
            norm(8),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3),  # -> 2 x 2
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(64, num_classes),
        )


# ------------------------------------------------- the reference, one process, no DDP


def rate(config, step, steps_per_epoch):
    """Learning rate of a step, 0 .. num_steps - 1, by the schedule's definition."""
    num_steps = config.epochs * steps_per_epoch
    ratio = config.global_batch_size / config.lr_batch_size
    peak = (
        config.lr * {"none": 1, "linear": ratio, "sqrt": ratio**0.5}[config.lr_scaling]
    )
    if config.schedule == "onecycle":  # from peak / 25 up, then to peak / 250,000
        up = 0.3 * (num_steps + 1) - 1
        if step <= up:
            return cosine(peak / 25, peak, step / up)
        return cosine(peak, peak / 25e4, (step - up) / (num_steps - up))
    num_warm = round(config.warmup_epochs * steps_per_epoch)
    if step < num_warm:
        begin = config.lr if peak > config.lr else peak / num_warm
        return begin + (peak - begin) * step / num_warm
    if config.schedule == "cosine":
        return cosine(peak, 0, (step - num_warm) / (num_steps - num_warm))
    return peak


def cosine(begin, end, share):
    return end + (begin - end) * (1 + math.cos(math.pi * share)) / 2


def clip(parameters, limit):
    """Shorten the gradient to ``limit``; True if it was longer."""
    norm = math.sqrt(sum(p.grad.square().sum().item() for p in parameters))
    if norm <= limit:
        return False
    for p in parameters:
        p.grad *= limit / (norm + 1e-6)  # torch adds that too
    return True


def crop_and_flip(images, draws, padding):
    """Each image by its own draw, one after the other."""
    size = images.shape[-1]
    rows = []
    for image, (y, x, mirrored) in zip(images, draws.tolist(), strict=True):
        row = F.pad(image, [padding] * 4)[:, y : y + size, x : x + size]
        rows.append(row.flip(2) if mirrored else row)
    return torch.stack(rows)


def normalise(images, data, config):
    """The pixels in float32, as in data.py: what follows is in ``config.precision``."""
    offset = torch.tensor(data.mean).view(3, 1, 1) * 255
    scale = torch.tensor(data.std).view(3, 1, 1) * 255
    return ((images.float() - offset) / scale).to(getattr(torch, config.precision))


def train_alone(config, data):
    """Train by plain PyTorch; return what a run leaves behind, and more."""
    model = build_model(config, 10).to(getattr(torch, config.precision))
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=1.0,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        nesterov=config.nesterov,
    )
    samples = TensorDataset(
        data.train.images, data.train.labels, torch.arange(len(data.train))
    )
    sampler = DistributedSampler(samples, 1, 0, shuffle=True, seed=config.seed)
    loader = DataLoader(
        samples, config.global_batch_size, sampler=sampler, drop_last=config.drop_last
    )
    found = defaultdict(list)
    for epoch in range(config.epochs):
        sampler.set_epoch(epoch)
        draws = draw_augmentation(
            len(samples), config.crop_padding, config.flip, config.seed, epoch
        )
        for images, labels, indices in loader:
            if config.crop_padding:
                images = crop_and_flip(images, draws[indices], config.crop_padding)
            lr = rate(config, len(found["lr"]), len(loader))
            optimizer.param_groups[0]["lr"] = lr
            optimizer.zero_grad()
            scores = model(normalise(images, data, config))
            loss = nn.CrossEntropyLoss()(scores, labels)
            loss.backward()
            if config.clip_grad_norm:
                parameters = list(model.parameters())
                found["clipped"].append(clip(parameters, config.clip_grad_norm))
            optimizer.step()
            found["lr"].append(lr)
            found["loss"].append(loss.item())
            right = scores.argmax(1) == labels
            found["accuracy"].append(right.double().mean().item())
        model.eval()
        with torch.no_grad():
            scores = model(normalise(data.test.images, data, config))
            found["test loss"].append(F.cross_entropy(scores, data.test.labels).item())
        right = scores.argmax(1) == data.test.labels
        found["correct"].append(right.sum().item())
        found["samples"].append(len(right))
        model.train()
    return {**found, "model": model.state_dict()}


# ------------------------------------------- on the ranks, once for each world size


def on_each_world_size(data):
    """Every setting, whole and split, and then with a fault planted."""
    loop.build_model = build_model
    with join_world(device="cpu") as world:
        found = {
            name: train(config, data, world)
            for name, config in all_runs(world.world_size).items()
        }
        for name, (place, fault, config) in FAULTS.items():
            right = getattr(loop, place)
            setattr(loop, place, fault)
            found[f"fault: {name}"] = train(config, data, world)
            setattr(loop, place, right)
    return found


def all_runs(world_size):
    """Name -> settings of everything that is right, at this world size."""
    runs = {**SETTINGS, "batch norm": BATCH_NORM, "float32": FLOAT32}
    for name in SPLIT:
        for micro in micro_batch_sizes(world_size):
            config = replace(SETTINGS[name], micro_batch_size=micro)
            runs[f"{name}, micro-batches of {micro}"] = config
    return runs


def micro_batch_sizes(world_size):
    """All that accumulate: world size x micro x steps = 12."""
    share = PLAIN.global_batch_size // world_size
    return [micro for micro in range(1, share) if share % micro == 0]


def train(config, data, world):
    """What `fit` reports, in the form of the reference; lines are rank 0's."""
    lines, states = [], []
    start = loop.start_training
    loop.start_training = lambda *args: states.append(start(*args)) or states[0]
    try:
        loop.fit(
            config,
            data[config.limit_train],
            world,
            on_line=lambda **line: lines.append(line),
        )
    finally:
        loop.start_training = start
    steps = [line for line in lines if line["kind"] == "step"]
    evals = [line for line in lines if line["kind"] == "eval"]
    return {
        **{key: [line[key] for line in steps] for key in ("lr", "loss", "accuracy")},
        "test loss": [line["loss"] for line in evals],
        "correct": [line["num_correct"] for line in evals],
        "samples": [line["num_samples"] for line in evals],
        "model": states[0].model.module.state_dict(),
    }


# ------------------------------------------------------------- faults that people make


def mean_of_means(model, batches, optimizer, _, *, num_micro_batches=1, **options):
    """The mean over a micro-batch, averaged over micro-batches and ranks."""
    optimizer.zero_grad()
    tally = torch.zeros(3, dtype=torch.float64)
    for _ in range(num_micro_batches):
        images, labels = next(batches)
        scores = model(images)
        reduction = "mean" if len(labels) else "sum"
        loss = F.cross_entropy(scores, labels, reduction=reduction)
        (loss / num_micro_batches).backward()
        tally += _tally(scores, labels, loss * len(labels))
    optimizer.step()
    return tally


def clip_early(each_micro_batch):
    """Clip a rank's own gradient, or after each micro-batch, not the average once."""

    def step(
        model, batches, optimizer, num, *, num_micro_batches=1, clip_grad_norm=None
    ):
        optimizer.zero_grad()
        tally = torch.zeros(3, dtype=torch.float64)
        for k in range(1, num_micro_batches + 1):
            images, labels = next(batches)
            with model.no_sync():
                scores = model(images)
                loss_sum = F.cross_entropy(scores, labels, reduction="sum")
                (loss_sum * dist.get_world_size() / num).backward()
            tally += _tally(scores, labels, loss_sum)
            if each_micro_batch or k == num_micro_batches:
                nn.utils.clip_grad_norm_(model.parameters(), clip_grad_norm)
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        optimizer.step()
        return tally

    return step


def without_warm_up(config, *rest):
    return START_TRAINING(replace(config, warmup_epochs=0.0), *rest)


def padded_evaluation(data, config, world, batch_size):
    """As DistributedSampler does it: the same number on all ranks, some twice."""
    batches = EVAL_LOADER(data, config, world, batch_size)
    num = math.ceil(len(data.test) / world.world_size)
    shard = shard_indices(num * world.world_size, world.rank, world.world_size)
    batches.indices = [i % len(data.test) for i in shard]
    batches.num_batches = math.ceil(num / batch_size)
    return batches


START_TRAINING, EVAL_LOADER = loop.start_training, loop.eval_loader
FAULTS = {  # name -> what of the loop it replaces, by what, and where that shows
    "mean of means": ("train_step", mean_of_means, UNEVEN),
    "mean of means, one left": ("train_step", mean_of_means, ONE_LEFT),
    "clip before averaging": (
        "train_step",
        clip_early(False),
        SETTINGS["clipped"],
    ),
    "clip each micro-batch": (
        "train_step",
        clip_early(True),
        replace(SETTINGS["clipped"], micro_batch_size=1),
    ),
    "no warm-up": (
        "start_training",
        without_warm_up,
        SETTINGS["cosine, warm-up"],
    ),
    "padded evaluation": ("eval_loader", padded_evaluation, PLAIN),
}


# ----------------------------------------------------------------------- the tests


@pytest.fixture(scope="module")
def data():
    return {
        limit: load_dataset(replace(PLAIN, limit_train=limit)) for limit in (61, 70)
    }


@pytest.fixture(scope="module")
def alone(data):
    """The reference of each of the settings, computed once."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    configs = SETTINGS | {"batch norm": BATCH_NORM, "float32": FLOAT32}
    yield {name: train_alone(c, data[c.limit_train]) for name, c in configs.items()}
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def ranks(data):
    """What rank 0 reports: world size -> name of the run -> its numbers."""
    with Workers(max(WORLD_SIZES), num_threads=1) as workers:
        return {
            n: workers.run(
                in_world_of, n, on_each_world_size, shared(data), only=range(n)
            )[0]
            for n in WORLD_SIZES
        }


def furthest(one, other):
    """The largest difference of any weight or running statistic."""
    return max((one[n].double() - other[n].double()).abs().max().item() for n in one)


def check_equal(ours, reference):
    for key in ("lr", "loss", "accuracy", "test loss"):
        assert ours[key] == pytest.approx(reference[key], rel=TOLERANCE, abs=1e-15), key
    assert ours["correct"] == reference["correct"]
    assert ours["samples"] == reference["samples"] == [41, 41]
    assert set(ours["model"]) == set(reference["model"])
    assert furthest(ours["model"], reference["model"]) < TOLERANCE


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("name", SETTINGS)
def test_ranks_train_what_one_process_trains(ranks, alone, name, world_size):
    """Also counts of evaluations, which are equal to the last image."""
    ours = ranks[world_size][name]
    assert len(ours["loss"]) == 2 * (5 if SETTINGS[name].drop_last else 6)
    check_equal(ours, alone[name])


@pytest.mark.parametrize(
    ("world_size", "micro"), [(w, m) for w in WORLD_SIZES for m in micro_batch_sizes(w)]
)
@pytest.mark.parametrize("name", SPLIT)
def test_accumulating_changes_nothing(ranks, alone, name, world_size, micro):
    run = f"{name}, micro-batches of {micro}"
    check_equal(ranks[world_size][run], alone[name])


@pytest.mark.parametrize("name", [n for n, c in SETTINGS.items() if c.clip_grad_norm])
def test_clipping_was_active(alone, name):
    """Else the tests above would say nothing about it."""
    clipped = alone[name]["clipped"]
    assert sum(clipped) >= len(clipped) / 2


def test_each_setting_makes_a_difference(alone):
    """Else equal curves would not show that it works."""
    names = list(SETTINGS)
    for k, name in enumerate(names):
        for other in names[:k]:
            if alone[name]["model"].keys() == alone[other]["model"].keys():
                apart = furthest(alone[name]["model"], alone[other]["model"])
                assert apart > 1e-4, (name, other)


def test_losses_fall(alone):
    assert alone["momentum"]["loss"][-1] < alone["momentum"]["loss"][0]


@pytest.mark.parametrize("world_size", WORLD_SIZES[1:])
def test_plain_batch_norm_is_another_training(ranks, alone, world_size):
    """From the first step on: each rank normalises by its own 6, 4 or 3 images.

    Losses were 2e-4 to 9e-3 apart at each step: no rounding, which is 1e-16 here.
    """
    one_rank = ranks[1]["batch norm"]
    check_equal(one_rank, alone["batch norm"])
    ours = ranks[world_size]["batch norm"]
    for loss, other in zip(ours["loss"], one_rank["loss"], strict=True):
        assert abs(loss - other) > 1e-4
    assert furthest(ours["model"], one_rank["model"]) > 0.01
    # while the data, and what is counted, are the same
    assert ours["lr"] == one_rank["lr"]
    assert ours["samples"] == one_rank["samples"]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_float32_begins_on_the_same_curve(ranks, alone, world_size):
    """All ten agreed to 2e-7 here; one ReLU that flips elsewhere may end that."""
    ours, theirs = ranks[world_size]["float32"], alone["float32"]
    assert ours["loss"][:3] == pytest.approx(theirs["loss"][:3], rel=1e-5)
    assert ours["loss"][0] == pytest.approx(alone["plain"]["loss"][0], rel=1e-5)
    assert ours["loss"][2] != alone["plain"]["loss"][2]  # it is another precision
    assert ours["samples"] == theirs["samples"]


@pytest.mark.parametrize(
    ("fault", "of", "world_sizes", "keys"),
    [
        # 10 images: 5 and 5 on 2 ranks, but 4, 3, 3 and 3, 3, 2, 2
        ("mean of means", "uneven", (3, 4), ["loss", "weights"]),
        ("mean of means, one left", "one left", (2, 3, 4), ["loss", "weights"]),
        ("clip before averaging", "clipped", (2, 3, 4), ["loss", "weights"]),
        ("clip each micro-batch", "clipped", (1, 2, 3, 4), ["loss", "weights"]),
        ("no warm-up", "cosine, warm-up", (1, 2, 3, 4), ["lr", "loss", "weights"]),
        ("padded evaluation", "plain", (2, 3, 4), ["samples", "test loss"]),
    ],
)
def test_a_fault_would_be_seen(ranks, alone, fault, of, world_sizes, keys):
    """By far: the tolerance is a billionth of it."""
    for world_size in world_sizes:
        ours = ranks[world_size][f"fault: {fault}"]
        for key in keys:
            if key == "weights":
                assert furthest(ours["model"], alone[of]["model"]) > A_FAULT
            else:
                pairs = zip(ours[key], alone[of][key], strict=True)
                assert max(abs(a - b) for a, b in pairs) > A_FAULT
        with pytest.raises(AssertionError):
            check_equal(ours, alone[of])
