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

SETUP = """
import os, sys, time, torch, torch.distributed as dist
from pathlib import Path
from torch.utils.data import DataLoader, Dataset
from ddp_lab.ranks.launch import launch

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

def in_both():
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        in_loader()
    ready()
    dist.recv(torch.ones(1), 1)
"""
READY = {
    # function: the files that say that it has come to its wait, and its processes
    "in_collective": (["rank0", "rank1"], 2),
    "in_python": (["rank0", "rank1"], 2),
    "in_loader": (["worker0", "worker1"], 4),
    "in_both": (["rank0", "worker1"], 3),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("stop")


@pytest.fixture(scope="module")
def kernel(folder):
    with kernel_in(str(folder)) as kernel:
        kernel.run(SETUP)
        yield kernel


def start(kernel: Kernel, folder: Path, fn: str) -> list[psutil.Process]:
    names, num_processes = READY[fn]
    kernel.start(f"launch({fn})", [folder / name for name in names])
    processes = kernel.children()
    assert len(processes) == num_processes
    return processes


@pytest.mark.parametrize("fn", ["in_collective", "in_python", "in_loader"])
def test_stop_button(kernel, folder, fn):
    processes = start(kernel, folder, fn)
    kernel.manager.interrupt_kernel()
    cell = kernel.finish()
    assert cell.ename == "KeyboardInterrupt"
    assert "Interrupted: 2 running rank(s) of 2 stopped in" in cell.stderr
    assert "no process is left" in cell.stderr
    assert wait_gone(processes) == []
    if fn == "in_collective":
        assert "waiting  recv" in cell.stderr
    if fn == "in_python":  # the user's own finally blocks ran
        assert all((folder / name).exists() for name in ("cleaned0", "cleaned1"))
        assert kernel.run("launch(lambda: 1)").result == "[1, 1]"  # it goes on


def test_restart(kernel, folder):
    processes = start(kernel, folder, "in_both")
    kernel.manager.restart_kernel(now=True)
    assert wait_gone(processes) == []


@pytest.mark.parametrize("how", ["kill -9", "shutdown"])
def test_kernel_goes(tmp_path, how):
    with kernel_in(str(tmp_path)) as kernel:
        kernel.run(SETUP)
        processes = start(kernel, tmp_path, "in_both")
        if how == "kill -9":
            psutil.Process(kernel.pid).kill()
        else:
            kernel.manager.shutdown_kernel(now=False)
        assert wait_gone(processes) == []


@pytest.mark.parametrize("early", [False, True])
def test_ctrl_c_in_a_terminal(tmp_path, early):
    """The whole foreground group gets SIGINT, also while the ranks are starting."""
    script = tmp_path / "script.py"
    # what runs these tests may ignore interrupts, as a shell's background job does
    heed = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    script.write_text(heed + SETUP + "launch(in_collective)\n")
    process = subprocess.Popen(
        [sys.executable, str(script)],
        cwd=tmp_path,
        start_new_session=True,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        until = time.monotonic() + 60
        while not all((tmp_path / name).exists() for name in READY["in_collective"][0]):
            assert time.monotonic() < until
            if early and len(descendants(process.pid)) == 3:  # and the tracker
                break
            time.sleep(0.02)
        ranks = descendants(process.pid)
        os.killpg(process.pid, signal.SIGINT)
        _, text = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode not in (0, None)
    assert text.count("Traceback") == 1  # the parent's; the ranks are silent
    assert "no process is left" in text
    assert wait_gone(ranks) == []
