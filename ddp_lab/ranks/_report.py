"""From what became of each rank to the one error that explains it.

A failure spreads: when a rank dies, the collectives of all others break too. So the
question is who was first. Errors that only say "the connection is gone" are
consequences and never the cause, unless nothing else happened: then some rank left
while others still needed it, and the table of stuck ranks says so.
"""

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ddp_lab.errors import Failure, RankFailed, RanksStuck, signal_name
from ddp_lab.ranks._calls import Outcome
from ddp_lab.ranks._pickling import unpack
from ddp_lab.ranks._watch import POINT_TO_POINT, Row, Sight, Watch, stuck_table

__all__ = ["died", "failure_error", "ranks_text", "rows_of", "stuck_error"]

Outcomes = Sequence[Outcome | None]  # by rank; None: it still runs

_LIKELY_CAUSE = {
    "SIGKILL": "killed from outside, most likely because memory ran out: each rank "
    "holds its own copy of what it is given",
    "SIGSEGV": "it crashed in native code",
    "SIGBUS": "most likely /dev/shm is full: give the machine or container more shared "
    "memory, or use DataLoader(num_workers=0)",
    "SIGABRT": "native code gave up; its reason is in the output above",
    "SIGTERM": "ended from outside",
}
_GAVE_UP = "Watchdog caught collective operation timeout"  # (read, not run)
_SIZES_DIFFER = "Received data size doesn't match expected size"


def died(
    rank: int,
    exit_code: int | None,
    sight: Sight | None,
    last_output: str,
    peak_bytes: int = 0,
) -> Outcome:
    """Describe a rank that ended without a word.

    Args:
        rank: which.
        exit_code: of the process, minus the signal's number if it was killed.
        sight: where it crashed, if it could still say so.
        last_output: the end of its stderr.
        peak_bytes: the most memory it had when it was last asked, 0 if it never was.
    """
    text = f"Stack (innermost call last):\n{sight.stack}" if sight else ""
    if exit_code is not None and exit_code < 0:
        kind = signal_name(-exit_code)
        message = _LIKELY_CAUSE.get(kind, "the process was killed")
        if gave_up := _GAVE_UP in last_output:
            message = "nccl gave up waiting for the other ranks, and ended the process"
        if _SIZES_DIFFER in last_output:
            message = "two ranks gave tensors of different sizes to one collective"
        if kind == "SIGKILL" and peak_bytes:
            text = f"It had {peak_bytes / 2**30:.1f} GiB when last asked{_of_all()}\n"
    else:
        gave_up = False
        kind = "exit"
        message = f"the process ended with exit code {exit_code}, fn did not return"
    failure = Failure(
        rank=rank,
        kind=kind,
        message=message,
        traceback=text,
        where=sight.where if sight else "",
        consequence=gave_up,
        exit_code=exit_code,
    )
    return Outcome(failure=failure, at_s=time.monotonic())


def _of_all() -> str:
    """How much memory there is for all ranks together, where the system tells."""
    sizes = []
    with contextlib.suppress(ValueError, OSError, AttributeError):
        sizes.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    with contextlib.suppress(ValueError, OSError):  # a container's limit, or "max"
        sizes.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return f"; all ranks share {min(sizes) / 2**30:.1f} GiB" if sizes else ""


def rows_of(outcomes: Outcomes, watch: Watch) -> list[Row]:
    """One line a rank: what it was doing when the call ended."""
    return [_row(rank, outcome, watch) for rank, outcome in enumerate(outcomes)]


def _row(rank: int, outcome: Outcome | None, watch: Watch) -> Row:
    sight = watch.last[rank]
    seen = sight.collective if sight is not None and "#" in sight.collective else "-"
    if outcome is not None and outcome.left_out:
        return Row(rank, "left out", "-", "not part of this call")
    if outcome is not None:
        last = outcome.collective if outcome.collective != "-" else seen
        failure = outcome.failure
        if failure is None:
            return Row(rank, "finished", last, "returned")
        if failure.consequence:
            return Row(rank, "waiting", last, failure.where)
        text = failure.headline.splitlines()[0]
        return Row(rank, "failed", last, f"{failure.where} ({text})".strip())
    if sight is None:
        return Row(rank, "running", "-", "gave no answer")
    state = "idle"
    if sight.waits:
        state = "waiting"
    elif watch.busy[rank]:
        state = "running"
    return Row(rank, state, sight.collective, sight.where)


def stuck_error(why: str, outcomes: Outcomes, watch: Watch) -> RanksStuck:
    """The error for ranks that could only wait, or whose time was over."""
    rows = rows_of(outcomes, watch)
    stacks = []
    for row, outcome in zip(rows, outcomes, strict=True):
        sight = watch.last[row.rank]
        if outcome is not None and outcome.failure is not None:
            stacks.append(f"Rank {row.rank}:\n{outcome.failure.traceback}")
        elif outcome is None and sight is not None:
            stacks.append(f"Rank {row.rank}, innermost call last:\n{sight.stack}")
    ended = ("finished", "failed", "left out")
    open_ = [row.rank for row in rows if row.state not in ended]
    lines = [f"{ranks_text(open_)} of {len(rows)} {why}", stuck_table(rows)]
    hint = _hint(rows)
    return RanksStuck(
        "\n".join(lines + ([hint] if hint else [])),
        rows=rows,
        stacks="\n".join(stacks).rstrip(),
    )


def ranks_text(numbers: Sequence[int]) -> str:
    """ "ranks 0, 1" or "rank 1"."""
    plural = "s" if len(numbers) != 1 else ""
    return f"rank{plural} {', '.join(map(str, numbers))}"


def _hint(rows: Sequence[Row]) -> str:
    """What the rows together say about the cause."""
    waiting = [row for row in rows if row.state == "waiting"]
    left = [row.rank for row in rows if row.state == "finished"]
    away = [row.rank for row in rows if row.state in ("idle", "running")]
    left_out = [row.rank for row in rows if row.state == "left out"]
    if waiting and left_out:
        return (
            f"{ranks_text(left_out)} did not run this: every rank must call every "
            "collective, equally often"
        )
    if any(row.collective.split(" ")[0] in POINT_TO_POINT for row in waiting):
        return (
            "a message needs both ends: one recv for each send, and wait() on the "
            "handle that isend and irecv return; keep it until then"
        )
    if waiting and left:
        return (
            f"{ranks_text(left)} returned without it: every rank must call every "
            "collective, equally often"
        )
    if waiting and away:
        return f"the others wait for {ranks_text(away)} to call it too"
    if waiting and all(row.collective == "init_process_group" for row in waiting):
        return (
            "they wait to meet: leave RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as "
            'they are set for you, as init_process_group("gloo") does'
        )
    if len({row.collective for row in waiting}) > 1:
        return (
            "they wait in different collectives: all ranks must call the same, in order"
        )
    return ""


def failure_error(outcomes: Outcomes, watch: Watch) -> RankFailed | RanksStuck:
    """The error for a call in which at least one rank failed."""
    failed = [o for o in outcomes if o is not None and o.failure is not None]
    failures = [_with_exception(o) for o in _root_first(failed)]
    root = failures[0].rank
    if failures[0].consequence:
        left = any(o is not None and o.failure is None for o in outcomes)
        why = "a rank that is needed has left" if left else "gave up waiting"
        return stuck_error(f"cannot go on: {why}", outcomes, watch)
    others = [
        f"rank {row.rank}: {row.state}, {row.where}"
        for row in rows_of(outcomes, watch)
        if row.rank != root and row.state != "left out"
    ]
    error = RankFailed(
        f"rank {root} of {len(outcomes)} failed: {failures[0].headline}",
        failures=failures,
        others=others,
    )
    # what concurrent.futures does: the remote traceback shows above the parent's own
    cause = failures[0].exception
    if cause is not None:
        cause.__cause__ = _RemoteTraceback(error.report)
    error.__cause__ = cause or _RemoteTraceback(error.report)
    return error


class _RemoteTraceback(Exception):
    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def _root_first(failed: Sequence[Outcome]) -> list[Outcome]:
    """Outcomes of ranks that failed, in rank order but for the first cause."""

    def when(outcome: Outcome) -> tuple[bool, float]:
        return _failure(outcome).consequence, outcome.at_s

    def alike(outcome: Outcome) -> tuple[bool, str, str]:
        failure = _failure(outcome)
        return failure.consequence, failure.kind, failure.where

    first = alike(min(failed, key=when))
    # the same mistake on several ranks: whoever was faster, the lowest rank speaks
    root = next(outcome for outcome in failed if alike(outcome) == first)
    return [root, *(outcome for outcome in failed if outcome is not root)]


def _failure(outcome: Outcome) -> Failure:
    assert outcome.failure is not None
    return outcome.failure


def _with_exception(outcome: Outcome) -> Failure:
    """The failure, with the exception itself if it has travelled."""
    if outcome.exception is not None:
        with contextlib.suppress(Exception):
            return replace(_failure(outcome), exception=unpack(outcome.exception))
    return _failure(outcome)
