"""What plain_single.py and plain_ddp.py do alike. Put your own data in their place."""

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import Subset, TensorDataset
from torchvision import datasets
from torchvision.transforms import v2


def parse_arguments():
    parser = argparse.ArgumentParser(description="Train ResNet-18, in plain PyTorch.")
    parser.add_argument("--cifar10", help="its folder; without it, handwritten digits")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--global-batch-size", type=int, default=64)
    parser.add_argument("--accumulate", type=int, default=1, help="backwards a step")
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--num-workers", type=int, default=0, help="that load images")
    file = Path(sys.argv[0]).stem + ".pt"
    parser.add_argument("--checkpoint", default=file, help="gone on with if there")
    return parser.parse_args()


def sizes(args, num_images, world_size=1):
    """How many images a rank holds at once, and how many steps an epoch has."""
    batch = args.global_batch_size
    micro, rest = divmod(batch, args.accumulate * world_size)
    parts = f"{world_size} ranks x {args.accumulate} backwards"
    if rest:
        raise SystemExit(f"--global-batch-size {batch} does not divide into {parts}")
    if batch > num_images:
        raise SystemExit(f"--global-batch-size {batch}, of only {num_images} images")
    return micro, num_images // batch  # the rest is left out


def load_data(cifar10):
    """Training set and test set: CIFAR-10 from this folder, or handwritten digits."""
    if cifar10:
        scale = [v2.PILToTensor(), v2.ToDtype(torch.float32), v2.Normalize([128], [64])]
        vary = [v2.RandomCrop(32, padding=4), v2.RandomHorizontalFlip()]
        train = datasets.CIFAR10(cifar10, True, v2.Compose([*vary, *scale]))
        return train, datasets.CIFAR10(cifar10, False, v2.Compose(scale))
    pixels, labels = map(torch.from_numpy, load_digits(return_X_y=True))
    images = pixels.float().view(-1, 1, 8, 8) * (255 / 16)
    images = F.interpolate(images, (32, 32), mode="bilinear").round().repeat(1, 3, 1, 1)
    digits = TensorDataset((images - 128) / 64, labels)
    order = torch.randperm(1797, generator=torch.Generator().manual_seed(0)).tolist()
    return Subset(digits, order[360:]), Subset(digits, order[:360])


@torch.no_grad()
def count_right(model, batches, device):
    """How many images of these batches the model names rightly: a tensor on device."""
    model.eval()
    right = torch.zeros((), dtype=torch.int64, device=device)
    for images, labels in batches:
        right += (model(images.to(device)).argmax(1) == labels.to(device)).sum()
    model.train()
    return right


def load(path):
    """The checkpoint in this file; nothing, if there is none."""
    if not os.path.exists(path):
        return {}
    state = torch.load(path, map_location="cpu")
    print(f"{path}: going on after epoch {state['epoch']}", flush=True)
    return state


def save(state, path):
    """Write a checkpoint, whole or not at all."""
    torch.save(state, path + ".new")
    os.replace(path + ".new", path)
