"""Gradient accumulation as a picture: what a micro-batch adds, and which one sends."""

from typing import TYPE_CHECKING, Any

from ddp_lab.figures.drawing import (
    FAINT,
    INK,
    draw_arrow,
    draw_cell,
    in_style,
    rank_colour,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["plot_accumulation"]

_MOST_RANKS, _MOST_STEPS = 4, 6
_PITCH = 1.5  # from one rank's row to the next
_GRADIENT = 0.62  # from a micro-batch down to the gradient that holds it


def plot_accumulation(
    num_ranks: int = 2,
    micro_batch_size: int = 8,
    num_micro_batches: int = 4,
    *,
    title: str | None = None,
) -> "Figure":
    """Draw one optimiser step of accumulated gradients, a row for each rank.

    Time goes from left to right. In each row the cells are micro-batches, forward and
    backward, and the strip below them is the rank's gradient, which grows by one
    micro-batch after the other. All but the last are under ``no_sync``; with the last
    one the gradients of all ranks travel, in a single all-reduce.

    Args:
        num_ranks: 1 to 4.
        micro_batch_size: images that a rank holds at once, 1 or more.
        num_micro_batches: accumulation steps, 1 to 6.
        title: one sentence; by default what is computed, and how often it is sent.

    Raises:
        ValueError: there is no room for so many.
    """
    if not (
        1 <= num_ranks <= _MOST_RANKS
        and 1 <= num_micro_batches <= _MOST_STEPS
        and micro_batch_size >= 1
    ):
        raise ValueError(
            f"{num_micro_batches} micro-batches of {micro_batch_size} images on "
            f"{num_ranks} ranks cannot be drawn: choose 1 to {_MOST_RANKS} ranks, 1 to "
            f"{_MOST_STEPS} micro-batches, and 1 image or more"
        )
    from matplotlib import pyplot

    sizes = num_ranks, micro_batch_size, num_micro_batches
    bottom = (num_ranks - 1) * _PITCH + _GRADIENT  # of the last rank's row
    reduce_at, step_at = num_micro_batches + 0.15, num_micro_batches + 1.3
    with in_style(**{"axes.grid": False}):
        figure, axes = pyplot.subplots(figsize=(6.4, 1.5 + 0.75 * num_ranks))
        for rank in range(num_ranks):
            _draw_rank(axes, rank, micro_batch_size, num_micro_batches)
            box: dict[str, Any] = {"width": 0.9, "height": 1.1, "font_size": 8}
            y = rank * _PITCH + _GRADIENT / 2
            draw_cell(axes, step_at, y, ["white"], "the same\nstep", edge=INK, **box)
            at = rank * _PITCH + _GRADIENT  # of the whole gradient
            draw_arrow(axes, (num_micro_batches - 0.53, at), (reduce_at - 0.42, at))
            draw_arrow(axes, (reduce_at + 0.42, y), (step_at - 0.47, y))
        tall: dict[str, Any] = {"width": 0.8, "height": bottom + 0.5, "font_size": 8}
        text, middle = "one\nall-\nreduce", bottom / 2
        draw_cell(axes, reduce_at, middle, ["white"], text, edge=INK, **tall)
        _draw_brackets(axes, num_micro_batches)
        _draw_product(axes, sizes, step_at, bottom + 0.75)
        axes.set_xlim(-1.3, step_at + 0.6)
        axes.set_ylim(bottom + 1.1, -1.15)
        axes.axis("off")
        axes.set_title(title or _title(*sizes))
    return figure


def _draw_rank(
    axes: Any, rank: int, micro_batch_size: int, num_micro_batches: int
) -> None:
    """One row: the micro-batches of a rank, and below them its gradient so far."""
    y = rank * _PITCH
    small: dict[str, Any] = {"fontsize": 8, "ha": "right", "va": "center"}
    axes.text(-0.6, y, f"rank {rank}", color=INK, **small)
    axes.text(-0.6, y + _GRADIENT, "gradient of", color=FAINT, **small)
    for k in range(num_micro_batches):
        place: dict[str, Any] = {"width": 0.9, "font_size": 8}
        images = f"{micro_batch_size} image" + ("" if micro_batch_size == 1 else "s")
        draw_cell(axes, k, y, [rank_colour(rank)], images, height=0.62, **place)
        held = str((k + 1) * micro_batch_size)
        strength = 0.45 * (k + 1) / num_micro_batches
        place |= {"height": 0.34, "strength": strength}
        draw_cell(axes, k, y + _GRADIENT, [rank_colour(rank)], held, **place)


def _draw_brackets(axes: Any, num_micro_batches: int) -> None:
    """Above the rows, which micro-batches stay silent and which one sends."""
    last = num_micro_batches - 1
    parts = [(last, last, "sends")]
    if last:
        silent = "no_sync: nothing is sent" if last > 1 else "no_sync"
        parts.append((0, last - 1, silent))
    head: dict[str, Any] = {"fontsize": 8, "ha": "center", "va": "bottom", "color": INK}
    for first, end, text in parts:
        left, right = first - 0.43, end + 0.43
        axes.plot([left, left, right, right], [-0.45, -0.6, -0.6, -0.45], color=INK)
        axes.text((first + end) / 2, -0.7, text, **head)


def _draw_product(
    axes: Any, sizes: tuple[int, int, int], step_at: float, y: float
) -> None:
    """Below, how the three numbers make the global batch."""
    ranks, micro, steps = sizes
    product = f"{ranks} x {micro} x {steps} = {ranks * micro * steps} images"
    text = f"ranks x micro-batch x accumulation steps = {product}, the global batch"
    low: dict[str, Any] = {"fontsize": 8, "ha": "center", "va": "center", "color": INK}
    axes.text((step_at - 0.7) / 2, y, text, **low)


def _title(num_ranks: int, micro_batch_size: int, num_micro_batches: int) -> str:
    total = num_ranks * micro_batch_size * num_micro_batches
    if num_micro_batches == 1:
        return (
            f"One micro-batch a step: its gradients travel at once, for {total} images"
        )
    return (
        f"Of {num_micro_batches} micro-batches only the last one sends: one all-reduce "
        f"for {total} images"
    )
