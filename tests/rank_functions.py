"""Functions that the tests run on ranks, importable by name in a spawned process."""

import atexit
import ctypes
import datetime
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from ddp_lab.ranks.launch import send_record


def who_am_i() -> tuple[int, int]:
    """Rank and world size, as torchrun's variables say."""
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def sum_of_ranks() -> float:
    """0 + 1 + ... by all-reduce; the group is opened by launch(init=True)."""
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    return total.item()


def meet_and_sum() -> float:
    """Open a group, use it, and leave it open, as a script would."""
    dist.init_process_group("gloo")
    return sum_of_ranks()


def environment() -> dict[str, Any]:
    """What a rank finds when it starts."""
    return {
        "variables": {k: v for k, v in os.environ.items() if k.isupper()},
        "threads": torch.get_num_threads(),
        "cuda": torch.cuda.is_initialized(),
        "main": sorted(k for k in vars(sys.modules["__main__"]) if k[0] != "_"),
    }


def step_one_weight(model: torch.nn.Module, data: torch.Tensor) -> dict[str, Any]:
    """One step of SGD, and a write into the data."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    data[int(os.environ["RANK"])] = 7.0
    dist.barrier()  # a shared weight would now have been stepped by both ranks
    return {"weight": model.weight, "data": data.clone(), "model": model}


def print_all_ways() -> None:
    """Write to both streams, as Python, as C and as a progress bar does."""
    rank = os.environ["RANK"]
    print(f"first from {rank}")
    print(f"warning from {rank}", file=sys.stderr)
    os.write(1, f"raw from {rank}\n".encode())
    for percent in (0, 50, 100):
        print(f"\r{percent} %", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    print(f"ünïcode from {rank}, no end", end="")


def print_and_die() -> None:
    """Rank 1 writes a line, and is killed at once."""
    if os.environ["RANK"] == "1":
        print("last words")
        os.kill(os.getpid(), signal.SIGKILL)


def fill_memory_and_die(num_bytes: int, asked: Path) -> None:
    """What the system does to the greediest process when memory runs out."""
    if os.environ["RANK"] == "1":
        memory = bytearray(num_bytes)
        memory[::4096] = b"x" * len(memory[::4096])
        wait_for(asked)
        os.kill(os.getpid(), signal.SIGKILL)


def print_much(num_lines: int) -> None:
    """Write as fast as Python can."""
    rank = os.environ["RANK"]
    for line in range(num_lines):
        print(f"line {line} of rank {rank}, with some text to fill it up")


def send_records() -> None:
    """Three records a rank."""
    for step in range(3):
        send_record(step=step, loss=torch.tensor(0.5))


def fail_as(how: str) -> None:
    """Rank 1 fails in one of many ways while rank 0 waits for it."""
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        if how == "raise":
            raise ValueError("boom")
        if how == "_exit":
            os._exit(0)
        os.kill(os.getpid(), getattr(signal, how))
        time.sleep(60)
    dist.all_reduce(torch.ones(1))


def fail_alone(how: str) -> None:
    """Rank 1 fails, and rank 0 does not need it."""
    if os.environ["RANK"] == "1":
        if how == "exit":
            sys.exit(3)
        if how == "interrupt":
            raise KeyboardInterrupt
        raise ConnectionRefusedError("Connection refused by the data server")


def wait_for(path: Path) -> None:
    """Until the test, or another rank, has made a file."""
    while not path.exists():
        time.sleep(0.01)


def rank_0_leaves_first(gone: Path) -> str:
    """The store must outlive it: the last rank still asks it something."""
    dist.init_process_group("gloo")
    dist.barrier()
    if dist.get_rank() == 0:
        dist.destroy_process_group()
        gone.touch()
        return "gone"
    wait_for(gone)
    store = dist.distributed_c10d._get_default_store()
    store.set("name", "value")
    return store.get("name").decode()


def give_up_after(seconds: float) -> None:
    """A deadlock with a time limit of torch's own."""
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=seconds))
    dist.recv(torch.ones(1), 1 - dist.get_rank())


def hold_the_lock() -> None:
    """Rank 1 sits in native code and never lets another Python thread run."""
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        ctypes.PyDLL(None).sleep(3600)
    dist.barrier()


def leave_things_behind(folder: Path) -> None:
    """Each rank starts processes; rank 0 returns, rank 1 is killed."""
    rank = os.environ["RANK"]
    loose = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    forked = (
        os.fork()
    )  # holds the ends of the rank's channels, as a pool's process does
    if forked == 0:
        time.sleep(1000)
    (folder / rank).write_text(f"{loose.pid} {forked}")
    if rank == "1":
        wait_for(folder / "0")
        os.kill(os.getpid(), signal.SIGKILL)


def leave_work_to_others(folder: Path) -> None:
    """A thread and an exit hook go on after the function has returned."""
    rank = os.environ["RANK"]

    def write_late() -> None:
        wait_for(folder / f"returned{rank}")
        (folder / f"thread{rank}").touch()
        print("late", flush=True)

    threading.Thread(target=write_late).start()
    atexit.register((folder / f"hook{rank}").touch)
    threading._register_atexit((folder / f"returned{rank}").touch)  # type: ignore[attr-defined]


def leave_a_thread_that_never_ends() -> None:
    threading.Thread(target=time.sleep, args=(1000,)).start()


class OnlyHere:
    """Cannot be rebuilt where no rank is."""

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuild_on_a_rank, ()


def rebuild_on_a_rank() -> str:
    return os.environ["RANK"]


class Unpicklable(Exception):
    """Needs two arguments, and pickle only gives it one."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


def fail_alike() -> None:
    """Every rank makes the same mistake."""
    raise Unpicklable(1, 2)


def lie_in_wait(folder: Path) -> None:
    """Meet, say so, and wait until the test says go on."""
    dist.init_process_group("gloo")
    dist.barrier()
    (folder / f"rank{dist.get_rank()}").touch()
    wait_for(folder / "go")


# Ten ways to get stuck. Each leaves the group open, as a script that hangs would.


def rank_0_only() -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1))  # HERE
    time.sleep(0.01)


def barrier_missed() -> None:
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() != 1:
        dist.barrier()  # HERE


def other_order() -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1))  # HERE
        dist.broadcast(torch.ones(1), 0)
    else:
        dist.broadcast(torch.ones(1), 0)  # HERE TOO
        dist.all_reduce(torch.ones(1))


def shapes_differ() -> None:
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(4 if dist.get_rank() else 400_000))  # HERE


def uneven_batches() -> None:
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
    for _ in range(3 if dist.get_rank() == 0 else 2):
        model(torch.ones(1, 1)).sum().backward()  # HERE


def returned_early() -> None:
    dist.init_process_group("gloo")
    for step in range(3):
        if dist.get_rank() == 1 and step == 2:
            dist.destroy_process_group()
            return
        dist.all_reduce(torch.ones(1))  # HERE


def raised(enough: Path) -> None:
    """Rank 0 has waited for long when rank 1, after much work, fails."""
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        compute_until(enough)
        raise RuntimeError("cannot write the result")  # HERE TOO
    dist.all_reduce(torch.ones(1))  # HERE


def endless_loop() -> None:
    dist.init_process_group("gloo")
    step = 0
    while dist.get_rank() == 1:
        step += 1  # HERE TOO
    dist.all_reduce(torch.ones(1))  # HERE


def recv_without_send() -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        dist.recv(torch.ones(1), 1)  # HERE


def other_place(port: int) -> None:
    """Nobody listens there: `launch` has set these already, as torchrun does."""
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = str(port)
    dist.init_process_group("gloo")  # HERE


def other_world_size() -> None:
    dist.init_process_group("gloo", world_size=3)  # HERE


def compute_until(enough: Path) -> None:
    """One native call after another."""
    matrix = torch.ones(400, 400)
    while not enough.exists():
        matrix = (matrix @ matrix).clamp(max=1.0)


# What looks like a standstill, and may end by itself ---------------------------------


def sleep_until(enough: Path) -> None:
    while not enough.exists():
        time.sleep(0.2)


def wait_for_a_child(enough: Path) -> None:
    """Its CPU time is not this process's."""
    subprocess.run(["sh", "-c", f"until [ -e {enough} ]; do :; done"], check=True)


def read_a_line(enough: Path) -> None:
    """A pipe that nobody has written to yet: a person at input(), a slow server."""
    child = subprocess.Popen(
        ["sh", "-c", f"until [ -e {enough} ]; do sleep 0.1; done; echo here"],
        stdout=subprocess.PIPE,
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"here\n"


class SlowStorage(Dataset[int]):
    """A loader's process waits for it, and this one for the loader."""

    def __init__(self, enough: Path) -> None:
        self.enough = enough

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        wait_for(self.enough)
        return index


def load_from_slow_storage(enough: Path) -> None:
    assert len(list(DataLoader(SlowStorage(enough), num_workers=1))) == 2


def await_a_lock(enough: Path) -> None:
    """Another thread has it."""
    lock = threading.Lock()
    lock.acquire()

    def let_go() -> None:
        wait_for(enough)
        lock.release()

    threading.Thread(target=let_go).start()
    lock.acquire()


HONEST = {
    fn.__name__: fn
    for fn in (
        compute_until,
        sleep_until,
        wait_for_a_child,
        read_a_line,
        load_from_slow_storage,
        await_a_lock,
    )
}


def wait_honestly(name: str, enough: Path) -> str:
    """Rank 0 waits in a barrier for rank 1, which takes its time, or has gone ahead."""
    dist.init_process_group("gloo")
    others = dist.new_group([0, 1])
    if dist.get_rank() == 0:
        dist.barrier(others)
        dist.all_reduce(torch.ones(1))
        return "waited"
    under_way = dist.all_reduce(torch.ones(1), async_op=True)
    HONEST[name](enough)
    dist.barrier(others)
    under_way.wait()
    return name


def raise_and_clean_up(clean_up: str) -> None:
    """Rank 1's exception waits behind a clean-up that does not end."""
    dist.init_process_group("gloo")
    try:
        if dist.get_rank() == 1:
            raise ValueError("boom")  # HERE
        dist.all_reduce(torch.ones(1))  # HERE TOO
    finally:
        if clean_up == "sleep":
            time.sleep(3600)
        dist.broadcast(torch.ones(1), 0)  # as nccl's destroy_process_group may wait


def drop_a_handle() -> None:
    """A message whose handle is dropped may never arrive."""
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        dist.isend(torch.ones(2_000_000), 1)
    else:
        dist.barrier()
        dist.recv(torch.ones(2_000_000), 0)
        return
    dist.barrier()
    dist.barrier()
