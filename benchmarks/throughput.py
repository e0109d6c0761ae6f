"""How much of the machine does training with ddp_lab use?

Four ways to train the same ResNet-18 on the same number of ranks, with the same batch
and threads, interleaved in one run:

    limit     forward, backward, step on one fixed batch: no DDP, no data. Nothing that
              averages gradients can be faster, so the others are given as its fraction
    article   the article's loop as written: an image is decoded by PIL and transformed
              alone, in 4 DataLoader workers a rank; loss.item() at every step
    by hand   a plain DDP loop over ddp_lab's batches, which says and writes nothing
    ddp_lab   ddp_lab.loop.fit, as `python -m ddp_lab.train` runs it: sums over ranks
              and a line of history at every step

Each measurement does some steps unmeasured, until the loaders' stock of batches is used
up, then times the rest. Images are random: no data set is needed.
"""

import argparse
import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import describe_machine, spread, table, write_results
from PIL import Image
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchvision import transforms

from ddp_lab.config import RECIPES, TrainConfig
from ddp_lab.data import train_loader
from ddp_lab.datasets import ImageSet, ImagesInMemory
from ddp_lab.loop import fit
from ddp_lab.model import build_model
from ddp_lab.ranks.launch import launch, shared
from ddp_lab.runs.record import Run
from ddp_lab.world import World, join_world

WAYS = ("limit", "article", "by hand", "ddp_lab")


def random_images(num_images: int) -> ImageSet:
    """Random pixels in CIFAR-10's shape: 10 classes, 32 x 32 RGB."""
    generator = torch.Generator().manual_seed(0)
    shape = (num_images, 3, 32, 32)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, 10, (num_images,), generator=generator)
    few = ImagesInMemory(images[:64], labels[:64])
    article = RECIPES["article"]
    return ImageSet(
        name="random",
        classes=tuple("0123456789"),
        mean=article.mean or (0.5, 0.5, 0.5),
        std=article.std or (0.25, 0.25, 0.25),
        train=ImagesInMemory(images, labels),
        test=few,
    )


class ArticleDataset(Dataset[Any]):
    """One sample at a time through PIL and torchvision's transforms."""

    def __init__(self, data: ImageSet) -> None:
        assert isinstance(data.train, ImagesInMemory)
        self.pixels: np.ndarray[Any, Any] = data.train.images.permute(
            0, 2, 3, 1
        ).numpy()
        self.labels = data.train.labels.tolist()
        self.transform = transforms.Compose(
            [
                transforms.RandomCrop(32, padding=4),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
                transforms.Normalize(data.mean, data.std),
            ]
        )

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = Image.fromarray(self.pixels[index])
        return self.transform(image), self.labels[index]


class Clock:
    """Seconds for the measured steps, from when all ranks have done the others."""

    def __init__(self, warm_steps: int, num_steps: int) -> None:
        self.warm_steps, self.num_steps = warm_steps, num_steps
        self.steps = 0
        self.started = self.seconds = 0.0

    def tick(self, world: World) -> bool:
        """Call after each step; False when it was the last."""
        self.steps += 1
        if self.steps == self.warm_steps:
            wait_for_all(world)
            self.started = time.perf_counter()
        if self.steps == self.warm_steps + self.num_steps:
            wait_for_all(world)
            self.seconds = time.perf_counter() - self.started
            return False
        return True


def wait_for_all(world: World) -> None:
    if world.device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def sgd(model: torch.nn.Module, config: TrainConfig) -> torch.optim.SGD:
    return torch.optim.SGD(
        model.parameters(),
        lr=config.lr,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        nesterov=config.nesterov,
    )


def limit(data: ImageSet, config: TrainConfig, world: World, clock: Clock) -> float:
    model = build_model(config, 10).to(world.device)
    optimizer = sgd(model, config)
    batch_size = config.global_batch_size // world.world_size
    images = torch.randn(batch_size, 3, 32, 32, device=world.device)
    labels = torch.randint(0, 10, (batch_size,), device=world.device)
    while True:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        if not clock.tick(world):
            return clock.seconds


def article(data: ImageSet, config: TrainConfig, world: World, clock: Clock) -> float:
    model = DistributedDataParallel(build_model(config, 10).to(world.device))
    optimizer = sgd(model, config)
    dataset = ArticleDataset(data)
    sampler: DistributedSampler[Any] = DistributedSampler(dataset)
    loader = DataLoader(
        dataset,
        batch_size=config.global_batch_size // world.world_size,
        sampler=sampler,
        num_workers=4,
        drop_last=True,
    )
    running = 0.0
    for images, labels in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images.to(world.device)), labels.to(world.device))
        loss.backward()
        optimizer.step()
        running += loss.item()
        if not clock.tick(world):
            break
    assert running > 0
    return clock.seconds


def by_hand(data: ImageSet, config: TrainConfig, world: World, clock: Clock) -> float:
    model = DistributedDataParallel(
        build_model(config, 10).to(world.device), gradient_as_bucket_view=True
    )
    optimizer = sgd(model, config)
    batch_size = config.global_batch_size // world.world_size
    for images, labels in train_loader(data, config, world, batch_size):
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        if not clock.tick(world):
            break
    return clock.seconds


def ddp_lab(data: ImageSet, config: TrainConfig, world: World, clock: Clock) -> float:
    """Train one epoch; the lines of its history say how long each step took."""
    with tempfile.TemporaryDirectory() as folder:
        fit(config, data, world, Path(folder) / "run")
        dist.barrier()
        if world.rank:
            return 0.0
        lines = Run(Path(folder) / "run").history.steps
        times = [line["time_s"] for line in lines]
        return (
            times[clock.warm_steps + clock.num_steps - 1] - times[clock.warm_steps - 1]
        )


def measure_all(
    data: ImageSet, config: TrainConfig, warm_steps: int, num_steps: int, repeats: int
) -> dict[str, list[float]]:
    """Images a second, all ranks together, of each way and repeat."""
    ways = dict(zip(WAYS, (limit, article, by_hand, ddp_lab), strict=True))
    found: dict[str, list[float]] = {way: [] for way in ways}
    with join_world(device=config.device) as world:
        for repeat in range(repeats):
            for way, function in ways.items():
                clock = Clock(warm_steps, num_steps)
                wait_for_all(world)
                seconds = function(data, config, world, clock)
                if world.rank == 0:
                    rate = num_steps * config.global_batch_size / seconds
                    found[way].append(rate)
                    print(
                        f"repeat {repeat + 1} of {repeats}  {way:8}  "
                        f"{rate:6.0f} images/s",
                        flush=True,
                    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--num-ranks", type=int, default=None, help="default: GPUs or 2"
    )
    parser.add_argument("--global-batch-size", type=int, default=1024, help="images")
    parser.add_argument("--warm-steps", type=int, default=8, help="unmeasured steps")
    parser.add_argument("--steps", type=int, default=8, help="measured steps")
    parser.add_argument("--repeats", type=int, default=5, help="of each way")
    parser.add_argument("--dry", action="store_true", help="write no results file")
    arguments = parser.parse_args()
    num_ranks = arguments.num_ranks or torch.cuda.device_count() or 2
    total = arguments.warm_steps + arguments.steps
    config = replace(
        RECIPES["article"], epochs=1, global_batch_size=arguments.global_batch_size
    )
    data = random_images(total * arguments.global_batch_size)
    found = launch(
        measure_all,
        shared(data),
        config,
        arguments.warm_steps,
        arguments.steps,
        arguments.repeats,
        num_ranks=num_ranks,
    )[0]

    # a ratio within one repeat: the machine's mood of that minute cancels
    ratios = {
        way: [
            rate / best for rate, best in zip(found[way], found["limit"], strict=True)
        ]
        for way in WAYS
    }
    rows = []
    for way in WAYS:
        rate, ratio = spread(found[way]), spread(ratios[way])
        rows.append(
            [
                way,
                f"{rate['median']:.0f} ({rate['min']:.0f}-{rate['max']:.0f})",
                f"{ratio['median']:.2f} ({ratio['min']:.2f}-{ratio['max']:.2f})",
            ]
        )
    header = ["way", "images/s, all ranks: median (range)", "of the limit"]
    print(table(header, rows))
    if not arguments.dry:
        results = {
            "machine": describe_machine(num_ranks=num_ranks, load=os.getloadavg()[0]),
            "settings": vars(arguments),
            "images_per_s": found,
            "of_the_limit": {way: spread(ratios[way]) for way in WAYS},
        }
        print(f"written to {write_results('throughput', results)}")


if __name__ == "__main__":
    main()
