"""Ctrl-C and the stop button, while there are processes that must be ended first."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from typing import Any

__all__ = ["hold_interrupts", "interrupts_blocked", "raise_if_interrupted"]

_held: list[int] | None = None  # interrupts that came while they were held


@contextmanager
def hold_interrupts() -> Iterator[None]:
    """Turn Ctrl-C and the stop button into a flag while processes are ours to end.

    An interrupt between "process started" and "process noted" would leave it behind.
    In the block it comes only where `raise_if_interrupted` is called, or at the end. A
    second one comes at once, in case the first finds no such place.
    """
    global _held
    ours = threading.current_thread() is threading.main_thread() and _held is None
    if not ours or signal.getsignal(signal.SIGINT) in (signal.SIG_IGN, None):
        yield
        return
    held: list[int] = []

    def note(number: int, frame: Any) -> None:
        held.append(number)
        if len(held) > 1:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, note)
    _held = held
    try:
        yield
    finally:
        _held = None
        signal.signal(signal.SIGINT, before)
    if held:
        raise KeyboardInterrupt


def raise_if_interrupted() -> None:
    """Raise the KeyboardInterrupt that `hold_interrupts` holds back, if any."""
    __tracebackhide__ = True
    if _held and threading.current_thread() is threading.main_thread():
        raise KeyboardInterrupt


@contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Let processes be born with SIGINT blocked, until they have their handler.

    A terminal sends Ctrl-C to all of the group: a rank that is only just starting would
    print a traceback about its own birth.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # its own start would unblock the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
