"""Functions that the tests run on ranks, importable by name in a spawned process."""

import os

import torch
import torch.distributed as dist


def who_am_i() -> tuple[int, int]:
    """Rank and world size, as torchrun's variables say."""
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def sum_of_ranks() -> float:
    """0 + 1 + ... by all-reduce; the group is opened by launch(init=True)."""
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    return total.item()
