"""The three steps in one picture: ranks that meet, copies of a model, cut batches."""

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

__all__ = ["plot_three_steps"]

_MOST_RANKS = 4
_PITCH = 1.7  # from one rank's row to the next
_SHARE_AT, _MODEL_AT, _GRADIENT_AT, _MEAN_AT, _STEP_AT = 2.4, 5.6, 8.0, 10.2, 12.2


def plot_three_steps(
    num_ranks: int = 2, global_batch_size: int = 8, *, title: str | None = None
) -> "Figure":
    """Draw one optimiser step of data-parallel training, a row for each rank.

    From left to right: a global batch is cut, each rank's part goes through its own
    copy of the model, the gradients are averaged, and all copies take the same step.

    Args:
        num_ranks: 2 to 4.
        global_batch_size: samples, a multiple of it, at most 16.
        title: one sentence; by default it says what becomes of the batch.
    """
    share, rest = divmod(global_batch_size, num_ranks)
    if not 2 <= num_ranks <= _MOST_RANKS or rest or not 0 < global_batch_size <= 16:
        raise ValueError(
            f"{global_batch_size} samples on {num_ranks} ranks cannot be drawn: choose "
            f"2 to {_MOST_RANKS} ranks, and a multiple of them up to 16"
        )
    from matplotlib import pyplot

    middle = (num_ranks - 1) / 2 * _PITCH
    with in_style(**{"axes.grid": False}):
        figure, axes = pyplot.subplots(figsize=(6.4, 1.3 + 0.75 * num_ranks))
        for sample in range(global_batch_size):
            y = middle + (sample - (global_batch_size - 1) / 2) * 0.36
            colours = [rank_colour(sample % num_ranks)]
            place: dict[str, Any] = {"width": 0.8, "height": 0.3, "font_size": 7}
            draw_cell(axes, 0, y, colours, str(sample), **place)
        for rank in range(num_ranks):
            y = rank * _PITCH
            _draw_rank(axes, rank, y, share, num_ranks)
            draw_arrow(axes, (0.5, middle), (_SHARE_AT - 0.4, y))
            draw_arrow(axes, (_GRADIENT_AT + 0.8, y), (_MEAN_AT - 0.7, middle))
            draw_arrow(axes, (_MEAN_AT + 0.7, middle), (_STEP_AT - 0.75, y))
        mean: dict[str, Any] = {"width": 1.3, "height": 0.9, "font_size": 8}
        draw_cell(axes, _MEAN_AT, middle, ["white"], "mean", edge=INK, **mean)
        _draw_steps(axes, num_ranks * _PITCH - 0.7)
        axes.set_xlim(-0.7, _STEP_AT + 0.9)
        axes.set_ylim(num_ranks * _PITCH + 0.35, -1.25)
        axes.axis("off")
        axes.set_title(
            title
            or f"Each rank computes a gradient of {share} samples; their mean is that "
            f"of all {global_batch_size}"
        )
    return figure


def _draw_rank(axes: Any, rank: int, y: float, share: int, num_ranks: int) -> None:
    """One row: the samples of a rank, its copy of the model, its gradient, its step."""
    colour = [rank_colour(rank)]
    for k in range(share):
        place: dict[str, Any] = {"width": 0.46, "height": 0.5, "font_size": 7}
        x = _SHARE_AT + 0.5 * k * min(1, 4 / share)
        draw_cell(axes, x, y, colour, str(k * num_ranks + rank), **place)
    box: dict[str, Any] = {"width": 1.5, "height": 0.8, "font_size": 8}
    draw_cell(axes, _MODEL_AT, y, ["white"], f"model,\ncopy {rank}", edge=INK, **box)
    draw_cell(axes, _GRADIENT_AT, y, colour, f"gradient\nof {share}", **box)
    draw_cell(axes, _STEP_AT, y, ["white"], "the same\nstep", edge=INK, **box)
    draw_arrow(axes, (_SHARE_AT + 1.85, y), (_MODEL_AT - 0.8, y))
    draw_arrow(axes, (_MODEL_AT + 0.8, y), (_GRADIENT_AT - 0.8, y))
    axes.text(_SHARE_AT - 0.3, y - 0.42, f"rank {rank}", fontsize=8, color=INK)


def _draw_steps(axes: Any, bottom: float) -> None:
    """What each part is called, above it; and who may speak to whom, below."""
    head: dict[str, Any] = {"fontsize": 8, "ha": "center", "color": INK}
    axes.text(0, -0.95, "global\nbatch", **head, va="center")
    axes.text(_SHARE_AT + 0.75, -0.95, "3  shard the data", **head, va="center")
    axes.text(6.8, -0.95, "2  wrap the model", **head, va="center")
    axes.text(_MEAN_AT, -0.95, "all-reduce", **head, va="center")
    line: dict[str, Any] = {"color": FAINT, "linewidth": 1, "linestyle": "--"}
    axes.plot([1.9, _STEP_AT + 0.8], [bottom, bottom], **line)
    text = "1  init the process group: ranks that have met can average"
    axes.text((1.9 + _STEP_AT + 0.8) / 2, bottom + 0.4, text, **head, va="center")
