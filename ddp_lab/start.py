"""What a rank needs at its start: variables, a store, and nothing of the main script.

Each of these is a small context or function of its own; `ddp_lab.ranks` puts them
together.
"""

import os
import signal
import socket
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from typing import Any

from ddp_lab.errors import LabError

__all__ = [
    "early_env",
    "environment",
    "hold_interrupts",
    "host_store",
    "interrupts_blocked",
    "nothing_to_import",
    "raise_if_interrupted",
    "threads_per_rank",
    "torchrun_env",
]

_held: list[int] | None = None  # interrupts that came while they were held


def torchrun_env(rank: int, num_ranks: int, port: int, threads: int) -> dict[str, str]:
    """The variables that torchrun sets, for one rank of a single machine.

    Source: PyTorch docs, "torchrun (Elastic Launch)", Environment Variables.
    """
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "ROLE_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "ROLE_WORLD_SIZE": str(num_ranks),
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "ddp_lab",
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the parent hosts it, not rank 0
        "OMP_NUM_THREADS": str(threads),
    }


def early_env() -> dict[str, str]:
    """What must be set before torch is imported, as far as the user has not set it."""
    wanted = {
        # no name lookup and no other interface: a single machine talks to itself
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        # the flight recorder keeps the last collectives that a rank entered
        "TORCH_FR_BUFFER_SIZE": "256",
        # without a name server the store warns that it cannot look up its own clients
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    return {name: value for name, value in wanted.items() if name not in os.environ}


@contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    """Set variables that processes started in the block inherit."""
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)


def host_store() -> tuple[int, Any]:
    """Host the key-value store where ranks meet; return its port and the store.

    The port is chosen by the system and already bound, so nobody can take it, and it is
    bound to 127.0.0.1: left alone, TCPStore listens on every interface.

    Raises:
        LabError: this machine lets nobody connect to it.
    """
    import torch.distributed as dist

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(128)
        port = int(listener.getsockname()[1])
        try:  # left alone, TCPStore tries for five minutes
            with socket.create_connection(("127.0.0.1", port), timeout=5.0):
                listener.accept()[0].close()
        except OSError as error:
            raise LabError(
                f"ranks cannot meet: no connection to 127.0.0.1 ({error}); is this "
                "machine's loopback interface up, and does its firewall let it through?"
            ) from None
        with _no_word_from_below():
            store = dist.TCPStore(
                "127.0.0.1",
                port,
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )
    return port, store


@contextmanager
def _no_word_from_below() -> Iterator[None]:
    """Drop what C++ writes to stderr; failures are raised all the same.

    Without a name server the store warns that it cannot look up its own client, and
    this process's torch was imported before anybody could tell it not to.
    """
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


@contextmanager
def nothing_to_import() -> Iterator[None]:
    """Keep multiprocessing from running the main script again in each rank.

    Functions travel by value, so a rank needs nothing of it: a script needs no
    ``if __name__ == "__main__"`` guard, and a notebook whose namespace has a
    ``__file__`` runs the cell's function, not that file's.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


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


def threads_per_rank(num_ranks: int) -> int:
    """OMP_NUM_THREADS where the user has set it, else this rank's share of the cores.

    Left alone, each rank would use all cores, and the ranks would slow each other down.
    """
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    if wanted.isdigit() and int(wanted) > 0:
        return int(wanted)
    if hasattr(os, "sched_getaffinity"):
        num_cores = len(os.sched_getaffinity(0))
    else:
        num_cores = os.cpu_count() or 1
    return max(1, num_cores // num_ranks)
