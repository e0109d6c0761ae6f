"""The parent's end of one rank: its process and the channels to it.

Methods never wait longer than they are told to, and never raise because the rank is
gone: that is noticed, and explained, when its report is read.
"""

import contextlib
import multiprocessing
import os
import pickle
import signal
import time
from dataclasses import replace
from multiprocessing import reduction
from multiprocessing.connection import wait
from typing import Any

from ddp_lab.errors import Failure
from ddp_lab.ranks._calls import Call, Outcome
from ddp_lab.ranks._main import Ends, kill_group
from ddp_lab.ranks._pickling import Packed, unpack
from ddp_lab.ranks._report import died
from ddp_lab.ranks._watch import Sight, Watch, sight_from_dump
from ddp_lab.ranks.stacks import traceback_text

__all__ = ["ANSWER_S", "RankProcess"]

ANSWER_S = 0.5
"""A rank that takes longer to answer sits in native code with the interpreter lock."""

_TAIL_BYTES = 4096  # of stderr, where native code says why it gives up


class RankProcess:
    """One rank, as its parent holds it."""

    process: Any  # of torch.multiprocessing.spawn, once it has been started

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.outcome: Outcome | None = None  # None: it still runs
        self.value: Any = None
        self.began = False
        self.asked_s: float | None = None  # when a question without answer was sent
        self.tail = b""
        self.peak_bytes = 0
        self._state: Any = None  # of the process, as psutil sees it
        self._group_ended = False
        self.open = [True, True]
        self.calls, calls = multiprocessing.Pipe()
        self.control, control = multiprocessing.Pipe()
        pipes = [multiprocessing.Pipe(duplex=False) for _ in range(3)]
        *self.streams, self.crash = (reader for reader, _ in pipes)
        self.ends = Ends(calls, control, *(writer for _, writer in pipes))
        for reader in (*self.streams, self.crash):
            os.set_blocking(reader.fileno(), False)

    def has_started(self, process: Any) -> None:
        """Take the process and drop its ends: ours would hide that it is gone."""
        import psutil

        self.process = process
        with contextlib.suppress(psutil.NoSuchProcess):
            self._state = psutil.Process(process.pid)
        for end in self.ends:
            end.close()

    def has_ended(self) -> bool:
        """Whether the process is gone, whoever still holds its ends of the channels.

        A process that it forked does: a pool's, a loader's. The exit code is not asked
        for, as that would reap the process: if its group is empty, the number could
        soon be another's.
        """
        import psutil

        try:
            return self._state is None or self._state.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    @property
    def exit_code(self) -> int | None:
        """None while it lives, minus the signal's number if it was killed."""
        if not self.has_ended():
            return None
        self._end_group()
        code: int | None = self.process.exitcode
        return code

    def send(self, call: Call, packed: Packed) -> None:
        """Send a call, and forget what came of the one before."""
        self.outcome, self.value, self.began = None, None, False
        with contextlib.suppress(OSError):
            self.calls.send_bytes(pickle.dumps(call))
            self.calls.send_bytes(packed.blob)
            for storage in packed.storages:
                handle, size = storage._share_fd_cpu_()
                self.calls.send_bytes(pickle.dumps(size))
                reduction.send_handle(self.calls, handle, self.process.pid)

    def leave_out(self) -> None:
        """Take no part in a call."""
        group_open = self.outcome is not None and self.outcome.group_open
        self.outcome = Outcome(group_open=group_open, left_out=True)

    def read(self, stream: int) -> bytes:
        """What the rank has written since; empty when that is all for now."""
        try:
            data = os.read(self.streams[stream].fileno(), 2**20)
        except BlockingIOError:
            return b""
        if not data:
            self.open[stream] = False  # the rank has closed it
        elif stream == 1:
            self.tail = (self.tail + data)[-_TAIL_BYTES:]
        return data

    def ask(self) -> None:
        """Ask what the rank is doing; `answer` takes the reply when it is there."""
        if self.asked_s is None:
            with contextlib.suppress(OSError):
                self.control.send_bytes(b"look")
                self.asked_s = time.monotonic()

    def answer(self, watch: Watch) -> None:
        """Take the answer."""
        with contextlib.suppress(EOFError, OSError):
            sight: Sight = pickle.loads(self.control.recv_bytes())
            watch.saw(self.rank, sight)
            self.peak_bytes = sight.peak_bytes
            self.asked_s = None

    def last_words(self, patience_s: float) -> Sight | None:
        """What faulthandler writes about the rank: where it crashed, or where it is."""
        text = b""
        until = time.monotonic() + patience_s
        while (left_s := until - time.monotonic()) > 0 and wait([self.crash], left_s):
            data = os.read(self.crash.fileno(), 2**16)
            text += data
            if (sight := sight_from_dump(text.decode("ascii", "replace"))) or not data:
                return sight
        return None

    def take_value(self, data: bytes, outcome: Outcome) -> None:
        """Take what the function returned; it may be of no use on this side."""
        try:
            self.value = unpack(data)
        except Exception as error:
            failure = Failure(
                rank=self.rank,
                kind=type(error).__name__,
                message=f"it returned what cannot be rebuilt here ({error}): return "
                "tensors, numbers, texts, and lists and dicts of these",
                traceback=traceback_text(error),
            )
            outcome = replace(outcome, failure=failure, at_s=time.monotonic())
        self.outcome = outcome

    @property
    def silent_s(self) -> float:
        """For how long a question has waited for its answer."""
        return 0.0 if self.asked_s is None else time.monotonic() - self.asked_s

    def say_enough(self) -> None:
        """Let the rank leave when its call is done."""
        with contextlib.suppress(OSError):
            self.calls.send_bytes(pickle.dumps(None))

    def signal(self, number: int) -> None:
        """Send a signal to the rank alone, not to what it has started."""
        if not self.has_ended():
            with contextlib.suppress(OSError):
                os.kill(self.process.pid, number)

    def kill(self) -> None:
        """End the rank and what it has started, without waiting for it."""
        self._end_group()
        self.signal(signal.SIGKILL)  # it may have no group yet

    def _end_group(self) -> None:
        """Kill the rank's process group, once.

        The system gives a number away again only when no process of its group is left:
        if another process has the rank's by now, there is nothing to kill.
        """
        import psutil

        pid = self.process.pid
        if self._group_ended:
            return
        self._group_ended = True
        ours = self._state is not None and self._state.is_running()
        if ours or not psutil.pid_exists(pid):
            kill_group(pid)

    def died(self) -> None:
        """Find out how the rank ended without a word."""
        until = time.monotonic() + 2.0  # it has closed its channels, or is gone
        while not self.has_ended() and time.monotonic() < until:
            time.sleep(0.01)
        self.kill()
        self.process.join(2.0)
        self.read(1)
        self.outcome = died(
            self.rank,
            self.exit_code,
            self.last_words(ANSWER_S),
            self.tail.decode("utf-8", "replace"),
            self.peak_bytes,
        )

    def close(self) -> None:
        """Close the channels; a rank that still lives ends when they are closed."""
        for end in (self.calls, self.control, *self.streams, self.crash, *self.ends):
            end.close()
