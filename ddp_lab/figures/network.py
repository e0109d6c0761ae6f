"""What a network costs: measured all-reduces, and what is to be expected.

A ring all-reduce of S bytes on n ranks makes 2 (n - 1) hops, one after the other. On
each, every rank sends S / n bytes to its neighbour and receives as many:

    time = 2 (n - 1) x latency + 2 (n - 1) / n x S / bandwidth

The second part nearly stays as ranks are added, the first grows with them.
"""

from collections.abc import Mapping, Sequence
from statistics import quantiles
from typing import TYPE_CHECKING, Any

from ddp_lab.figures.drawing import FAINT, INK, in_style, num_bytes_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Link", "bus_factor", "plot_bandwidth", "plot_network_cost", "ring_seconds"]

_MEASURED, _HIDDEN = "#D55E00", "#009E73"  # no colours of ranks that are drawn here

Link = tuple[float, float, int]
"""Bits a second, seconds of latency a hop, and how many ranks it can join."""


def bus_factor(num_ranks: int) -> float:
    """Return bus bandwidth / algorithm bandwidth of an all-reduce on ``num_ranks``.

    The algorithm bandwidth is size / time. Each of n ranks has to send at least
    2 (n - 1) / n times the size, so that many times more is what its link carries.

    Source: nccl-tests, doc/PERFORMANCE.md, "AllReduce"
    (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md).
    """
    return 2 * (num_ranks - 1) / num_ranks


def ring_seconds(
    num_bytes: float, num_ranks: int, bits_per_s: float, latency_s: float = 0.0
) -> float:
    """Return how long a ring all-reduce takes at least.

    Args:
        num_bytes: of the tensor, the same on each rank.
        num_ranks: in the ring, each with a link to the next one.
        bits_per_s: of a link, in each direction.
        latency_s: of a hop: from a message's start until its first byte is there.

    Source: Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for
    clusters of workstations" (https://doi.org/10.1016/j.jpdc.2008.09.002).
    """
    bytes_a_link = bus_factor(num_ranks) * num_bytes
    return 2 * (num_ranks - 1) * latency_s + bytes_a_link * 8 / bits_per_s


def plot_bandwidth(
    seconds: Mapping[int, Sequence[float]],
    num_ranks: int,
    fit: tuple[float, float] | None = None,
) -> "Figure":
    """Draw what all-reduces took against their size, and the bus bandwidth below.

    Args:
        seconds: from the tensor's bytes to the times of several calls, 2 or more: the
            dot is the median, the bar spans the middle half.
        num_ranks: that took part.
        fit: ``latency_s, bytes_per_s`` of ``latency + size / bandwidth``, drawn as a
            line.
    """
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    sizes = sorted(seconds)
    factor = bus_factor(num_ranks)
    parts = [quantiles(seconds[size], n=4, method="inclusive") for size in sizes]
    with in_style():
        size = (6.4, 4.4)
        figure, (top, bottom) = pyplot.subplots(2, 1, sharex=True, figsize=size)
        dots: dict[str, Any] = {"fmt": "o", "color": _MEASURED, "markersize": 4}
        ms = [[1e3 * t for t in part] for part in parts]
        bars = [[m - low for low, m, _ in ms], [high - m for _, m, high in ms]]
        label = "median, middle half"
        top.errorbar(sizes, [m for _, m, _ in ms], yerr=bars, label=label, **dots)
        pairs = zip(sizes, parts, strict=True)
        speeds = [[factor * s / t / 1e9 for t in part] for s, part in pairs]
        bars = [[m - low for _, m, low in speeds], [high - m for high, m, _ in speeds]]
        bottom.errorbar(sizes, [m for _, m, _ in speeds], yerr=bars, **dots)
        title = f"What {len(sizes)} sizes took on {num_ranks} ranks"
        if fit:
            latency_s, bytes_per_s = fit
            curve = [sizes[0] * (sizes[-1] / sizes[0]) ** (k / 99) for k in range(100)]
            times = [latency_s + s / bytes_per_s for s in curve]
            line: dict[str, Any] = {"color": INK, "linewidth": 1, "zorder": 0}
            label = f"{1e3 * latency_s:.3g} ms + size / ({bytes_per_s / 1e9:.3g} GB/s)"
            top.plot(curve, [1e3 * t for t in times], label=label, **line)
            bus = [factor * s / t / 1e9 for s, t in zip(curve, times, strict=True)]
            bottom.plot(curve, bus, **line)
            title = (
                f"Below {num_bytes_text(latency_s * bytes_per_s)} a message costs its "
                "latency, above its bytes"
            )
        for axes in (top, bottom):
            axes.set_xscale("log", base=2)
        top.set_yscale("log")
        top.yaxis.set_major_formatter(FuncFormatter(lambda ms, _: f"{ms:g}"))
        bottom.set_ylim(bottom=0)
        bottom.xaxis.set_major_locator(LogLocator(base=16, numticks=12))
        bottom.xaxis.set_minor_locator(NullLocator())
        in_words = FuncFormatter(lambda size, _: num_bytes_text(size))
        bottom.xaxis.set_major_formatter(in_words)
        top.set(ylabel="time (ms, log scale)", title=title)
        bottom.set(
            ylabel="bus bandwidth (GB/s)", xlabel="size of the tensor (log scale)"
        )
        top.legend(loc="upper left")
    return figure


def plot_network_cost(
    num_bytes: float,
    links: Mapping[str, Link],
    backward_s: float,
    measured: Mapping[int, float] | None = None,
) -> "Figure":
    """Draw how long a ring all-reduce takes against the number of ranks.

    A line ends where its kind of link does; the dashed one is the part of the latency,
    for the slowest of them to answer. What lies in the band can be hidden behind the
    backward pass, but for the last bucket.

    Args:
        num_bytes: of all gradients.
        links: name -> bits a second, latency of a hop in seconds, most ranks.
        backward_s: how long the backward pass of a step takes.
        measured: number of ranks -> seconds, drawn as dots.
    """
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter, NullLocator

    most = max(ranks for _, _, ranks in links.values())
    with in_style():
        figure, axes = pyplot.subplots(figsize=(6.4, 4.2))
        band: dict[str, Any] = {"color": _HIDDEN, "alpha": 0.12, "linewidth": 0}
        label = f"hidden by a backward pass of {1e3 * backward_s:g} ms"
        axes.axhspan(0, 1e3 * backward_s, label=label, **band)
        for name, (bits_per_s, latency_s, last) in links.items():
            ranks = range(2, last + 1)
            times = [ring_seconds(num_bytes, n, bits_per_s, latency_s) for n in ranks]
            axes.plot(ranks, [1e3 * t for t in times], color=FAINT)
            place: dict[str, Any] = {"va": "center", "ha": "left"}
            if last < most:  # inside the picture, above its line
                place = {"va": "bottom", "ha": "right"}
            end = last * (1.06 if last == most else 1), 1.1e3 * times[-1]
            axes.text(*end, name, fontsize=8, **place)
        longest = max(latency_s for _, latency_s, _ in links.values())
        late = [1e3 * ring_seconds(0, n, 1, longest) for n in range(2, most + 1)]
        label = f"latency alone, {1e6 * longest:g} µs a hop"
        axes.plot(range(2, most + 1), late, "--", color=INK, linewidth=1, label=label)
        if measured:
            dots = [1e3 * s for s in measured.values()]
            axes.plot([*measured], dots, "o", color=_MEASURED, label="measured")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.xaxis.set_minor_locator(NullLocator())
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        axes.set_xlim(1.9, most * 1.1)
        axes.set_xlabel("ranks in the ring (log scale)")
        axes.set_ylabel(f"all-reduce of {num_bytes / 1e6:.1f} MB (ms, log scale)")
        axes.set_title("The link decides; more ranks cost little, until latency counts")
        axes.legend(loc="lower right", fontsize=8)
    return figure
