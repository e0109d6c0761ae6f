"""Step 1: who am I, and how do the processes meet?

Each process of a distributed run is a *rank*. Whoever starts the processes (`launch`,
``torchrun`` or Slurm) tells each one four things through environment variables: its
RANK among all, its LOCAL_RANK on this machine, the WORLD_SIZE, and the address of a
small key-value *store* where they meet. `join_world` reads them, waits until everybody
has arrived, opens the process group, and closes it again at a normal end:

    with join_world() as world:
        print(world.rank, world.world_size, world.device)
        total = sum_over_ranks(torch.tensor([float(world.rank)]))

Without these variables the process is a world of its own: rank 0 of 1.

Source: PyTorch docs, "Distributed communication package" and "torchrun"
(https://docs.pytorch.org/docs/stable/distributed.html).
"""

import datetime
import json
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist

from ddp_lab.errors import BadInput, RanksDisagree
from ddp_lab.rendezvous.meeting import meet
from ddp_lab.rendezvous.slurm import expand_counts

__all__ = [
    "World",
    "agree_any",
    "check_joined",
    "check_same",
    "count_gpus",
    "gather_json",
    "gather_over_ranks",
    "join_world",
    "pick_device",
    "read_ranks",
    "speaks_for_all",
    "sum_over_ranks",
]


@dataclass(frozen=True, kw_only=True)
class World:
    """This process's place among all processes of the run."""

    rank: int
    """0 .. world_size - 1, unique in the run. Rank 0 prints and writes."""
    local_rank: int
    """0 .. local_world_size - 1, unique on this machine. Picks the GPU."""
    world_size: int
    """Number of processes of the run, on all machines."""
    local_world_size: int
    """Number of processes of the run on this machine."""
    device: torch.device
    """Where this rank computes: its own GPU, or the CPU."""
    backend: str
    """Who carries the collectives: ``nccl`` between GPUs, ``gloo`` between CPUs."""


def read_ranks(environ: Mapping[str, str] = os.environ) -> dict[str, int] | None:
    """Read what torchrun, `launch` or Slurm's srun says about this process.

    Args:
        environ: environment variables; torchrun's names win over Slurm's.

    Returns:
        ``rank``, ``local_rank``, ``world_size`` and ``local_world_size``, or None when
        nobody started this process as one of several.

    Raises:
        BadInput: a variable is missing or is no whole number, a rank is not below its
            world size, or a launcher whose variables are others has started us.
    """
    if "RANK" in environ:
        names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"]
    elif "SLURM_PROCID" in environ and environ.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        names = ["SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS"]
        _check_no_shell(environ)
    else:
        _check_alone(environ)
        return None
    numbers = []
    for name in names:
        # a hand-made environment often has RANK and WORLD_SIZE only: one machine
        fallback = {"LOCAL_RANK": "RANK", "LOCAL_WORLD_SIZE": "WORLD_SIZE"}.get(name)
        text = environ.get(name) or environ.get(fallback or "", "")
        if not (text.isascii() and text.isdigit()):
            raise BadInput(
                f"{names[0]} is set, but {name} is {text or 'missing'!r}: start the "
                "ranks with torchrun, srun or launch(), which set all of them"
            )
        numbers.append(int(text))
    if len(numbers) == 3:  # Slurm: "2(x3),1" = 2 tasks on three nodes, 1 on the fourth
        counts = expand_counts(environ.get("SLURM_STEP_TASKS_PER_NODE", "")) or [1]
        node = environ.get("SLURM_NODEID", "0")
        numbers.append(counts[int(node) if node.isdigit() else 0])
    rank, local_rank, world_size, local_world_size = numbers
    if not rank < world_size:
        raise BadInput(
            f"{names[0]}={rank} must be below {names[2]}={world_size}: "
            "ranks count from 0"
        )
    if not local_rank < local_world_size <= world_size:
        raise BadInput(
            f"{names[1]}={local_rank} must be below the number of ranks on this "
            f"machine, {local_world_size}, of {world_size} in all: start the ranks "
            "with torchrun, srun or launch(), which set what belongs together"
        )
    return {
        "rank": rank,
        "local_rank": local_rank,
        "world_size": world_size,
        "local_world_size": local_world_size,
    }


def speaks_for_all() -> bool:
    """Whether this process is rank 0, or no rank at all: the one that is to print."""
    ranks = read_ranks()
    return ranks is None or ranks["rank"] == 0


def check_joined(num_ranks: int | None, world_size: int) -> None:
    """Refuse to choose the number of ranks, which the launcher has started already.

    Args:
        num_ranks: of the command line (None: not chosen).
        world_size: what the launcher started.
    """
    if num_ranks not in (None, world_size):
        raise BadInput(
            f"num_ranks {num_ranks}: the launcher started {world_size} ranks "
            "already; leave --num-ranks out and tell torchrun or srun instead"
        )


def _check_no_shell(environ: Mapping[str, str]) -> None:
    """Refuse to be rank 0 in an ``srun --pty`` shell: no other task runs this."""
    if "SLURM_PTY_PORT" not in environ:
        return
    import psutil

    parent = psutil.Process().parent()
    if not parent or parent.name() != "slurmstepd":
        raise BadInput(
            f"this is an interactive srun shell of {environ['SLURM_STEP_NUM_TASKS']} "
            "tasks, of which only this one has a terminal; none of the others runs "
            "this command: start all ranks with srun --overlap python ..., or unset "
            "SLURM_STEP_NUM_TASKS to let this process start ranks here"
        )


def _check_alone(environ: Mapping[str, str]) -> None:
    """Refuse to train alone what was meant to be one of several."""
    for name in ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        if environ.get(name, "1") not in ("", "1"):
            raise BadInput(
                f"{name}={environ[name]} speaks of several processes, but RANK is "
                "missing: start the ranks with torchrun, srun or launch(), or let your "
                "launcher set RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE; for "
                f"one process, unset {name}"
            )


def count_gpus(device: str = "auto") -> int:
    """Count the GPUs that ranks may use here: none if ``device`` is ``cpu``."""
    return 0 if device == "cpu" else torch.cuda.device_count()


def pick_device(
    device: str = "auto",
    local_rank: int = 0,
    local_world_size: int = 1,
    *,
    joined: bool = False,
) -> torch.device:
    """Choose where a rank computes, without initialising CUDA.

    Args:
        device: ``cpu``; ``cuda`` for one GPU a rank, or an error; ``auto`` for GPUs
            when each local rank can have its own, else the CPU.
        local_rank: this rank's number on its machine.
        local_world_size: number of ranks on this machine.
        joined: torchrun or Slurm has started this rank. It may show each rank a GPU of
            its own, and no other (``--gpus-per-task=1``); and a rank never takes the
            CPU, unasked, on a machine that shows GPUs.

    Returns:
        ``cuda:LOCAL_RANK``, ``cuda:0`` where it is the only one, or ``cpu``.

    Raises:
        BadInput: ``cuda`` is asked for and there is no GPU; or there are fewer GPUs
            than local ranks, and ``cuda`` is asked for or a launcher has started the
            ranks. Under a launcher a single GPU is taken for this rank's own (`meet`
            refuses one that two ranks share), and with ``auto`` no GPU means the CPU.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise BadInput(f"device {device!r} is unknown: choose auto, cpu or cuda")
    num_gpus = count_gpus(device)
    if device == "cuda" and num_gpus == 0:
        raise BadInput(
            "device cuda: this machine shows no GPU to PyTorch; choose device cpu, or "
            "check nvidia-smi and CUDA_VISIBLE_DEVICES"
        )
    if joined and num_gpus == 1:
        return torch.device("cuda", 0)
    if num_gpus < local_world_size and (device == "cuda" or (joined and num_gpus)):
        raise BadInput(
            f"device {device}: {local_world_size} ranks on this machine, but only "
            f"{num_gpus} GPU(s); start at most {num_gpus}, or choose device cpu"
        )
    if device == "cpu" or num_gpus < local_world_size:
        return torch.device("cpu")
    return torch.device("cuda", local_rank)


def _gpu(device: torch.device) -> str:
    """What tells a GPU from all others, empty for the CPU. (On GPUs it has not run.)"""
    if device.type == "cpu":
        return ""
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", device))


@contextmanager
def join_world(
    *,
    device: str = "auto",
    arrive_timeout_s: float = 60.0,
    timeout_s: float = 600.0,
) -> Iterator[World]:
    """Join the process group of this run, and leave it again at a normal end.

    After an exception the group stays open, unless this rank is alone: closing it waits
    for the collectives under way, in which the other ranks may never take part. Let the
    exception end the process; the launcher then stops the others.

    Args:
        device: ``auto``, ``cpu`` or ``cuda``, see `pick_device`.
        arrive_timeout_s: seconds to wait for the other ranks to arrive.
        timeout_s: seconds after which a collective that misses a rank fails.

    Yields:
        The `World`; its ``device`` is the current CUDA device, if it is a GPU.

    Raises:
        BadInput: the environment variables or the device make no sense.
        LabError: not all ranks arrived; the message names the missing ones.

    **Collective**: all ranks of the run must enter it, and leave it.
    """
    ranks = read_ranks()
    alone = ranks is None
    if ranks is None:
        ranks = {"rank": 0, "local_rank": 0, "world_size": 1, "local_world_size": 1}
    # launch() decides by itself, and tells its ranks by the same rule
    joined = not alone and os.environ.get("TORCHELASTIC_RUN_ID") != "ddp_lab"
    where = pick_device(
        device, ranks["local_rank"], ranks["local_world_size"], joined=joined
    )
    backend = "nccl" if where.type == "cuda" else "gloo"
    if alone:
        store: dist.Store = dist.HashStore()
    else:
        store = meet(ranks, arrive_timeout_s, gpu=_gpu(where))
    if where.type == "cuda":
        torch.cuda.set_device(where)
    dist.init_process_group(
        backend,
        store=store,
        rank=ranks["rank"],
        world_size=ranks["world_size"],
        timeout=datetime.timedelta(seconds=timeout_s),
        device_id=where if where.type == "cuda" else None,
    )
    try:
        yield World(**ranks, device=where, backend=backend)
        # Rank 0 may host the store: nobody leaves before everybody is done.
        dist.barrier()
    except BaseException:
        if ranks["world_size"] == 1:  # else it may wait for ranks that never come
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """Add a tensor up over all ranks; the argument itself is left as it is.

    Args:
        values: any shape and dtype, the same on all ranks, on the world's device.

    Returns:
        The sum, the same on all ranks.

    **Collective**: all ranks must call it. **Cost**: one all-reduce; each of W ranks
    sends 2 (W - 1) / W times the tensor's bytes.
    """
    total = values.clone()
    dist.all_reduce(total)
    return total


def gather_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """Collect a tensor from every rank.

    Args:
        values: any shape and dtype, the same on all ranks, on the world's device.

    Returns:
        Shape (world size, \\*values.shape), row r from rank r, the same on all ranks.

    **Collective**: all ranks must call it. **Cost**: one all-gather, W - 1 times the
    tensor's bytes sent by each of W ranks.
    """
    rows = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, values.contiguous())
    return torch.stack(rows)


def agree_any(flag: bool, device: torch.device | str = "cpu") -> bool:
    """Decide together: True on all ranks as soon as it is True on one.

    Stopping, skipping or saving because of something that only one rank saw leaves the
    others waiting in their next collective. Decide with this instead.

    Args:
        flag: this rank's own opinion.
        device: the world's device (nccl carries GPU tensors only).

    Returns:
        The same on all ranks.

    **Collective**: all ranks must call it. **Cost**: one all-reduce of 4 bytes.
    """
    votes = torch.tensor([int(flag)], dtype=torch.int32, device=device)
    dist.all_reduce(votes, op=dist.ReduceOp.MAX)
    return bool(votes.item())


def gather_json(value: Any, device: torch.device | str = "cpu") -> list[Any]:
    """Collect a small JSON-able value from every rank, without pickle.

    Args:
        value: dicts, lists, strings, numbers, booleans, None.
        device: the world's device (nccl carries GPU tensors only).

    Returns:
        One value a rank, in rank order, the same on all ranks.

    **Collective**: all ranks must call it. **Cost**: two all-gathers, of 8 bytes and of
    the longest text.
    """
    text = torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)
    lengths = gather_over_ranks(torch.tensor([len(text)], device=device)).flatten()
    padded = torch.zeros(int(lengths.max()), dtype=torch.uint8, device=device)
    padded[: len(text)] = text
    rows = gather_over_ranks(padded).cpu()
    return [
        json.loads(bytes(row[:length].tolist()).decode())
        for row, length in zip(rows, lengths.tolist(), strict=True)
    ]


def check_same(facts: dict[str, str], device: torch.device | str = "cpu") -> None:
    """Stop all ranks unless they are about to do the same thing.

    Ranks with different models or numbers of batches would hang in their first
    collectives, or mix their weights in silence.

    Args:
        facts: what must be equal, by name, in an order that must be equal too.
        device: the world's device.

    Raises:
        RanksDisagree: names the first difference, and who holds which value.

    **Collective**: all ranks must call it. **Cost**: two all-gathers, of 8 bytes and of
    the facts as text.
    """
    first, *others = gather_json([socket.gethostname(), list(facts.items())], device)
    for rank, other in enumerate(others, start=1):
        pairs = zip_longest(first[1], other[1], fillvalue=["nothing more", ""])
        for ours, theirs in pairs:
            if ours != theirs:
                hosts = (first[0], other[0])
                at = [f" on {h}" if hosts[0] != hosts[1] else "" for h in hosts]
                raise RanksDisagree(
                    f"the ranks disagree: rank 0{at[0]} has {_fact(ours)}, rank {rank}"
                    f"{at[1]} has {_fact(theirs)}; give all ranks the same code, data "
                    "and settings"
                )


def _fact(pair: list[str]) -> str:
    name, value = pair
    return f"{name} {value}".strip()
