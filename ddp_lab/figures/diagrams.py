"""Who holds what, samples, parameters and memory; and which rank is on which host."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ddp_lab.figures.drawing import (
    FAINT,
    INK,
    draw_cell,
    in_style,
    num_bytes_text,
    rank_colour,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

__all__ = ["plot_buckets", "plot_hosts", "plot_memory", "plot_shards"]

_MOST_SAMPLES = 64
_MOST_HOSTS, _MOST_RANKS = 4, 16
_MB = 2**20
# Not ranks, so not their colours: greys for what stays, bright for what grows.
_FIXED = {"parameters": "#222222", "gradients": "#858585", "optimiser": "#d0d0d0"}
_GROWING = {"activations": "#AA3377", "other": "#EEC5D8"}
_THIN = 0.02  # of the picture's height; what is thinner has no colour to be seen


def plot_shards(
    shards: Sequence[Sequence[Iterable[int]]],
    num_samples: int | None = None,
    *,
    batch_size_per_rank: int = 1,
    title: str | None = None,
) -> "Figure":
    """Draw which rank gets which sample, one row an epoch.

    The colour of a sample is that of its rank, and the number in it the step in which
    it is seen. A sample that is seen several times has a stripe for each, with its
    rank's colour and its step; one that nobody sees is empty.

    Args:
        shards: ``shards[epoch][rank]``, the sample indices of a rank in their order:
            ``[[list(sampler) for sampler in samplers] for epoch in ...]``.
        num_samples: of the data set, at most 64; by default up to the largest index.
        batch_size_per_rank: samples that a rank sees in one step.
        title: one sentence; by default it counts what was seen twice and not at all.
    """
    from matplotlib import pyplot

    epochs = [[list(indices) for indices in ranks] for ranks in shards]
    if num_samples is None:
        num_samples = 1 + max((i for e in epochs for own in e for i in own), default=0)
    if num_samples > _MOST_SAMPLES:
        raise ValueError(
            f"{num_samples} samples are too many to draw: take {_MOST_SAMPLES} or less"
        )
    seen = [_who_sees(ranks, num_samples) for ranks in epochs]
    num_rows = 1 + (num_samples - 1) // 32  # a long epoch is broken into two rows
    width = -(-num_samples // num_rows)
    height = len(epochs) * (num_rows + 0.25)
    with in_style(**{"axes.grid": False}):
        size = (6.4, min(4.6, 1.25 + 0.42 * height))
        figure, axes = pyplot.subplots(figsize=size)
        for epoch, samples in enumerate(seen):
            for sample, visits in enumerate(samples):
                row, x = divmod(sample, width)
                y = epoch * (num_rows + 0.25) + row
                draw_cell(axes, x, y, [rank_colour(rank) for rank, _ in visits])
                steps = [1 + place // batch_size_per_rank for _, place in visits]
                _write_steps(axes, x, y, steps, num_cells=width)
        axes.set_xlim(-0.6, width - 0.4)
        axes.set_ylim(height - 0.6, -0.6)
        middle = (num_rows - 1) / 2
        axes.set_yticks(
            [epoch * (num_rows + 0.25) + middle for epoch in range(len(epochs))],
            [f"epoch {epoch}" for epoch in range(len(epochs))],
        )
        every = 1 if width <= 24 else 4
        axes.set_xticks(range(0, width, every))
        axes.tick_params(length=0)
        for spine in axes.spines.values():
            spine.set_visible(False)
        axes.set_xlabel(
            "sample (its number in the data set); in the cell: the step that sees it"
        )
        _rank_legend(axes, len(epochs[0]))
        axes.set_title(title or _shards_title(seen), pad=22)
    return figure


def _write_steps(
    axes: Any, x: float, y: float, steps: list[int], *, num_cells: int
) -> None:
    """Write each stripe's step into it, small enough to fit, or not at all."""
    texts = [str(step) for step in steps]
    for k, text in enumerate(texts):
        room = 420 / num_cells / len(texts)  # a stripe's width, in points
        font_size = min(8.0, room / (0.65 * len(text)))
        if font_size >= 5:
            at = x - 0.45 + 0.9 * (k + 0.5) / len(texts)
            middle = {"ha": "center", "va": "center_baseline", "fontsize": font_size}
            axes.text(at, y, text, color=INK, **middle)


def _who_sees(ranks: list[list[int]], num_samples: int) -> list[list[tuple[int, int]]]:
    """For each sample, the (rank, place in its order) of all who see it."""
    seen: list[list[tuple[int, int]]] = [[] for _ in range(num_samples)]
    for rank, indices in enumerate(ranks):
        for place, index in enumerate(indices):
            seen[index].append((rank, place))
    return seen


def _shards_title(seen: list[list[list[tuple[int, int]]]]) -> str:
    visits = [len(who) for samples in seen for who in samples]
    often, never = sum(n > 1 for n in visits), visits.count(0)
    if not often and not never:
        return "Every sample is seen once in each epoch"
    parts = [f"{often} are seen more than once"] * bool(often)
    parts += [f"{never} are not seen at all"] * bool(never)
    epochs = "1 epoch" if len(seen) == 1 else f"{len(seen)} epochs"
    return f"In {epochs} of {len(seen[0])} samples, " + " and ".join(parts)


def _rank_legend(axes: Any, num_ranks: int) -> None:
    from matplotlib.patches import Patch

    from ddp_lab.figures.drawing import fill_colour

    axes.legend(
        handles=[
            Patch(color=fill_colour(rank_colour(rank), 0.45), label=f"rank {rank}")
            for rank in range(num_ranks)
        ],
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        borderpad=0,
        borderaxespad=0.2,
        ncols=8,
        handlelength=1,
    )


def plot_buckets(
    parameters: "Iterable[tuple[str, Tensor | int]]",
    buckets: Sequence[Sequence[int]] | Sequence[Sequence[str]],
    *,
    ready_s: Mapping[str, float] | None = None,
    sent_s: Sequence[Sequence[float]] = (),
    title: str | None = None,
) -> "Figure":
    """Draw which parameters travel together, and in which order the buckets leave.

    A row is a bucket, as long as its bytes; the first one to leave is on top. The
    colour of a parameter tells its place in the model, so that one sees that the last
    layers leave first. With times, a row is instead what happened in a backward pass:
    a tick for each gradient, and a bar from where the bucket left to where its sum was
    back.

    Args:
        parameters: ``model.named_parameters()``, or names with numbers of bytes.
        buckets: positions, as `by_hand.assign_buckets` gives them, or names, as
            ``BucketDDP.bucket_names`` does, in the order of sending.
        ready_s: when each gradient was ready, by name, on any clock, in seconds.
        sent_s: on the same clock, when each bucket left and when its sum was back.
        title: one sentence; with times, by default how much of the sending ran while
            gradients were still computed.
    """
    import matplotlib
    from matplotlib import pyplot

    named = [(name, x if isinstance(x, int) else x.nbytes) for name, x in parameters]
    place = {name: position for position, (name, _) in enumerate(named)}
    rows = [[x if isinstance(x, int) else place[x] for x in row] for row in buckets]
    if ready_s is not None:
        return _plot_flights(named, rows, ready_s, sent_s, title)
    largest = max(sum(named[i][1] for i in row) for row in rows)
    unit, unit_name = (_MB, "MB") if largest >= _MB else (1024, "KB")
    sizes = [num_bytes / unit for _, num_bytes in named]
    colours = matplotlib.colormaps["viridis"]
    longest = largest / unit
    with in_style(**{"axes.grid.axis": "x"}):
        figure, axes = pyplot.subplots(figsize=(6.4, min(4.6, 1.5 + 0.55 * len(rows))))
        for y, row in enumerate(rows):
            left = 0.0
            for position in row:
                shade = colours(position / max(1, len(named) - 1))
                size = sizes[position]
                axes.barh(y, size, left=left, height=0.55, color=shade, edgecolor="w")
                name = named[position][0]
                if size / longest > 0.0135 * len(name):  # it has the room
                    dark = sum(shade[:3]) < 1.5
                    ink = "white" if dark else INK
                    place_ = {"ha": "center", "va": "center", "fontsize": 7}
                    axes.text(left + size / 2, y, name, color=ink, **place_)  # type: ignore[arg-type]
                left += size
            total = num_bytes_text(sum(named[i][1] for i in row))
            first, last = named[row[0]][0], named[row[-1]][0]
            what = first if len(row) == 1 else f"{first} ... {last}"
            axes.text(0, y - 0.33, f"{total}: {what}", fontsize=8, va="bottom")
        axes.set_ylim(len(rows) - 0.55, -0.75)
        axes.set_yticks(range(len(rows)), [f"bucket {k}" for k in range(len(rows))])
        axes.set_xlabel(f"size of the gradients ({unit_name})")
        _layer_scale(figure, axes)
        axes.set_title(
            title
            or f"{len(named)} parameters travel in {len(rows)} "
            f"{'bucket' if len(rows) == 1 else 'buckets'}, the last layers first"
        )
    return figure


def _plot_flights(
    named: list[tuple[str, int]],
    rows: list[list[int]],
    ready_s: Mapping[str, float],
    sent_s: Sequence[Sequence[float]],
    title: str | None,
) -> "Figure":
    """`plot_buckets` over time: gradients as ticks, and each bucket's way as a bar."""
    import matplotlib
    from matplotlib import pyplot

    began_s = min(ready_s.values())
    computed_ms = 1000 * (max(ready_s.values()) - began_s)
    flights_ms = [[1000 * (s - began_s) for s in flight] for flight in sent_s]
    colours = matplotlib.colormaps["viridis"]
    with in_style(**{"axes.grid.axis": "x"}):
        figure, axes = pyplot.subplots(figsize=(6.4, min(4.6, 1.5 + 0.55 * len(rows))))
        for y, (row, (left, back)) in enumerate(zip(rows, flights_ms, strict=True)):
            at = [1000 * (ready_s[named[i][0]] - began_s) for i in row]
            shades = [colours(i / max(1, len(named) - 1)) for i in row]
            axes.vlines(at, y - 0.3, y, colors=shades, linewidth=1.5)
            axes.barh(y + 0.17, back - left, left=left, height=0.24, color=FAINT)
        line = {"color": INK, "linestyle": "--", "linewidth": 1}
        axes.axvline(computed_ms, **line)  # type: ignore[arg-type]
        axes.text(computed_ms, -0.5, "all computed ", ha="right", fontsize=8)
        axes.set_ylim(len(rows) - 0.5, -0.65)
        sizes = [num_bytes_text(sum(named[i][1] for i in row)) for row in rows]
        labels = [f"bucket {k}\n{size}" for k, size in enumerate(sizes)]
        axes.set_yticks(range(len(rows)), labels)
        axes.set_xlabel("time since the first gradient was ready (ms)")
        _layer_scale(figure, axes)
        total_ms = sum(back - left for left, back in flights_ms)
        hidden = [min(back, computed_ms) - left for left, back in flights_ms]
        share = sum(max(0.0, ms) for ms in hidden) / total_ms
        says = f"{share:.0%} of the sending runs while backward computes"
        axes.set_title(title or says)
    return figure


def _layer_scale(figure: "Figure", axes: Any) -> None:
    """What the colours say: the place of a parameter in the model."""
    import matplotlib

    scale = matplotlib.cm.ScalarMappable(cmap=matplotlib.colormaps["viridis"])
    bar = figure.colorbar(scale, ax=axes, ticks=[0, 1], pad=0.01, aspect=30)
    bar.ax.set_yticklabels(["first\nlayer", "last\nlayer"])
    bar.ax.invert_yaxis()


def plot_memory(
    rows: Sequence[Mapping[str, float]],
    *,
    limit_bytes: float | None = None,
    title: str | None = None,
) -> "Figure":
    """Draw where memory goes, by kind, against the batch size.

    Parameters, gradients and optimiser are one strip where they would be too thin to be
    told apart.

    Args:
        rows: one for each batch size, in rising order: ``batch_size``, and bytes of
            ``parameters``, ``gradients``, ``optimiser``, ``activations`` and ``other``;
            what is not there counts as 0.
        limit_bytes: memory of the GPU, drawn as a line.
        title: one sentence; by default what fits, or the share of the activations.
    """
    from matplotlib import pyplot

    kinds = (*_FIXED, *_GROWING)
    totals = [sum(row.get(kind, 0) for kind in kinds) for row in rows]
    top = max([*totals, limit_bytes or 0])
    unit, name = (2**30, "GB") if top >= 2**30 else (_MB, "MB")
    at = range(len(rows))
    with in_style(**{"axes.grid.axis": "y"}):
        figure, axes = pyplot.subplots()
        below = [0.0] * len(rows)
        for label, colour, num_bytes in _memory_strips(rows, _THIN * top):
            heights = [size / unit for size in num_bytes]
            look: dict[str, Any] = {"color": colour, "label": label}
            axes.bar(at, heights, 0.7, bottom=below, **look)
            below = [b + h for b, h in zip(below, heights, strict=True)]
        for x, total in zip(at, totals, strict=True):
            axes.text(x, total / unit, num_bytes_text(total), ha="center", va="bottom")
        if limit_bytes is not None:
            _draw_limit(axes, limit_bytes / unit, num_bytes_text(limit_bytes))
        axes.set_xticks(at, [f"{row['batch_size']:g}" for row in rows])
        axes.set_xlabel("batch size (samples on one GPU at once)")
        axes.set_ylabel(f"memory ({name})")
        axes.margins(y=0.12)
        figure.legend(loc="outside lower center", ncols=4)
        axes.set_title(title or _memory_title(rows, totals, limit_bytes))
    return figure


def _memory_strips(
    rows: Sequence[Mapping[str, float]], thin: float
) -> list[tuple[str, str, list[float]]]:
    """From the bottom up: label, colour, and bytes for each row."""
    strips = [
        (kind, colour, [row.get(kind, 0) for row in rows])
        for kind, colour in (_FIXED | _GROWING).items()
        if any(row.get(kind, 0) for row in rows)
    ]
    fixed = [strip for strip in strips if strip[0] in _FIXED]
    if len(fixed) > 1 and all(max(sizes) < thin for _, _, sizes in fixed):
        label = ", ".join(kind for kind, _, _ in fixed)
        sums = [sum(sizes) for sizes in zip(*(s for _, _, s in fixed), strict=True)]
        strips = [(label, _FIXED["parameters"], sums), *strips[len(fixed) :]]
    return strips


def _draw_limit(axes: Any, height: float, size: str) -> None:
    """A line across, which says by itself what it is."""
    axes.axhline(height, color=INK, linestyle="--", linewidth=1)
    on_white = {"facecolor": "white", "edgecolor": "none", "pad": 1}
    place: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "va": "center"}
    axes.text(0.01, height, f"GPU memory: {size}", bbox=on_white, **place)


def _memory_title(
    rows: Sequence[Mapping[str, float]],
    totals: list[float],
    limit_bytes: float | None,
) -> str:
    if limit_bytes is None:
        share = rows[-1].get("activations", 0) / totals[-1]
        size = f"{rows[-1]['batch_size']:g}"
        return f"At a batch of {size}, {share:.0%} of the memory are activations"
    sizes = [row["batch_size"] for row in rows]
    fits = [s for s, total in zip(sizes, totals, strict=True) if total <= limit_bytes]
    if not fits:
        return "Not even the smallest of these batches fits"
    if len(fits) == len(rows):
        return f"All of these batches fit, up to {fits[-1]:g}"
    return f"A batch of {fits[-1]:g} fits, {sizes[len(fits)]:g} is too many"


def plot_hosts(
    num_hosts: int, ranks_per_host: int, *, title: str | None = None
) -> "Figure":
    """Draw which rank is where under torchrun, and who talks to whom.

    A box is a host, with its torchrun and the ranks that it has started. The dashed
    lines are used once, to meet. The arrows from rank to rank are a ring all-reduce, in
    every step; the dark ones among them cross the network.

    Args:
        num_hosts: 1 to 4, numbered by rank; the rendezvous endpoint is drawn on host 0.
        ranks_per_host: such that there are at most 16 in all.
        title: one sentence; by default it counts the links that cross the network.
    """
    num_ranks = num_hosts * ranks_per_host
    if not (1 <= num_hosts <= _MOST_HOSTS and 1 <= num_ranks <= _MOST_RANKS):
        raise ValueError(
            f"{num_hosts} hosts of {ranks_per_host} ranks cannot be drawn: choose 1 to "
            f"{_MOST_HOSTS} hosts, and up to {_MOST_RANKS} ranks in all"
        )
    from matplotlib import pyplot

    pitch = ranks_per_host + 0.09 * num_ranks  # from one host to the next, in cells
    places = [divmod(rank, ranks_per_host) for rank in range(num_ranks)]
    at = [host * pitch + local_rank for host, local_rank in places]
    bottom = 1.1 if num_hosts == 1 else 0.9  # of the hosts' boxes
    links = f"{num_hosts if num_hosts > 1 else 0} of the {num_ranks} links"
    hosts = "1 host" if num_hosts == 1 else f"{num_hosts} hosts"
    small: dict[str, Any] = {"fontsize": 8, "va": "center", "color": INK}
    with in_style(**{"axes.grid": False}):
        figure, axes = pyplot.subplots(figsize=(6.4, 2.9))
        endpoint = "the endpoint, a port on one of the hosts: torchruns meet here"
        axes.text(at[0] - 0.45, -1.6, endpoint, **small)
        for host in range(num_hosts):
            _draw_host(axes, host, host * pitch, ranks_per_host, num_ranks, bottom)
        _draw_ring(axes, at, ranks_per_host)
        key = "cell: rank (local rank)    dashed: once    arrow: in every step"
        axes.text(at[0] - 0.45, 1.45, f"{key}, dark if over the network", **small)
        axes.set_xlim(-0.6, at[-1] + 0.6)
        axes.set_ylim(1.6, -1.8)
        axes.axis("off")
        axes.set_title(title or f"On {hosts}, {links} between ranks cross the network")
    return figure


def _draw_host(
    axes: Any,
    host: int,
    left: float,
    ranks_per_host: int,
    num_ranks: int,
    bottom: float,
) -> None:
    """One host: its box, its torchrun with a line to the endpoint, and its ranks."""
    from matplotlib.patches import Rectangle

    middle = left + (ranks_per_host - 1) / 2
    size = ranks_per_host + 0.04, bottom + 0.95
    axes.add_patch(Rectangle((left - 0.52, -0.95), *size, fill=False, edgecolor=FAINT))
    meet = {"color": FAINT, "linestyle": "--", "linewidth": 1}
    first = (ranks_per_host - 1) / 2  # the middle of host 0
    axes.plot([first, first, middle, middle], [-1.45, -1.2, -1.2, -0.7], **meet)
    text, width = f"host {host}: torchrun", ranks_per_host - 0.28
    draw_cell(axes, middle, -0.48, [FAINT], text, width=width, height=0.44, font_size=8)
    for local_rank in range(ranks_per_host):
        rank = host * ranks_per_host + local_rank
        text = f"rank {rank}\n(local {local_rank})"
        if num_ranks > 6:
            text = f"{rank}\n({local_rank})"
        colours, x = [rank_colour(rank)], left + local_rank
        font_size = 8 if num_ranks <= 8 else 6.5
        shape: dict[str, Any] = {"width": 0.72, "height": 0.8, "font_size": font_size}
        draw_cell(axes, x, 0.32, colours, text, **shape)


def _draw_ring(axes: Any, at: Sequence[float], ranks_per_host: int) -> None:
    """An arrow from each rank to the next, and from the last one back to rank 0."""
    num_ranks = len(at)
    arrow: dict[str, Any] = {"arrowstyle": "-|>", "shrinkA": 0, "shrinkB": 0}
    inside = arrow | {"color": FAINT, "linewidth": 1}
    across = arrow | {"color": INK, "linewidth": 1.8}
    for rank in range(num_ranks - 1):
        style = inside if (rank + 1) % ranks_per_host else across
        start, end = (at[rank] + 0.36, 0.32), (at[rank + 1] - 0.36, 0.32)
        axes.annotate("", end, start, arrowprops=style)
    if num_ranks > 1:
        style = across if num_ranks > ranks_per_host else inside
        look = {"color": style["color"], "linewidth": style["linewidth"]}
        y = 1.1 if num_ranks > ranks_per_host else 0.95
        axes.plot([at[-1], at[-1], at[0]], [0.72, y, y], **look)
        axes.annotate("", (at[0], 0.72), (at[0], y), arrowprops=style)
