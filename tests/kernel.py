"""A real Jupyter kernel for tests: run cells, interrupt, kill, count what is left."""

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from jupyter_client.manager import KernelManager

_ANSI = re.compile(r"\x1b\[[0-9;]*m")


@dataclass
class Cell:
    """What one cell left behind, as a notebook would show it."""

    stdout: str = ""
    stderr: str = ""
    result: str = ""
    ename: str = ""
    evalue: str = ""
    traceback: str = ""
    messages: list[tuple[str, str]] = field(default_factory=list)

    def keep(self, message) -> None:
        """Take one message from the kernel."""
        kind, content = message["msg_type"], message["content"]
        if kind == "stream":
            name = content["name"]
            setattr(self, name, getattr(self, name) + content["text"])
            self.messages.append((name, content["text"]))
        elif kind == "execute_result":
            self.result = content["data"]["text/plain"]
        elif kind == "error":
            self.ename, self.evalue = content["ename"], content["evalue"]
            self.traceback = _ANSI.sub("", "\n".join(content["traceback"]))


class Kernel:
    """One kernel process; its working directory is ``folder``."""

    def __init__(self, folder: str) -> None:
        # ipykernel shows less when it believes that it runs under pytest
        env = {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"}
        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel(cwd=folder, env=env)
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)
        self.pid = self.manager.provisioner.pid

    def run(
        self,
        code: str,
        timeout_s: float = 120.0,
        look: Callable[[Cell], None] | None = None,
    ) -> Cell:
        """Run one cell to its end; after each message, ``look`` at what is there."""
        cell = Cell()

        def keep(message) -> None:
            cell.keep(message)
            if look is not None:
                look(cell)

        self.client.execute_interactive(
            code, timeout=timeout_s, output_hook=keep, allow_stdin=False
        )
        return cell

    def finish(self, timeout_s: float = 30.0) -> Cell:
        """The rest of what a cell that was begun with `start` leaves behind."""
        cell = Cell()
        while True:
            message = self.client.get_iopub_msg(timeout=timeout_s)
            cell.keep(message)
            if message["content"].get("execution_state") == "idle":
                return cell

    def start(self, code: str, until_exists: list[Path], timeout_s: float = 60) -> None:
        """Start a cell and go on as soon as the files exist."""
        self.client.execute(code)
        end = time.monotonic() + timeout_s
        while not all(path.exists() for path in until_exists):
            assert time.monotonic() < end, "the cell did not come that far"
            time.sleep(0.02)
        for path in until_exists:
            path.unlink()

    def children(self) -> list[psutil.Process]:
        """All processes that the kernel started, without multiprocessing's tracker."""
        return [p for p in descendants(self.pid) if "resource_tracker" not in cmd(p)]

    def shutdown(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


def descendants(pid: int) -> list[psutil.Process]:
    """The living processes under ``pid``."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [
            p
            for p in psutil.Process(pid).children(recursive=True)
            if p.status() != psutil.STATUS_ZOMBIE
        ]
    return []


def cmd(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def wait_gone(
    processes: list[psutil.Process], timeout_s: float = 60.0
) -> list[psutil.Process]:
    """Wait for processes to end; return those that are there even after a long time."""
    _, left = psutil.wait_procs(processes, timeout=timeout_s)
    return [p for p in left if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


@contextlib.contextmanager
def kernel_in(folder: str) -> Iterator[Kernel]:
    """A kernel that is gone after the block, with everything it started."""
    kernel = Kernel(folder)
    try:
        yield kernel
    finally:
        for process in descendants(kernel.pid):
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)
        kernel.shutdown()
