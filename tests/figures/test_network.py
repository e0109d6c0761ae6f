"""What a network costs: the formula against a played ring, and the pictures."""

import pytest

from ddp_lab.figures.network import plot_bandwidth, plot_network_cost, ring_seconds


@pytest.mark.parametrize("num_ranks", [1, 2, 5, 16])
def test_the_formula_is_a_ring_played_hop_by_hop(num_ranks):
    """Two rounds of n - 1 hops, each of which sends a piece to the neighbour."""
    clock = 0.0
    for _round in ("scatter", "gather"):
        for _hop in range(num_ranks - 1):
            clock += 14e-6 + 44.7e6 / num_ranks / (10e9 / 8)
    assert ring_seconds(44.7e6, num_ranks, 10e9, 14e-6) == pytest.approx(clock)


def test_more_ranks_never_double_the_bytes_but_the_latency_grows_with_them():
    two, many = (ring_seconds(1e6, n, 1e9) for n in (2, 1000))
    assert 1.9 < many / two < 2
    two, many = (ring_seconds(0, n, 1e9, 1e-5) for n in (2, 1000))
    assert many / two == pytest.approx(999)


TIMES = {
    2**12: [3e-4, 1e-4, 2e-4],
    2**20: [1e-3, 1e-3, 1e-3],
    2**26: [0.05, 0.07, 0.09],
}


def test_times_and_bus_bandwidths_are_drawn_with_their_middle_half():
    top, bottom = plot_bandwidth(TIMES, 4).axes
    (dots, _, (bars,)), *_ = top.containers
    assert list(dots.get_xdata()) == [2**12, 2**20, 2**26]
    assert list(dots.get_ydata()) == pytest.approx([0.2, 1, 70])
    spans = [[y for _, y in segment] for segment in bars.get_segments()]
    assert spans[0] == pytest.approx([0.15, 0.25])
    (speeds, _, (bars,)), *_ = bottom.containers
    expected = [
        1.5 * s / t / 1e9 for s, t in zip(TIMES, (2e-4, 1e-3, 0.07), strict=True)
    ]
    assert list(speeds.get_ydata()) == pytest.approx(expected)
    low, high = (y for _, y in bars.get_segments()[0])
    assert low == pytest.approx(1.5 * 2**12 / 2.5e-4 / 1e9)
    assert high == pytest.approx(1.5 * 2**12 / 1.5e-4 / 1e9)


def test_the_fit_is_a_line_through_both_panels():
    top, bottom = plot_bandwidth(TIMES, 2, (2e-4, 1e9)).axes
    times, speeds = top.lines[-1], bottom.lines[-1]
    first = 2e-4 + 2**12 / 1e9
    assert times.get_ydata()[0] == pytest.approx(1e3 * first)
    assert speeds.get_ydata()[0] == pytest.approx(2**12 / first / 1e9)
    labels = [text.get_text() for text in top.get_legend().texts]
    assert "0.2 ms + size / (1 GB/s)" in labels
    assert "Below 195 KB" in top.get_title("left")  # where both parts are equal


LINKS = {"slow": (1e9, 14e-6, 64), "fast": (400e9, 14e-6, 64), "box": (3600e9, 3e-6, 8)}


def test_a_line_ends_where_its_links_do_and_the_latency_is_drawn_alone():
    (axes,) = plot_network_cost(44.7e6, LINKS, 0.065, {2: 0.374}).axes
    slow, fast, box, latency, dot = axes.lines
    for line, (name, most) in (
        (slow, ("slow", 64)),
        (fast, ("fast", 64)),
        (box, ("box", 8)),
    ):
        assert (line.get_xdata()[0], line.get_xdata()[-1]) == (2, most)
        bits_per_s, latency_s, _ = LINKS[name]
        for n, ms in ((2, line.get_ydata()[0]), (most, line.get_ydata()[-1])):
            assert ms == pytest.approx(
                1e3 * ring_seconds(44.7e6, n, bits_per_s, latency_s)
            )
    assert latency.get_linestyle() == "--"
    assert latency.get_ydata()[-1] == pytest.approx(2 * 63 * 0.014)
    assert (dot.get_xdata()[0], dot.get_ydata()[0]) == (2, 374)
    (band,) = axes.patches
    assert band.get_height() == 65
