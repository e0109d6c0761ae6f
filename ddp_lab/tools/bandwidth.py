"""How fast is my network? All-reduces of growing size, timed where they will run.

    python -m ddp_lab.tools.bandwidth --num-ranks 2      ranks of its own, on this host
    torchrun --nnodes 2 ... -m ddp_lab.tools.bandwidth   joins torchrun's ranks
    srun python -m ddp_lab.tools.bandwidth               joins Slurm's

It uses nccl between GPUs (not run yet) and gloo between CPUs, as a training does.

Source: nccl-tests, doc/PERFORMANCE.md, for the two bandwidths
(https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md).
"""

import argparse
import re
import socket
import statistics
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from ddp_lab.errors import BadInput, LabError, lab_error_inside
from ddp_lab.figures import plot_bandwidth, save_picture
from ddp_lab.figures.network import bus_factor
from ddp_lab.ranks.launch import launch, leave_process
from ddp_lab.world import (
    check_joined,
    count_gpus,
    gather_json,
    gather_over_ranks,
    join_world,
    pick_device,
    read_ranks,
    speaks_for_all,
)

__all__ = ["fit_line", "main", "measure_all_reduce"]

_NAME = "ddp_lab.tools.bandwidth"
_NUM_WARMUPS = 5  # the first calls open connections
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
_SIZES = ["4K", "16K", "64K", "256K", "1M", "4M", "16M", "64M"]


def fit_line(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Fit ``seconds = latency_s + size / bytes_per_s``; each point counts in per cent.

    Args:
        sizes: bytes, at least two different ones.
        seconds: the time for each.

    Returns:
        ``latency_s``, 0 or more, and ``bytes_per_s``, infinite if more bytes took no
        longer.
    """
    # least squares of (latency + size * slope) / second - 1
    rows = [(1 / t, size / t) for size, t in zip(sizes, seconds, strict=True)]
    a, b = (sum(row[i] for row in rows) for i in (0, 1))
    aa, ab, bb = (sum(r[i] * r[j] for r in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    latency = (a * bb - b * ab) / (aa * bb - ab * ab)
    slope = (b * aa - a * ab) / (aa * bb - ab * ab)
    if latency < 0:
        latency, slope = 0.0, b / bb
    return (latency, 1 / slope) if slope > 0 else (a / aa, float("inf"))


def measure_all_reduce(
    sizes: Sequence[int], num_repeats: int = 20, device: str = "auto"
) -> dict[str, Any]:
    """Time all-reduces of each size among the ranks of this run.

    Args:
        sizes: bytes of the tensor, each a multiple of 4 (it holds float32).
        num_repeats: calls that are timed for each size, back to back.
        device: ``auto``, ``cpu`` or ``cuda``, see `ddp_lab.world.pick_device`.

    Returns:
        The same on all ranks: ``num_ranks``, ``num_hosts``, ``backend``, and
        ``seconds``: for each size the time of each call, a mean over the ranks.

    Raises:
        BadInput: this rank is alone.

    **Collective**: all ranks of the run call it, with no process group open.
    **Cost**: ``num_repeats`` + 5 all-reduces of each size.
    """
    ranks = read_ranks()
    if ranks is None or ranks["world_size"] < 2:
        raise BadInput("one rank has nobody to send to: start 2 or more")
    seconds = {}
    with join_world(device=device) as world:
        for size in sizes:
            tensor = torch.zeros(size // 4, device=world.device)
            _time_calls(tensor, _NUM_WARMUPS)
            dist.barrier()
            own = torch.tensor(_time_calls(tensor, num_repeats), device=world.device)
            seconds[size] = gather_over_ranks(own).mean(dim=0).tolist()
        hosts = gather_json(socket.gethostname(), world.device)
    return {
        "num_ranks": world.world_size,
        "num_hosts": len(set(hosts)),
        "backend": world.backend,
        "seconds": seconds,
    }


def _time_calls(tensor: torch.Tensor, num_calls: int) -> list[float]:
    """Seconds from the end of each call to the end of the next, on this rank."""
    if tensor.is_cuda:  # a call returns before it is done: the GPU takes the time
        events = [torch.cuda.Event(enable_timing=True) for _ in range(num_calls + 1)]
        events[0].record()
        for event in events[1:]:
            dist.all_reduce(tensor)
            event.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) / 1000 for start, end in pairwise(events)]
    times = [time.perf_counter()]
    for _ in range(num_calls):
        dist.all_reduce(tensor)
        times.append(time.perf_counter())
    return [end - start for start, end in pairwise(times)]


def _table(found: dict[str, Any], fit: tuple[float, float] | None) -> str:
    """A line for each size, and the fit."""
    num_ranks, backend = found["num_ranks"], found["backend"]
    factor, hops = bus_factor(num_ranks), 2 * (num_ranks - 1)
    lines = [
        f"all-reduce on {num_ranks} ranks, {backend}, hosts: {found['num_hosts']}",
        f"{'KB':>8}{'ms: median':>13}{'middle half':>20}"
        f"{'algbw GB/s':>13}{'busbw GB/s':>13}",
    ]
    for size, seconds in found["seconds"].items():
        low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
        middle, speed = f"{1e3 * low:.3f} - {1e3 * high:.3f}", size / median / 1e9
        lines.append(
            f"{size / 1024:8g}{1e3 * median:13.3f}{middle:>20}"
            f"{speed:13.3f}{factor * speed:13.3f}"
        )
    if fit:
        latency_s, bytes_per_s = fit
        bus = factor * bytes_per_s
        lines.append(
            f"fit: {1e6 * latency_s:.0f} us + size / ({bytes_per_s / 1e9:.2f} GB/s)\n"
            f"as a ring: {1e6 * latency_s / hops:.0f} us a hop, of {hops}; links of "
            f"{bus / 1e9:.2f} GB/s = {8 * bus / 1e9:.1f} Gbit/s"
        )
    return "\n".join(lines)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise BadInput(f"{message}; see --help")


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+)([KMG]?)B?", text.upper())
    size = int(match[1]) * _UNITS[match[2]] if match else 0
    if size < 4 or size % 4:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size like 512, 4K or 16M")
    return size


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 2 on")
    return int(text)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(prog=f"python -m {_NAME}", description=(__doc__ or "")[:79])
    add = parser.add_argument
    told = f"bytes of the tensor; K, M, G: times 1024: {' '.join(_SIZES)}"
    add("--sizes", nargs="+", type=_size, metavar="SIZE", help=told)
    parser.set_defaults(sizes=[*map(_size, _SIZES)])
    add("--repeats", type=_count, default=20, help="timed calls of each size: 20")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--num-ranks", type=_count, help="ranks to start here: one a GPU, else 2")
    add("--out", type=Path, metavar="FILE.png", help="draw the times, and the fit")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit status.

    0: measured; 1: a rank failed; 2: bad input, nothing was started; 130: interrupted.
    """
    try:
        options = _parse(sys.argv[1:] if arguments is None else arguments)
        ranks = read_ranks()
        speaks = speaks_for_all()
        out = options.out if speaks else None
        if out and not (out.suffix == ".png" and out.absolute().parent.is_dir()):
            raise BadInput(f"out {out}: name a .png in a folder that is there")
        task = sorted(set(options.sizes)), options.repeats, options.device
        if ranks is None:
            num_ranks = options.num_ranks or max(2, count_gpus(options.device))
            pick_device(options.device, local_world_size=num_ranks)
            found = launch(measure_all_reduce, *task, num_ranks=num_ranks)[0]
        else:
            check_joined(options.num_ranks, ranks["world_size"])
            found = measure_all_reduce(*task)
        if speaks:
            medians = {s: statistics.median(t) for s, t in found["seconds"].items()}
            fit = (
                fit_line([*medians], [*medians.values()]) if len(medians) > 1 else None
            )
            print(_table(found, fit), flush=True)
            if out:
                save_picture(
                    plot_bandwidth(found["seconds"], found["num_ranks"], fit), out
                )
    except LabError as error:
        cause = lab_error_inside(error)
        print(f"{_NAME}: {cause}", file=sys.stderr, flush=True)
        return cause.exit_status
    except KeyboardInterrupt:
        print(f"{_NAME}: interrupted, all ranks are stopped", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    leave_process(record(main)() or 0)
