"""Several trainings in one picture, also with different batch sizes."""

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from ddp_lab.figures.drawing import INK, RANK_COLOURS, in_style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["plot_losses"]

Losses = Sequence[float]
Runs = Mapping[str, tuple[int, Losses | Sequence[Losses]]]

_DASHES: tuple[Any, ...] = ("-", "--", ":", "-.")


def plot_losses(panels: Mapping[str, Runs], title: str) -> "Figure":
    """Draw the losses of several trainings against the images that they have seen.

    A point is a mean over as many images as the largest global batch in the picture
    has, so small batches look no noisier than large ones. The first run of each panel
    is the one to compare with, broad and pale. Of a training with several seeds the
    line is their median, and each seed a thin line beside it; where a loss is infinite
    or NaN its line ends.

    Args:
        panels: name of a panel, drawn side by side -> its runs: label -> (global batch
            size, loss of each optimiser step, or a row of them for each seed).
        title: one sentence that says what to see.

    Raises:
        ValueError: a run is shorter than one point.
    """
    from matplotlib import pyplot

    window = max(size for runs in panels.values() for size, _ in runs.values())
    with in_style():
        width = 6.4 if len(panels) == 1 else 8.4
        figure = pyplot.figure(figsize=(width, 4.2))
        row = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for axes, (name, runs) in zip(row, panels.items(), strict=True):
            for k, (label, (size, losses)) in enumerate(runs.items()):
                how: dict[str, Any] = {"color": INK, "alpha": 0.25, "linewidth": 5}
                if k:
                    how = {"color": RANK_COLOURS[(k - 1) % len(RANK_COLOURS)]}
                    how["linestyle"] = _DASHES[(k - 1) % len(_DASHES)]
                _draw_run(axes, label, size, _by_seed(losses), window, how)
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter("{x:g}" if _is_narrow(axes) else "")
            axes.set_xlabel("images seen")
            axes.set_title(name)
            below: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (0, -0.16)}
            axes.legend(fontsize=8, ncols=2, **below)
        row[0].set_ylabel("loss (nats, log scale)")
        figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    return figure


def _by_seed(losses: Losses | Sequence[Losses]) -> list[Losses]:
    """A row of losses for each seed, also where there is only one."""
    rows = [row for row in losses if isinstance(row, Sequence)]
    return rows or [[loss for loss in losses if not isinstance(loss, Sequence)]]


def _draw_run(
    axes: Any,
    label: str,
    size: int,
    seeds: list[Losses],
    window: int,
    how: dict[str, Any],
) -> None:
    """One training: a thin line for each seed, and the median of them all."""
    rows = [_points(label, size, losses, window) for losses in seeds]
    images = rows[0][0]
    middle = [
        median(point) for point in zip(*(means for _, means in rows), strict=True)
    ]
    axes.plot(images, middle, label=label, **how)
    thin: dict[str, Any] = {"color": how["color"], "alpha": 0.5, "linewidth": 0.7}
    for _, means in rows if len(rows) > 1 else ():
        axes.plot(images, means, **thin)


def _points(
    label: str, size: int, losses: Losses, window: int
) -> tuple[list[int], list[float]]:
    """Images seen, and the mean loss over the last ``window`` of them."""
    steps = window // size
    ends = range(steps, len(losses) + 1, steps)
    if not ends:
        raise ValueError(
            f"{label}: {len(losses)} steps of {size} images are fewer than the "
            f"{window} images of a point"
        )
    means = [sum(losses[end - steps : end]) / steps for end in ends]
    images = [end * size for end in ends]
    return images, [mean if math.isfinite(mean) else math.inf for mean in means]


def _is_narrow(axes: Any) -> bool:
    """Whether the axis shows too few powers of ten to be read by them."""
    low, high = axes.get_ylim()
    return bool(high < 20 * low)
