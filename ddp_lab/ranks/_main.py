"""What runs in a rank: wait for a call, run it, report.

A rank is a process that the parent has started (``_rank_set.py``). Its main thread
receives calls and sends back what came out. A second thread answers the parent's
question "what are you doing?" and ends the process as soon as the parent is gone,
however it went. Both talk through socket pairs that the rank was born with: nothing
listens.

Its process was started by `torch.multiprocessing.spawn`, which imports torch before
anything here runs: what must be set before that, ``_rank_set.py`` lets it inherit.
"""

import atexit
import contextlib
import ctypes
import faulthandler
import multiprocessing
import os
import pickle
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, NoReturn, TextIO

from ddp_lab.errors import Failure
from ddp_lab.ranks import _pickling as pickling
from ddp_lab.ranks._calls import Call, Outcome
from ddp_lab.ranks._watch import (
    forget_collectives,
    last_collective,
    look,
)
from ddp_lab.ranks.stacks import traceback_text, user_line

__all__ = [
    "MARK",
    "STACK_SIGNAL",
    "Ends",
    "kill_group",
    "kill_marked",
    "leave_process",
    "rank_main",
    "send_record",
]

STACK_SIGNAL = getattr(signal, "SIGUSR2", signal.SIGTERM)
"""Makes a rank write its stack into the crash pipe, even inside native code."""

MARK = "DDP_LAB_SET_OF_RANKS"
"""A variable that all processes inherit which a set of ranks starts."""

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>

_CONNECTION_LOST = re.compile(
    "closed by peer|reset by peer|connection refused|broken pipe|failed to recv"
    "|remote process exited|timed out waiting|socket timeout|wait timeout",
    re.IGNORECASE,
)


class Ends(NamedTuple):
    """One rank's ends of its channels."""

    calls: Connection
    control: Connection
    out: Connection
    err: Connection
    crash: Connection


_rank = 0
_calls: Connection | None = None
_crash: Connection | None = None  # kept open for faulthandler
_in_call = False  # the user's code is running
_told = False  # how it failed, before it has left the process group
_sending = threading.Lock()


def send_record(**fields: Any) -> None:
    """Hand a few numbers to the notebook while the rank runs, for a live picture.

    `launch(..., on_record=show)` calls ``show(rank, fields)`` in the notebook. Outside
    of `launch` it does nothing, so the same function also runs under torchrun.

    Args:
        fields: numbers, strings, one-element tensors, and lists or dictionaries of
            numbers and strings.
    """
    if _calls is not None:
        plain = {k: v.item() if hasattr(v, "item") else v for k, v in fields.items()}
        with _sending:
            _calls.send_bytes(pickle.dumps(("record", plain)))


def rank_main(rank: int, ends_of_ranks: Sequence[Ends]) -> None:
    """Run calls until the parent says that it is enough, or is gone.

    `torch.multiprocessing.spawn` calls it in each new process.

    Args:
        rank: this process's number.
        ends_of_ranks: everybody's, as spawn gives all ranks the same arguments.
    """
    global _calls, _crash, _rank
    _rank = rank
    for other, ends in enumerate(ends_of_ranks):
        for end in ends if other != rank else ():
            end.close()  # or nobody would see when that rank has gone
    calls, control, out, err, crash = ends_of_ranks[rank]
    _outlive_the_starting_thread()
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)  # the terminal's Ctrl-C is for the parent, which stops us
    signal.signal(signal.SIGINT, _interrupt)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    for source, target in ((out, 1), (err, 2)):
        os.dup2(source.fileno(), target)
        source.close()
    # a new wrapper: the old one may remember that fd 1 was a file
    sys.stdout = _line_buffered(1)
    sys.stderr = _line_buffered(2)
    _crash = crash
    faulthandler.enable(file=crash.fileno())
    if hasattr(faulthandler, "register"):
        faulthandler.register(STACK_SIGNAL, file=crash.fileno())
    parent = os.getppid()
    threading.Thread(
        target=_answer, args=(control, parent), daemon=True, name="ddp_lab control"
    ).start()
    pickler: Any = reduction.ForkingPickler
    pickler.reducer_override = pickling.main_by_value
    _calls = calls
    exit_code = 0
    with contextlib.suppress(EOFError, ConnectionError):
        while (call := pickle.loads(calls.recv_bytes())) is not None:
            exit_code = 0 if _run(calls, call) else 1
    leave_process(exit_code)


def _outlive_the_starting_thread() -> None:
    """Undo what spawn asks of Linux: SIGINT when the thread that started us ends.

    That thread may be one of many in a notebook; `_answer` watches the whole parent.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0)


def _interrupt(number: int, frame: Any) -> None:
    """Raise KeyboardInterrupt in the user's code, never in ours."""
    if _in_call:
        raise KeyboardInterrupt


def _line_buffered(descriptor: int) -> TextIO:
    return open(
        descriptor, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False
    )


def _answer(control: Connection, parent: int) -> None:
    """Tell the parent what this rank is doing; leave when the parent has gone."""
    try:
        while True:
            while not control.poll(1.0):
                if os.getppid() != parent:
                    raise EOFError
            control.recv_bytes()
            sight = look(_failure_of if _in_call else None)
            control.send_bytes(pickle.dumps(sight))
    except (EOFError, OSError):
        kill_marked(os.environ.get(MARK, ""))
        kill_group(os.getpid())
        os._exit(1)


def kill_marked(mark: str) -> None:
    """Kill the ranks of a set and what they have started, in whatever process group.

    They are known by a variable that they have inherited.
    """
    import psutil

    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and process.environ().get(MARK) == mark != "":
                process.kill()


def kill_group(pid: int) -> None:
    """Kill a rank and the processes it has started: DataLoader workers."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _run(calls: Connection, call: Call) -> bool:
    """Run one call and report; say whether it returned."""
    global _in_call, _told
    _told = False
    os.environ.update(call.env)
    forget_collectives()
    blob = calls.recv_bytes()
    try:
        import torch

        storages = [_open_shared(calls) for _ in range(call.num_shared)]
        fn, args, kwargs = pickling.unpack_call(blob, call.sources, storages)
        del blob
        if call.fork_loaders and sys.platform == "linux":
            # DataLoader workers by fork, as torchrun's ranks have them: a spawned one
            # could not find what a cell defines
            multiprocessing.set_start_method("fork", force=True)
        torch.set_num_threads(call.num_threads)
        with _sending:
            calls.send_bytes(pickle.dumps(("began", None)))
        _in_call = True
        value = _call(fn, args, kwargs, call)
        _in_call = False
        try:
            result = pickling.pack(value)
        except Exception as error:
            raise pickling.explain("the return value", value, error) from None
    except BaseException as error:
        _in_call = False
        if isinstance(error, SystemExit) and error.code in (None, 0):
            result = pickling.pack(None)  # a script's way to say that all went well
        else:
            _tell(error)
            return False
    _flush()
    outcome = Outcome(collective=last_collective().name, group_open=_group_open())
    with _sending:
        calls.send_bytes(pickle.dumps(("returned", outcome)))
        calls.send_bytes(result)
    return True


def _open_shared(calls: Connection) -> Any:
    from torch import UntypedStorage

    size = pickle.loads(calls.recv_bytes())
    handle = reduction.recv_handle(calls)
    try:
        return UntypedStorage._new_shared_fd_cpu(handle, size)  # type: ignore[attr-defined]
    finally:
        os.close(handle)


def _call(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], call: Call
) -> Any:
    if not call.init:
        return fn(*args, **kwargs)
    from ddp_lab.world import join_world

    with join_world(device=call.device):
        try:
            return fn(*args, **kwargs)
        except Exception as error:
            _tell(error)  # now: to leave the group, nccl may wait for the others
            raise


def _tell(error: BaseException) -> None:
    """Report how the call failed, once."""
    global _told
    if _told or _calls is None:
        return
    _told = True
    at_s = time.monotonic()
    try:
        exception = pickling.pack(error)
        pickling.unpack(exception)
    except Exception:
        exception = None
    outcome = Outcome(
        failure=_failure_of(error),
        exception=exception,
        at_s=at_s,
        collective=last_collective().name,
        group_open=_group_open(),
    )
    _flush()
    with _sending:
        _calls.send_bytes(pickle.dumps(("failed", outcome)))


def _failure_of(error: BaseException) -> Failure:
    frames = traceback.extract_tb(error.__traceback__)
    lines = [(f.filename, f.lineno or 0, f.name) for f in frames]
    code = error.code if isinstance(error, SystemExit) else None
    return Failure(
        rank=_rank,
        kind=type(error).__name__,
        message=str(error) + _hint(error),
        traceback=traceback_text(error),
        where=user_line(lines),
        consequence=_lost_the_others(error),
        exit_code=code if isinstance(code, int) else 1 if code else None,
    )


def _hint(error: BaseException) -> str:
    if "initialize the default process group twice" in str(error):
        return (
            " This rank has joined one already: %ranks and init=True do that, and a "
            "group that an earlier cell opened stays; leave init_process_group out"
        )
    return ""


def _lost_the_others(error: BaseException) -> bool:
    """Whether a collective broke because another rank has gone or does not come.

    Only torch's own words count: a download that is refused is this rank's own failure.
    """
    words = f"{type(error).__name__}: {error}"
    return (
        isinstance(error, RuntimeError)
        and re.search(r"gloo/|NCCL|TCPStore|Dist\w+Error", words) is not None
        and _CONNECTION_LOST.search(words) is not None
    )


def _group_open() -> bool:
    dist = sys.modules.get("torch.distributed")
    return dist is not None and dist.is_available() and dist.is_initialized()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    with contextlib.suppress(Exception):
        ctypes.CDLL(None).fflush(None)  # what C code has printed


def leave_process(exit_status: int) -> NoReturn:
    """End this process as a rank must: threads are waited for, exit hooks run.

    Python would then take itself apart, for a second. Meanwhile the C++ threads of gloo
    go on, as a DDP model keeps its group alive even after `destroy_process_group`; if
    one of them lets go of a tensor just then it aborts the process, and a finished run
    ends with status 134 (the abort is described in
    https://github.com/pytorch/pytorch/pull/179291, which was not merged).
    """
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    _flush()
    os._exit(exit_status)
