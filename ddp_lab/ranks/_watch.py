"""Is a rank working, waiting or stuck, and where?

A deadlock has no error message: each rank waits, quietly, for a message that no other
rank will ever send. This module tells it from work:

* in each rank, `look` takes one `Sight`: the line of the user's code, the whole stack,
  the CPU time used so far, the last collective that the rank entered, and whether its
  main thread *waits* there for other ranks;
* in the parent, a `Watch` compares the sights. Ranks are stuck when every one that
  still runs has waited for other ranks, at one place, for ``stuck_after_s``.

Whatever else a rank does may end by itself and is left alone: it computes, waits for a
child, a disk or a person, or holds the interpreter's lock. If it never ends, as an
endless loop, ``timeout_s`` ends it, if one was given. CPU time says little: a waiting
rank may spin. It counts only for a rank whose collective another rank is in too, or
whose message it may be the other end of: much data may be on its way.
"""

import contextlib
import json
import linecache
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any, NamedTuple

from ddp_lab.errors import Failure
from ddp_lab.ranks.stacks import PACKAGE, Line, stack_text, user_line

__all__ = [
    "POINT_TO_POINT",
    "LastCollective",
    "Row",
    "Sight",
    "Watch",
    "forget_collectives",
    "last_collective",
    "look",
    "sight_from_dump",
    "stuck_table",
]

_IDLE_CPU_SHARE = 0.02  # a waiting rank's helper threads use 0.6 % of a core
_BUSY_CPU_SHARE = 0.1
_DISTRIBUTED = os.sep + os.path.join("torch", "distributed", "distributed_c10d")
_MEETING = os.path.join(PACKAGE, "rendezvous", "meeting.py")
_NO_WAIT = ("get_rank", "get_world_size", "is_initialized")
# Where a main thread stands that waits for a collective it has begun before: torch's
# backward, for DDP's; or a call on the user's own line, on a GPU one for the result.
_BACKWARD = "_engine_run_backward"
_WAIT_CALLS = re.compile(r"\.(wait|synchronize|item|tolist|cpu|numpy|wait_all)\(")
POINT_TO_POINT = ("send", "recv", "isend", "irecv", "batch_isend_irecv")

_since_ns = 0


@dataclass(frozen=True, kw_only=True)
class Sight:
    """What a rank was doing at one moment."""

    where: str
    """The user's own line: ``Cell In[3], line 4: dist.barrier()``."""
    stack: str
    """The whole stack, innermost call last, as text."""
    mark: tuple[tuple[str, int], ...]
    """The instruction of each frame: equal marks mean that nothing has moved."""
    cpu_s: float
    """CPU time that the process has used so far, without the thread that looks."""
    collective: str
    """The last collective that was entered, ``all_reduce #2``, or ``-``."""
    waits: bool
    """Whether the main thread waits for other ranks, inside torch.distributed."""
    group: str = ""
    """The name of the process group that this collective belongs to."""
    peak_bytes: int = 0
    """The most memory that the process has had so far; 0 if unknown."""
    handled: Failure | None = None
    """The exception that the rank has not got rid of yet: it cleans up, or waits."""


def look(describe: Callable[[BaseException], Failure] | None = None) -> Sight:
    """Take a `Sight` of this process's main thread, from another thread.

    Args:
        describe: makes a `Failure` of an exception that the main thread is handling,
            as it does in a ``finally``; None to leave that out.
    """
    main = threading.main_thread().ident or 0
    frame = sys._current_frames().get(main)
    frames: list[tuple[CodeType, int, int]] = []
    while frame is not None:
        frames.append((frame.f_code, frame.f_lineno or 0, frame.f_lasti))
        frame = frame.f_back
    frames.reverse()
    lines = [(code.co_filename, line, code.co_name) for code, line, _ in frames]
    last = last_collective()
    name = last.name
    inside = [name for file, _, name in lines if _DISTRIBUTED in file][:1]
    if inside and inside[0] in _NO_WAIT:
        inside.clear()
    if inside and not last.open:  # the recorder leaves some out, such as recv
        name = inside[0]
    handled = None
    if describe is not None and (error := _exception_of(main)) is not None:
        handled = describe(error)
    return Sight(
        where=user_line(lines),
        stack=stack_text(lines),
        mark=tuple((code.co_filename, lasti) for code, _, lasti in frames),
        cpu_s=time.process_time() - time.thread_time(),
        collective=name,
        waits=bool(inside) or _arriving(lines) or (last.open and _awaits(lines)),
        group=last.group,
        peak_bytes=_peak_bytes(),
        handled=handled,
    )


def _awaits(lines: Sequence[Line]) -> bool:
    """Whether a main thread at these lines waits for what it has begun before."""
    if not lines:
        return False
    if any(function == _BACKWARD for _, _, function in lines):
        return True
    file, number, _ = lines[-1]
    return _WAIT_CALLS.search(linecache.getline(file, number)) is not None


def _exception_of(thread: int) -> BaseException | None:
    """The exception that a thread is handling, in an ``except`` or a ``finally``."""
    handled: Any = sys._current_exceptions().get(thread)
    error: BaseException | None
    error = handled[1] if isinstance(handled, tuple) else handled  # 3.11, 3.12
    return error


def _peak_bytes() -> int:
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def forget_collectives() -> None:
    """Leave collectives of earlier calls out of `last_collective`."""
    global _since_ns
    _since_ns = time.time_ns()


class LastCollective(NamedTuple):
    """What the recorder tells of a rank's last collective."""

    name: str = "-"
    """``all_reduce #2``: its kind, and how many of them the group had with it."""
    open: bool = False
    """Whether it is still under way, and so waits for other ranks."""
    group: str = ""
    """The process group's name."""


def last_collective() -> LastCollective:
    """The last collective this rank entered, of the groups of either backend.

    gloo and nccl each keep a flight recorder of their own. An nccl collective waits for
    others once the GPU has begun it; before, it waits for the GPU's other work. nccl's
    recorder knows that only with TORCH_NCCL_ENABLE_TIMING, which ranks are born with.
    (How nccl fills its recorder was read, not run.)
    """
    try:  # torch may be half imported, and the recorders' readers are private names
        initialized = sys.modules["torch.distributed"].is_initialized()
        c10d = sys.modules["torch._C._distributed_c10d"]
    except Exception:
        return LastCollective()
    entries = []
    for recorder in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        with contextlib.suppress(Exception):
            entries += json.loads(getattr(c10d, recorder)()).get("entries", [])
    entries = [e for e in entries if e.get("time_created_ns", _since_ns) >= _since_ns]
    if not entries:
        return LastCollective()
    last = max(entries, key=lambda entry: entry.get("time_created_ns", 0))
    backend, _, name = str(last.get("profiling_name", "?")).rpartition(":")
    number = last.get("p2p_seq_id" if last.get("is_p2p") else "collective_seq_id")
    waits = not last.get("retired", True)
    if backend == "nccl":
        waits = waits and last.get("state") == "started"
    return LastCollective(
        name=f"{name.split(' ')[0]} #{number}",
        open=initialized and waits,
        group=str(last.get("process_group", [""])[0]),
    )


def _arriving(lines: Sequence[Line]) -> bool:
    """Whether the rank waits for the others in `join_world`."""
    return any(file == _MEETING and fn == "meet" for file, _, fn in lines)


def sight_from_dump(text: str) -> Sight | None:
    """Read what faulthandler wrote about the main thread, if it did."""
    for thread in re.split(r"^(?:Current thread|Thread) .*$", text, flags=re.MULTILINE):
        if " in rank_main" in thread:
            found = re.findall(r'File "(.*)", line (\d+) in (.*)', thread)
            lines = [(file, int(line), fn) for file, line, fn in reversed(found)]
            return Sight(
                where=user_line(lines),
                stack=stack_text(lines),
                mark=(),
                cpu_s=0.0,
                collective="-",
                waits=any(_DISTRIBUTED in file for file, _, _ in lines),
            )
    return None


class Watch:
    """Compare the ranks' sights and tell when all of them wait for each other."""

    def __init__(self, num_ranks: int, stuck_after_s: float) -> None:
        self.stuck_after_s = stuck_after_s
        self.last: list[Sight | None] = [None] * num_ranks
        self.busy = [False] * num_ranks  # used the CPU between the last two sights
        self._seen_at = [0.0] * num_ranks
        self._still = [_Rest() for _ in range(num_ranks)]  # waits, at one place
        self._idle = [_Rest() for _ in range(num_ranks)]  # ... and without CPU time

    def moved(self, rank: int) -> None:
        """Note that ``rank`` showed a sign of life, such as output."""
        self._still[rank] = _Rest()
        self._idle[rank] = _Rest()

    def saw(self, rank: int, sight: Sight) -> None:
        """Note what ``rank`` is doing now.

        Only what is seen counts: a rank that has not answered does not rest, and of a
        gap between two sights, as when all processes were paused, at most a quarter of
        ``stuck_after_s`` counts as rest.
        """
        now = time.monotonic()
        gap_s = now - self._seen_at[rank]
        if (last := self.last[rank]) is not None and gap_s > 0:
            self.busy[rank] = (sight.cpu_s - last.cpu_s) / gap_s > _BUSY_CPU_SHARE
        self.last[rank], self._seen_at[rank] = sight, now
        rest_s = min(gap_s, self.stuck_after_s / 4)
        self._still[rank].add(sight, now, rest_s, cpu_counts=False)
        self._idle[rank].add(sight, now, rest_s, cpu_counts=True)

    def still(self, rank: int, ranks: Sequence[int]) -> bool:
        """Whether ``rank`` was seen to wait, for ``stuck_after_s``, for others."""
        rest = self._idle if self._may_carry_data(rank, ranks) else self._still
        return rest[rank].seconds >= self.stuck_after_s

    def _may_carry_data(self, rank: int, ranks: Sequence[int]) -> bool:
        """Whether another rank is in the same collective, or at its other end."""
        sight = self.last[rank]
        others = [self.last[other] for other in ranks if other != rank]
        return sight is not None and any(
            other is not None and _match(sight, other) for other in others
        )

    def stuck(self, running: Iterable[int]) -> bool:
        """Whether the ranks that still run can only wait for ever."""
        ranks = list(running)
        return bool(ranks) and all(self.still(rank, ranks) for rank in ranks)


class _Rest:
    """How long a rank has been seen to wait at one place."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._base: Sight | None = None
        self._base_at = 0.0

    def add(self, sight: Sight, now: float, rest_s: float, *, cpu_counts: bool) -> None:
        base = self._base
        idle_cpu_s = 0.05 + _IDLE_CPU_SHARE * (now - self._base_at)
        if (
            base is None
            or not sight.waits
            or base.mark != sight.mark
            or base.collective != sight.collective
            or (cpu_counts and sight.cpu_s - base.cpu_s > idle_cpu_s)
        ):
            self._base, self._base_at, self.seconds = sight, now, 0.0
        else:
            self.seconds += rest_s


def _match(one: Sight, other: Sight) -> bool:
    """Whether two waiting ranks may be the two ends of one message."""
    kinds = [sight.collective.split(" ")[0] for sight in (one, other)]
    if any(kind in POINT_TO_POINT for kind in kinds):
        return all(kind in POINT_TO_POINT for kind in kinds)
    return (one.group, one.collective) == (other.group, other.collective)


@dataclass(frozen=True)
class Row:
    """One rank's line in the table of stuck ranks."""

    rank: int
    state: str
    """finished, failed, waiting (in a collective), idle, or running."""
    collective: str
    where: str


def stuck_table(rows: Sequence[Row]) -> str:
    """Lay the rows out in columns, with a title line."""
    cells = [("rank", "state", "last collective", "where")]
    cells += [(str(row.rank), row.state, row.collective, row.where) for row in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(3)]
    return "\n".join(
        "  ".join([c.ljust(w) for c, w in zip(row, widths, strict=False)] + [row[3]])
        for row in cells
    )
