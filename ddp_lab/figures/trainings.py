"""Several trainings in one picture, also with different batch sizes."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ddp_lab.figures.drawing import INK, RANK_COLOURS, in_style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["plot_losses"]

Runs = Mapping[str, tuple[int, Sequence[float]]]

_DASHES: tuple[Any, ...] = ("-", "--", ":", "-.")


def plot_losses(panels: Mapping[str, Runs], title: str) -> "Figure":
    """Draw the losses of several trainings against the images that they have seen.

    A point is a mean over as many images as the largest global batch in the picture
    has, so small batches look no noisier than large ones. The first run of each panel
    is the one to compare with, broad and pale.

    Args:
        panels: name of a panel, drawn side by side -> its runs: label -> (global batch
            size, loss of each optimiser step).
        title: one sentence that says what to see.

    Raises:
        ValueError: a run is shorter than one point.
    """
    from matplotlib import pyplot

    window = max(size for runs in panels.values() for size, _ in runs.values())
    with in_style():
        width = 6.4 if len(panels) == 1 else 8.4
        figure = pyplot.figure(figsize=(width, 3.6))
        row = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for axes, (name, runs) in zip(row, panels.items(), strict=True):
            for k, (label, (size, losses)) in enumerate(runs.items()):
                images, means = _points(label, size, losses, window)
                how: dict[str, Any] = {"color": INK, "alpha": 0.25, "linewidth": 5}
                if k:
                    how = {"color": RANK_COLOURS[(k - 1) % len(RANK_COLOURS)]}
                    how["linestyle"] = _DASHES[(k - 1) % len(_DASHES)]
                axes.plot(images, means, label=label, **how)
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter("{x:g}" if _is_narrow(axes) else "")
            axes.set_xlabel("images seen")
            axes.set_title(name)
            axes.legend(fontsize=8)
        row[0].set_ylabel("loss (nats, log scale)")
        figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    return figure


def _points(
    label: str, size: int, losses: Sequence[float], window: int
) -> tuple[list[int], list[float]]:
    """Images seen, and the mean loss over the last ``window`` of them."""
    steps = window // size
    ends = range(steps, len(losses) + 1, steps)
    if not ends:
        raise ValueError(
            f"{label}: {len(losses)} steps of {size} images are fewer than the "
            f"{window} images of a point"
        )
    return (
        [end * size for end in ends],
        [sum(losses[end - steps : end]) / steps for end in ends],
    )


def _is_narrow(axes: Any) -> bool:
    """Whether the axis shows too few powers of ten to be read by them."""
    low, high = axes.get_ylim()
    return bool(high < 20 * low)
