"""Ranks, launchers and hosts that die: torchrun starts again, the run goes on.

All runs here have one set of settings, in float64 and with GroupNorm, so they are
compared with one uninterrupted run: on as many ranks bit for bit, and on another
number to 1e-11. (Measured, 24 steps on 1 rank and on 2: MEASURED.) The model is small,
and the ranks wait at the steps where something is to happen: see small_model/.
"""

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest
import torch

import small_commands
from ddp_lab.runs import checkpoint
from ddp_lab.runs.record import Run
from small_commands import ENVIRON, LIMIT_S, forget_held, hold, let_go, num_held

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
ALONE = [*TORCHRUN, "--standalone", "--nproc-per-node=2", "--max-restarts=3"]
TRAIN = [
    *("-m", "ddp_lab.train", "--device", "cpu", "--out", "run"),
    *("--norm", "group", "--precision", "float64", "--image-size", "16"),
    *("--global-batch-size", "8", "--limit-train", "96", "--limit-test", "16"),
    *("--epochs", "2", "--lr", "0.01", "--checkpoint-every", "1"),
]
NUM_STEPS = 24
TOLERANCE = 1e-11
pytestmark = pytest.mark.timeout(900)  # many starts in one test


class Launcher:
    """torchrun, started in a folder that stands for its host's disk."""

    def __init__(self, command, folder, **environ):
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.run = Run(folder / "run")
        self.log = folder / f"{time.monotonic_ns()}.log"
        with self.log.open("w") as log:
            self.process = psutil.Popen(
                command,
                cwd=folder,
                env={**os.environ, **ENVIRON, **environ},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def steps(self):
        file = self.run.history_file
        return self.run.history.steps if file.exists() else []

    def wait_for(self, condition):
        small_commands.wait_for(condition, self.process, self.log.read_text)

    def wait_until_held(self, place, *, ranks):
        """Wait until so many ranks wait at the place where they are to wait."""
        self.wait_for(lambda: num_held(self.folder, place) == ranks)

    def ranks(self):
        found = []
        for child in self.process.children():
            with contextlib.suppress(psutil.Error):  # gone in this moment
                if "ddp_lab.train" in " ".join(child.cmdline()):
                    found.append(child)
        return found

    def kill(self):
        """The power goes: launcher and ranks at once."""
        family = [self.process, *self.process.children(recursive=True)]
        for process in family:
            process.kill()
        self.process.wait(LIMIT_S)

    def end(self):
        """Its status, and everything it said."""
        status = self.process.wait(LIMIT_S)
        return status, self.log.read_text()


@pytest.fixture
def start():
    """Start launchers that do not outlive the test."""
    launchers = []

    def start_one(*arguments, **environ):
        launchers.append(Launcher(*arguments, **environ))
        return launchers[-1]

    yield start_one
    for launcher in launchers:
        if launcher.process.is_running():
            launcher.kill()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run that nobody interrupts."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    run = small_commands.train_uninterrupted(TRAIN[2:], folder)
    assert [line["step"] for line in run.history.steps] == list(range(1, NUM_STEPS + 1))
    return run


def listens(port):
    with socket.socket() as caller:
        return caller.connect_ex(("127.0.0.1", port)) == 0


def without_times(run):
    times = ("time_s", "images_per_s")
    return [
        {k: v for k, v in line.items() if k not in times} for line in run.history.lines
    ]


def weights(run):
    return checkpoint.load(run.checkpoint_file)["model"]


def test_a_killed_rank_and_a_stopped_launcher(whole, start, tmp_path):
    """torchrun starts the ranks again by itself, and itself with the same command."""
    hold(tmp_path, "step 4")
    first = start([*ALONE, *TRAIN], tmp_path)
    first.wait_until_held("step 4", ranks=2)
    first.ranks()[1].kill()
    hold(tmp_path, "step 8")  # rank 0 goes on, and finds itself alone
    first.wait_until_held("step 8", ranks=2)
    assert len(first.run.environment["resumed"]) == 1
    first.process.send_signal(signal.SIGTERM)
    status, said = first.end()
    assert status != 0
    stopped = [line for line in said.splitlines() if "stopped by SIGTERM" in line]
    assert len(stopped) == 1, said
    step = first.run.history.steps[-1]["step"]
    assert f"after step {step}, in epoch" in stopped[0]
    assert stopped[0].endswith("; go on with --resume run")
    assert checkpoint.saved_steps(first.run.folder)[0] == step == 8

    let_go(tmp_path)
    status, said = start([*ALONE, *TRAIN], tmp_path).end()
    assert status == 0, said
    assert f"going on after step {step}," in said
    assert len(first.run.environment["resumed"]) == 2
    assert without_times(first.run) == without_times(whole)
    ours = weights(first.run)
    for name, tensor in weights(whole).items():
        assert torch.equal(ours[name], tensor), name


def test_a_host_goes_and_comes_back(whole, start, tmp_path):
    """Two launchers as two hosts, each with a disk of its own.

    The global batch stays what it is, so the curve does, on one rank and on two.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [
        *TORCHRUN,
        *("--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3"),
        *("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=x"),
        "--rdzv-conf=last_call_timeout=5,keep_alive_interval=1",
        *TRAIN,
    ]
    # Launchers share one store unless told not to, and say where it is in the first
    # round only: who joins a later one waits for that in vain (torch 2.14).
    own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    disks = tmp_path / "host1", tmp_path / "host2"
    for disk in disks:
        disk.mkdir()
        hold(disk, "step 3")
    first = start(command, disks[0], LOGLEVEL="INFO", **own_store)
    first.wait_for(lambda: listens(port))  # the place to meet is on the host that stays
    second = start(command, disks[1], **own_store)
    for launcher in (first, second):
        launcher.wait_until_held("step 3", ranks=1)
    assert len(first.steps[-1]["local"]) == 2
    second.kill()
    forget_held(disks[1])
    hold(disks[0], "step 6")  # the first goes on, and finds itself alone
    hold(disks[1], "nowhere")
    first.wait_until_held("step 6", ranks=1)
    assert len(first.steps[-1]["local"]) == 1
    joined = first.log.read_text().count("new nodes")
    second = start(command, disks[1], **own_store)
    first.wait_for(lambda: first.log.read_text().count("new nodes") > joined)
    let_go(disks[0])
    for launcher in (first, second):
        status, said = launcher.end()
        assert status == 0, said

    lines = first.run.history.lines
    assert [line["kind"] for line in lines] == [
        line["kind"] for line in whole.history.lines
    ]
    for line, expected in zip(lines, whole.history.lines, strict=True):
        assert line["step"] == expected["step"]
        assert line["loss"] == pytest.approx(expected["loss"], rel=TOLERANCE)
        assert line["accuracy"] == expected["accuracy"]
    ours = weights(first.run)
    for name, tensor in weights(whole).items():
        torch.testing.assert_close(ours[name], tensor, rtol=TOLERANCE, atol=TOLERANCE)
    # who worked at it: both, one, both; perhaps one before the second host was there
    sizes = [len(line["local"]) for line in first.run.history.steps]
    assert [size for size, _ in itertools.groupby(sizes)][-3:] == [2, 1, 2]
    # and each has the whole run on its own disk
    assert without_times(second.run) == without_times(first.run)
    for name, tensor in weights(second.run).items():
        assert torch.equal(tensor, ours[name]), name
