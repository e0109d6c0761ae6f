"""What a failure costs, and the pictures of a run that came back.

A run that saves after every ``every_s`` seconds of work loses time in two ways: each
save takes ``save_s``, and each failure costs what was done since the last save.
Failures come by chance, on average ``mtbf_s`` apart (mean time between failures).
Saving often makes the first loss large, saving seldom the second.
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ddp_lab.figures.drawing import FAINT, INK, in_style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["best_interval_s", "lost_share", "plot_lost_time", "plot_resumed"]

# no colours of ranks, which these curves are not
_CURVES = (INK, "#D55E00", "#009E73", "#CC79A7")
_MARKERS = ("o", "D", "s", "v")


def best_interval_s(save_s: float, mtbf_s: float) -> float:
    """Return after how many seconds of work to save, so that least time is lost.

    Args:
        save_s: seconds that a save takes, above 0.
        mtbf_s: mean time between failures of the whole run, in seconds; much longer
            than ``save_s``.

    Source: Young 1974, "A first order approximation to the optimum checkpoint
    interval", CACM 17(9) (https://doi.org/10.1145/361147.361115).
    """
    return math.sqrt(2 * save_s * mtbf_s)


def lost_share(every_s: float, save_s: float, mtbf_s: float) -> float:
    """Return the expected share of the time that is not progress, 0 to 1.

    How long it takes to come back after a failure is left out: it costs the same
    whatever the interval is.

    Args:
        every_s: seconds of work between two saves.
        save_s: seconds that a save takes.
        mtbf_s: mean time between failures, in seconds.

    Source: Daly 2006, "A higher order estimate of the optimum checkpoint interval for
    restart dumps", FGCS 22(3) (https://doi.org/10.1016/j.future.2004.11.016),
    section 3, with a restart time of 0.
    """
    return 1 - every_s / (mtbf_s * math.expm1((every_s + save_s) / mtbf_s))


def plot_lost_time(
    save_s: float, mtbf_s: float, measured: Mapping[float, float] | None = None
) -> "Figure":
    """Draw the share of the time that is lost against the interval between saves.

    Args:
        save_s, mtbf_s: see `lost_share`.
        measured: from ``every_s`` to the share that was lost, drawn as dots.
    """
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter, LogLocator

    best_s = best_interval_s(save_s, mtbf_s)
    low, high = best_s / 20, best_s * 20
    every_s = [low * (high / low) ** (k / 200) for k in range(201)]
    with in_style():
        figure, axes = pyplot.subplots()
        minutes = [s / 60 for s in every_s]
        lost = [100 * lost_share(s, save_s, mtbf_s) for s in every_s]
        axes.plot(minutes, lost, color=INK, label="expected")
        saving = [100 * save_s / (s + save_s) for s in every_s]
        axes.plot(minutes, saving, color=FAINT, linestyle=":", label="by saving alone")
        if measured:
            at = [s / 60 for s in measured]
            share = [100 * lost for lost in measured.values()]
            dots: dict[str, Any] = {"linestyle": "none", "color": _CURVES[1]}
            axes.plot(at, share, marker="o", label="simulated", **dots)
        least = 100 * lost_share(best_s, save_s, mtbf_s)
        axes.annotate(
            f"every {best_s / 60:.0f} min:\n{least:.0f} % is lost",
            (best_s / 60, least),
            (best_s / 60, least + 32),
            ha="center",
            arrowprops={"arrowstyle": "-|>", "color": INK},
        )
        axes.set_xscale("log", subs=())
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        axes.set(xlim=(low / 60, high / 60), ylim=(0, 100))
        axes.set(xlabel="work between two saves (minutes, log scale)")
        axes.set(ylabel="time lost (%)")
        axes.set_title("Too often costs saving, too seldom costs work done twice")
        axes.legend(loc="upper center", ncols=3)
    return figure


def plot_resumed(
    whole: Mapping[int, float],
    parts: Mapping[str, Mapping[int, float]],
    marks: Mapping[int, str],
    title: str,
) -> "Figure":
    """Draw the loss of a run that was interrupted over that of one that was not.

    Args:
        whole: from optimiser step to loss, of the run that was never interrupted.
        parts: of the other one, by name, in the order in which they ran.
        marks: what happened after which step.
        title: one sentence that says what to see.
    """
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    with in_style():
        figure, axes = pyplot.subplots()
        band: dict[str, Any] = {"color": FAINT, "alpha": 0.35, "linewidth": 7}
        axes.plot(
            [*whole], [*whole.values()], label="never interrupted", zorder=1, **band
        )
        for k, (name, part) in enumerate(parts.items()):
            how: dict[str, Any] = {
                "color": _CURVES[k % len(_CURVES)],
                "marker": _MARKERS[k % len(_MARKERS)],
                # the first is seen around the others, where they lie on it
                "markersize": (7 if k == 0 else 4) if len(whole) < 40 else 0,
                "markerfacecolor": None if k else "white",
                "linewidth": 1.2,
            }
            axes.plot([*part], [*part.values()], label=name, **how)
        low, high = axes.get_ylim()
        axes.set_ylim(low, high + 0.22 * (high - low))  # room for the words
        for k, (step, text) in enumerate(sorted(marks.items())):
            axes.axvline(step, color=INK, linestyle=":", linewidth=1)
            axes.annotate(
                text,
                (step, 1),
                (-4, -4 - 13 * k),
                xycoords=("data", "axes fraction"),
                textcoords="offset points",
                ha="right",
                va="top",
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
            )
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set(xlabel="optimiser step", ylabel="loss (nats)", title=title)
        axes.legend(loc="lower left")
    return figure
