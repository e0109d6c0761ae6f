"""What runs in a rank: wait for a call, run it, report.

A rank is a process that the parent has started (`ddp_lab.ranks`). Its main thread
receives calls and sends back what came out. A second thread answers the parent's
question "what are you doing?" and ends the process as soon as the parent is gone,
however it went. Both talk through socket pairs that the rank was born with: nothing
listens.

Nothing here imports torch before the environment variables of the call are set, because
OpenMP reads its thread count once, when torch is loaded.
"""

import atexit
import contextlib
import ctypes
import faulthandler
import linecache
import multiprocessing
import os
import pickle
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any, TextIO

from ddp_lab import payload
from ddp_lab.stuck import (
    PLUMBING,
    forget_collectives,
    last_collective,
    look,
    short_name,
    user_line,
)

__all__ = [
    "STACK_SIGNAL",
    "Call",
    "Failed",
    "Returned",
    "kill_group",
    "rank_main",
    "send_record",
    "traceback_text",
]

STACK_SIGNAL = getattr(signal, "SIGUSR2", signal.SIGTERM)
"""Makes a rank write its stack into the crash pipe, even inside native code."""

_CONNECTION_LOST = re.compile(
    "closed by peer|reset by peer|connection refused|broken pipe|failed to recv"
    "|remote process exited|timed out waiting|socket timeout|wait timeout",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Call:
    """What the parent asks of a rank; the packed function follows as bytes."""

    env: dict[str, str]
    num_threads: int
    init: bool
    device: str
    sources: dict[str, list[str]]
    num_shared: int  # handles of shared storages that follow


@dataclass(frozen=True)
class Returned:
    """The function returned; the packed value follows as bytes."""

    collective: str
    group_open: bool  # the process group outlives the call, and needs its store
    left_out: bool = False  # the call was not for this rank


@dataclass(frozen=True)
class Failed:
    """The function raised."""

    kind: str
    message: str
    text: str  # the traceback, without our own frames
    where: str  # the user's line
    at_s: float  # monotonic clock, the same for all processes of the machine
    consequence: bool  # the connection broke: somebody else failed first
    exit_code: int | None  # of sys.exit
    exception: bytes | None  # the exception itself, when it can travel
    collective: str
    group_open: bool


_calls: Connection | None = None
_crash: Connection | None = None  # kept open for faulthandler
_in_call = False  # the user's code is running
_sending = threading.Lock()


def send_record(**fields: Any) -> None:
    """Hand a few numbers to the notebook while the rank runs, for a live picture.

    `launch(..., on_record=show)` calls ``show(rank, fields)`` in the notebook. Outside
    of `launch` it does nothing, so the same function also runs under torchrun.

    Args:
        fields: numbers, strings, one-element tensors.
    """
    if _calls is not None:
        plain = {k: v.item() if hasattr(v, "item") else v for k, v in fields.items()}
        with _sending:
            _calls.send_bytes(pickle.dumps(("record", plain)))


def rank_main(
    calls: Connection,
    control: Connection,
    out: Connection,
    err: Connection,
    crash: Connection,
) -> None:
    """Run calls until the parent says that it is enough, or is gone."""
    global _calls, _crash
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
    _calls = calls
    exit_code = 0
    with contextlib.suppress(EOFError, ConnectionError):
        while (call := pickle.loads(calls.recv_bytes())) is not None:
            exit_code = 0 if _run(calls, call) else 1
    _leave(exit_code)


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
            control.send_bytes(pickle.dumps(look()))
    except (EOFError, OSError):
        kill_group(os.getpid())
        os._exit(1)


def kill_group(pid: int) -> None:
    """Kill a rank and the processes it has started: DataLoader workers."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _run(calls: Connection, call: Call) -> bool:
    """Run one call and report; say whether it returned."""
    global _in_call
    os.environ.update(call.env)
    forget_collectives()
    blob = calls.recv_bytes()
    try:
        storages = [_open_shared(calls) for _ in range(call.num_shared)]
        fn, args, kwargs = payload.unpack_call(blob, call.sources, storages)
        del blob
        if sys.platform == "linux":
            # DataLoader workers by fork, as torchrun's ranks have them: a spawned one
            # could not find what a cell defines
            multiprocessing.set_start_method("fork", force=True)
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(call.num_threads)
        with _sending:
            calls.send_bytes(pickle.dumps(("began", None)))
        _in_call = True
        value = _call(fn, args, kwargs, call)
        _in_call = False
        try:
            result = payload.pack(value)
        except Exception as error:
            raise payload.explain("the return value", value, error) from None
    except BaseException as error:
        _in_call = False
        if isinstance(error, SystemExit) and error.code in (None, 0):
            result = payload.pack(None)  # a script's way to say that all went well
        else:
            _flush()
            with _sending:
                calls.send_bytes(pickle.dumps(("failed", _describe(error))))
            return False
    _flush()
    with _sending:
        returned = Returned(last_collective()[0], _group_open())
        calls.send_bytes(pickle.dumps(("returned", returned)))
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
        return fn(*args, **kwargs)


def _describe(error: BaseException) -> Failed:
    at_s = time.monotonic()
    frames = traceback.extract_tb(error.__traceback__)
    lines = [(f.filename, f.lineno or 0, f.name) for f in frames]
    message = str(error)
    try:
        exception = payload.pack(error)
        payload.unpack(exception)
    except Exception:
        exception = None
    code = error.code if isinstance(error, SystemExit) else None
    return Failed(
        kind=type(error).__name__,
        message=message,
        text=traceback_text(error),
        where=user_line(lines),
        at_s=at_s,
        consequence=_lost_the_others(error),
        exit_code=code if isinstance(code, int) else 1 if code else None,
        exception=exception,
        collective=last_collective()[0],
        group_open=_group_open(),
    )


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


def traceback_text(error: BaseException) -> str:
    """Format an exception as Python does, with cells named and our frames left out."""
    inside = error.__traceback__
    while inside is not None and inside.tb_frame.f_code.co_filename in PLUMBING:
        inside = inside.tb_next
    linecache.checkcache()
    text = "".join(traceback.format_exception(type(error), error, inside))
    return re.sub(r'File "([^"]+)"', _file_text, text)


def _file_text(match: re.Match[str]) -> str:
    name = match[1]
    return name if name.startswith("Cell In[") else f'File "{short_name(name)}"'


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    with contextlib.suppress(Exception):
        ctypes.CDLL(None).fflush(None)  # what C code has printed


def _leave(exit_code: int) -> None:
    """End the process without the second that tearing torch down would cost."""
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    _flush()
    os._exit(exit_code)
