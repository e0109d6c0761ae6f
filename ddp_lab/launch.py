"""Run a function on several ranks, from a notebook cell or a script.

    def train(lr):
        dist.init_process_group("gloo")
        ...
        return loss

    losses = launch(train, 0.1, num_ranks=2)     # one return value a rank

``fn`` gets exactly the arguments given here. Who it is, it reads from the environment,
as under torchrun: RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT.
"""

import inspect
import sys
from collections.abc import Callable
from typing import Any

from ddp_lab.errors import BadInput
from ddp_lab.inside import send_record
from ddp_lab.payload import pack_call, shared
from ddp_lab.ranks import Ranks
from ddp_lab.start import hold_interrupts

__all__ = ["launch", "send_record", "shared"]

_NOTICE_BYTES = 10 * 2**20


def launch(
    fn: Callable[..., Any],
    *args: Any,
    num_ranks: int | None = 2,
    init: bool = False,
    device: str = "auto",
    timeout_s: float | None = None,
    stuck_after_s: float = 30.0,
    echo: bool = True,
    num_threads: int | None = None,
    start_method: str = "spawn",
    on_record: Callable[[int, dict[str, Any]], None] | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Run ``fn(*args, **kwargs)`` on ``num_ranks`` new processes and wait for them.

    Args:
        fn: a function, also one from a cell, a lambda or a bound method.
        args: its arguments. Each rank works on its own copy; tensors arrive on the CPU.
        num_ranks: number of processes; None for one a GPU, or 2 without a GPU.
        init: True joins the process group around ``fn``; False leaves that to ``fn``.
        device: with ``init``, where the ranks compute: ``auto``, ``cpu`` or ``cuda``.
        timeout_s: seconds after which the ranks are stopped, None for no limit.
        stuck_after_s: seconds without progress after which waiting ranks are stopped.
        echo: show what the ranks print.
        num_threads: CPU threads of a rank; None for OMP_NUM_THREADS where it is set,
            else the cores shared out.
        start_method: ``spawn``, or ``forkserver``, quicker from the second launch on.
        on_record: called here with (rank, fields) for each `send_record` of a rank.
        kwargs: keyword arguments of ``fn``.

    Returns:
        What ``fn`` returned on each rank, in rank order. Tensors come back on the CPU.

    Raises:
        BadInput: an argument cannot work, or cannot travel; nothing was started.
        RankFailed: a rank raised, exited or was killed.
        RanksStuck: ranks waited for each other, or ``timeout_s`` was over.

    **Cost**: about a second, most of it to import torch in each rank.
    """
    __tracebackhide__ = True  # in a notebook, the cell's line is what matters
    try:
        num_ranks = _check(fn, num_ranks, device, start_method)
        _check_positive(
            num_threads=num_threads, timeout_s=timeout_s, stuck_after_s=stuck_after_s
        )
        packed = pack_call(fn, args, kwargs)
    except BadInput as error:
        raise error.with_traceback(None) from None
    if len(packed.blob) > _NOTICE_BYTES:
        size_mb = len(packed.blob) / 2**20
        print(
            f"launch: {size_mb:.0f} MB of arguments are copied to each of {num_ranks} "
            "ranks; shared(tensor) passes one copy for all",
            file=sys.stderr,
        )
    with hold_interrupts(), Ranks(num_ranks, start_method=start_method) as ranks:
        return ranks.call(
            packed,
            init=init,
            device=device,
            num_threads=num_threads,
            timeout_s=timeout_s,
            stuck_after_s=stuck_after_s,
            echo=echo,
            on_record=on_record,
        )


def _check(fn: Any, num_ranks: int | None, device: str, start_method: str) -> int:
    """Refuse what cannot work, before a process is started."""
    if not callable(fn):
        raise BadInput(
            f"launch needs a function, not {type(fn).__name__!r}: "
            "launch(train, config), not launch(train(config))"
        )
    if inspect.iscoroutinefunction(fn):
        raise BadInput(f"{fn.__name__} is a coroutine function: pass a plain function")
    if inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
        raise BadInput(f"{fn.__name__} is a generator function: return a list instead")
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


def _check_positive(**numbers: float | None) -> None:
    for name, number in numbers.items():
        if number is not None and not number > 0:
            raise BadInput(f"{name} must be above 0, not {number!r}")
