"""Run a function on several ranks, from a notebook cell or a script.

    def train(lr):
        dist.init_process_group("gloo")
        ...
        return loss

    losses = launch(train, 0.1, num_ranks=2)     # one return value a rank

``fn`` gets exactly the arguments given here. Who it is, it reads from the environment,
as under torchrun: RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT.

The processes come from `torch.multiprocessing.spawn`; see ``_rank_set.py``.
"""

from collections.abc import Callable
from typing import Any

from ddp_lab.errors import BadInput
from ddp_lab.ranks._arguments import (
    check_function,
    check_positive,
    check_ranks,
    notice_big_copies,
)
from ddp_lab.ranks._interrupts import hold_interrupts
from ddp_lab.ranks._main import leave_process, send_record
from ddp_lab.ranks._pickling import pack_call, shared
from ddp_lab.ranks._rank_set import OnRecord, RankSet

__all__ = ["OnRecord", "launch", "leave_process", "send_record", "shared"]


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
    on_record: OnRecord | None = None,
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
        check_function(fn, "launch")
        num_ranks = check_ranks(num_ranks, device)
        check_positive(
            num_threads=num_threads, timeout_s=timeout_s, stuck_after_s=stuck_after_s
        )
        packed = pack_call(fn, args, kwargs)
    except BadInput as error:
        raise error.with_traceback(None) from None
    notice_big_copies("launch", packed, num_ranks)
    with hold_interrupts(), RankSet(num_ranks, num_threads=num_threads) as ranks:
        return ranks.call(
            packed,
            init=init,
            device=device,
            timeout_s=timeout_s,
            stuck_after_s=stuck_after_s,
            echo=echo,
            on_record=on_record,
        )
