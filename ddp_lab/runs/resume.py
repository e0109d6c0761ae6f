"""Take a run up where it stopped, wherever its files are.

All ranks go on from one checkpoint, the newest that any machine holds. The first rank
of each machine looks into its own folder; whoever finds the newest reads it and sends
it to the others. So a run goes on with another number of ranks, on other machines, and
without a shared disk.

Rank 0 writes a run's files. Where other machines have disks of their own, the first
rank of each writes them there too: any machine may be lost for good.
"""

import contextlib
import io
import socket
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ddp_lab.config import TrainConfig
from ddp_lab.errors import BadInput
from ddp_lab.runs import checkpoint
from ddp_lab.runs.record import Run, describe_environment, writing_to
from ddp_lab.world import World, gather_json

__all__ = ["Found", "find_newest", "open_run"]


@dataclass(frozen=True)
class Found:
    """A checkpoint, and the history of its run."""

    state: dict[str, Any]
    history: str
    host: str = ""
    """Whose disk it was on, if not rank 0's."""
    skipped: list[str] = field(default_factory=list)
    """What is wrong with newer files, on any machine."""

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
        BadInput: there are checkpoints, and none can be read, or some machine's newest
            was written by a newer version; on all ranks.

    **Collective**: all ranks must call it. **Cost**: one broadcast of the checkpoint,
    three times a model's size under SGD with momentum.
    """
    own: Found | None = None
    problem, too_new = "", ""
    skipped: list[str] = []
    if world.local_rank == 0:
        try:
            state = checkpoint.load_latest(folder, warn=skipped.append)
            own = Found(state, Run(folder).read_history()) if state else None
        except checkpoint.NewerFormat as error:
            too_new = str(error)
        except BadInput as error:
            problem = str(error)
            skipped = [f"{problem}; another machine's is taken"]
    _fail_together(too_new, world)
    report = [own.step if own else -1, socket.gethostname(), skipped]
    steps, hosts, texts = zip(*gather_json(report, world.device), strict=True)
    newest = max(steps)
    if newest < 0:
        _fail_together(problem, world)
        return None
    source = steps.index(newest)
    return replace(
        _broadcast(own, source, world),
        host=hosts[source] if hosts[source] != hosts[0] else "",
        skipped=[
            _told(text, host, hosts)
            for host, of_rank in zip(hosts, texts, strict=True)
            for text in of_rank
        ],
    )


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
    config: TrainConfig,
    world: World,
    folder: Path | None,
    found: Found | None,
    classes: Sequence[str],
) -> tuple[Run | None, list[str]]:
    """Create or continue the run's folder, once on every disk.

    Args:
        config: the settings of the run.
        world: this rank.
        folder: of the run, on each machine (None: nobody writes).
        found: what to go on with.
        classes: their names, in the order of the model's outputs.

    Returns:
        The run, on rank 0 and on the first rank of each machine whose disk is its own,
        None on the others; and the hosts of those that have it.

    Raises:
        BadInput: a machine cannot write there, or holds another run under this name;
            on all ranks.

    **Collective**: all ranks must call it.
    """
    if folder is None:
        return None, []
    run, problem = None, ""
    if _writes(folder, world, new=found is None and not config.auto_resume):
        try:
            run = _create_or_continue(config, world, folder, found, classes)
        except BadInput as error:
            problem = str(error)
    writers = _fail_together(problem, world, socket.gethostname() if run else None)
    return run, [host for host in writers if host]


def _writes(folder: Path, world: World, *, new: bool) -> bool:
    """Whether this rank is rank 0, or the first on a disk where rank 0 does not write.

    Rank 0 creates a file that the others then try to create. That asks the file server,
    while looking for it could be answered from a cache.
    """
    if world.local_world_size == world.world_size:
        return world.rank == 0
    nonce = gather_json(uuid.uuid4().hex, world.device)[0]
    mark = folder / f".seen-by-all-{nonce}"
    created = False
    try:
        for turn in (world.rank == 0, world.rank > 0):  # rank 0, then the others
            problem = ""
            if turn and world.local_rank == 0:
                created, problem = _create_mark(folder, mark, new)
            _fail_together(problem, world)
    finally:
        if created:
            mark.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # if there is something in it, it stays
                folder.rmdir()
    return created


def _create_mark(folder: Path, mark: Path, new: bool) -> tuple[bool, str]:
    """Whether the mark was not there yet, and what is wrong with the folder."""
    created = False
    try:
        with writing_to(folder):
            folder.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                mark.touch(exist_ok=False)
                created = True
        if created and new:
            Run.check_free(folder)
    except BadInput as error:
        return created, str(error)
    return created, ""


def _fail_together(problem: str, world: World, value: Any = None) -> list[Any]:
    """Raise one rank's problem on all ranks; if there is none, gather a value."""
    reports = gather_json([socket.gethostname(), problem, value], world.device)
    hosts, problems, values = zip(*reports, strict=True)
    for host, text in zip(hosts, problems, strict=True):
        if text:
            raise BadInput(_told(text, host, hosts))
    return list(values)


def _told(text: str, host: str, hosts: Sequence[str]) -> str:
    return f"on {host}: {text}" if len(set(hosts)) > 1 else text


def _create_or_continue(
    config: TrainConfig,
    world: World,
    folder: Path,
    found: Found | None,
    classes: Sequence[str],
) -> Run:
    environment = describe_environment(
        device=str(world.device.type),
        device_name=torch.cuda.get_device_name() if world.backend == "nccl" else None,
        backend=world.backend,
        world_size=world.world_size,
        num_threads=torch.get_num_threads(),
    )
    run = Run(folder)
    if found is None:
        if config.auto_resume and run.config_file.exists():
            if Run(folder).history.evals:
                raise BadInput(
                    f"out {folder}: the run there has done epochs and has no "
                    "checkpoint any more, so nothing can go on: choose another --out"
                )
            # it ended before its first checkpoint: start again
            run.config_file.unlink(missing_ok=True)
            run.history_file.unlink(missing_ok=True)
        return Run.create(folder, config, environment, classes)
    if not run.config_file.is_file():  # the run comes from another machine
        run = Run.create(folder, config, environment, classes)
    run.go_on(found.step, found.history, environment)
    checkpoint.tidy(folder, found.step, config.keep_checkpoints)
    if config.resume_anyway:  # from now on these are the run's settings
        run.write_config(replace(config, resume=None, resume_anyway=False))
    return run
