"""The life of a rank: who does which step how often, and what it reads."""

import pytest
from matplotlib import pyplot
from matplotlib.colors import to_hex

from ddp_lab.figures.drawing import fill_colour, rank_colour
from ddp_lab.figures.life import plot_life


def rows(axes):
    """The steps in each rank's row, from left to right."""
    found = {}
    for text in axes.texts:
        if text.get_text().isdigit():
            x, y = text.get_position()
            found.setdefault(y - 1, []).append((x, int(text.get_text())))
    return {rank: [step for _, step in sorted(steps)] for rank, steps in found.items()}


@pytest.mark.parametrize(
    ("case", "second"),
    [
        ((12, 4, 11), [9, 10, 11, 12]),
        ((6, 2, 3), [3, 4, 5, 6]),
        ((4, 4, 4), [1, 2, 3, 4]),
    ],
)
def test_every_rank_begins_again_after_the_last_checkpoint(case, second):
    num_steps, every, killed_in = case
    (axes,) = plot_life(*case, num_ranks=3).axes
    first = list(range(1, killed_in))
    assert rows(axes) == dict.fromkeys(range(3), first + second)
    words = [text.get_text() for text in axes.texts]
    assert words.count("SIGKILL") == 1
    assert words.count(f"waits in {killed_in}") == 2
    marks = [word for word in words if word.startswith("saved")]
    assert marks == [f"saved {step}" for step in range(every, num_steps + 1, every)]


def test_what_is_lost_is_pale():
    (axes,) = plot_life(12, 4, 11).axes
    fills = [to_hex(p.get_facecolor()) for p in axes.patches if p.get_fill()]
    kept, lost = (to_hex(fill_colour(rank_colour(1), part)) for part in (0.45, 0.12))
    assert fills.count(lost) == 2  # steps 9 and 10
    assert fills.count(kept) == 8 + 4
    assert "steps 9 and 10 are done twice" in axes.get_title("left")


@pytest.mark.parametrize(
    ("case", "told"),
    [
        (
            (12, 4, 9),
            "After step 8 all ranks live a second time; no step is done twice",
        ),
        ((12, 4, 10), "step 9 is done twice"),
        ((12, 4, 12), "steps 9 to 11 are done twice"),
    ],
)
def test_the_title_counts_what_is_done_twice(case, told):
    (axes,) = plot_life(*case).axes
    assert told in axes.get_title("left")


@pytest.mark.parametrize(
    "wrong",
    [{"killed_in": 13}, {"num_steps": 17}, {"num_ranks": 5}, {"killed_rank": 2}],
)
def test_what_cannot_be_drawn_is_refused(wrong):
    with pytest.raises(ValueError, match="choose up to 16 steps"):
        plot_life(**wrong)
    assert not pyplot.get_fignums()
