"""For all tests: nothing that they start outlives them, and ranks that are there.

Starting a rank costs more than most tests, as it imports torch. A test whose subject is
not the start takes ranks that are there already: `warm`, or `doomed` to lose them.
"""

import contextlib
import io
import signal
from collections.abc import Iterator

import psutil
import pytest

from ddp_lab.ranks.workers import Workers

# A shell starts "make test &" deaf to Ctrl-C, and what the tests interrupt inherits it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Python's own helper, which lives as long as the process that uses it.
_HELPER = "multiprocessing.resource_tracker"

_kept: list[Workers] = []  # sets of ranks that stay from one module to the next


@pytest.fixture(autouse=True, scope="module")
def no_process_is_left() -> Iterator[None]:
    """Fail a module that leaves a process behind."""
    yield
    kept = {pid for workers in _kept for pid in workers.pids}
    ours = [
        child
        for child in psutil.Process().children(recursive=True)
        if child.pid not in kept and _HELPER not in _command(child)
    ]
    _, alive = psutil.wait_procs(ours, timeout=5)
    left = [_command(child) for child in alive if child.is_running()]
    assert not left, f"processes outlive their tests: {left}"


def _command(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):  # gone in this moment
        return " ".join(process.cmdline())
    return ""


@pytest.fixture(scope="session")
def _warm() -> Iterator[Workers]:
    with Workers(2) as workers:
        _kept.append(workers)
        yield workers
        _kept.remove(workers)


@pytest.fixture
def warm(_warm: Workers) -> Workers:
    """Two ranks that can be called at once; those that a test has lost are replaced."""
    with contextlib.redirect_stdout(io.StringIO()):  # the notice is another's subject
        _warm.run(int)
    return _warm


class _Spares:
    """Sets of two ranks, to be lost: the next one starts while a test waits."""

    def __init__(self) -> None:
        self._next = self._start()

    def take(self) -> Workers:
        taken, self._next = self._next, self._start()
        return taken

    def give_back(self, workers: Workers) -> None:
        workers.close()
        _kept.remove(workers)

    def close(self) -> None:
        self._next._ranks.kill()  # it may still be starting: no word reaches it
        self.give_back(self._next)

    def _start(self) -> Workers:
        workers = Workers(2)
        _kept.append(workers)
        return workers


@pytest.fixture(scope="session")
def _spares() -> Iterator[_Spares]:
    spares = _Spares()
    yield spares
    spares.close()


@pytest.fixture
def doomed(_spares: _Spares) -> Iterator[Workers]:
    """Two ranks for a test that does not leave them alive."""
    workers = _spares.take()
    yield workers
    _spares.give_back(workers)
