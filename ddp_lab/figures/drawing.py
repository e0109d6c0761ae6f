"""What all pictures of the lab have in common: one style, one colour a rank.

A picture is about 6.4 x 4 inches at 100 dots an inch, on white, so that it can be read
on a dark page too. Its title is one sentence that says what to see in it. The colour of
a rank is the same in every picture, told apart by colour-blind readers, and never the
only sign: the rank's number stands beside it.
"""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "FAINT",
    "INK",
    "RANK_COLOURS",
    "draw_arrow",
    "draw_cell",
    "fill_colour",
    "in_style",
    "num_bytes_text",
    "rank_colour",
    "save_picture",
    "style",
]

# Okabe and Ito's palette, told apart by colour-blind readers too (jfly.uni-koeln.de).
RANK_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
INK = "#222222"
"""Text, and the run as a whole."""
FAINT = "#888888"
"""What is there, but not what the picture is about."""

_EMPTY: dict[str, Any] = {"edgecolor": FAINT, "linewidth": 0.8, "linestyle": ":"}


def style() -> dict[Any, Any]:
    """Matplotlib settings shared by all figures, for ``matplotlib.rc_context``."""
    return {
        "figure.figsize": (6.4, 4.0),
        "figure.dpi": 100,
        "figure.facecolor": "white",  # also on a dark page
        "savefig.facecolor": "white",
        "figure.constrained_layout.use": True,
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.edgecolor": FAINT,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.titlesize": 10,
        "axes.titlelocation": "left",
        "grid.color": "#e4e4e4",
        "font.family": ["DejaVu Sans"],  # comes with matplotlib: the same everywhere
        "font.size": 9,
        "legend.frameon": False,
    }


@contextlib.contextmanager
def in_style(**more: Any) -> Iterator[None]:
    """Draw in the lab's style, with a few settings of one's own on top."""
    import matplotlib

    with matplotlib.rc_context(style() | more):
        yield


def rank_colour(rank: int) -> str:
    """The colour of a rank; a seventh rank starts again from the first colour."""
    return RANK_COLOURS[rank % len(RANK_COLOURS)]


def fill_colour(colour: str, strength: float = 0.3) -> tuple[float, float, float]:
    """Mix a colour with white, for areas that carry dark text."""
    from matplotlib.colors import to_rgb

    red, green, blue = (1 - strength * (1 - part) for part in to_rgb(colour))
    return red, green, blue


def draw_cell(
    axes: "Axes",
    x: float,
    y: float,
    colours: Sequence[str],
    text: str = "",
    *,
    width: float = 0.9,
    height: float = 0.9,
    edge: str = "white",
    font_size: float = 9,
    strength: float = 0.45,
) -> None:
    """Draw one cell of a grid, with a stripe for each colour and a text on top.

    Args:
        axes: their y-axis may point down.
        x, y: the middle of the cell.
        colours: none for an empty, dashed cell.
        text: in dark ink.
        width, height: of the cell, in units of the axes.
        edge: colour of the outline.
        font_size: in points.
        strength: of the colours, 1 for pure; below 0.5 a text on top can be read.
    """
    from matplotlib.patches import Rectangle

    left, bottom = x - width / 2, y - height / 2
    for k, colour in enumerate(colours):
        stripe = width / len(colours)
        fill = fill_colour(colour, strength)
        corner = (left + k * stripe, bottom)
        axes.add_patch(Rectangle(corner, stripe, height, color=fill, linewidth=0))
    outline = {"edgecolor": edge, "linewidth": 1.2} if colours else _EMPTY
    axes.add_patch(Rectangle((left, bottom), width, height, fill=False, **outline))
    if text:
        middle = {"ha": "center", "va": "center_baseline", "fontsize": font_size}
        axes.text(x, y, text, color=INK, **middle)  # type: ignore[arg-type]


def draw_arrow(
    axes: "Axes", start: tuple[float, float], end: tuple[float, float]
) -> None:
    """Draw a faint arrow from one place to another, in units of the axes."""
    look = {"arrowstyle": "-|>", "color": FAINT, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", end, start, arrowprops=look)


def num_bytes_text(num_bytes: float) -> str:
    """A size with its unit, in powers of 1024: 512 bytes, 3 KB, 44.7 MB, 1.5 GB."""
    size = float(num_bytes)
    if size < 1024:
        return f"{size:g} byte" + ("" if size == 1 else "s")
    for unit in ("KB", "MB"):
        size /= 1024
        if size < 999.5:
            return f"{size:.3g} {unit}"
    return f"{size / 1024:.3g} GB"


def save_picture(figure: "Figure", path: Path) -> None:
    """Write a figure as PNG, the same bytes each time, and close it."""
    from matplotlib import pyplot

    figure.savefig(path, dpi=100, metadata={"Software": None})
    pyplot.close(figure)
