"""The ranks' output, put in order for one reader.

Each rank writes into two pipes (its stdout and stderr). Rank 0's text appears at once,
as it comes, so that a progress bar moves. The lines of the others wait, and follow in
rank order when the call ends, each with its ``[rank 1]`` mark. The text of a cell is
therefore the same every time, whichever rank was faster.

No line is lost and no rank waits for the screen. A notebook, though, stands a megabyte
of text in a cell and not a hundred: there the middle of a longer output is left out,
and a line says in which file the whole of it is.
"""

import atexit
import codecs
import contextlib
import itertools
import os
import shutil
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from typing import IO

__all__ = ["Output"]

_EVERY_S = 0.05  # show batches: jupyter drops messages above 1000 a second
_IN_MEMORY_BYTES = 2**20  # of waiting text a stream; the rest is in a temporary file
_NOTEBOOK_BYTES = 2**20  # shown of rank 0, and of all others together
_LAST_LINES = 20  # shown of what was left out


class Output:
    """Collect what the ranks write during one call, and show it in order."""

    def __init__(
        self, num_ranks: int, *, echo: bool = True, limit_bytes: int | None = None
    ) -> None:
        if limit_bytes is None and _in_notebook():
            limit_bytes = _NOTEBOOK_BYTES
        self._echo = echo
        self._limit = limit_bytes
        self._num_ranks = num_ranks
        decoder = codecs.getincrementaldecoder("utf-8")
        self._decoders = [decoder("replace") for _ in range(2)]
        self._pending: list[list[str]] = [[], []]  # rank 0's text, by stream
        self._shown = [0, 0]  # characters of rank 0's text
        self._last = ["\n", "\n"]  # rank 0's last character
        self._shown_at = 0.0
        self._folder: str | None = None  # for what was left out
        # all text of each rank, by stream; deleted when closed, readable by us only
        self._kept = [[_temporary() for _ in range(2)] for _ in range(num_ranks)]

    def feed(self, rank: int, stream: int, data: bytes) -> None:
        """Take what ``rank`` wrote to its stdout (stream 0) or stderr (stream 1)."""
        live = rank == 0 and self._echo
        if live:
            self._pending[stream].append(self._decoders[stream].decode(data))
        if not live or self._limit is not None:
            self._kept[rank][stream].write(data)

    def show(self) -> float | None:
        """Show rank 0's new text, if it is time; return the seconds until it is."""
        if not any(self._pending):
            return None
        wait_s = self._shown_at + _EVERY_S - time.monotonic()
        if wait_s > 0:
            return wait_s
        self._show_live()
        return None

    def _show_live(self) -> None:
        for stream in range(2):
            text = "".join(self._pending[stream])
            self._pending[stream].clear()
            if self._limit is not None:
                text = text[: max(0, self._limit - self._shown[stream])]
            if text:
                self._shown[stream] += len(text)
                self._last[stream] = text[-1]
                _write(stream, text)
        self._shown_at = time.monotonic()

    def finish(self, *, failed: bool = False) -> None:
        """Show the rest: the other ranks' lines, in rank order.

        After a failure even a call without echo shows its output.
        """
        if self._echo:
            self._show_live()
            self._end_live()
        first = 1 if self._echo else 0
        if self._echo or failed:
            for rank in range(first, self._num_ranks):
                for stream in range(2):
                    self._show_kept(rank, stream)
        for kept in self._kept:
            for file in kept:
                file.close()

    def _end_live(self) -> None:
        """Close rank 0's open line, and say what of it was left out."""
        others = any(file.tell() for kept in self._kept[1:] for file in kept)
        for stream in range(2):
            file = self._kept[0][stream]
            cut = self._limit is not None and self._shown[stream] >= self._limit
            if self._last[stream] != "\n" and (others or cut):
                _write(stream, "\n")
            if cut:
                file.seek(0)
                tail = [_plain(line) + "\n" for line in deque(file, _LAST_LINES)]
                _write(stream, self._note(0, stream) + "".join(tail))

    def _show_kept(self, rank: int, stream: int) -> None:
        file = self._kept[rank][stream]
        limit = self._limit and self._limit // max(1, self._num_ranks - 1)
        size = file.tell()
        file.seek(0)
        if limit is None or size <= limit:
            for text in _batches(rank, file):
                _write(stream, text)
            return
        head: list[str] = []
        shown = 0
        for line in file:
            shown += len(line)
            if shown > limit:
                break
            head.append(_marked(rank, line))
        tail = [
            _marked(rank, line)
            for line in deque(itertools.chain([line], file), _LAST_LINES)
        ]
        _write(stream, "".join(head))
        _write(stream, self._note(rank, stream) + "".join(tail))

    def _note(self, rank: int, stream: int) -> str:
        """Save a rank's whole output and say where."""
        if self._folder is None:
            self._folder = tempfile.mkdtemp(prefix="ddp_lab-output-")
            atexit.register(shutil.rmtree, self._folder, ignore_errors=True)
        name = f"rank{rank}-{('stdout', 'stderr')[stream]}.txt"
        path = os.path.join(self._folder, name)
        file = self._kept[rank][stream]
        file.seek(0)
        with open(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600), "wb") as whole:
            while data := file.read(2**20):
                whole.write(data)
        return (
            f"[rank {rank}: too much for a notebook; all of it is in {path} "
            f"until the kernel ends, the last lines are]\n"
        )


def _temporary() -> tempfile.SpooledTemporaryFile[bytes]:
    return tempfile.SpooledTemporaryFile(_IN_MEMORY_BYTES)


def _batches(rank: int, file: IO[bytes]) -> Iterator[str]:
    batch: list[str] = []
    for line in file:
        batch.append(_marked(rank, line))
        if len(batch) == 10_000:
            yield "".join(batch)
            batch.clear()
    yield "".join(batch)


def _plain(line: bytes) -> str:
    """One line as text; of a progress bar's many states, the last."""
    return line.decode("utf-8", "replace").rstrip("\r\n").rsplit("\r", 1)[-1]


def _marked(rank: int, line: bytes) -> str:
    return f"[rank {rank}] {_plain(line)}\n"


def _write(stream: int, text: str) -> None:
    """Show text, if anybody reads it: a service has nobody, and ``head`` leaves."""
    target = (sys.stdout, sys.stderr)[stream]
    if text and target is not None:
        with contextlib.suppress(BrokenPipeError):
            target.write(text)
            target.flush()


def _in_notebook() -> bool:
    return type(sys.stdout).__module__.startswith("ipykernel")
