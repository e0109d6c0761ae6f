"""What a rank is born with: variables, and nothing of the main script.

Each of these is a small context or function of its own; ``_rank_set.py`` puts them
together.
"""

import contextlib
import multiprocessing
import os
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = [
    "early_env",
    "inherited",
    "no_start_method_chosen",
    "nothing_to_import",
    "num_cores",
    "one_at_a_time",
    "threads_per_rank",
    "torchrun_env",
]


one_at_a_time = threading.RLock()
"""Held while this process's environment, ``__main__`` or stderr is another's: several
threads may launch."""


_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


def no_start_method_chosen() -> bool:
    """Whether the user has left open how multiprocessing starts its processes.

    The default counts as left open: multiprocessing notes it at its first use.
    """
    default = multiprocessing.get_all_start_methods()[0]
    return multiprocessing.get_start_method(allow_none=True) in (None, default)


def torchrun_env(rank: int, num_ranks: int, port: int, threads: int) -> dict[str, str]:
    """The variables that torchrun sets, for one rank of a single machine.

    Source: PyTorch docs, "torchrun (Elastic Launch)", Environment Variables.
    """
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "ROLE_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "ROLE_WORLD_SIZE": str(num_ranks),
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "ddp_lab",
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the parent hosts it, not rank 0
        "OMP_NUM_THREADS": str(threads),
    }


def early_env(num_threads: int) -> dict[str, str]:
    """What must be set before torch is imported, which a rank does first of all.

    Args:
        num_threads: CPU threads of a rank; OpenMP reads it once, when it is loaded.
    """
    wanted = {
        # no name lookup and no other interface: a single machine talks to itself
        "GLOO_SOCKET_IFNAME": _LOOPBACK,
        "NCCL_SOCKET_IFNAME": _LOOPBACK,
        # the flight recorder keeps the last collectives that a rank entered
        "TORCH_FR_BUFFER_SIZE": "256",
        # ... and nccl's says which of them the GPU has begun (not run)
        "TORCH_NCCL_ENABLE_TIMING": "1",
        # without a name server the store warns that it cannot look up its own clients
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    users = {name: os.environ[name] for name in wanted if name in os.environ}
    return {**wanted, **users, "OMP_NUM_THREADS": str(num_threads)}


@contextmanager
def inherited(variables: dict[str, str]) -> Iterator[None]:
    """Set variables that processes started in the block inherit."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def nothing_to_import() -> Iterator[None]:
    """Keep multiprocessing from running the main script again in each rank.

    Functions travel by value, so a rank needs nothing of it: a script needs no
    ``if __name__ == "__main__"`` guard, and a notebook whose namespace has a
    ``__file__`` runs the cell's function, not that file's.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def threads_per_rank(num_ranks: int) -> int:
    """OMP_NUM_THREADS where the user has set it, else this rank's share of the cores.

    Left alone, each rank would use all cores, and the ranks would slow each other down.
    """
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    if wanted.isdigit() and int(wanted) > 0:
        return int(wanted)
    return max(1, num_cores() // num_ranks)


def num_cores(quota_file: str = "/sys/fs/cgroup/cpu.max") -> int:
    """How many cores this process may use: a container may have a part of them.

    Args:
        quota_file: cgroup v2's, "150000 100000" for one and a half cores, or "max ...".
    """
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path(quota_file).read_text().split()
        cores = min(cores, max(1, int(quota) // int(period)))
    return cores
