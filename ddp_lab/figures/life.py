"""The life of a rank: killed, met anew, and resumed from the last checkpoint."""

from typing import TYPE_CHECKING, Any

from ddp_lab.figures.drawing import FAINT, INK, draw_cell, in_style, rank_colour

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["plot_life"]

_MOST_RANKS, _MOST_STEPS = 4, 16
_BEGIN = 2.0  # where the first step stands: before it a rank starts
_GAP = 1.7  # how long the launcher needs to see it, and to stop the others
_NEW = 3.6  # from there to the first step of the second life
_LOST = "#D55E00"


def plot_life(
    num_steps: int = 12,
    checkpoint_every: int = 4,
    killed_in: int = 11,
    *,
    num_ranks: int = 2,
    killed_rank: int = 1,
) -> "Figure":
    """Draw what becomes of each rank when one of them is killed under torchrun.

    Time goes from left to right; a row is torchrun or a rank, a cell an optimiser step
    with its number. Pale cells are done, but not in a checkpoint when the rank dies.

    Args:
        num_steps: of the whole run, at most 16.
        checkpoint_every: steps between two checkpoints.
        killed_in: the step in which a rank is killed, 1 to ``num_steps``.
        num_ranks: 2 to 4.
        killed_rank: which of them.
    """
    if not (
        1 <= killed_in <= num_steps <= _MOST_STEPS
        and 2 <= num_ranks <= _MOST_RANKS
        and 0 <= killed_rank < num_ranks
        and checkpoint_every > 0
    ):
        raise ValueError(
            f"rank {killed_rank} of {num_ranks}, killed in step {killed_in} of "
            f"{num_steps}, cannot be drawn: choose up to {_MOST_STEPS} steps, one of "
            f"them to be killed in, and 2 to {_MOST_RANKS} ranks"
        )
    from matplotlib import pyplot

    saved = (killed_in - 1) // checkpoint_every * checkpoint_every
    death = _BEGIN + killed_in - 1.5  # where the step would begin
    met = death + 1 + _GAP
    again = met + _NEW  # the middle of the first step of the second life
    end = again + num_steps - saved - 0.5
    with in_style(**{"axes.grid": False}):
        figure, axes = pyplot.subplots(figsize=(6.4, 1.7 + 0.5 * num_ranks))
        _draw_launcher(axes, death, again, end)
        for rank in range(num_ranks):
            _draw_first_life(axes, rank, killed_in, saved, rank == killed_rank)
            _draw_start(axes, (met + again - 0.5) / 2, rank, "start,\nload", 2.4)
            for step in range(saved + 1, num_steps + 1):
                x = again + step - saved - 1
                _step(axes, x, rank, str(step), 0.45)
        for step in range(checkpoint_every, num_steps + 1, checkpoint_every):
            first = step <= saved
            x = _BEGIN + step - 0.5 if first else again + step - saved - 0.5
            _draw_checkpoint(axes, x, step, num_ranks)
        if saved:
            bottom = num_ranks + 0.95
            arrow = _BEGIN + saved - 0.5, (met + again - 0.5) / 2
            _read(axes, *arrow, bottom, num_ranks)
        axes.set_xlim(-2.1, end + 0.3)
        axes.set_ylim(num_ranks + 1.5, -0.75)
        axes.axis("off")
        axes.set_title(_title(saved, killed_in))
    return figure


def _title(saved: int, killed_in: int) -> str:
    lost = killed_in - 1 - saved
    if not lost:
        return f"After step {saved} all ranks live a second time; no step is done twice"
    first = (
        f"step {saved + 1} is"
        if lost == 1
        else f"steps {saved + 1} to {killed_in - 1} are"
    )
    if lost == 2:
        first = f"steps {saved + 1} and {killed_in - 1} are"
    return f"One rank dies, and all begin a second life: {first} done twice"


def _draw_launcher(axes: Any, death: float, again: float, end: float) -> None:
    """torchrun's row: it starts, sees the death, stops the rest, and starts anew."""
    _write(axes, -2, 0, "torchrun", ha="left")
    line: dict[str, Any] = {"color": FAINT, "linewidth": 1, "zorder": 0}
    axes.plot([0.4, end], [0, 0], **line)
    box: dict[str, Any] = {"height": 0.8, "font_size": 7, "edge": FAINT}
    draw_cell(axes, 0.6, 0, ["white"], "starts", width=1.6, **box)
    left, right = death + 0.6, again - 0.6
    text = "stops the rest, rendez-\nvous, starts all anew"
    middle, width = (left + right) / 2, right - left
    draw_cell(axes, middle, 0, ["white"], text, width=width, **box)


def _draw_first_life(
    axes: Any, rank: int, killed_in: int, saved: int, dies: bool
) -> None:
    """A rank's steps up to the one in which one of them is killed."""
    y = rank + 1
    _write(axes, -2, y, f"rank {rank}", ha="left")
    _draw_start(axes, 0.6, rank, "start", 1.6)
    for step in range(1, killed_in):
        x, strength = _BEGIN + step - 1, 0.45 if step <= saved else 0.12
        _step(axes, x, rank, str(step), strength)
    x = _BEGIN + killed_in - 1
    if dies:
        cross: dict[str, Any] = {"color": _LOST, "markersize": 9, "markeredgewidth": 2}
        axes.plot([x], [y], "x", **cross)
        _write(axes, x + 0.45, y, "SIGKILL", ha="left", color=_LOST)
    else:
        shape: dict[str, Any] = {"width": 0.9 + _GAP, "height": 0.72, "font_size": 7}
        draw_cell(axes, x + _GAP / 2, y, [], f"waits in {killed_in}", **shape)


def _draw_start(axes: Any, x: float, rank: int, text: str, width: float) -> None:
    """A process begins."""
    look: dict[str, Any] = {"width": width, "height": 0.72, "font_size": 7}
    draw_cell(axes, x, rank + 1, ["white"], text, edge=rank_colour(rank), **look)


def _step(axes: Any, x: float, rank: int, text: str, strength: float) -> None:
    look: dict[str, Any] = {"width": 0.92, "height": 0.72, "font_size": 7}
    draw_cell(axes, x, rank + 1, [rank_colour(rank)], text, strength=strength, **look)


def _draw_checkpoint(axes: Any, x: float, step: int, num_ranks: int) -> None:
    """A line through all ranks, as they save together, and its name below."""
    axes.plot([x, x], [0.5, num_ranks + 0.55], color=INK, linewidth=1.4)
    _write(axes, x, num_ranks + 0.75, f"saved {step}", ha="center")


def _read(axes: Any, start: float, end: float, bottom: float, num_ranks: int) -> None:
    """From the last checkpoint to the second life that reads it."""
    line: dict[str, Any] = {"color": INK, "linewidth": 1}
    axes.plot([start, start, end], [bottom, bottom + 0.3, bottom + 0.3], **line)
    look = {"arrowstyle": "-|>", "color": INK, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", (end, num_ranks + 0.45), (end, bottom + 0.3), arrowprops=look)


def _write(axes: Any, x: float, y: float, text: str, **more: Any) -> None:
    look = {"fontsize": 7, "va": "center", "color": INK} | more
    axes.text(x, y, text, **look)
