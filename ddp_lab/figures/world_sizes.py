"""Two numbers of ranks, one curve: how far apart trainings are, as a picture."""

from typing import TYPE_CHECKING, Any

from ddp_lab.figures.drawing import FAINT, INK, RANK_COLOURS, in_style
from ddp_lab.proofs.comparison import Comparison, Curve

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["plot_comparison"]


def plot_comparison(comparison: Comparison, title: str | None = None) -> "Figure":
    """Draw the losses of all world sizes, and how far they are from the first one.

    On the left the curves lie on top of each other, as far as they do: the first one is
    broad and pale, the others are drawn into it. On the right, step by step, the
    largest difference in the loss (thin) and in any weight (bold), on a logarithmic
    axis; the dashed line is the spacing of floating point numbers at the largest
    weight, below which no weight can differ by less. Differences of 0 are not on it.

    Args:
        comparison: what `compare_world_sizes` returned.
        title: one sentence; by default it tells the largest difference.
    """
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    with in_style():
        figure = pyplot.figure(figsize=(8.4, 4.4))
        left, right = figure.subplots(1, 2)
        _draw_losses(left, comparison)
        _draw_differences(right, comparison)
        for axes in (left, right):
            axes.set_xlabel("optimiser steps")
            axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        lines, names = right.get_legend_handles_labels()
        figure.legend(lines, names, loc="outside lower right", ncols=2, fontsize=8)
        figure.suptitle(title or _title(comparison), x=0.01, ha="left", fontsize=10)
    return figure


def _steps(curve: Curve) -> range:
    return range(1, len(curve.losses) + 1)


def _name(curve: Curve) -> str:
    return f"{curve.world_size} rank" + ("" if curve.world_size == 1 else "s")


def _draw_losses(axes: "Axes", comparison: Comparison) -> None:
    first, *others = comparison.curves
    broad: dict[str, Any] = {"color": INK, "alpha": 0.25, "linewidth": 6}
    marker = "o" if comparison.num_steps == 1 else ""
    axes.plot(_steps(first), first.losses, label=_name(first), marker=marker, **broad)
    for k, curve in enumerate(others):
        how: dict[str, Any] = {"color": RANK_COLOURS[k % len(RANK_COLOURS)]}
        how["linestyle"] = (3 * k, (3, 3 * (len(others) - 1)))  # side by side
        axes.plot(_steps(curve), curve.losses, label=_name(curve), marker=marker, **how)
    axes.set_title("loss of each step")
    axes.set_ylabel("loss (nats)")
    axes.legend()


def _draw_differences(axes: "Axes", comparison: Comparison) -> None:
    first, *others = comparison.curves
    shown = False
    for k, curve in enumerate([*others, comparison.control]):
        control = curve is comparison.control
        colour = FAINT if control else RANK_COLOURS[k % len(RANK_COLOURS)]
        name = _name(curve) + (", once more" if control else "")
        if not any((*curve.weight_differences, *curve.loss_differences)):
            axes.plot([], [], color=colour, label=f"{name}: 0, the same bits")
            continue
        shown = True
        for what, width, differences in (
            ("weights", 2.2, curve.weight_differences),
            ("loss", 0.9, curve.loss_differences),
        ):
            pairs = zip(_steps(curve), differences, strict=True)
            above = [(step, difference) for step, difference in pairs if difference]
            axes.plot(
                [step for step, _ in above],
                [difference for _, difference in above],
                color=colour,
                linewidth=width,
                marker="o",
                markersize=width,
                label=f"{name}, {what}",
            )
    spacing = comparison.epsilon * comparison.largest_weight
    dashed: dict[str, Any] = {"color": FAINT, "linestyle": "--", "linewidth": 1}
    name = f"spacing of {comparison.config.precision} at the largest weight"
    axes.axhline(spacing, label=name, **dashed)
    if shown:
        axes.set_yscale("log")
    axes.set_title(f"largest difference to {_name(first)}")
    axes.set_ylabel("absolute difference" + (" (log scale)" if shown else ""))


def _title(comparison: Comparison) -> str:
    most = max(max(curve.weight_differences) for curve in comparison.curves)
    if not most:
        return f"After {comparison.num_steps} steps all weights are the same bits"
    return (
        f"After each of {comparison.num_steps} steps no weight is further than "
        f"{most:.0e} from the one of {_name(comparison.curves[0])}"
    )
