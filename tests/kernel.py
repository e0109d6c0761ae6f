"""A real Jupyter kernel for tests: run cells, interrupt, kill, and count what is left."""

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

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
    messages: list[tuple[float, str, str]] = field(default_factory=list)


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

    def run(self, code: str, timeout_s: float = 120.0) -> Cell:
        """Run one cell to its end."""
        cell = Cell()

        def keep(message):
            kind, content = message["msg_type"], message["content"]
            if kind == "stream":
                name = content["name"]
                setattr(cell, name, getattr(cell, name) + content["text"])
                cell.messages.append((time.monotonic(), name, content["text"]))
            elif kind == "execute_result":
                cell.result = content["data"]["text/plain"]
            elif kind == "error":
                cell.ename, cell.evalue = content["ename"], content["evalue"]
                cell.traceback = _ANSI.sub("", "\n".join(content["traceback"]))

        self.client.execute_interactive(
            code, timeout=timeout_s, output_hook=keep, allow_stdin=False
        )
        return cell

    def run_and(self, code: str, action, after: str = "ready") -> Cell:
        """Run one cell; once its ranks have printed ``after``, call ``action``."""
        timer = threading.Thread(target=self._wait_and_act, args=(after, action))
        timer.start()
        try:
            return self.run(code)
        finally:
            timer.join()

    def _wait_and_act(self, path: str, action) -> None:
        until = time.monotonic() + 60
        while not os.path.exists(path) and time.monotonic() < until:
            time.sleep(0.02)
        action()

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
    processes: list[psutil.Process], timeout_s: float
) -> list[psutil.Process]:
    """Wait for processes to end; return those that are still there."""
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
