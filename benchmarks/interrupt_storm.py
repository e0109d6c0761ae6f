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
import signal
import sys
import threading
import time
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from ddp_lab.launch import launch

HELPERS = ("resource_tracker", "forkserver import main")


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
    """Living processes under this one, without multiprocessing's own helpers."""
    found = psutil.Process().children(recursive=True)
    return [p for p in found if not any(h in " ".join(p.cmdline()) for h in HELPERS)]


def left_behind(shared_memory: set[str]) -> dict[str, int]:
    """What is there 5 s after a launch at the latest, and should not be."""
    end = time.monotonic() + 5.0
    while children() and time.monotonic() < end:
        time.sleep(0.05)
    connections = psutil.Process().net_connections("inet")
    return {
        "processes": len(children()),
        "ports": sum(c.status == psutil.CONN_LISTEN for c in connections),
        "shared memory": len(segments() - shared_memory),
    }


def segments() -> set[str]:
    folder = Path("/dev/shm")
    return {p.name for p in folder.glob("*torch*")} if folder.exists() else set()


def storm(rounds: int, start_method: str, seed: int) -> dict[str, int]:
    """Interrupt that many launches; return what was left, added up."""
    random.seed(seed)
    launch(leave_soon, start_method=start_method)  # what is imported once
    shared_memory = segments()
    total = {"interrupted": 0}
    for _ in range(rounds):
        fn = random.choice(FUNCTIONS)
        timer = threading.Timer(
            random.uniform(0.0, 2.5), os.kill, (os.getpid(), signal.SIGINT)
        )
        try:
            timer.start()
            launch(fn, start_method=start_method, timeout_s=60)
            timer.join()  # it came too late: take the interrupt here
            time.sleep(0.01)
        except KeyboardInterrupt:
            total["interrupted"] += 1
        for name, count in left_behind(shared_memory).items():
            total[name] = total.get(name, 0) + count
    assert launch(os.getpid, start_method=start_method)
    return total


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("rounds", type=int, nargs="?", default=100)
    parser.add_argument("--start-method", default="forkserver")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    # a shell's background job ignores interrupts
    signal.signal(signal.SIGINT, signal.default_int_handler)
    before = time.monotonic()
    total = storm(options.rounds, options.start_method, options.seed)
    seconds = time.monotonic() - before
    print(f"{options.rounds} rounds in {seconds:.0f} s:", total)
    return int(any(count for name, count in total.items() if name != "interrupted"))


if __name__ == "__main__":
    sys.exit(main())
