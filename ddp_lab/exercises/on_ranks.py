"""Try a function in worlds of 1, 2 and 3 ranks, and write down what was seen.

Three processes are enough for all three: the first one alone is a world of 1, the first
two are a world of 2. Each world meets, does its cases, and parts again:

    process 0   | world of 1 | world of 2 | world of 3 |
    process 1                | world of 2 | world of 3 |
    process 2                             | world of 3 |

A function that raises, or that waits for a message that never comes, ends its world;
the other ranks of that world then lose their connection, and go on to the next one.
"""

import contextlib
import datetime
import functools
import io
import linecache
import os
import re
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch.distributed as dist

from ddp_lab.exercises.exercise import Exercise, plain
from ddp_lab.ranks.stacks import PACKAGE
from ddp_lab.rendezvous.store import host_store

__all__ = ["WORLD_SIZES", "Seen", "try_here", "try_on_ranks"]

WORLD_SIZES = (1, 2, 3)
_MEET_S = 120.0

# Everything that sends, so that an exercise can allow a few of them only.
_SENDERS = """
all_gather all_gather_into_tensor all_gather_object all_reduce all_to_all
all_to_all_single broadcast broadcast_object_list gather gather_object reduce
reduce_scatter reduce_scatter_tensor scatter scatter_object_list batch_isend_irecv
irecv isend recv recv_object_list send send_object_list
"""


@dataclass
class Seen:
    """What one rank saw in one world: an entry a case, and how it ended."""

    values: list[Any] = field(default_factory=list)
    error: str = ""  # kind and message of what the function raised
    is_consequence: bool = False  # another rank broke the connection
    is_stuck: bool = False
    is_stub: bool = False
    is_forbidden: bool = False
    report: str = ""  # the traceback
    printed: str = ""


class _Forbidden(Exception):
    """The function calls what the exercise does not allow."""


def try_on_ranks(
    trials: Sequence[tuple[Exercise, Callable[..., Any]]], patience_s: float
) -> list[dict[int, Seen]]:
    """On each of 3 ranks: for each trial, what it saw in each world it belongs to.

    Args:
        trials: pairs of an exercise and a function.
        patience_s: seconds after which a rank that waits is told that nobody comes.

    **Collective**: every rank of a world of 3 calls it, with no process group open.
    """
    rank = int(os.environ["RANK"])
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        wait_for_workers=False,
        timeout=datetime.timedelta(seconds=_MEET_S),
    )
    all_seen = []
    for k, (exercise, fn) in enumerate(trials):
        seen = {}
        for world_size in WORLD_SIZES:
            if rank < world_size:
                meet = functools.partial(_meet, store, rank, world_size)
                meet(f"{k} begins")
                own_store = dist.PrefixStore(f"check {k} on {world_size}", store)
                with _world(exercise, rank, world_size, own_store, patience_s):
                    meet(f"{k} met")  # who fails at once must not be gone by then
                    all_did = functools.partial(
                        _all_did, own_store, rank, world_size, patience_s
                    )
                    saw = _try(exercise, fn, rank, world_size, all_did)
                    if saw.error:
                        own_store.set("broken", "")
                    if dist.is_initialized():
                        # who still waits for this rank learns now that it has gone
                        dist.destroy_process_group()
                    seen[world_size] = saw
                meet(f"{k} ends")
        all_seen.append(seen)
    return all_seen


def _meet(store: dist.Store, rank: int, world_size: int, what: str) -> None:
    """Wait until every rank of the world has come this far."""
    keys = [f"check {what} {r} of {world_size}" for r in range(world_size)]
    store.set(keys[rank], "")
    # init_process_group leaves its own limit on the store
    store.wait(keys, datetime.timedelta(seconds=_MEET_S))


@contextlib.contextmanager
def _world(
    exercise: Exercise,
    rank: int,
    world_size: int,
    store: dist.Store,
    patience_s: float,
) -> Iterator[None]:
    """Let this process be a rank of a smaller world."""
    changed = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
    }
    host = None
    if exercise.where == "ranks":  # the function may want to meet by itself
        if rank == 0:
            port, host = host_store()
            store.set("port", str(port))
        changed["MASTER_PORT"] = store.get("port").decode()
    else:
        # after this time, gloo gives up receiving what nobody sends
        limit = datetime.timedelta(seconds=patience_s)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=limit
        )
    with mock.patch.dict(os.environ, changed):
        yield
    del host


def _try(
    exercise: Exercise,
    fn: Callable[..., Any],
    rank: int,
    world_size: int,
    all_did: Callable[[int], bool] = lambda case: True,
) -> Seen:
    """Do all cases in one world; the first one that fails is the last."""
    seen, printed = Seen(), io.StringIO()
    try:
        with (
            contextlib.redirect_stdout(printed),
            _only(exercise.allowed),
            # a group that the function opens itself is closed later, together
            mock.patch.object(dist, "destroy_process_group"),
        ):
            for k, case in enumerate(exercise.cases):
                seen.values.append(plain(exercise.call(fn, case, rank, world_size)))
                if not all_did(k):
                    break
    except _Forbidden as error:
        seen.is_forbidden, seen.error = True, str(error)
    except NotImplementedError:
        seen.is_stub = True
    except Exception as error:
        _note(seen, error)
    seen.printed = printed.getvalue()
    return seen


def _all_did(
    store: dist.Store, rank: int, world_size: int, patience_s: float, case: int
) -> bool:
    """Wait until every rank has done this case; False if one of them never will.

    By the store and not by a barrier, which a forgotten recv might take for its own.
    """
    store.set(f"{rank} did {case}", "")
    keys = [f"{r} did {case}" for r in range(world_size)]
    until = time.monotonic() + patience_s
    while not store.check(keys):
        if store.check(["broken"]) or time.monotonic() > until:
            return False
        time.sleep(0.005)
    return True


@contextlib.contextmanager
def _only(allowed: tuple[str, ...]) -> Iterator[None]:
    """Make everything else that communicates raise."""
    names = _SENDERS.split() if allowed else []
    forbidden = [name for name in names if name not in allowed]
    before = {name: getattr(dist, name) for name in forbidden}
    for name in forbidden:
        setattr(dist, name, functools.partial(_forbid, name, allowed))
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(dist, name, function)


def _forbid(name: str, allowed: tuple[str, ...], *_: Any, **__: Any) -> None:
    raise _Forbidden(f"it calls {name}")


def _note(seen: Seen, error: Exception) -> None:
    """Write down what the function raised, with the learner's own lines."""
    words = f"{type(error).__name__}: {error}"
    about_network = isinstance(error, RuntimeError) and re.search(
        "gloo|closed by peer|reset by peer|Dist.*Error", words
    )
    seen.is_stuck = bool(about_network and re.search("(?i)timed? ?out", words))
    seen.is_consequence = bool(about_network) and not seen.is_stuck
    first = str(error).strip().split("\n")[0]
    first = re.sub(r"(?:/[\w.+-]+)+/(?=[\w.+-])", "", first)  # no folders
    seen.error = f"{type(error).__name__}: {first}".removesuffix(": ")
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(PACKAGE)
        and f"{os.sep}torch{os.sep}" not in frame.filename
    ]
    for frame in frames:
        name = frame.filename
        if "ipykernel" in name:  # run in the notebook's own process
            name = "the cell"
        elif not name.startswith("Cell In["):
            name = os.path.basename(name)
        line = linecache.getline(frame.filename, frame.lineno or 0).strip()
        seen.report += f"  {name}, line {frame.lineno}, in {frame.name}\n    {line}\n"


def try_here(exercise: Exercise, fn: Callable[..., Any]) -> list[dict[int, Seen]]:
    """Play each rank of each world in turn, in this process."""
    sizes = (1,) if exercise.where == "once" else WORLD_SIZES
    return [
        {w: _try(exercise, fn, rank, w) for w in sizes if rank < w}
        for rank in range(max(sizes))
    ]
