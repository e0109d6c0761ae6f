"""What cannot work is refused in one line, before a process is started.

Shared by those who start ranks: `launch`, `Workers` and the magics.
"""

import inspect
import sys
from collections.abc import Sequence
from typing import Any

from ddp_lab.errors import BadInput
from ddp_lab.ranks._pickling import Packed

__all__ = [
    "check_function",
    "check_positive",
    "check_ranks",
    "check_which",
    "notice_big_copies",
]

_NOTICE_BYTES = 10 * 2**20


def check_function(fn: Any, caller: str) -> None:
    """Refuse what is no plain function, in the name of ``caller``."""
    if not callable(fn):
        raise BadInput(
            f"{caller} needs a function, not {type(fn).__name__!r}: "
            f"{caller}(train, config), not {caller}(train(config))"
        )
    if inspect.iscoroutinefunction(fn):
        raise BadInput(f"{fn.__name__} is a coroutine function: pass a plain function")
    if inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
        raise BadInput(f"{fn.__name__} is a generator function: return a list instead")


def check_ranks(num_ranks: int | None, device: str) -> int:
    """Refuse ranks that this machine cannot have; return their number.

    Args:
        num_ranks: from 1 on; None for one a GPU, or 2 without a GPU.
        device: ``auto``, ``cpu`` or ``cuda``.
    """
    from ddp_lab.world import count_gpus, pick_device

    if sys.platform == "win32":
        raise BadInput(
            "ranks need Linux or macOS: on Windows, work in WSL "
            "(https://learn.microsoft.com/windows/wsl/install)"
        )
    if num_ranks is not None and (
        isinstance(num_ranks, bool) or not isinstance(num_ranks, int) or num_ranks < 1
    ):
        raise BadInput(f"num_ranks must be a whole number from 1 on, not {num_ranks!r}")
    num_ranks = num_ranks or count_gpus(device) or 2
    pick_device(device, local_world_size=num_ranks)
    return num_ranks


def check_which(ranks: Sequence[int], num_ranks: int) -> None:
    """Refuse numbers that are no ranks of a set of ``num_ranks``, and none at all."""
    for rank in ranks:
        if rank not in range(num_ranks):
            last = num_ranks - 1
            which = f"the ranks are 0 to {last}" if last else "the only rank is 0"
            raise BadInput(f"there is no rank {rank}: {which}")
    if not ranks or len(set(ranks)) < len(ranks):
        raise BadInput("`only` must name at least one rank, and each rank once")


def check_positive(**numbers: float | None) -> None:
    """Refuse numbers that are not above 0; None stands for no limit."""
    for name, number in numbers.items():
        if number is not None and not number > 0:
            raise BadInput(f"{name} must be above 0, not {number!r}")


def notice_big_copies(caller: str, packed: Packed, num_ranks: int) -> None:
    """Say so when much data is copied to every rank."""
    if len(packed.blob) > _NOTICE_BYTES:
        print(
            f"{caller}: {len(packed.blob) / 2**20:.0f} MB of arguments are copied to "
            f"each of {num_ranks} ranks; shared(tensor) passes one copy for all",
            file=sys.stderr,
        )
