"""Interrupt `launch` at random moments and count what is left behind.

    python benchmarks/interrupt_storm.py 100

Each round starts two ranks that compute, wait in a collective, or sit in a DataLoader,
and presses Ctrl-C after a random time: also while the ranks are being started, and
while they end. After it no process, no listening port and no shared memory may be
left, and the next launch has to work. Prints one line with the counts; exits with 1
if anything was left.
"""

import argparse
import os
import random
import re
import signal
import sys
import threading
import time
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from ddp_lab.ranks.launch import launch

HELPER = "resource_tracker"
SHARED = Path("/dev/shm")


def compute() -> None:
    while True:
        torch.ones(200, 200) @ torch.ones(200, 200)


def wait_for_each_other() -> None:
    dist.init_process_group("gloo")
    dist.recv(torch.ones(1), 1 - dist.get_rank())


def load() -> None:
    for _ in DataLoader(range(10**9), num_workers=1):
        pass


def leave_soon() -> None:
    time.sleep(0.1)


FUNCTIONS = [compute, wait_for_each_other, load, leave_soon]


def children() -> list[psutil.Process]:
    """Living processes under this one, without multiprocessing's own helper."""
    found = psutil.Process().children(recursive=True)
    return [p for p in found if HELPER not in " ".join(p.cmdline())]


def note_children(pids: set[int]) -> None:
    """Keep a list of all that were started, as shared memory is named after them."""
    while True:
        pids |= {process.pid for process in psutil.Process().children(recursive=True)}
        time.sleep(0.02)


def left_behind(pids: set[int]) -> dict[str, int]:
    """What is there 5 s after a launch at the latest, and should not be."""
    end = time.monotonic() + 5.0
    while children() and time.monotonic() < end:
        time.sleep(0.05)
    connections = psutil.Process().net_connections("inet")
    return {
        "processes": len(children()),
        "ports": sum(c.status == psutil.CONN_LISTEN for c in connections),
        "shared memory": len(segments(pids)),
    }


def segments(pids: set[int]) -> list[Path]:
    """Shared memory that these processes have made: ``torch_PID_...``."""
    made = [(path, re.match(r"torch_(\d+)_", path.name)) for path in SHARED.glob("*")]
    return [path for path, found in made if found and int(found[1]) in pids]


def storm(rounds: int, seed: int) -> dict[str, int]:
    """Interrupt that many launches; return what was left, added up."""
    random.seed(seed)
    launch(leave_soon)  # what is imported once
    pids = {os.getpid()}
    threading.Thread(target=note_children, args=(pids,), daemon=True).start()
    total = {"interrupted": 0}
    for _ in range(rounds):
        fn = random.choice(FUNCTIONS)
        timer = threading.Timer(
            random.uniform(0.0, 2.5), os.kill, (os.getpid(), signal.SIGINT)
        )
        try:
            timer.start()
            launch(fn, timeout_s=60)
            timer.join()  # it came too late: take the interrupt here
            time.sleep(0.01)
        except KeyboardInterrupt:
            total["interrupted"] += 1
        for name, count in left_behind(pids).items():
            total[name] = total.get(name, 0) + count
    assert launch(os.getpid)
    return total


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("rounds", type=int, nargs="?", default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    # a shell's background job ignores interrupts
    signal.signal(signal.SIGINT, signal.default_int_handler)
    before = time.monotonic()
    total = storm(options.rounds, options.seed)
    seconds = time.monotonic() - before
    print(f"{options.rounds} rounds in {seconds:.0f} s:", total)
    return int(any(count for name, count in total.items() if name != "interrupted"))


if __name__ == "__main__":
    sys.exit(main())
