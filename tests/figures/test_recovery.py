"""What failures cost: the formulas against a simulated run, and the pictures."""

import math
import random

import pytest
from matplotlib import pyplot

from ddp_lab.figures.recovery import (
    best_interval_s,
    lost_share,
    plot_lost_time,
    plot_resumed,
)


def simulated_share(every_s, save_s, mtbf_s, num_saves):
    """Live through it: work, save, and lose what was done since the last save."""
    chance = random.Random(1)
    clock_s, useful_s, failure_at_s = 0.0, 0.0, chance.expovariate(1 / mtbf_s)
    while useful_s < num_saves * every_s:
        saved_at_s = clock_s + every_s + save_s
        if saved_at_s <= failure_at_s:
            clock_s, useful_s = saved_at_s, useful_s + every_s
        else:
            clock_s = failure_at_s
            failure_at_s = clock_s + chance.expovariate(1 / mtbf_s)
    return 1 - useful_s / clock_s


@pytest.mark.parametrize("every_s", [60, 600, 1_200, 7_200])
def test_lost_share_is_what_a_simulated_run_loses(every_s):
    """To 0.01: the share is a mean over thousands of intervals and failures."""
    expected = lost_share(every_s, 60, 10_000)
    simulated = simulated_share(every_s, 60, 10_000, 20_000)
    assert simulated == pytest.approx(expected, abs=0.01)
    assert 0.05 < expected < 0.6


def test_no_other_interval_loses_much_less_than_the_best():
    """Young's rule is of first order: right where a save is short beside failures."""
    for save_s, mtbf_s in ((1, 1e4), (60, 1e5), (5, 86_400)):
        best_s = best_interval_s(save_s, mtbf_s)
        assert best_s == math.sqrt(2 * save_s * mtbf_s)
        least = min(
            lost_share(best_s * 1.02**k, save_s, mtbf_s) for k in range(-100, 101)
        )
        assert lost_share(best_s, save_s, mtbf_s) <= 1.001 * least
        for factor in (0.5, 2):  # the bottom is flat, but it is one
            assert lost_share(factor * best_s, save_s, mtbf_s) > 1.15 * least


def test_the_picture_marks_the_best_interval():
    figure = plot_lost_time(60, 11_136, {600: 0.12})
    (axes,) = figure.axes
    expected, saving, dots = axes.lines
    lowest = min(zip(expected.get_ydata(), expected.get_xdata(), strict=True))
    assert lowest[1] == pytest.approx(best_interval_s(60, 11_136) / 60, rel=0.1)
    assert (dots.get_xdata()[0], dots.get_ydata()[0]) == (10, 12)
    assert all(saving.get_ydata() < expected.get_ydata())
    (mark,) = axes.texts
    assert mark.get_text() == "every 19 min:\n10 % is lost"
    assert "minutes" in axes.get_xlabel()
    assert "%" in axes.get_ylabel()
    pyplot.close(figure)


def test_parts_lie_on_the_whole_run():
    whole = {step: 1 / step for step in range(1, 13)}
    first = {step: whole[step] for step in range(1, 11)}
    second = {step: whole[step] for step in range(9, 13)}
    figure = plot_resumed(
        whole,
        {"until it was killed": first, "going on": second},
        {11: "killed", 8: "checkpoint"},
        "Two steps are done twice",
    )
    (axes,) = figure.axes
    band, *parts = axes.lines[:3]
    assert band.get_linewidth() > 3 * parts[0].get_linewidth()
    for line, part in zip(parts, (first, second), strict=True):
        drawn = dict(zip(line.get_xdata(), line.get_ydata(), strict=True))
        assert drawn == part
    marks = [line.get_xdata()[0] for line in axes.lines[3:]]
    assert marks == [8, 11]
    assert [text.get_text() for text in axes.texts] == ["checkpoint", "killed"]
    names = [text.get_text() for text in axes.get_legend().get_texts()]
    assert names == ["never interrupted", "until it was killed", "going on"]
    pyplot.close(figure)
