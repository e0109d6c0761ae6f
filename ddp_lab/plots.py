"""From records to figures; nothing here knows of ranks as processes.

Every figure is a few inches wide, has units on its axes and, as its title, the one
sentence that says what to see in it. One colour a rank throughout the lab.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_lab.record import History

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["RANK_COLOURS", "plot_loss", "save_picture", "style"]

# Okabe and Ito's palette, told apart by colour-blind readers too (jfly.uni-koeln.de).
RANK_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
_INK = "#222222"  # the run as a whole
_TEST = "#D55E00"  # evaluation


def style() -> dict[Any, Any]:
    """Matplotlib settings shared by all figures, for ``matplotlib.rc_context``."""
    return {
        "figure.figsize": (6.4, 4.0),
        "figure.dpi": 100,
        "figure.facecolor": "white",  # also on a dark page
        "figure.constrained_layout.use": True,
        "axes.edgecolor": "#888888",
        "axes.grid": True,
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.titlesize": 10,
        "axes.titlelocation": "left",
        "grid.color": "#e4e4e4",
        "font.size": 9,
        "legend.frameon": False,
    }


def plot_loss(history: History, title: str | None = None) -> "Figure":
    """Draw a run's loss and accuracy against its optimiser steps.

    Each rank's own loss is drawn faintly behind the run's, which is their mean.

    Args:
        history: of a run, see `Run.history`.
        title: one sentence; by default it tells where the run got to.

    Raises:
        ValueError: the history is still empty.
    """
    import matplotlib
    from matplotlib import pyplot

    steps, evals = history.steps, history.evals
    if not steps:
        raise ValueError("the history has no training step yet: nothing to draw")
    at = [line["step"] for line in steps]
    per_epoch = len(steps) / (steps[-1]["epoch"] - steps[0]["epoch"] + 1)
    with matplotlib.rc_context(style()):
        figure, (top, bottom) = pyplot.subplots(2, 1, sharex=True, height_ratios=(3, 2))
        num_ranks = len(steps[0]["local"])
        if num_ranks > 1:
            for rank in range(num_ranks):
                own = [line["local"][rank]["loss"] for line in steps]
                colour = RANK_COLOURS[rank % len(RANK_COLOURS)]
                label = f"rank {rank}, local" if rank < 4 else None
                top.plot(at, own, color=colour, alpha=0.35, linewidth=0.8, label=label)
        top.plot(
            at,
            [line["loss"] for line in steps],
            color=_INK,
            linewidth=1.2,
            label="training, all ranks",
        )
        bottom.plot(
            at,
            [100 * line["accuracy"] for line in steps],
            color=_INK,
            linewidth=0.8,
            alpha=0.6,
            label="training, all ranks",
        )
        if evals:
            marks: dict[str, Any] = {"color": _TEST, "marker": "o", "markersize": 4}
            epochs = [line["step"] for line in evals]
            label = f"test, {evals[-1]['num_samples']} images"
            top.plot(epochs, [line["loss"] for line in evals], label=label, **marks)
            accuracy = [100 * line["accuracy"] for line in evals]
            bottom.plot(epochs, accuracy, label=label, **marks)
        top.set_ylabel("loss (nats, log scale)")
        top.set_yscale("log")
        top.legend(loc="lower left", ncols=2)
        bottom.set_ylabel("accuracy (%)")
        bottom.set_ylim(0, 102)
        bottom.set_xlabel(f"optimiser steps ({per_epoch:g} points an epoch)")
        if title is None:
            title = "The loss falls"
            if evals:
                last = evals[-1]
                title = (
                    f"After {last['epoch']} epochs {last['num_correct']} of "
                    f"{last['num_samples']} test images are recognised"
                )
        top.set_title(title)
    return figure


def save_picture(figure: "Figure", path: Path) -> None:
    """Write a figure as PNG, the same bytes each time, and close it."""
    from matplotlib import pyplot

    figure.savefig(path, metadata={"Software": None})
    pyplot.close(figure)
