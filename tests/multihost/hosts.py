"""Several hosts on one machine: Linux network namespaces, joined by a cable.

    with two_hosts(folder) as (first, second):
        process = first.start(["hostname"], log="first.log")
        second.cut()  # pull its cable out
        second.mend()

Each host has a name, an address, a loopback and a hosts file of its own; disk and
processors are shared. Needs root and iproute2. At the end of the block every process
on the hosts is killed and the hosts are gone, also after a failure.

Source: ip-netns(8), veth(4), unshare(1).
"""

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

__all__ = ["Host", "missing_for_hosts", "two_hosts", "wait_for"]

LIMIT_S = 120.0
_TOOLS = ("ip", "nsenter", "unshare", "mount", "hostname", "ss")
_numbers = itertools.count(1)

# In the namespace: take the host's name and its own files of names (there is no name
# server to ask, and waiting for none takes seconds), then become the command.
_ENTER = """
hostname "$1" && mount --bind "$2" /etc/hosts && mount --bind /dev/null /etc/resolv.conf
shift 2 && exec "$@"
"""


def missing_for_hosts() -> str:
    """Why this machine cannot play several hosts; empty if it can."""
    if not sys.platform.startswith("linux"):
        return "network namespaces are Linux's"
    if os.geteuid():
        return "needs root, to make network namespaces"
    if absent := [tool for tool in _TOOLS if not shutil.which(tool)]:
        return f"needs {', '.join(absent)}: apt install iproute2"
    attempt = subprocess.run(
        ["unshare", "--net", "--uts", "--mount", "true"], capture_output=True
    )
    return attempt.stderr.decode().strip()


class Host:
    """One host: a network namespace with an interface and an address."""

    def __init__(self, name: str, address: str, hosts_file: Path) -> None:
        self.name = name
        self.address = address
        self.hosts_file = hosts_file
        self.namespace = f"lab{os.getpid()}-{next(_numbers)}"
        self.interface = "cable"
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(
        self, command: Sequence[str], *, log: Path, cwd: Path, **environ: str
    ) -> subprocess.Popen[bytes]:
        """Start a command on this host; stdout and stderr go to the end of a file."""
        inside = ["sh", "-c", _ENTER, "sh", self.name, str(self.hosts_file), *command]
        with log.open("ab") as file:
            process = subprocess.Popen(
                _in(self.namespace, "unshare", "--uts", "--mount", *inside),
                cwd=cwd,
                env=_environment() | environ,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        self.processes.append(process)
        return process

    def cut(self) -> None:
        """Pull the cable out: what is sent is lost, and no side is told."""
        _ip("-n", self.namespace, "link", "set", self.interface, "down")

    def mend(self) -> None:
        """Put the cable back."""
        _ip("-n", self.namespace, "link", "set", self.interface, "up")

    def sockets(self) -> str:
        """What the kernel knows of this host's connections."""
        command = _in(self.namespace, "ss", "--tcp", "--info", "--no-header")
        return subprocess.run(command, capture_output=True, text=True).stdout

    def pids(self) -> list[int]:
        """All processes on this host."""
        return [int(p) for p in _ip("netns", "pids", self.namespace).split()]

    def kill_all(self) -> None:
        """As if the power went: no process on this host gets to say a word."""
        end = time.monotonic() + LIMIT_S
        while pids := self.pids():
            assert time.monotonic() < end, f"{self.name}: {pids} cannot be killed"
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for process in self.processes:  # ours to reap
                process.poll()
            time.sleep(0.01)
        for process in self.processes:
            process.wait()


@contextlib.contextmanager
def two_hosts(folder: Path) -> Iterator[tuple[Host, Host]]:
    """Make two hosts with a cable between them; nothing of them is left afterwards."""
    hosts = (
        Host("host1", "10.77.0.1", folder / "hosts1"),
        Host("host2", "10.77.0.2", folder / "hosts2"),
    )
    names = "".join(f"{host.address} {host.name}\n" for host in hosts)
    for host in hosts:
        host.hosts_file.write_text("127.0.0.1 localhost\n" + names)
    with contextlib.ExitStack() as at_the_end:
        for host in hosts:
            _ip("netns", "add", host.namespace)
            at_the_end.callback(_ip, "netns", "del", host.namespace)
            at_the_end.callback(host.kill_all)
        first, second = hosts
        _ip("-n", first.namespace, "link", "add", first.interface, "type", "veth",
            "peer", "name", second.interface, "netns", second.namespace)  # fmt: skip
        for host in hosts:
            network = ["addr", "add", f"{host.address}/24", "dev", host.interface]
            _ip("-n", host.namespace, *network)
            _ip("-n", host.namespace, "link", "set", "lo", "up")
            host.mend()
        yield hosts


def wait_for(condition, what: str, *, among=(), limit_s: float = LIMIT_S) -> None:
    """Wait until a condition holds, while the processes that it needs are alive."""
    end = time.monotonic() + limit_s
    while not condition():
        ended = [p for p in among if p.poll() is not None]
        assert not ended, f"ended before {what}: {[p.args for p in ended]}"
        assert time.monotonic() < end, f"not within {limit_s:g} s: {what}"
        time.sleep(0.05)


def _environment() -> dict[str, str]:
    """Ours, without what a launcher or a test runner may have left in it."""
    stray = ("SLURM_", "TORCHELASTIC_", "GLOO_", "NCCL_", "PYTEST_", "MASTER_", "RANK")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(stray)}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def _in(namespace: str, *command: str) -> list[str]:
    # not by "ip netns exec", which hides the cgroups that slurmd wants to see
    return ["nsenter", f"--net=/run/netns/{namespace}", *command]


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"
    return done.stdout
