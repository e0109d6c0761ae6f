"""What cannot work is refused in one line, before a process is started.

Shared by those who start ranks: `launch`, `Workers` and `ddp_lab.train`.
"""

import inspect
import sys
from typing import Any

from ddp_lab.errors import BadInput
from ddp_lab.payload import Packed

__all__ = [
    "check_function",
    "check_no_notebook",
    "check_positive",
    "check_ranks",
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


def check_no_notebook(rank: int, world_size: int) -> None:
    """Refuse to be one rank of several in a Jupyter kernel: no other would come.

    People set RANK and WORLD_SIZE by hand when they copy a script into a notebook.
    """
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if world_size > 1 and hasattr(shell, "kernel"):
        raise BadInput(
            f"this notebook's environment makes it rank {rank} of {world_size}, and no "
            "other rank would come: delete RANK and WORLD_SIZE from os.environ, or use "
            f"launch(), or !torchrun --nproc-per-node {world_size} -m ddp_lab.train"
        )


def check_ranks(num_ranks: int | None, device: str, start_method: str) -> int:
    """Refuse ranks that this machine cannot have; return their number.

    Args:
        num_ranks: from 1 on; None for one a GPU, or 2 without a GPU.
        device: ``auto``, ``cpu`` or ``cuda``.
        start_method: ``spawn`` or ``forkserver``.
    """
    if start_method not in ("spawn", "forkserver"):
        raise BadInput(
            f"start_method {start_method!r} is unknown: choose spawn or forkserver "
            "(fork deadlocks once this process has used threads or CUDA)"
        )
    if device not in ("auto", "cpu", "cuda"):
        raise BadInput(f"device {device!r} is unknown: choose auto, cpu or cuda")
    import torch

    num_gpus = torch.cuda.device_count() if device != "cpu" else 0
    if num_ranks is None:
        return num_gpus or 2
    if isinstance(num_ranks, bool) or not isinstance(num_ranks, int) or num_ranks < 1:
        raise BadInput(f"num_ranks must be a whole number from 1 on, not {num_ranks!r}")
    if device == "cuda" and num_ranks > num_gpus:
        raise BadInput(
            f"num_ranks={num_ranks}, but this machine has {num_gpus} GPU(s): use "
            'device="cpu", or start at most that many ranks'
        )
    return num_ranks


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
