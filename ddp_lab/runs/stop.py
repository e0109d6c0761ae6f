"""Stop on request: a cluster that wants its machine back sends a signal first.

SIGTERM is what Kubernetes, spot instances and ``scancel`` send; SIGUSR1 is what Slurm
sends before the time limit, if it is asked to (``--signal=USR1@120``). A handler here
only writes the number down. The ranks look at it between two steps and agree, so that
all of them stop after the same one, save, and can go on later as if nothing happened.

    request = StopRequest()
    with request.on_signals():
        ...                              # training looks at request.signal_number
"""

import contextlib
import signal
import threading
from collections.abc import Iterator

import torch

from ddp_lab.errors import STOP_SIGNALS

__all__ = ["StopRequest"]


class StopRequest:
    """Whether somebody asked this run to stop, and by which signal.

    Args:
        flag: int32 of shape (1,), 0 for no; None for one of its own. Ranks that are
            given the parent's, in shared memory, see what the parent was told.
    """

    def __init__(self, flag: torch.Tensor | None = None) -> None:
        self.flag = torch.zeros(1, dtype=torch.int32) if flag is None else flag

    @property
    def signal_number(self) -> int:
        """The signal that asked, 0 if none did."""
        return int(self.flag.item())

    @contextlib.contextmanager
    def on_signals(self) -> Iterator["StopRequest"]:
        """Note SIGTERM and SIGUSR1 instead of dying of them, inside the block.

        If one came, the process is on its way out, and after the block further ones
        are ignored: they are sent to be sure. Only a process's main thread can catch
        signals; in another one this does nothing.
        """
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
        for number in STOP_SIGNALS:
            signal.signal(number, lambda number, _: self.flag.fill_(number))
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, signal.SIG_IGN if self.signal_number else handler)
