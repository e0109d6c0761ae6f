"""Is a rank working, waiting or stuck, and where?

A deadlock has no error message: each rank waits, quietly, for a message that no other
rank will ever send. This module tells it from work:

* in each rank, `look` takes one `Sight`: the line of the user's code, the whole stack,
  the CPU time used so far, and the last collective that the rank entered;
* in the parent, a `Watch` compares the sights. A rank *moves* when its stack, its last
  collective or its output changes, or when it uses CPU time. Ranks are stuck when none
  that still runs has moved for ``stuck_after_s`` and either one of them waits in
  torch.distributed or another rank has already ended.

So a rank that computes is never called stuck, however long it takes; an endless loop is
computing too, and is ended by ``timeout_s``. So is a rank that cannot answer, because
native code holds the interpreter's lock.
"""

import json
import os
import re
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import CodeType

from ddp_lab.ranks.stacks import PACKAGE, Line, stack_text, user_line

__all__ = [
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
    in_collective: bool
    """Whether the rank waits inside torch.distributed."""
    peak_bytes: int = 0
    """The most memory that the process has had so far; 0 if unknown."""


def look() -> Sight:
    """Take a `Sight` of this process's main thread, from another thread."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    frames: list[tuple[CodeType, int, int]] = []
    while frame is not None:
        frames.append((frame.f_code, frame.f_lineno or 0, frame.f_lasti))
        frame = frame.f_back
    frames.reverse()
    lines = [(code.co_filename, line, code.co_name) for code, line, _ in frames]
    collective, open_ = last_collective()
    inside = [name for file, _, name in lines if _DISTRIBUTED in file][:1]
    if inside and inside[0] in _NO_WAIT:
        inside.clear()
    if inside and not open_:  # the recorder leaves some out, such as recv
        collective = inside[0]
    return Sight(
        where=user_line(lines),
        stack=stack_text(lines),
        mark=tuple((code.co_filename, lasti) for code, _, lasti in frames),
        cpu_s=time.process_time() - time.thread_time(),
        collective=collective,
        in_collective=open_ or bool(inside) or _arriving(lines),
        peak_bytes=_peak_bytes(),
    )


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


def last_collective() -> tuple[str, bool]:
    """The last collective this rank entered, and whether it is still under way."""
    try:  # torch may be half imported, and the recorder's reader is a private name
        initialized = sys.modules["torch.distributed"].is_initialized()
        recorder = sys.modules["torch._C._distributed_c10d"]
        entries = json.loads(recorder._dump_fr_trace_json())["entries"]
    except Exception:
        return "-", False
    if not entries or entries[-1].get("time_created_ns", _since_ns) < _since_ns:
        return "-", False
    last = entries[-1]
    name = str(last.get("profiling_name", "?")).rpartition(":")[2].split(" ")[0]
    number = last.get("p2p_seq_id" if last.get("is_p2p") else "collective_seq_id")
    return f"{name} #{number}", initialized and not last.get("retired", True)


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
                in_collective=any(_DISTRIBUTED in file for file, _, _ in lines),
            )
    return None


class Watch:
    """Compare the ranks' sights and tell when nobody moves any more."""

    def __init__(self, num_ranks: int, stuck_after_s: float) -> None:
        self.stuck_after_s = stuck_after_s
        self._base: list[Sight | None] = [None] * num_ranks  # sight of the last move
        self._base_at = [0.0] * num_ranks
        self._still_s = [0.0] * num_ranks  # seen without a move for so long
        self.last: list[Sight | None] = [None] * num_ranks
        self._seen_at = [0.0] * num_ranks
        self.busy = [False] * num_ranks  # used the CPU between the last two sights

    def moved(self, rank: int) -> None:
        """Note that ``rank`` showed a sign of life, such as output."""
        self._base[rank] = None
        self._still_s[rank] = 0.0

    def saw(self, rank: int, sight: Sight) -> None:
        """Note what ``rank`` is doing now.

        Only what is seen counts: a rank that has not answered is not still, and a gap
        between two sights, because all processes were paused, is not taken for rest.
        """
        now = time.monotonic()
        base, last = self._base[rank], self.last[rank]
        gap_s = now - self._seen_at[rank]
        if last is not None and gap_s > 0:
            self.busy[rank] = (sight.cpu_s - last.cpu_s) / gap_s > _BUSY_CPU_SHARE
        self.last[rank], self._seen_at[rank] = sight, now
        idle_cpu_s = 0.05 + _IDLE_CPU_SHARE * (now - self._base_at[rank])
        if (
            base is None
            or base.mark != sight.mark
            or base.collective != sight.collective
            or sight.cpu_s - base.cpu_s > idle_cpu_s
        ):
            self._base[rank], self._base_at[rank] = sight, now
            self._still_s[rank] = 0.0
        else:
            self._still_s[rank] += min(gap_s, self.stuck_after_s / 4)

    def still(self, rank: int) -> bool:
        """Whether ``rank`` was seen not to move for ``stuck_after_s``."""
        return self._still_s[rank] >= self.stuck_after_s

    def stuck(self, running: Iterable[int], some_ended: bool) -> bool:
        """Whether the ranks that still run can only wait for ever."""
        ranks = list(running)
        waits = any((s := self.last[r]) is not None and s.in_collective for r in ranks)
        return bool(ranks) and all(map(self.still, ranks)) and (waits or some_ended)


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
