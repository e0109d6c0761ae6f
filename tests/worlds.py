"""Worlds for tests, without processes or with few of them."""

import os

import torch

from ddp_lab.world import World


def cpu_world(rank: int = 0, world_size: int = 1) -> World:
    """One rank's place among ``world_size`` ranks of one machine, on the CPU."""
    return World(
        rank=rank,
        local_rank=rank,
        world_size=world_size,
        local_world_size=world_size,
        device=torch.device("cpu"),
        backend="gloo",
    )


def in_world_of(world_size: int, fn, *arguments):
    """On one of the first ranks of `Workers`: do something as if they were all.

    Several world sizes then share one start, which takes seconds a rank.
    """
    os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(world_size)
    return fn(*arguments)
