"""The loss of a run, as a picture afterwards and while the ranks still train.

    plot_loss(Run.open("runs/first").history)            # afterwards

    curve = LiveCurve()                                  # while they train
    launch(train, num_ranks=2, on_record=curve)

Both draw the same picture: the run's loss in black, and each rank's own loss faintly
behind it in the rank's colour.
"""

import base64
import io
import math
import time
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ddp_lab.figures.drawing import INK, in_style, rank_colour
from ddp_lab.runs.record import History

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["LiveCurve", "plot_loss"]

_TEST = "#D55E00"  # evaluation
_MOST_IN_LEGEND = 4  # ranks
_UPDATE_EVERY_S = 0.25
_SHARE_FOR_DRAWING = 0.2  # of the time: the ranks need the cores


def plot_loss(history: History, title: str | None = None) -> "Figure":
    """Draw a run's loss and accuracy against its optimiser steps.

    Each rank's own loss is drawn faintly behind the run's, which is their mean. The
    axis is chosen for the run's training losses; a test loss far above them is drawn as
    an arrow at the upper edge, with its value below it and above the run's curve.

    Args:
        history: of a run, see `Run.history`.
        title: one sentence; by default it tells where the run got to.

    Raises:
        ValueError: the history is still empty.
    """
    if not history.steps:
        raise ValueError("the history has no training step yet: nothing to draw")
    from matplotlib import pyplot

    with in_style():
        figure = pyplot.figure()
        _draw(figure, history, title)
    return figure


def _draw(figure: "Figure", history: History, title: str | None) -> None:
    from matplotlib.ticker import MaxNLocator

    steps, evals = history.steps, history.evals
    at = [line["step"] for line in steps]
    bottom = None
    if "accuracy" in steps[0]:
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    else:
        top = figure.subplots()
    _draw_ranks(top, steps)
    run: dict[str, Any] = {"color": INK, "label": "training, all ranks"}
    top.plot(at, [line["loss"] for line in steps], linewidth=1.2, **run)
    if bottom is not None:
        accuracy = [100 * line["accuracy"] for line in steps]
        bottom.plot(at, accuracy, linewidth=0.8, alpha=0.6, **run)
    kept = _set_loss_axis(top, steps, evals)
    if evals:
        label = f"test, {evals[-1]['num_samples']} images"
        test: dict[str, Any] = {"color": _TEST, "marker": "o", "markersize": 4}
        _plot_lines(top, kept, "loss", 1, label=label, **test)
        if bottom is not None:
            _plot_lines(bottom, evals, "accuracy", 100, label=label, **test)
    top.set_ylabel("loss (nats, log scale)" if _is_log(top) else "loss (nats)")
    figure.legend(*top.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    lowest = bottom or top
    if bottom is not None:
        bottom.set_ylabel("accuracy (%)")
        bottom.set_ylim(0, 102)
    lowest.xaxis.set_major_locator(MaxNLocator(integer=True))
    lowest.set_xlabel("optimiser steps" + _points_per_epoch(steps))
    top.set_title(title or _default_title(evals))


def _draw_ranks(axes: "Axes", steps: list[dict[str, Any]]) -> None:
    """Each rank's own loss; one rank alone is the run."""
    num_ranks = max(len(line["local"]) for line in steps)
    if num_ranks < 2:
        return
    for rank in range(num_ranks):
        own = [
            (line["step"], line["local"][rank]["loss"])
            for line in steps
            if rank < len(line["local"]) and line["local"][rank] is not None
        ]
        axes.plot(
            [step for step, _ in own],
            [loss for _, loss in own],
            color=rank_colour(rank),
            alpha=0.35,
            linewidth=0.8,
            label=f"rank {rank}, local" if rank < _MOST_IN_LEGEND else None,
        )


def _plot_lines(
    axes: "Axes", lines: list[dict[str, Any]], key: str, factor: float, **how: Any
) -> None:
    values = [factor * line[key] for line in lines]
    axes.plot([line["step"] for line in lines], values, **how)


def _set_loss_axis(
    axes: "Axes", steps: list[dict[str, Any]], evals: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Fit the axis to the training losses; return the evaluations that are inside."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

    losses = [line["loss"] for line in steps]
    losses = [loss for loss in losses if math.isfinite(loss) and loss > 0]
    if not losses:  # nothing that a logarithm could show
        return evals
    # After its first epoch a model with BatchNorm can have a test loss above 100.
    too_high = 3 * max(losses)
    kept = [line for line in evals if line["loss"] <= too_high]
    losses += [line["loss"] for line in kept if line["loss"] > 0]
    low, high = min(losses) / 1.5, max(losses) * 1.5
    if len(kept) < len(evals):  # the upper fifth is for arrows and their values
        high = max(high, max(losses) * (max(losses) / low) ** 0.28)
    axes.set_yscale("log", subs=())  # no ticks but those below
    axes.minorticks_off()
    few = MaxNLocator(5, steps=[1, 2, 5, 10])  # a narrow range may hold no decade
    each = LogLocator(subs=(1,) if high > 100 * low else (1, 2, 5))
    axes.yaxis.set_major_locator(each if high > 10 * low else few)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda loss, _: f"{loss:g}"))
    axes.set_ylim(low, high)
    for line in evals:
        if line not in kept:
            axes.annotate(
                f"{line['loss']:.3g}",
                (line["step"], 1.0),
                (line["step"], 0.9),
                xycoords=("data", "axes fraction"),
                textcoords=("data", "axes fraction"),
                color=_TEST,
                ha="center",
                va="top",
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
                arrowprops={"arrowstyle": "-|>", "color": _TEST},
            )
    return kept


def _is_log(axes: "Axes") -> bool:
    return axes.get_yscale() == "log"


def _points_per_epoch(steps: list[dict[str, Any]]) -> str:
    if "epoch" not in steps[0]:
        return ""
    per_epoch = len(steps) / (steps[-1]["epoch"] - steps[0]["epoch"] + 1)
    return f" ({per_epoch:g} points an epoch)"


def _default_title(evals: list[dict[str, Any]]) -> str:
    if not evals:
        return "The loss falls"
    last = evals[-1]
    epochs = "1 epoch" if last["epoch"] == 1 else f"{last['epoch']} epochs"
    return (
        f"After {epochs} {last['num_correct']} of {last['num_samples']} test images "
        "are recognised"
    )


class LiveCurve:
    """A loss curve that grows in the cell while the ranks train.

    Give it to `launch` as ``on_record``. It understands two kinds of records:

    - the lines of a run's history, which `ddp_lab.loop.fit` sends from rank 0,
    - ``send_record(step=step, loss=loss.item())`` from a loop of your own, on every
      rank; ``accuracy=`` may be added. The run's loss is then the mean over ranks.

    The picture is one PNG that is replaced in place, at most 4 times a second and for
    at most a fifth of the time. When the cell ends, or fails, the complete picture is
    drawn once more, and that is what the notebook keeps. Outside of a notebook it only
    collects: ``plot_loss(curve.history)`` draws it.

    Args:
        title: one sentence; by default it tells where the run got to.
        clock: returns seconds.
    """

    def __init__(
        self,
        title: str | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.title = title
        self._clock = clock
        self._lines: list[dict[str, Any]] = []  # sent as lines of a history
        self._own: dict[int, dict[int, dict[str, Any]]] = {}  # step -> rank -> fields
        self._last_step: dict[tuple[int, str], int] = {}
        self._next_at = -math.inf
        self._is_complete = True
        self._display_id = uuid.uuid4().hex
        self._is_shown = False
        self._shell = _shell()

    def __call__(self, rank: int, fields: dict[str, Any]) -> None:
        """Take one record of a rank; draw, unless the last picture is too fresh."""
        if "step" not in fields or "loss" not in fields:
            return
        kind, step = str(fields.get("kind", "own")), int(fields["step"])
        if step <= self._last_step.get((rank, kind), -1):
            self._forget()  # the steps start again: a new run
        self._last_step[rank, kind] = step
        if kind == "own":
            self._own.setdefault(step, {})[rank] = fields
        else:
            self._lines.append(fields)
        if self._shell is None:
            return
        if self._is_complete:
            self._is_complete = False
            self._shell.events.register("post_execute", self.finish)
        now = self._clock()
        if now >= self._next_at and self.history.steps:
            self._show()
            took_s = self._clock() - now
            self._next_at = now + max(_UPDATE_EVERY_S, took_s / _SHARE_FOR_DRAWING)

    @property
    def history(self) -> History:
        """What has arrived so far, for `plot_loss`."""
        num_ranks = 1 + max((r for own in self._own.values() for r in own), default=-1)
        lines = list(self._lines)
        for step, own in sorted(self._own.items()):
            if len(own) < num_ranks:  # a rank is still on its way to this step
                continue
            line = {
                "kind": "step",
                "step": step,
                "local": [own[r] for r in sorted(own)],
            }
            for key in ("loss", "accuracy"):
                if all(key in fields for fields in own.values()):
                    values = [fields[key] for fields in own.values()]
                    line[key] = sum(values) / num_ranks
            lines.append(line)
        return History(lines)

    def finish(self) -> None:
        """Draw the complete picture; the end of the cell does it by itself."""
        if self._shell is None or self._is_complete:
            return
        self._is_complete = True
        self._shell.events.unregister("post_execute", self.finish)
        if self.history.steps:
            self._show()

    def _forget(self) -> None:
        self._lines.clear()
        self._own.clear()
        self._last_step.clear()

    def _show(self) -> None:
        self._shell.display_pub.publish(
            # The text is what nbval compares: alike in all pictures.
            data={"image/png": self._png(), "text/plain": "<a loss curve, live>"},
            metadata={},
            transient={"display_id": self._display_id},
            update=self._is_shown,
        )
        self._is_shown = True

    def _png(self) -> str:
        from matplotlib.figure import Figure

        with in_style():
            figure = Figure()  # not one of pyplot's, which the cell would show again
            _draw(figure, self.history, self.title)
            file = io.BytesIO()
            figure.savefig(file, format="png", dpi=100, metadata={"Software": None})
        return base64.b64encode(file.getvalue()).decode()


def _shell() -> Any:
    """The notebook's shell, or None outside of a notebook."""
    try:
        from IPython import get_ipython
    except ImportError:
        return None
    shell = get_ipython()
    return shell if hasattr(shell, "kernel") else None
