"""Stop means stopped: no process of a launch outlives the stop button or the kernel."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from kernel import Kernel, descendants, kernel_in, wait_gone

LIMIT_S = 5.0

SETUP = """
import os, sys, time, torch, torch.distributed as dist
from pathlib import Path
from torch.utils.data import DataLoader, Dataset
from ddp_lab.launch import launch

class Slow(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        Path(f"worker{os.environ['RANK']}").touch()
        time.sleep(3600)

def ready():
    Path(f"rank{os.environ['RANK']}").touch()

def in_collective():
    dist.init_process_group("gloo")
    ready()
    dist.recv(torch.ones(1), 1 - dist.get_rank())

def in_python():
    ready()
    try:
        while True:
            time.sleep(0.01)
    finally:
        Path(f"cleaned{os.environ['RANK']}").touch()

def in_loader():
    for _ in DataLoader(Slow(), num_workers=1):
        pass
"""
RANKS = ["rank0", "rank1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("stop")


@pytest.fixture(scope="module")
def kernel(folder):
    with kernel_in(str(folder)) as kernel:
        kernel.run(SETUP)
        yield kernel


def start(kernel: Kernel, folder: Path, fn: str) -> list[psutil.Process]:
    names = ["worker0", "worker1"] if fn == "in_loader" else RANKS
    kernel.start(f"launch({fn})", [folder / name for name in names])
    processes = kernel.children()
    assert len(processes) == (4 if fn == "in_loader" else 2)
    return processes


@pytest.mark.parametrize("fn", ["in_collective", "in_python", "in_loader"])
def test_stop_button(kernel, folder, fn):
    processes = start(kernel, folder, fn)
    kernel.manager.interrupt_kernel()
    cell = kernel.finish()
    assert cell.ename == "KeyboardInterrupt"
    assert "Interrupted: 2 running rank(s) of 2 stopped in" in cell.stderr
    assert "no process is left" in cell.stderr
    assert wait_gone(processes, LIMIT_S) == []
    if fn == "in_collective":
        assert "waiting  recv" in cell.stderr
    if fn == "in_python":  # the user's own finally blocks ran
        assert all((folder / name).exists() for name in ("cleaned0", "cleaned1"))


def test_kernel_works_after_stop(kernel):
    assert kernel.run("launch(lambda: 1)").result == "[1, 1]"


@pytest.mark.parametrize(
    ("how", "fn"),
    [
        ("kill -9", "in_collective"),
        ("kill -9", "in_loader"),
        ("shutdown", "in_loader"),
        ("restart", "in_collective"),
    ],
)
def test_kernel_goes(tmp_path, how, fn):
    with kernel_in(str(tmp_path)) as kernel:
        kernel.run(SETUP)
        processes = start(kernel, tmp_path, fn)
        if how == "kill -9":
            psutil.Process(kernel.pid).kill()
        elif how == "shutdown":
            kernel.manager.shutdown_kernel(now=False)
        else:
            kernel.manager.restart_kernel(now=True)
        assert wait_gone(processes, LIMIT_S) == []


@pytest.mark.parametrize("early", [False, True])
def test_ctrl_c_in_a_terminal(tmp_path, early):
    """The whole foreground group gets SIGINT, also while the ranks are starting."""
    script = tmp_path / "script.py"
    script.write_text(SETUP + "launch(in_collective)\n")
    process = subprocess.Popen(
        [sys.executable, str(script)],
        cwd=tmp_path,
        start_new_session=True,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        until = time.monotonic() + 60
        while not all((tmp_path / name).exists() for name in RANKS):
            assert time.monotonic() < until
            if early and len(descendants(process.pid)) == 3:  # and the tracker
                break
            time.sleep(0.02)
        ranks = descendants(process.pid)
        os.killpg(process.pid, signal.SIGINT)
        _, text = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    assert process.returncode not in (0, None)
    assert text.count("Traceback") == 1  # the parent's; the ranks are silent
    assert "no process is left" in text
    assert wait_gone(ranks, LIMIT_S) == []
