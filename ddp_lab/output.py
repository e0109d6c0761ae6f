"""The ranks' output, put in order for one reader.

Each rank writes into two pipes (its stdout and stderr). Rank 0's text appears at once,
as it comes, so that a progress bar moves. The lines of the others wait, and follow in
rank order when the call ends, each with its ``[rank 1]`` mark. The text of a cell is
therefore the same every time, whichever rank was faster.
"""

import codecs
import sys
import tempfile
import time
from typing import IO

__all__ = ["Output"]

_EVERY_S = 0.05  # a chatty rank is shown in batches: jupyter drops over 1000 messages/s
_IN_MEMORY_BYTES = (
    2**20
)  # of waiting output a stream; the rest waits in a temporary file


class Output:
    """Collect what the ranks write during one call, and show it in order."""

    def __init__(self, num_ranks: int, *, echo: bool = True) -> None:
        self._echo = echo
        self._decoders = [
            codecs.getincrementaldecoder("utf-8")("replace") for _ in range(2)
        ]
        self._pending: list[list[str]] = [[], []]  # rank 0's text, by stream
        self._shown_at = 0.0
        self._line_open = [False, False]  # rank 0's last line has no end yet
        self._waiting: list[list[IO[bytes]]] = [
            [tempfile.SpooledTemporaryFile(_IN_MEMORY_BYTES) for _ in range(2)]  # type: ignore[misc]
            for _ in range(num_ranks - 1)
        ]

    def feed(self, rank: int, stream: int, data: bytes) -> None:
        """Take what ``rank`` wrote to its stdout (stream 0) or stderr (stream 1)."""
        if rank == 0:
            self._pending[stream].append(self._decoders[stream].decode(data))
        else:
            self._waiting[rank - 1][stream].write(data)

    def show(self) -> float | None:
        """Show rank 0's new text, if it is time; return the seconds until it is."""
        if not any(self._pending):
            return None
        wait_s = self._shown_at + _EVERY_S - time.monotonic()
        if wait_s > 0:
            return wait_s
        self._show_now()
        return None

    def _show_now(self) -> None:
        for stream in range(2):
            text = "".join(self._pending[stream])
            self._pending[stream].clear()
            if text:
                self._line_open[stream] = not text.endswith("\n")
                self._write(stream, text)
        self._shown_at = time.monotonic()

    def finish(self) -> None:
        """Show all that is left: the other ranks' lines, in rank order."""
        self._show_now()
        for stream in range(2):
            if self._line_open[stream] and any(
                spools[stream].tell() for spools in self._waiting
            ):
                self._write(stream, "\n")
        for rank, spools in enumerate(self._waiting, start=1):
            for stream, spool in enumerate(spools):
                spool.seek(0)
                lines = [_marked(rank, line) for line in spool]
                if lines:
                    self._write(stream, "".join(lines))
                spool.close()
        self._waiting.clear()

    def _write(self, stream: int, text: str) -> None:
        if self._echo:
            target = (sys.stdout, sys.stderr)[stream]
            target.write(text)
            target.flush()


def _marked(rank: int, line: bytes) -> str:
    """One whole line with its mark; of a progress bar's many states, the last."""
    text = line.decode("utf-8", "replace").rstrip("\r\n").rsplit("\r", 1)[-1]
    return f"[rank {rank}] {text}\n"
