"""Where ranks find each other: the key-value store, and what they say there first.

    rank r                           rank 0
    hello/r = who I am, once more    has everybody said hello? then, to each:
    wait for welcome/NONCE-OF-r      welcome/NONCE-OF-r = who everybody is

A hello is repeated until it is answered, and it carries a number that was never used
before (a *nonce*): what an earlier attempt left in the store is not taken for a rank
that is here now, as torchrun starts one attempt after another on one store.

The store has no password: who reaches its port can take part, or disturb. On one
machine it listens on the loopback interface only; on several, at the address that
MASTER_ADDR names, which belongs into a network of the cluster's own.

Whoever waits in vain says who is missing, and on which host as far as that is known.
"""

import datetime
import errno
import itertools
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

import torch.distributed as dist

from ddp_lab.errors import BadInput, LabError
from ddp_lab.rendezvous.slurm import slurm_hosts

__all__ = ["meet"]

_POLL_S = 0.05  # between two looks into the store
_ALIVE_S = 1.0  # who has not repeated its hello for so long is not here any more
_ANSWER_S = 10.0  # for whoever listens at the port to show that it is a store

# What this process hosts, for as long as it lives: the others may come back to it.
_hosted: dict[tuple[str, int], dist.TCPStore] = {}


def meet(ranks: Mapping[str, int], timeout_s: float, *, gpu: str = "") -> dist.Store:
    """Connect to the store and wait there until every rank has checked in.

    Args:
        ranks: what `read_ranks` says.
        timeout_s: seconds to wait for the store, and then for the other ranks.
        gpu: which one this rank computes on, by a name that no other has; empty for
            the CPU, where gloo carries the collectives.

    Returns:
        A part of the store that is this group's alone.

    Raises:
        BadInput: MASTER_ADDR or MASTER_PORT make no sense, the port is taken, or
            a host's own name leads other hosts to themselves, or two ranks were
            given one GPU, or some a GPU and others none.
        LabError: not all ranks arrived; the message names the missing ones.

    **Collective**: all ranks of the run.
    """
    # the main thread stands still meanwhile, which shows those who look that it waits
    return _aside(lambda: _meet(ranks, timeout_s, gpu))


T = TypeVar("T")


def _aside(work: Callable[[], T], limit_s: float | None = None) -> T:
    """Do something in a thread of its own, and give it up after a time."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future.result(limit_s)


def _meet(ranks: Mapping[str, int], timeout_s: float, gpu: str) -> dist.Store:
    rank, world_size = ranks["rank"], ranks["world_size"]
    host, port = _address(rank)
    # torchrun and launch() host the store themselves and say so; otherwise rank 0 does
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    listener = None
    if rank == 0 and not hosted and (host, port) not in _hosted:
        only_here = ranks["local_world_size"] == world_size
        listener = _listen(host, port, only_here)
    tcp_store = _open_store(rank, host, port, listener, timeout_s)
    # two jobs may have been given one port: each keeps to its own part of the store
    store = dist.PrefixStore(f"ddp_lab/{_run_id()}", tcp_store)
    everybody = _check_in(store, ranks, timeout_s, gpu)
    if not gpu:
        _check_addresses(everybody, host, port)
    return dist.PrefixStore(f"group/{everybody[0]['nonce']}", store)


def _address(rank: int) -> tuple[str, int]:
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not host or not port.isdigit() or not 0 < int(port) < 2**16 or ".." in host:
        raise BadInput(
            f"rank {rank}: MASTER_ADDR={host!r} and MASTER_PORT={port!r} must say "
            "where rank 0 waits; torchrun sets both, under srun the job script does"
        )
    return host, int(port)


def _run_id() -> str:
    """What tells this run from another one on the same port, where anything does."""
    names = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID")
    return next((os.environ[name] for name in names if name in os.environ), "")


def _listen(host: str, port: int, only_here: bool) -> socket.socket:
    """Listen where the ranks will meet, and nowhere else if that can be.

    MASTER_ADDR names one interface of this machine. If it does not, as behind a
    router or a service that forwards to us, all of them listen. With other hosts the
    loopback would be of no use: a machine's own name often leads there.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        for family, _, _, _, address in found:
            if only_here or not str(address[0]).startswith(("127.", "::1")):
                try:
                    return socket.create_server(address, family=family)
                except OSError as error:
                    if error.errno != errno.EADDRNOTAVAIL:  # of another machine
                        raise
        if socket.has_dualstack_ipv6():
            return socket.create_server(
                ("", port), family=socket.AF_INET6, dualstack_ipv6=True
            )
        return socket.create_server(("", port))
    except socket.gaierror as error:
        raise BadInput(
            f"rank 0: MASTER_ADDR={host!r} is the name of no machine: {error.strerror}"
        ) from error
    except OSError as error:
        raise BadInput(
            f"rank 0 on {socket.gethostname()} cannot listen on port {port} "
            f"({error.strerror}): another program or job has it, or a second process "
            "that was given rank 0; choose another MASTER_PORT, the same for all ranks "
            "(ss -ltnp says who has it)"
        ) from error


def _open_store(
    rank: int, host: str, port: int, listener: socket.socket | None, timeout_s: float
) -> dist.TCPStore:
    """Become a client of the store; with a listener, host it too."""
    if (host, port) in _hosted:
        return _hosted[host, port]
    if listener is None:
        _wait_for_port(rank, host, port, timeout_s)
    timeout = datetime.timedelta(seconds=max(timeout_s, _ANSWER_S))
    try:
        # a program that lets us in, but is no store and silent, would hold us for ever
        store = _aside(
            lambda: dist.TCPStore(
                host,
                port,
                is_master=listener is not None,
                timeout=timeout,
                wait_for_workers=False,
                master_listen_fd=listener.detach() if listener else None,
            ),
            limit_s=_ANSWER_S,
        )
    except (TimeoutError, dist.DistError) as error:
        cure = "another program has the port: choose another MASTER_PORT for all ranks"
        if listener:
            cure = "rank 0 hosts one, so MASTER_ADDR must be its own machine's address"
        raise LabError(
            f"rank {rank} on {socket.gethostname()}: what answers at {host}:{port} is "
            f"no store of PyTorch's; {cure}"
        ) from error
    if listener:
        _hosted[host, port] = store
    return store


def _wait_for_port(rank: int, host: str, port: int, timeout_s: float) -> None:
    """Wait until somebody listens; the store's own attempts are noisy and overtime."""
    end = time.monotonic() + timeout_s
    while True:
        left = max(end - time.monotonic(), _POLL_S)
        try:
            socket.create_connection((host, port), timeout=left).close()
            return
        except OSError as error:
            if time.monotonic() + _POLL_S < end:
                time.sleep(_POLL_S)
                continue
            raise LabError(
                f"rank {rank} on {socket.gethostname()} found no store at {host}:{port}"
                f" within {timeout_s:g} s ({error.strerror or error}): has rank 0 "
                f"started{_expected([0])}, is the address right, and does the firewall "
                "let the port through?"
            ) from error


def _check_in(
    store: dist.Store, ranks: Mapping[str, int], timeout_s: float, gpu: str
) -> list[dict[str, Any]]:
    """Say hello until rank 0 has heard everybody; return who everybody is, by rank."""
    rank, world_size = ranks["rank"], ranks["world_size"]
    me = {
        "nonce": uuid.uuid4().hex,
        "host": socket.gethostname(),
        "world_size": world_size,
        "gpu": gpu,
        "gloo_address": _gloo_address(),
    }
    hello = [f"hello/{r}" for r in range(world_size)]
    welcome = f"welcome/{me['nonce']}"
    end = time.monotonic() + timeout_s
    before: dict[int, bytes] = {}  # what was there shortly before the end
    try:
        if rank == 0:  # those of an earlier attempt, who will not say it again
            for key in hello:
                store.delete_key(key)
        for count in itertools.count():
            if store.check([welcome]):
                everybody = json.loads(store.get(welcome))
                read = f"read/{everybody[0]['nonce']}"
                num_read = store.add(read, 1)
                # rank 0 may host the store, and may be about to fail: not before all
                # others know why
                while rank == 0 and num_read < world_size and time.monotonic() < end:
                    time.sleep(_POLL_S / 10)
                    num_read = store.add(read, 0)
                return _agreed(everybody)
            if count and store.check(hello[rank : rank + 1]):
                _check_alone(me, json.loads(store.get(hello[rank])), rank)
            store.set(hello[rank], json.dumps(me | {"count": count}))
            now = time.monotonic()
            if rank == 0 and store.check(hello):
                everybody = [json.loads(store.get(key)) for key in hello]
                for other in everybody:
                    store.set(f"welcome/{other['nonce']}", json.dumps(everybody))
                continue
            if not before and now > end - min(_ALIVE_S, timeout_s / 2):
                before = _present(store, hello)
            if now > end:
                after = _present(store, hello).items()
                alive = {r: text for r, text in after if text != before.get(r)}
                if len(alive) < world_size or now > end + _ANSWER_S:
                    hosts = {r: json.loads(text)["host"] for r, text in alive.items()}
                    raise LabError(_who_is_missing(ranks, hosts, timeout_s))
            time.sleep(_POLL_S)
    except dist.DistError as error:
        raise LabError(
            f"rank {rank} on {socket.gethostname()} lost the store before all ranks "
            "had arrived: its host, rank 0 or the launcher, has ended; what that one "
            "said tells why"
        ) from error
    raise AssertionError("count has no end")


def _check_alone(me: dict[str, Any], found: dict[str, Any], rank: int) -> None:
    if found["nonce"] != me["nonce"]:
        raise BadInput(
            f"rank {rank} on {me['host']}: a process on {found['host']} says that it "
            f"is rank {rank} too: two processes were given one rank, or two jobs one "
            "MASTER_PORT"
        )


def _present(store: dist.Store, keys: list[str]) -> dict[int, bytes]:
    return {k: store.get(key) for k, key in enumerate(keys) if store.check([key])}


def _agreed(everybody: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for rank, they in enumerate(everybody):
        if they["world_size"] != len(everybody):
            raise BadInput(
                f"rank 0 on {everybody[0]['host']} was told WORLD_SIZE="
                f"{len(everybody)}, but rank {rank} on {they['host']} "
                f"{they['world_size']}: it must be the number of ranks, and the same "
                "for all of them"
            )
    _check_gpus(everybody)
    return everybody


def _check_gpus(everybody: list[dict[str, Any]]) -> None:
    """One backend for all, and no GPU for two: nccl would refuse it, in other words."""
    first = everybody[0]
    holders: dict[tuple[str, str], int] = {}  # of each host's GPUs
    for rank, they in enumerate(everybody):
        if bool(they["gpu"]) != bool(first["gpu"]):
            on = [
                "a GPU (nccl)" if r["gpu"] else "the CPU (gloo)" for r in (first, they)
            ]
            raise BadInput(
                f"rank 0 on {first['host']} computes on {on[0]}, but rank {rank} on "
                f"{they['host']} on {on[1]}: give every rank a GPU, or all of them "
                "device cpu"
            )
        other = holders.setdefault((they["host"], they["gpu"]), rank)
        if they["gpu"] and other != rank:
            raise BadInput(
                f"ranks {other} and {rank} on {they['host']} were given the same GPU: "
                "start one rank a GPU, or choose device cpu"
            )


def _who_is_missing(
    ranks: Mapping[str, int], hosts: dict[int, str], timeout_s: float
) -> str:
    world_size = ranks["world_size"]
    missing = [r for r in range(world_size) if r not in hosts]
    if not missing:
        return f"all {world_size} ranks are here, but rank 0 lets none in: start anew"
    message = (
        f"{len(hosts)} of {world_size} ranks arrived within {timeout_s:g} s, missing: "
        f"{_ranges(missing)}{_expected(missing)}. Did it fail before it came here, or "
        "was it never started (is the world size right)?"
    )
    if ranks["local_world_size"] < world_size:
        message += f" Arrived: {_by_host(hosts)}."
    return message


def _expected(missing: list[int]) -> str:
    """ " (Slurm put 2-3 on n2)", where Slurm says so."""
    layout = slurm_hosts()
    known = {r: layout[r] for r in missing if r < len(layout)}
    return f" (Slurm put {_by_host(known)})" if known else ""


def _by_host(hosts: dict[int, str]) -> str:
    ranks_of: dict[str, list[int]] = {}
    for rank, host in sorted(hosts.items()):
        ranks_of.setdefault(host, []).append(rank)
    return ", ".join(f"{_ranges(ranks)} on {host}" for host, ranks in ranks_of.items())


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] as "0-2, 5"."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else f"{p[0]}" for p in parts)


# ---------------------------------------------------------------- gloo's addresses


def _gloo_address() -> str:
    """The address at which gloo will wait for other ranks; empty where the user chose.

    Gloo takes the first address of this machine's own name at which it can wait, and
    the loopback if there is none.
    """
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return ""
    try:
        found = socket.getaddrinfo(socket.gethostname(), 0, type=socket.SOCK_STREAM)
    except OSError:
        return "127.0.0.1"
    for family, kind, _, _, address in found:
        try:
            with socket.socket(family, kind) as attempt:
                attempt.bind(address)
        except OSError:
            continue
        return str(address[0])
    return "127.0.0.1"


def _check_addresses(everybody: list[dict[str, Any]], host: str, port: int) -> None:
    """Stop if gloo would have another host's ranks connect to themselves."""
    if len({rank["host"] for rank in everybody}) == 1:
        return
    for rank, they in enumerate(everybody):
        if they["gloo_address"].startswith(("127.", "::1")):
            raise BadInput(
                f"rank {rank}: on {they['host']} the machine's own name leads to "
                f"{they['gloo_address']}, so gloo would send the other hosts to "
                f"themselves: set GLOO_SOCKET_IFNAME there to the interface that "
                f"reaches {host} (ip route get says which), or correct its /etc/hosts"
            )
