"""Host the key-value store where the ranks of one machine find each other.

Source: PyTorch docs, "Distributed communication package", `TCPStore`.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ddp_lab.errors import LabError

__all__ = ["host_store"]


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
