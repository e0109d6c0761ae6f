"""Take a run up where it stopped, wherever its files are.

All ranks go on from one checkpoint, the newest that any machine holds. The first rank
of each machine looks into its own folder; whoever finds the newest reads it and sends
it to the others. So a run goes on with another number of ranks, on other machines, and
without a shared disk.
"""

import io
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ddp_lab import checkpoint
from ddp_lab.config import TrainConfig
from ddp_lab.errors import BadInput
from ddp_lab.record import Run, describe_environment
from ddp_lab.world import World, gather_json

__all__ = ["Found", "find_newest", "open_run"]


@dataclass(frozen=True)
class Found:
    """A checkpoint, and the history of its run."""

    state: dict[str, Any]
    history: str

    @property
    def step(self) -> int:
        """Optimiser steps done."""
        return int(self.state["progress"]["step"])


def find_newest(folder: Path, world: World) -> Found | None:
    """Find the newest checkpoint of a run on any machine, and give it to all ranks.

    Args:
        folder: of the run, on each machine.
        world: this rank.

    Returns:
        The same on all ranks, its tensors on the CPU; None if nobody has one.

    Raises:
        BadInput: there are checkpoints, and none can be read; on all ranks.

    **Collective**: all ranks must call it. **Cost**: one broadcast of the checkpoint,
    three times a model's size under SGD with momentum.
    """
    own: Found | None = None
    problem = ""
    if world.local_rank == 0:
        try:
            state = checkpoint.load_latest(folder)
            own = Found(state, Run(folder).read_history()) if state else None
        except BadInput as error:
            problem = str(error)
    reports = gather_json([own.step if own else -1, problem], world.device)
    newest = max(step for step, _ in reports)
    if newest < 0:
        if problems := [text for _, text in reports if text]:
            raise BadInput(problems[0])
        return None
    source = [step for step, _ in reports].index(newest)
    return _broadcast(own, source, world)


def _broadcast(own: Found | None, source: int, world: World) -> Found:
    """Send a checkpoint as bytes, which are read without running anybody's code."""
    if world.world_size == 1:
        assert own is not None
        return own
    buffer = io.BytesIO()
    if world.rank == source:
        assert own is not None
        torch.save({"state": own.state, "history": own.history}, buffer)
    length = torch.tensor([buffer.tell()], device=world.device)
    dist.broadcast(length, src=source)
    if world.rank == source:
        content = torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)
        content = content.to(world.device)
    else:
        content = torch.empty(
            int(length.item()), dtype=torch.uint8, device=world.device
        )
    dist.broadcast(content, src=source)
    if own is not None and world.rank == source:
        return own
    received = io.BytesIO(content.cpu().numpy().tobytes())
    return Found(**torch.load(received, map_location="cpu", weights_only=True))


def open_run(
    config: TrainConfig, world: World, folder: Path | None, found: Found | None
) -> Run | None:
    """Create or continue the run's folder on rank 0; elsewhere None."""
    if world.rank or folder is None:
        return None
    environment = describe_environment(
        device=str(world.device.type),
        device_name=torch.cuda.get_device_name() if world.backend == "nccl" else None,
        backend=world.backend,
        world_size=world.world_size,
        num_threads=torch.get_num_threads(),
    )
    run = Run(folder)
    if found is None:
        if config.auto_resume:  # it ended before its first checkpoint: start again
            run.config_file.unlink(missing_ok=True)
            run.history_file.unlink(missing_ok=True)
        return Run.create(folder, config, environment)
    if not run.config_file.is_file():  # the run comes from another machine
        run = Run.create(folder, config, environment)
    run.go_on(found.step, found.history, environment)
    if config.resume_anyway:  # from now on these are the run's settings
        run.write_config(replace(config, resume=None, resume_anyway=False))
    return run
