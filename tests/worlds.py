"""A world for tests, without processes."""

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
