"""How long does it take to run a function on two ranks?

    python benchmarks/launch_latency.py --repeats 10

Four ways, interleaved in one run:

    torch spawn     torch.multiprocessing.spawn, which returns no values
    launch          launch()
    Workers         Workers(2).run(): the processes stay
    Workers, init   Workers(2, init=True).run(): the process group stays too

and two functions. ``touch`` makes one tensor, so that a new process has to import
torch. ``meet`` opens a process group (unless it is open), sums one number over the
ranks, and leaves. Each time is that of the whole call, as the caller waits for it. The
very first call of a way, which starts the workers, is told apart.
"""

import argparse
import functools
import os
import socket
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from common import describe_machine, spread, table, write_results

from ddp_lab.ranks.launch import launch
from ddp_lab.ranks.workers import Workers

WARM_CALLS = 10  # of ways that start no process, in each repeat

Call = Callable[[Callable[[], Any]], Any]


def touch() -> None:
    """Make one tensor."""
    torch.ones(1)


def meet() -> float:
    """Sum one number over the ranks."""
    ours = not dist.is_initialized()
    if ours:
        dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    if ours:
        dist.destroy_process_group()
    return total.item()


def torch_spawn(fn: Callable[[], Any], num_ranks: int) -> None:
    """What a script writes that uses torch alone."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(
        on_spawned_rank, (fn, num_ranks, port), nprocs=num_ranks
    )


def on_spawned_rank(
    rank: int, fn: Callable[[], Any], num_ranks: int, port: int
) -> None:
    """Set what `init_process_group` reads, and call the function."""
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    torch.set_num_threads(1)
    fn()


@functools.cache
def kept(num_ranks: int, init: bool) -> Workers:
    """A set of ranks, started by its first call; it ends with this process."""
    return Workers(num_ranks, init=init)


def all_ways(num_ranks: int) -> dict[str, Call]:
    """What calls a function on the ranks, by name."""
    return {
        "torch spawn": lambda fn: torch_spawn(fn, num_ranks),
        "launch": lambda fn: launch(fn, num_ranks=num_ranks),
        "Workers": lambda fn: kept(num_ranks, False).run(fn),
        "Workers, init": lambda fn: kept(num_ranks, True).run(fn),
    }


def measure(num_ranks: int, repeats: int) -> tuple[dict[str, Any], dict[str, float]]:
    """Milliseconds of each call by way and function, and of each way's first call."""
    ways = all_ways(num_ranks)
    first = {name: time_ms(call, touch) for name, call in ways.items()}
    found: dict[str, dict[str, list[float]]] = {
        name: {"touch": [], "meet": []} for name in ways
    }
    for _ in range(repeats):
        for name, call in ways.items():
            num_calls = WARM_CALLS if name.startswith("Workers") else 1
            for fn in (touch, meet):
                times = [time_ms(call, fn) for _ in range(num_calls)]
                found[name][fn.__name__] += times
    return found, first


def time_ms(call: Call, fn: Callable[[], Any]) -> float:
    """Milliseconds of one call."""
    start = time.perf_counter()
    call(fn)
    return (time.perf_counter() - start) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num-ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=10, help="of each way")
    parser.add_argument("--dry", action="store_true", help="write no results file")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    found, first = measure(options.num_ranks, options.repeats)
    times_ms = {
        way: {fn: spread(times) for fn, times in by_fn.items()}
        for way, by_fn in found.items()
    }
    header = ["way", "touch, ms: median (range)", "meet, ms", "first touch, ms"]
    rows = []
    for way, by_fn in times_ms.items():
        cells = [text(by_fn[fn]) for fn in ("touch", "meet")]
        rows.append([way, *cells, f"{first[way]:.0f}"])
    print(table(header, rows))
    if not options.dry:
        results = {
            "machine": describe_machine(num_ranks=options.num_ranks, load=load),
            "settings": vars(options),
            "times_ms": times_ms,
            "first_call_ms": first,
            "all_times_ms": found,
        }
        print(f"written to {write_results('launch_latency', results)}")


def text(times: dict[str, float]) -> str:
    """A median and its range, with as many digits as mean something."""
    digits = 0 if times["median"] >= 100 else 1
    low, middle, high = (f"{times[k]:.{digits}f}" for k in ("min", "median", "max"))
    return f"{middle} ({low}-{high})"


if __name__ == "__main__":
    main()
