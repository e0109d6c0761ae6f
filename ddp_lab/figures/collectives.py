"""What goes between ranks, as pictures of cells.

In both pictures a row is a rank and a cell is a piece of a tensor. The colours of a
cell say whose data is in it; a cell in the colours of all ranks holds their sum.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
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
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from torch import Tensor

__all__ = ["plot_collective", "plot_ring", "ring_steps"]

_SAYS = {
    "broadcast": "broadcast: rank {src}'s tensor is copied to every rank",
    "scatter": "scatter: rank {src} deals out its pieces, one to each rank",
    "gather": "gather: rank {src} collects every rank's tensor",
    "all_gather": "all_gather: every rank collects every rank's tensor",
    "reduce": "reduce: rank {src} gets the sum over all ranks",
    "all_reduce": "all_reduce: every rank gets the sum over all ranks",
    "reduce_scatter": "reduce_scatter: rank r gets the sum over all ranks of piece r",
}

_TITLE: dict[str, Any] = {"x": 0.01, "ha": "left", "fontsize": 10}


def plot_collective(
    name: str,
    before: Sequence[Any],
    after: Sequence[Any],
    *,
    src: int = 0,
    title: str | None = None,
) -> "Figure":
    """Draw what each rank holds before and after a collective.

    Give it the real tensors. A value that some rank held before keeps that rank's
    colour, so take values that are all different. A value that is the sum, the mean,
    the largest or the smallest over ranks gets all colours. After ``reduce_scatter``
    a rank's piece stands at the place that it has in the whole.

    Args:
        name: of the collective, ``all_reduce`` for instance.
        before: for each rank its tensor, a list of tensors, or None for nothing.
        after: the same, afterwards.
        src: the rank that sends or collects, for the title.
        title: one sentence; there is one for each of the seven collectives.
    """
    from matplotlib import pyplot

    held, holds = [_pieces(x) for x in before], [_pieces(x) for x in after]
    colours = [rank_colour(rank) for rank in range(len(before))]
    owners: dict[str, int] = {}
    for rank in reversed(range(len(held))):
        owners.update({_text(value): rank for piece in held[rank] for value in piece})
    together = _together([[v for piece in x for v in piece] for x in held])
    starts = _starts(holds) if name == "reduce_scatter" else []

    def colours_after(rank: int, value: float) -> list[str]:
        text = _text(value)
        if any(_text(old) == text for piece in held[rank] for old in piece):
            return [colours[rank]]
        if text in owners:
            return [colours[owners[text]]]
        return colours if text in together else [FAINT]

    with in_style(**{"axes.grid": False}):
        num_cells = max(_num_cells(pieces) for pieces in (*held, *holds))
        figure, (left, right) = pyplot.subplots(
            1, 2, figsize=(6.4, min(4.0, 0.9 + 0.55 * len(before))), sharey=True
        )
        for axes, rows, heading in (
            (left, held, "before"),
            (right, holds, "after"),
        ):
            for rank, pieces in enumerate(rows):
                x = 0.0
                if starts and axes is right:
                    x = starts[rank]
                    for place in range(starts[-1]):  # its own one is drawn over
                        draw_cell(axes, place, rank, [])
                for piece in pieces:
                    for value in piece:
                        own = (
                            [colours[rank]]
                            if axes is left
                            else colours_after(rank, value)
                        )
                        size = 9 if num_cells < 9 else 7
                        draw_cell(axes, x, rank, own, _text(value), font_size=size)
                        x += 1
                    x += 0.35  # a gap between the tensors of a list
                if not pieces:
                    draw_cell(axes, 0, rank, [])
            _bare(axes, len(before), (-0.7, num_cells - 0.4))
            axes.set_xlabel(heading)
            if starts:
                middles = [(a + b - 1) / 2 for a, b in pairwise(starts)]
                names = [f"piece {rank}" for rank in range(len(middles))]
                axes.set_xticks(middles, names, fontsize=8)
        figure.suptitle(title or _SAYS.get(name, name).format(src=src), **_TITLE)
    return figure


def _bare(axes: "Axes", num_ranks: int, x_limits: tuple[float, float]) -> None:
    """A grid of cells: a row a rank, its name in its colour, no lines."""
    axes.set_xlim(*x_limits)
    axes.set_ylim(num_ranks - 0.4, -0.6)  # rank 0 on top
    axes.set_xticks([])
    axes.set_yticks(range(num_ranks), [f"rank {rank}" for rank in range(num_ranks)])
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _pieces(held: Any) -> list[list[float]]:
    """One rank's tensor, list of tensors or None as lists of numbers."""
    if held is None:
        return []
    tensors: Sequence[Tensor] = held if isinstance(held, list | tuple) else [held]
    return [tensor.detach().flatten().tolist() for tensor in tensors]


def _starts(holds: list[list[list[float]]]) -> list[int]:
    """Where each rank's piece begins in the whole tensor, and where the last ends."""
    return [0, *accumulate(sum(map(len, pieces)) for pieces in holds)]


def _num_cells(pieces: list[list[float]]) -> float:
    return sum(map(len, pieces)) + 0.35 * (len(pieces) - 1)


def _text(value: float) -> str:
    return f"{value:.4g}"


def _together(rows: list[list[float]]) -> set[str]:
    """Sums, means and extremes over ranks at each place that all ranks have."""
    found = set()
    for values in zip(*rows, strict=False):
        total = sum(values)
        results = (total, total / len(values), max(values), min(values))
        found |= {_text(result) for result in results}
    return found


# ------------------------------------------------------------------ the ring


def ring_steps(num_elements: int, world_size: int) -> list[list[tuple[int, int, int]]]:
    """List the messages of a ring all-reduce, as `by_hand.ring_all_reduce` sends them.

    Args:
        num_elements: length of the tensor.
        world_size: number of ranks.

    Returns:
        For each of the 2 (W - 1) steps and each rank: chunk number, number of elements
        that it sends to its right neighbour, and number of ranks summed in it so far.
    """
    # tensor_split: the first chunks are one element longer if it does not divide
    length, rest = divmod(num_elements, world_size)
    sizes = [length + (chunk < rest) for chunk in range(world_size)]
    steps = []
    for step in range(2 * (world_size - 1)):
        num_summed = min(step + 1, world_size)  # reduce-scatter, then all-gather
        row = []
        for rank in range(world_size):
            chunk = (rank - step) % world_size  # the one that arrived a step before
            row.append((chunk, sizes[chunk], num_summed))
        steps.append(row)
    return steps


def plot_ring(
    num_elements: int, world_size: int = 3, *, bytes_per_element: int = 4
) -> "Figure":
    """Draw a ring all-reduce step by step, with the bytes that each rank sends.

    A column of a small grid is a chunk of the tensor, and each chunk has a slot for
    every rank whose numbers it has summed. Each step shows the state after it, with
    what has just arrived outlined, and at the right edge what each rank has sent to the
    next one; the last rank sends to rank 0.

    Args:
        num_elements: length of the tensor, alike on all ranks.
        world_size: 2 to 5 ranks.
        bytes_per_element: 4 for float32.
    """
    if not 2 <= world_size <= 5:
        raise ValueError(f"a ring of {world_size} ranks: choose 2 to 5")
    from matplotlib import pyplot

    steps = ring_steps(num_elements, world_size)
    holds = [[{rank} for _ in range(world_size)] for rank in range(world_size)]
    with in_style(**{"axes.grid": False, "font.size": 8, "axes.titlesize": 8}):
        figure, grid = pyplot.subplots(2, world_size, squeeze=False)
        panels = [*grid[0], *grid[1][:-1]]
        _draw_state(panels[0], holds, set())
        panels[0].set_title("start")
        for step, (axes, row) in enumerate(zip(panels[1:], steps, strict=True)):
            sent = [set(holds[rank][row[rank][0]]) for rank in range(world_size)]
            arrived = set()
            for rank in range(world_size):
                right, chunk = (rank + 1) % world_size, row[rank][0]
                holds[right][chunk] |= sent[rank]
                arrived.add((right, chunk))
            _draw_state(axes, holds, arrived)
            for rank in range(world_size):
                num_bytes = row[rank][1] * bytes_per_element
                _draw_link(axes, rank, world_size, num_bytes_text(num_bytes))
            axes.set_title(f"step {step + 1}: {_phase(step, world_size)}")
        for axes in (*grid[0][1:], *grid[1][1:]):
            axes.set_yticks([])
        _draw_totals(grid[1][-1], steps, num_elements * bytes_per_element)
        figure.suptitle(
            "A chunk fills up with every rank's part on its way round the ring, "
            "then the sums go round",
            **_TITLE,
        )
    return figure


def _phase(step: int, world_size: int) -> str:
    return "add" if step < world_size - 1 else "copy"


def _draw_state(
    axes: "Axes", holds: list[list[set[int]]], arrived: set[tuple[int, int]]
) -> None:
    world_size = len(holds)
    for rank, chunks in enumerate(holds):
        for chunk, ranks in enumerate(chunks):
            draw_cell(
                axes,
                chunk,
                rank,
                [rank_colour(r) if r in ranks else "white" for r in range(world_size)],
                edge=INK if (rank, chunk) in arrived else "#cccccc",
                strength=0.8,
                width=0.88,
                height=0.8,
            )
    _bare(axes, world_size, (-0.6, 1.5 * world_size + 0.1))


def _draw_link(axes: "Axes", rank: int, world_size: int, text: str) -> None:
    """An arrow at the right edge from a rank down to the next one."""
    x = world_size - 0.35
    last = rank == world_size - 1
    axes.annotate(
        "",
        (x, rank + (0.5 if last else 0.95)),
        (x, rank + 0.05),
        arrowprops={
            "arrowstyle": "-|>",
            "color": rank_colour(rank),
            "shrinkA": 0,
            "shrinkB": 0,
        },
    )
    text += "\nto rank 0" if last else ""
    axes.text(x + 0.15, rank + 0.4, text, fontsize=7, va="center", color=INK)


def _draw_totals(
    axes: "Axes", steps: list[list[tuple[int, int, int]]], num_bytes: int
) -> None:
    """In numbers: what a rank sends in all, and how that compares to the tensor."""
    axes.axis("off")
    world_size = len(steps[0])
    num_elements = sum(length for _, length, _ in steps[0])
    sent = [
        sum(row[rank][1] for row in steps) * num_bytes // num_elements
        for rank in range(world_size)
    ]
    least, most = num_bytes_text(min(sent)), num_bytes_text(max(sent))
    axes.text(
        0.0,
        0.95,
        f"{world_size} ranks (W), {len(steps)} steps\n"
        f"the tensor: {num_bytes_text(num_bytes)}\n"
        "each rank sends\n"
        f"{most if least == most else f'{least} to {most}'}\n"
        "= 2 (W - 1) / W tensors",
        transform=axes.transAxes,
        va="top",
        linespacing=1.5,
    )
