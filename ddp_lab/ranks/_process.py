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
from multiprocessing import reduction
from multiprocessing.connection import wait
from typing import Any

from ddp_lab.ranks._calls import Call, Outcome
from ddp_lab.ranks._main import Ends, kill_group
from ddp_lab.ranks._pickling import Packed
from ddp_lab.ranks._report import died
from ddp_lab.ranks._watch import Sight, Watch, sight_from_dump

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
        self.process = process
        for end in self.ends:
            end.close()

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

    def say_enough(self) -> None:
        """Let the rank leave when its call is done."""
        with contextlib.suppress(OSError):
            self.calls.send_bytes(pickle.dumps(None))

    def signal(self, number: int) -> None:
        """Send a signal to the rank alone, not to what it has started."""
        if self.process.exitcode is None:
            with contextlib.suppress(OSError):
                os.kill(self.process.pid, number)

    def kill(self) -> None:
        """End the rank and what it has started, without waiting for it."""
        if self.process.exitcode is None:
            # a dead rank keeps its number and its group until it is waited for
            kill_group(self.process.pid)
            self.signal(signal.SIGKILL)  # it may have no group yet

    def died(self) -> None:
        """Find out how the rank ended without a word."""
        wait([self.process.sentinel], 2.0)
        self.kill()
        self.process.join(2.0)
        self.read(1)
        self.outcome = died(
            self.rank,
            self.process.exitcode,
            self.last_words(ANSWER_S),
            self.tail.decode("utf-8", "replace"),
            self.peak_bytes,
        )

    def close(self) -> None:
        """Close the channels; a rank that still lives ends when they are closed."""
        for end in (self.calls, self.control, *self.streams, self.crash, *self.ends):
            end.close()
