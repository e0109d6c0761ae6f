"""How ranks meet, and what they say when they do not.

The ranks here are threads of this process: `meet` needs no more than a rank's numbers.
"""

import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from ddp_lab.errors import BadInput, LabError
from ddp_lab.rendezvous import meeting
from ddp_lab.rendezvous.meeting import meet
from ddp_lab.rendezvous.store import host_store

SLURM = {
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_PROCID": "0",
    "SLURM_NODEID": "0",
    "SLURM_JOB_ID": "7",
}


def ranks(rank, world_size=2, local_world_size=None):
    return {
        "rank": rank,
        "local_rank": rank,
        "world_size": world_size,
        "local_world_size": local_world_size or world_size,
    }


@pytest.fixture(autouse=True)
def free_port(monkeypatch):
    """Ranks that meet on a port of 127.0.0.1, under no launcher."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    for name in ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID", *SLURM):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(meeting, "_hosted", {})
    return port


@pytest.fixture
def launcher(monkeypatch):
    """A launcher that hosts the store, as torchrun and launch() do."""
    port, store = host_store()
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    return store


def at_once(*calls):
    """Results, or errors, of calls that run at the same time."""
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(meet, *call) for call in calls]
        return [future.exception() or future.result() for future in futures]


def test_they_meet_and_meet_again(free_port):
    for word in ("first", "second"):
        one, other = at_once((ranks(0), 20.0), (ranks(1), 20.0))
        assert not one.check(["word"])  # nothing of the time before
        one.set("word", word)
        assert other.get("word").decode() == word
    listening = {
        connection.laddr.ip
        for connection in psutil.Process().net_connections()
        if connection.laddr.port == free_port
        and connection.status == psutil.CONN_LISTEN
    }
    assert listening == {"127.0.0.1"}


@pytest.mark.usefixtures("launcher")
def test_who_died_has_not_arrived():
    """One store, several attempts: each counts only who is there now."""
    for rank, other in [(1, 0), (0, 1), (1, 0)]:
        with pytest.raises(LabError, match=f"1 of 2 .* 0.3 s, missing: {other}. Did"):
            meet(ranks(rank), 0.3)
    one, other = at_once((ranks(0), 20.0), (ranks(1), 20.0))
    one.set("word", "met")
    assert other.get("word") == b"met"


@pytest.mark.usefixtures("launcher")
def test_two_with_one_rank():
    outcomes = [str(o) for o in at_once((ranks(1), 0.5), (ranks(1), 0.5))]
    here = socket.gethostname()
    said = f"rank 1 on {here}: a process on {here} says that it is rank 1 too: two"
    assert any(o.startswith(said) for o in outcomes), outcomes


@pytest.mark.usefixtures("launcher")
def test_another_job_on_the_same_port(monkeypatch):
    """It is not taken for one of ours, even where ours is late."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    with ThreadPoolExecutor(1) as pool:
        stranger = pool.submit(meet, ranks(1), 2.0)
        with pytest.raises(LabError, match=r"2 of 3 .* missing: 0"):  # it is there
            meet(ranks(2, 3), 0.5)
        monkeypatch.setenv("SLURM_JOB_ID", "8")
        with pytest.raises(LabError, match=r"1 of 2 .* missing: 1"):
            meet(ranks(0), 0.5)
        assert "missing: 0" in str(stranger.exception())


@pytest.mark.usefixtures("launcher")
def test_world_sizes_differ():
    outcomes = at_once((ranks(0), 20.0), (ranks(1, 3), 20.0))
    assert all(isinstance(o, BadInput) for o in outcomes), outcomes
    assert "was told WORLD_SIZE=2, but rank 1 on" in str(outcomes[0])


def test_the_missing_are_named_with_their_host(monkeypatch):
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    outcomes = at_once(*[(ranks(r, 4, 2), 0.5) for r in (0, 1)])
    here = socket.gethostname()
    said = [str(o) for o in outcomes if "arrived" in str(o)]
    assert said
    assert (
        "2 of 4 ranks arrived within 0.5 s, missing: 2-3 (Slurm put 2-3 on n2)."
        in said[0]
    )
    assert said[0].endswith(f"Arrived: 0-1 on {here}.")


@pytest.mark.parametrize(
    ("gpus", "message"),
    [
        (
            ["", "GPU-1"],
            r"rank 0 on \S+ computes on the CPU \(gloo\), but rank 1 on \S+ on a GPU",
        ),
        (
            ["GPU-1", "GPU-1"],
            r"ranks 0 and 1 on \S+ were given the same GPU: start one",
        ),
    ],
)
def test_gpus_that_do_not_go_together(free_port, gpus, message):
    """Said before nccl would wait, or refuse it in words of its own."""
    with ThreadPoolExecutor(2) as pool:
        both = [
            pool.submit(meet, ranks(r), 20.0, gpu=gpu) for r, gpu in enumerate(gpus)
        ]
        for one in both:
            assert re.search(message, str(one.exception()))


def test_rank_0_is_missing(monkeypatch, free_port):
    for name, value in (SLURM | {"SLURM_PROCID": "2", "SLURM_NODEID": "1"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LabError, match=f"found no store at 127.0.0.1:{free_port}") as e:
        meet(ranks(2, 4, 2), 0.3)
    assert "(Connection refused): has rank 0 started (Slurm put 0 on n1), " in str(
        e.value
    )


def test_the_host_of_the_store_ends(monkeypatch):
    port, store = host_store()
    monkeypatch.setenv("MASTER_PORT", str(port))
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(meet, ranks(1), 20.0)
        store.wait(["ddp_lab//hello/1"])
        del store
        assert "lost the store before all ranks had arrived" in str(other.exception())


def test_port_is_taken(free_port):
    with socket.create_server(("127.0.0.1", free_port)):
        with pytest.raises(BadInput, match=f"cannot listen on port {free_port} ") as e:
            meet(ranks(0), 1.0)
    assert "another program or job has it, or a second process" in str(e.value)


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n" * 9])
def test_a_stranger_has_the_port(monkeypatch, free_port, answer):
    monkeypatch.setattr(meeting, "_ANSWER_S", 0.3)
    silent = threading.Event()
    with socket.create_server(("127.0.0.1", free_port)) as server:
        server.settimeout(20.0)

        def serve():
            while not silent.is_set():
                with server.accept()[0] as client:
                    if answer and client.recv(100):
                        client.sendall(answer)
                    if not answer:
                        silent.wait(20.0)

        with ThreadPoolExecutor(1) as pool:
            serving = pool.submit(serve)
            try:
                with pytest.raises(LabError, match="is no store of PyTorch's; another"):
                    meet(ranks(1), 0.3)
            finally:
                silent.set()
                socket.create_connection(("127.0.0.1", free_port)).close()
                assert serving.exception() is None


@pytest.mark.parametrize("port", ["", "0", "65536", "-1", "http"])
def test_port_makes_no_sense(monkeypatch, port):
    monkeypatch.setenv("MASTER_PORT", port)
    with pytest.raises(BadInput, match=f"MASTER_PORT='{port}' must say where rank 0"):
        meet(ranks(0), 1.0)


def test_address_is_unknown(monkeypatch):
    def unknown(*_, **__):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(BadInput, match=r"127.0.0.1' is the name of no machine"):
        meet(ranks(0), 1.0)
    with pytest.raises(LabError, match=r"within 0.1 s \(Name or service not known\)"):
        meet(ranks(1), 0.1)


def people(*places):
    return [{"host": host, "gloo_address": address} for host, address in places]


def test_loopback_is_fine_on_one_host():
    meeting._check_addresses(people(("a", "127.0.1.1"), ("a", "127.0.1.1")), "a", 1)
    meeting._check_addresses(people(("a", "10.0.0.1"), ("b", "")), "a", 1)


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.1.1", "::1"])
def test_loopback_is_refused_between_hosts(address):
    with pytest.raises(BadInput) as error:
        meeting._check_addresses(people(("a", "10.0.0.1"), ("b", address)), "a", 1)
    assert str(error.value).startswith(
        f"rank 1: on b the machine's own name leads to {address}, so gloo would send"
    )
    assert "set GLOO_SOCKET_IFNAME there" in str(error.value)
    assert "/etc/hosts" in str(error.value)


def test_gloo_address(monkeypatch):
    """The first that is ours; the loopback if none is, or there is no such name."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (a, 0))
             for a in ("192.0.2.1", "127.0.0.2")]  # fmt: skip
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert meeting._gloo_address() == "127.0.0.2"
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found[:1])
    assert meeting._gloo_address() == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    assert meeting._gloo_address() == ""


def test_ranges():
    assert meeting._ranges([5, 0, 1, 2]) == "0-2, 5"
