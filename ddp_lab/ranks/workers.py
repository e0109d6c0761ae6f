"""Ranks that stay alive between calls, so that the second call takes milliseconds.

    with Workers(2) as workers:
        workers.run(train, 0.1)      # about a second: each rank imports torch
        workers.run(train, 0.2)      # a few milliseconds

A call keeps the promises of `launch`: every rank's output, return value and traceback
reach the caller, and a deadlock ends in a table. What differs is what stays:

* The processes stay, with their modules, their memory and their open files. A module
  that you edit afterwards is still the old one there: make new Workers.
* With ``init=True`` the process group stays too: it is joined once, before the first
  call, and each call finds it open.
* With ``init=False`` step 1 is the function's own business, as under torchrun. A group
  that it leaves open is closed after the call, so that it can be called again.

After a failure the ranks go on if they can:

    call ends by              ranks                       group (init=True)
    every rank returned       stay                        stays
    an exception, and all     stay                        stays if each rank has called
    ranks came to an end                                  as many collectives, else new
    an exception, and others  new ones at the next call   new
    still waited for it
    crash, deadlock, Stop     new ones at the next call   new
    a rank died while idle    new ones at the next call   new

New ranks know nothing of the old ones' variables, so the next call says in one line
that they are new, and why.
"""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

from ddp_lab.errors import BadInput, RankFailed, RanksStuck, signal_name
from ddp_lab.ranks._arguments import (
    check_function,
    check_positive,
    check_ranks,
    check_which,
    notice_big_copies,
)
from ddp_lab.ranks._interrupts import hold_interrupts
from ddp_lab.ranks._pickling import Packed, pack_call
from ddp_lab.ranks._rank_set import OnRecord, RankSet

__all__ = ["Workers"]

_HOUSEKEEPING_S = 90.0  # joining gives up after 60 s and says who is missing


class Workers:
    """``num_ranks`` processes that wait for functions to run.

    They start as soon as the set is made; the first call waits until each has imported
    what it needs. They end with the ``with`` block, with `close`, or with the process
    that made them, however it goes.

    Args:
        num_ranks: number of processes; None for one a GPU, or 2 without a GPU.
        init: True joins the process group once and keeps it open for all calls; False
            leaves that to each function.
        device: with ``init``, where the ranks compute: ``auto``, ``cpu`` or ``cuda``.
        num_threads: CPU threads of a rank; None for OMP_NUM_THREADS where it is set,
            else the cores shared out.
        setup: called once on each new rank, with the group open if ``init``: load
            here what all calls need. Its output is shown.
        name: who speaks in the notices.

    Raises:
        BadInput: an argument cannot work; nothing was started.
    """

    def __init__(
        self,
        num_ranks: int | None = 2,
        *,
        init: bool = False,
        device: str = "auto",
        num_threads: int | None = None,
        setup: Callable[[], Any] | None = None,
        name: str = "Workers",
    ) -> None:
        __tracebackhide__ = True
        try:
            self.num_ranks = check_ranks(num_ranks, device)
            check_positive(num_threads=num_threads)
            self._setup = None
            if setup is not None:
                check_function(setup, "setup")
                self._setup = pack_call(setup, (), {})
        except BadInput as error:
            raise error.with_traceback(None) from None
        self._init = init
        self._device = device
        self._num_threads = num_threads
        self._name = name
        self._busy = threading.Lock()
        self._closed = False
        self._start()

    @property
    def pids(self) -> list[int]:
        """The ranks' process ids, in rank order."""
        return self._ranks.pids

    @property
    def exit_codes(self) -> list[int | None]:
        """None for each rank that lives, minus the signal's number if it was killed."""
        return self._ranks.exit_codes

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        only: Sequence[int] | None = None,
        timeout_s: float | None = None,
        stuck_after_s: float = 30.0,
        echo: bool = True,
        on_record: OnRecord | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Run ``fn(*args, **kwargs)`` on every rank and wait for all of them.

        Args:
            fn: a function, also one from a cell, a lambda or a bound method.
            args: its arguments. Each rank works on its own copy.
            only: run on these ranks, while the others stay idle; None for all.
            timeout_s: seconds after which the ranks are stopped, None for no limit.
            stuck_after_s: seconds without progress after which waiting ranks are
                stopped.
            echo: show what the ranks print.
            on_record: called here with (rank, fields) for each `send_record`.
            kwargs: keyword arguments of ``fn``.

        Returns:
            What ``fn`` returned on each rank that ran it, in rank order.

        Raises:
            BadInput: an argument cannot work, or cannot travel; nothing ran.
            RankFailed: a rank raised, exited or was killed.
            RanksStuck: ranks waited for each other, or ``timeout_s`` was over.

        **Cost**: a few milliseconds, once the ranks are there.
        """
        __tracebackhide__ = True
        try:
            check_function(fn, "run")
            check_positive(timeout_s=timeout_s, stuck_after_s=stuck_after_s)
            if only is not None:
                check_which(only, self.num_ranks)
            packed = pack_call(fn, args, kwargs)
        except BadInput as error:
            raise error.with_traceback(None) from None
        notice_big_copies(self._name, packed, self.num_ranks)
        with hold_interrupts(), self._one_call():
            self._make_ready()
            return self._call(
                packed,
                only=only,
                timeout_s=timeout_s,
                stuck_after_s=stuck_after_s,
                echo=echo,
                on_record=on_record,
            )

    def close(self) -> None:
        """End the ranks; a second time it does nothing.

        Raises:
            BadInput: another thread's call still runs.
        """
        if self._closed:
            return
        with hold_interrupts(), self._one_call():
            self._closed = True
            if not self._why_new():
                with contextlib.suppress(Exception):
                    self._leave_group()  # nccl warns when a process forgets to
            self._ranks.close()

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _one_call(self) -> Iterator[None]:
        """Keep other threads out, and calls after the end."""
        __tracebackhide__ = True
        if self._closed:
            raise BadInput("these workers are closed: make new ones")
        if not self._busy.acquire(blocking=False):
            raise BadInput("these workers run a call already, from another thread")
        try:
            yield
        finally:
            self._busy.release()

    def _start(self) -> None:
        self._lost = ""  # why the ranks cannot go on
        self._regroup = ""  # why the group cannot
        self._joined = False
        self._set_up = False
        self._ranks = RankSet(self.num_ranks, num_threads=self._num_threads)
        try:
            self._ranks.start()
        except BaseException:
            self._ranks.kill()
            raise

    def _why_new(self) -> str:
        """Why these ranks cannot run another call; empty if they can."""
        for rank, code in enumerate(self.exit_codes):
            if code is not None and not self._lost:
                self._lost = f"rank {rank} {_ended(code)}"
        return self._lost

    def _make_ready(self) -> None:
        """Replace ranks that are lost, and join the group if there is to be one."""
        __tracebackhide__ = True
        if why := self._why_new():
            self._ranks.close()
            self._start()
            many = f"{self.num_ranks} new rank{'s' if self.num_ranks > 1 else ''}"
            self._say(f"{many}, because {why}; what the old held is gone")
        if self._init and not self._joined:
            self._call(pack_call(_join, (self._device,), {}), echo=False)
            self._joined = True
            if self._regroup:
                again = "wrap DDP models again"
                self._say(f"a new process group, because {self._regroup}; {again}")
                self._regroup = ""
        if self._setup is not None and not self._set_up:
            self._call(self._setup)
            self._set_up = True

    def _say(self, text: str) -> None:
        print(f"{self._name}: {text}", flush=True)

    def _call(self, packed: Packed, **options: Any) -> list[Any]:
        """Run a packed call, and note what has become of the ranks."""
        __tracebackhide__ = True
        try:
            values = self._ranks.call(packed, **options)
        except RankFailed as error:
            self._after_failure(error)
            raise
        except RanksStuck:
            self._lost = "the last call did not come to an end"
            raise
        except KeyboardInterrupt:
            self._lost = "the last call was interrupted"
            raise
        except BaseException:
            if not self._ranks.alive:
                self._lost = "the last call was given up"
            raise
        open_groups = self._ranks.groups_open
        if self._joined and not all(open_groups):
            self._lose_group("a rank has closed the last one")
        elif not self._init and any(open_groups):
            self._leave_group()
        return values

    def _after_failure(self, error: RankFailed) -> None:
        first = error.failures[0]
        if not self._ranks.alive:
            self._lost = f"rank {first.rank} failed and others still waited for it"
        elif not self._why_new() and any(self._ranks.groups_open):
            if not self._init:
                self._leave_group()
            elif self._out_of_step(error):
                self._lose_group(f"rank {first.rank} failed between two collectives")

    def _out_of_step(self, error: RankFailed) -> bool:
        """Whether the next collective of one rank would meet another's last one."""
        if any(failure.consequence for failure in error.failures):
            return True
        try:
            counts = self._ranks.call(pack_call(_num_collectives, (), {}), echo=False)
        except RankFailed:  # torch has no such count: the error at hand is the news
            return True
        return None in counts or len(set(counts)) > 1

    def _lose_group(self, why: str) -> None:
        self._leave_group()
        self._regroup = why

    def _leave_group(self) -> None:
        self._joined = False
        try:
            leave = pack_call(_leave, (), {})
            self._ranks.call(leave, echo=False, timeout_s=_HOUSEKEEPING_S)
        except Exception:
            self._ranks.kill()
            self._lost = "the process group of the last call could not be closed"


def _ended(exit_code: int) -> str:
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    return f"was ended by {signal_name(-exit_code)}"


# On the ranks ---------------------------------------------------------------------

_membership: ExitStack | None = None  # of the process group


def _join(device: str) -> None:
    from ddp_lab.world import join_world

    global _membership
    _membership = ExitStack()
    _membership.enter_context(join_world(device=device))


def _leave() -> None:
    """Close the group, whoever opened it, without waiting for the others."""
    global _membership
    membership, _membership = _membership, None
    if membership is not None:
        leaving = RuntimeError("leave at once")
        with contextlib.suppress(Exception):  # the user's code may have closed it
            membership.__exit__(RuntimeError, leaving, None)
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_initialized():
        dist.destroy_process_group()


def _num_collectives() -> int | None:
    """How many collectives this rank has called in the group that is open."""
    import torch.distributed as dist

    group: Any = dist.group.WORLD
    return int(group._get_sequence_number_for_group()) if group is not None else None
