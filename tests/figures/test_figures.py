import math
import re

import pytest
import torch
import torch.distributed as dist
from matplotlib import pyplot
from matplotlib.colors import to_hex
from matplotlib.text import Text
from torch import nn

from ddp_lab.by_hand import BucketDDP, assign_buckets, ring_all_reduce
from ddp_lab.figures import (
    RANK_COLOURS,
    plot_accumulation,
    plot_bandwidth,
    plot_buckets,
    plot_collective,
    plot_hosts,
    plot_life,
    plot_loss,
    plot_losses,
    plot_lost_time,
    plot_memory,
    plot_network_cost,
    plot_resumed,
    plot_ring,
    plot_shards,
    plot_three_steps,
    save_picture,
    style,
)
from ddp_lab.figures.collectives import ring_steps
from ddp_lab.figures.drawing import INK, fill_colour, num_bytes_text
from ddp_lab.ranks.workers import Workers
from ddp_lab.runs.record import History


def history(num_ranks=2, num_epochs=2, evals=True):
    lines, step = [], 0
    for epoch in range(1, num_epochs + 1):
        for _ in range(3):
            step += 1
            local = [
                {"loss": 1 / step + rank / 10, "accuracy": 0.5}
                for rank in range(num_ranks)
            ]
            mean = sum(own["loss"] for own in local) / num_ranks
            lines.append(
                {
                    "kind": "step",
                    "epoch": epoch,
                    "step": step,
                    "loss": mean,
                    "accuracy": 0.5,
                    "local": local,
                }
            )
        if evals:
            lines.append(
                {
                    "kind": "eval",
                    "epoch": epoch,
                    "step": step,
                    "loss": 1 / epoch,
                    "accuracy": epoch / 4,
                    "num_correct": epoch * 25,
                    "num_samples": 100,
                }
            )
    return History(lines)


def test_curves_hold_the_numbers_of_the_history():
    figure = plot_loss(history())
    top, bottom = figure.axes
    curves = {line.get_label(): line for line in top.lines}
    assert set(curves) == {
        "rank 0, local",
        "rank 1, local",
        "training, all ranks",
        "test, 100 images",
    }
    run = curves["training, all ranks"]
    expected = [line["loss"] for line in history().steps]
    assert run.get_ydata().tolist() == pytest.approx(expected)
    assert run.get_xdata().tolist() == [1, 2, 3, 4, 5, 6]
    assert curves["rank 1, local"].get_color() == RANK_COLOURS[1]
    assert curves["test, 100 images"].get_xdata().tolist() == [3, 6]
    assert bottom.lines[-1].get_ydata().tolist() == [25.0, 50.0]
    assert (
        top.get_title("left") == "After 2 epochs 50 of 100 test images are recognised"
    )


def test_axes_have_units():
    top, bottom = plot_loss(history()).axes
    assert top.get_ylabel() == "loss (nats, log scale)"
    assert bottom.get_ylabel() == "accuracy (%)"
    assert bottom.get_xlabel() == "optimiser steps (3 points an epoch)"


def test_one_rank_and_no_evaluation_yet():
    figure = plot_loss(history(num_ranks=1, evals=False))
    assert [line.get_label() for line in figure.axes[0].lines] == [
        "training, all ranks"
    ]


def test_empty_history_says_so():
    with pytest.raises(ValueError, match="no training step yet"):
        plot_loss(History([]))
    assert not pyplot.get_fignums()


def collective():
    return plot_collective("all_reduce", PARTS, [sum(PARTS)] * 3)


def buckets():
    model = two_layers()
    plan = assign_buckets(model.parameters(), bucket_cap_mb=0.02, first_bucket_mb=0.001)
    return plot_buckets(model.named_parameters(), plan)


PICTURES = {
    "loss": lambda: plot_loss(history()),
    "losses": lambda: plot_losses({"both": runs()}, "Two batch sizes, one curve"),
    "shards": lambda: plot_shards([[[0, 2], [1, 3]], [[3, 1], [0, 2]]]),
    "buckets": buckets,
    "buckets over time": lambda: plot_buckets(
        [("a", 10), ("b", 20)],
        [["b"], ["a"]],
        ready_s={"a": 0.2, "b": 0.1},
        sent_s=[[0.1, 0.15], [0.2, 0.3]],
    ),
    "ring": lambda: plot_ring(3 * 2**20),
    "memory": lambda: plot_memory(MEMORY, limit_bytes=100 * 2**20),
    "collective": collective,
    "hosts": lambda: plot_hosts(2, 3),
    "steps": plot_three_steps,
    "accumulation": lambda: plot_accumulation(2, 8, 4),
    "resumed": lambda: plot_resumed(
        {1: 2.0, 2: 1.0, 3: 0.5},
        {"first": {1: 2.0, 2: 1.0}, "second": {2: 1.0, 3: 0.5}},
        {1: "checkpoint", 2: "killed"},
        "The second part lies on the whole run",
    ),
    "lost time": lambda: plot_lost_time(60, 11_136),
    "life": plot_life,
    "bandwidth": lambda: plot_bandwidth(
        {2**12: [1e-4, 2e-4], 2**26: [0.1, 0.2]}, 2, (1e-4, 5e8)
    ),
    "network cost": lambda: plot_network_cost(44.7e6, {"1 Gbit/s": (1e9, 0, 8)}, 0.065),
}


@pytest.mark.parametrize("draw", PICTURES.values(), ids=PICTURES)
def test_picture_is_the_same_bytes_each_time(tmp_path, draw):
    pictures = []
    for name in ("a.png", "b.png"):
        save_picture(draw(), tmp_path / name)
        pictures.append((tmp_path / name).read_bytes())
    assert pictures[0] == pictures[1]
    assert pictures[0].startswith(b"\x89PNG")
    assert b"Software" not in pictures[0]
    assert not pyplot.get_fignums()


def test_style_is_readable_on_a_dark_page():
    assert style()["figure.facecolor"] == "white"
    assert len(set(RANK_COLOURS)) == len(RANK_COLOURS)


@pytest.mark.parametrize("draw", PICTURES.values(), ids=PICTURES)
def test_pictures_have_the_size_of_a_page_and_a_sentence(draw):
    figure = draw()
    width, height = figure.get_size_inches()
    assert width == 6.4
    assert 2 <= height <= 4.6
    assert figure.dpi == 100
    assert to_hex(figure.get_facecolor()) == "#ffffff"
    titles = [axes.get_title("left") for axes in figure.axes]
    titles.append(figure.get_suptitle())
    assert max(len(title.split()) for title in titles) >= 5


def texts(axes):
    return [text.get_text() for text in axes.texts]


def fills(axes):
    """The colour of each stripe, from left to right in each row."""
    stripes = [patch for patch in axes.patches if patch.get_fill()]
    return [to_hex(patch.get_facecolor()) for patch in stripes]


def shade(rank):
    return to_hex(fill_colour(RANK_COLOURS[rank], 0.45))


# ---- loss ------------------------------------------------------------------------


def test_a_far_test_loss_does_not_squeeze_the_axis():
    lines = history().lines
    first = next(line for line in lines if line["kind"] == "eval")
    first["loss"] = 137.25
    top = plot_loss(History(lines)).axes[0]
    low, high = top.get_ylim()
    losses = [line["loss"] for line in lines if line["kind"] == "step"]
    assert low < min(losses)
    assert high < 2
    (arrow,) = top.texts
    assert arrow.get_text() == "137"
    assert arrow.xy == (3, 1.0)  # its step, at the upper edge
    drawn = {line.get_label(): line for line in top.lines}["test, 100 images"]
    assert drawn.get_xdata().tolist() == [6]  # no line to what is outside
    top.figure.canvas.draw()
    label = Text.get_window_extent(arrow)  # without its arrow
    highest = top.transData.transform((3, max(losses)))[1]
    assert label.y0 > highest, "the value lies on the curve"
    assert label.y1 < top.get_window_extent().y1


def test_a_loss_within_a_decade_has_round_ticks():
    steps = [
        {"kind": "step", "step": k, "loss": 2.5 - 0.05 * k, "local": []}
        for k in range(30)
    ]
    (axes,) = plot_loss(History(steps)).axes
    axes.figure.canvas.draw()
    low, high = axes.get_ylim()
    ticks = [t for t in axes.get_yticks() if low <= t <= high]
    assert ticks == pytest.approx([1, 2, 3])
    assert axes.get_yticklabels(minor=True) == []


def test_a_loss_over_decades_has_a_tick_for_each_and_its_legend_beside_it():
    steps = [
        {"kind": "step", "step": k, "loss": 10.0**-k, "local": []} for k in range(4)
    ]
    steps[1]["local"] = [{"loss": 1e-9}, {"loss": 0.2}]  # a rank's own fall of luck
    figure = plot_loss(History(steps))
    (axes,) = figure.axes
    low, high = axes.get_ylim()
    ticks = [t for t in axes.get_yticks() if low <= t <= high]
    assert ticks == pytest.approx([1e-3, 1e-2, 1e-1, 1])
    assert axes.get_legend() is None
    assert [text.get_text() for text in figure.legends[0].texts][-1:] == [
        "training, all ranks"
    ]


def test_a_loss_without_accuracy_has_one_panel():
    step = {"kind": "step", "step": 1, "loss": 1.0, "local": []}
    figure = plot_loss(History([step, {**step, "step": 2, "loss": 0.5}]))
    (axes,) = figure.axes
    assert axes.get_xlabel() == "optimiser steps"


# ---- shards ----------------------------------------------------------------------


def test_shards_show_rank_and_step_of_each_sample():
    axes = plot_shards([[[0, 2], [1, 3]], [[3, 1], [0, 2]]]).axes[0]
    assert texts(axes) == ["1", "1", "2", "2", "1", "2", "2", "1"]
    ranks = [0, 1, 0, 1, 1, 0, 1, 0]
    assert fills(axes) == [shade(rank) for rank in ranks]
    assert [t.get_text() for t in axes.get_yticklabels()] == ["epoch 0", "epoch 1"]
    assert "the step" in axes.get_xlabel()
    assert axes.get_title("left") == "Every sample is seen once in each epoch"


def test_shards_count_what_is_seen_twice_and_never():
    figure = plot_shards([[[0, 1], [1, 2]]], 5, batch_size_per_rank=2)
    axes = figure.axes[0]
    assert axes.get_title("left") == (
        "In 1 epoch of 5 samples, 1 are seen more than once and 2 are not seen at all"
    )
    assert fills(axes) == [shade(0), shade(0), shade(1), shade(1)]
    assert texts(axes) == ["1", "1", "1", "1"]
    with pytest.raises(ValueError, match="take 64 or less"):
        plot_shards([[range(65)]])


def test_each_stripe_of_a_sample_has_its_own_step():
    """Ranks 0 and 1 see sample 1, in steps 1 and 3."""
    axes = plot_shards([[[1, 0, 3], [2, 4, 1]]]).axes[0]
    stripes = [patch for patch in axes.patches if patch.get_fill()]
    assert len(axes.texts) == len(stripes) == 6
    for text, stripe in zip(axes.texts, stripes, strict=True):
        middle = stripe.get_x() + stripe.get_width() / 2
        assert text.get_position()[0] == pytest.approx(middle)
    assert [(t, f) for t, f in zip(texts(axes), fills(axes), strict=True)][1:3] == [
        ("1", shade(0)),
        ("3", shade(1)),
    ]


def test_a_step_that_does_not_fit_is_left_out():
    everybody = [[*range(32)] for _ in range(8)]  # eight stripes in a narrow cell
    assert texts(plot_shards([everybody]).axes[0]) == []


# ---- buckets ---------------------------------------------------------------------


def two_layers():
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8))


def bars(axes):
    """Bucket and size of each bar."""
    rectangles = [bar for container in axes.containers for bar in container]
    return [(round(r.get_y() + r.get_height() / 2), r.get_width()) for r in rectangles]


def test_buckets_are_as_long_as_their_bytes():
    model = two_layers()
    names = [["2.bias", "2.weight"], ["0.bias"], ["0.weight"]]
    sizes = {name: p.nbytes / 2**20 for name, p in model.named_parameters()}
    axes = plot_buckets(model.named_parameters(), names).axes[0]
    expected = [(k, sizes[name]) for k, row in enumerate(names) for name in row]
    assert [bucket for bucket, _ in bars(axes)] == [bucket for bucket, _ in expected]
    drawn = [size for _, size in bars(axes)]
    assert drawn == pytest.approx([1024 * size for _, size in expected])
    assert axes.get_xlabel() == "size of the gradients (KB)"
    large = [("a", torch.zeros(2**20)), ("b", torch.zeros(10))]
    in_mb = plot_buckets(large, [[1], [0]]).axes[0]
    assert in_mb.get_xlabel() == "size of the gradients (MB)"
    assert bars(in_mb)[1] == (1, 4.0)
    assert "1.03 KB: 2.bias ... 2.weight" in texts(axes)
    assert axes.get_title("left").startswith("4 parameters travel in 3 buckets")


def test_buckets_by_position_and_by_name_are_alike(tmp_path):
    model, pictures = two_layers(), []
    positions = assign_buckets(model.parameters(), first_bucket_mb=0.001)
    names = [name for name, _ in model.named_parameters()]
    for plan in (positions, [[names[i] for i in row] for row in positions]):
        path = tmp_path / "buckets.png"
        save_picture(plot_buckets(model.named_parameters(), plan), path)
        pictures.append(path.read_bytes())
    assert pictures[0] == pictures[1]
    assert hasattr(BucketDDP, "bucket_names")


def test_buckets_over_time_show_when_they_left_and_what_was_hidden():
    sizes = [("0.weight", 2**20), ("1.weight", 2**21), ("2.weight", 2**20)]
    ready_s = {"2.weight": 5.0, "1.weight": 5.1, "0.weight": 5.2}
    sent_s = [[5.1, 5.2], [5.2, 5.3]]
    order = [["2.weight", "1.weight"], ["0.weight"]]
    axes = plot_buckets(sizes, order, ready_s=ready_s, sent_s=sent_s).axes[0]
    ticks = [[line[0][0] for line in c.get_segments()] for c in axes.collections]
    assert ticks[0] == pytest.approx([0, 100])
    assert ticks[1] == pytest.approx([200])
    rectangles = [bar for container in axes.containers for bar in container]
    assert [bar.get_x() for bar in rectangles] == pytest.approx([100, 200])
    assert [bar.get_width() for bar in rectangles] == pytest.approx([100, 100])
    assert axes.lines[0].get_xdata()[0] == pytest.approx(200)
    labels = [tick.get_text() for tick in axes.get_yticklabels()]
    assert labels == ["bucket 0\n3 MB", "bucket 1\n1 MB"]
    assert "(ms)" in axes.get_xlabel()
    assert axes.get_title("left") == "50% of the sending runs while backward computes"


# ---- memory ----------------------------------------------------------------------

MEMORY = [
    {
        "batch_size": size,
        "parameters": 10 * 2**20,
        "gradients": 10 * 2**20,
        "optimiser": 10 * 2**20,
        "activations": size * 2**20,
    }
    for size in (10, 50, 90)
]


def test_memory_is_stacked_by_kind():
    axes = plot_memory(MEMORY).axes[0]
    heights = {c.get_label(): [bar.get_height() for bar in c] for c in axes.containers}
    assert heights == {
        "parameters": [10, 10, 10],
        "gradients": [10, 10, 10],
        "optimiser": [10, 10, 10],
        "activations": [10, 50, 90],
    }
    assert [bar.get_y() for bar in axes.containers[-1]] == [30, 30, 30]
    assert axes.get_ylabel() == "memory (MB)"
    assert "samples" in axes.get_xlabel()
    assert [t.get_text() for t in axes.get_xticklabels()] == ["10", "50", "90"]
    assert texts(axes) == ["40 MB", "80 MB", "120 MB"]
    assert "75% of the memory" in axes.get_title("left")


@pytest.mark.parametrize(
    ("limit_mb", "title"),
    [
        (100, "A batch of 50 fits, 90 is too many"),
        (20, "Not even the smallest of these batches fits"),
        (500, "All of these batches fit, up to 90"),
    ],
)
def test_memory_says_what_fits(limit_mb, title):
    axes = plot_memory(MEMORY, limit_bytes=limit_mb * 2**20).axes[0]
    assert axes.get_title("left") == title
    (line,) = axes.lines
    assert line.get_ydata()[0] == limit_mb


def test_memory_is_labelled_beside_the_bars_and_not_on_them():
    figure = plot_memory(MEMORY, limit_bytes=100 * 2**20)
    (axes,), (legend,) = figure.axes, figure.legends
    figure.canvas.draw()
    lowest = axes.xaxis.label.get_window_extent().y0
    assert legend.get_window_extent().y1 <= lowest
    named = [text.get_text() for text in legend.get_texts()]
    assert named == ["parameters", "gradients", "optimiser", "activations"]
    (limit,) = (text for text in axes.texts if "GPU memory" in text.get_text())
    assert limit.get_text() == "GPU memory: 100 MB"
    assert limit.get_position()[1] == 100


def test_strips_too_thin_to_tell_apart_are_one():
    rows = [{**row, "activations": 100 * row["activations"]} for row in MEMORY]
    axes = plot_memory(rows).axes[0]
    fixed, activations = axes.containers
    assert fixed.get_label() == "parameters, gradients, optimiser"
    thirty_mb = 30 / 1024
    assert [bar.get_height() for bar in fixed] == pytest.approx([thirty_mb] * 3)
    assert [bar.get_y() for bar in activations] == pytest.approx([thirty_mb] * 3)
    assert texts(axes)[0] == "1.01 GB"


def test_memory_of_a_large_gpu_is_in_gb():
    axes = plot_memory(MEMORY, limit_bytes=2**30).axes[0]
    assert axes.get_ylabel() == "memory (GB)"
    assert axes.containers[-1][0].get_height() == pytest.approx(10 / 1024)


def test_bytes_in_words():
    told = [num_bytes_text(n) for n in (1, 512, 1536, 2**20, 1023 * 2**20, 3 * 2**30)]
    assert told == ["1 byte", "512 bytes", "1.5 KB", "1 MB", "0.999 GB", "3 GB"]


# ---- collectives -----------------------------------------------------------------

PARTS = [torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0]), torch.tensor([7.0, 5.0])]


def test_a_sum_has_the_colours_of_all():
    before, after = collective().axes
    assert texts(before) == ["1", "2", "10", "20", "7", "5"]
    assert fills(before) == [shade(r) for r in (0, 0, 1, 1, 2, 2)]
    assert texts(after) == ["18", "27"] * 3
    assert fills(after) == [shade(0), shade(1), shade(2)] * 6


def test_what_moves_keeps_its_colour():
    pieces = [torch.tensor([4.0]), torch.tensor([5.0])]
    figure = plot_collective("scatter", [pieces, None], [pieces[0], pieces[1]])
    before, after = figure.axes
    assert texts(before) == ["4", "5"]
    assert fills(after) == [shade(0), shade(0)]
    assert "rank 0 deals out" in figure.get_suptitle()
    gathered = plot_collective("all_gather", PARTS[:2], [PARTS[:2]] * 2).axes[1]
    assert fills(gathered) == [shade(r) for r in (0, 0, 1, 1)] * 2


def test_each_piece_of_a_reduce_scatter_stands_at_its_place():
    whole = [torch.tensor([1.0, 2.0, 4.0]) * 10**rank for rank in range(3)]
    pieces = list(sum(whole).split(1))
    before, after = plot_collective("reduce_scatter", whole, pieces).axes
    placed = {text.get_text(): text.get_position() for text in after.texts}
    assert placed == {"111": (0, 0), "222": (1, 1), "444": (2, 2)}
    for axes in (before, after):
        labels = [tick.get_text() for tick in axes.get_xticklabels()]
        assert labels == ["piece 0", "piece 1", "piece 2"]
        assert list(axes.get_xticks()) == [0, 1, 2]
    two = [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([10.0, 20.0, 30.0])]
    uneven = plot_collective("reduce_scatter", two, list(sum(two).split([2, 1]))).axes
    assert list(uneven[1].get_xticks()) == [0.5, 2]


# ---- the ring --------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ring_shows_every_link_and_ends_with_all_sums(world_size):
    figure = plot_ring(world_size * 2**18, world_size)  # chunks of 1 MB
    panels = figure.axes[: 2 * world_size - 1]
    for panel in panels[1:]:
        links = [t for t in texts(panel) if t]
        assert links == ["1 MB"] * (world_size - 1) + ["1 MB\nto rank 0"]
    assert texts(panels[0]) == []
    assert "#ffffff" in fills(panels[0])
    assert "#ffffff" not in fills(panels[-1])  # every slot is filled
    totals = "\n".join(texts(figure.axes[-1]))
    assert f"{world_size} ranks (W), {2 * world_size - 2} steps" in totals
    assert f"each rank sends\n{2 * world_size - 2} MB" in totals


def test_ring_refuses_what_it_cannot_draw():
    with pytest.raises(ValueError, match="choose 2 to 5"):
        plot_ring(10, 1)


def sent_sizes(num_elements):
    """On a rank: how many elements it really sends, message by message."""
    real, sizes = dist.P2POp, []

    def noting(op, tensor, peer):
        if op is dist.isend:
            sizes.append(tensor.numel())
        return real(op, tensor, peer)

    dist.P2POp = noting
    try:
        ring_all_reduce(torch.ones(num_elements))
    finally:
        dist.P2POp = real
    return sizes


def test_ring_is_the_one_that_by_hand_runs():
    """Message by message, also when the tensor does not divide."""
    with Workers(3, init=True, device="cpu") as workers:
        for num_elements in (3, 10, 11):
            steps = ring_steps(num_elements, 3)
            drawn = [[row[rank][1] for row in steps] for rank in range(3)]
            assert workers.run(sent_sizes, num_elements) == drawn


def test_titles_are_sentences_without_a_full_stop():
    for draw in PICTURES.values():
        figure = draw()
        for title in (
            figure.get_suptitle(),
            *(a.get_title("left") for a in figure.axes),
        ):
            assert not re.search(r"[.;]$", title)


# ---- hosts -----------------------------------------------------------------------


def arrows(axes):
    """Colour of the arrow that starts at each rank; the last one goes to rank 0."""
    arrows = [text.arrow_patch for text in axes.texts if not text.get_text()]
    return [to_hex(arrow.get_edgecolor()) for arrow in arrows]


@pytest.mark.parametrize(
    ("num_hosts", "ranks_per_host", "crossing"),
    [
        (2, 3, [2, 5]),
        (3, 2, [1, 3, 5]),
        (4, 1, [0, 1, 2, 3]),
        (1, 4, []),
        (2, 1, [0, 1]),
    ],
)
def test_hosts_show_which_links_cross_the_network(num_hosts, ranks_per_host, crossing):
    (axes,) = plot_hosts(num_hosts, ranks_per_host).axes
    num_ranks = num_hosts * ranks_per_host
    drawn = arrows(axes)
    assert len(drawn) == num_ranks
    assert [rank for rank, colour in enumerate(drawn) if colour == INK] == crossing
    links = f"{len(crossing)} of the {num_ranks} links"
    assert links in axes.get_title("left")


def test_hosts_number_ranks_through_and_local_ranks_anew():
    (axes,) = plot_hosts(2, 3).axes
    cells = [text for text in texts(axes) if "local " in text and "\n" in text]
    places = [(0, 0), (1, 1), (2, 2), (3, 0), (4, 1), (5, 2)]
    assert cells == [f"rank {rank}\n(local {local})" for rank, local in places]
    launchers = [text for text in texts(axes) if text.endswith(": torchrun")]
    assert launchers == ["host 0: torchrun", "host 1: torchrun"]
    assert fills(axes).count(shade(4)) == 1
    (crowded,) = plot_hosts(2, 8).axes
    assert "15\n(7)" in texts(crowded)


@pytest.mark.parametrize(("num_hosts", "each"), [(5, 1), (0, 2), (2, 0), (2, 9)])
def test_hosts_refuse_what_cannot_be_drawn(num_hosts, each):
    with pytest.raises(ValueError, match="1 to 4 hosts, and up to 16 ranks"):
        plot_hosts(num_hosts, each)
    assert not pyplot.get_fignums()


def runs():
    small = [2.0, 1.0, 1.0, 0.5]  # of 16 images each
    return {"16": (16, small), "32": (32, [1.4, 0.8])}


def test_batches_of_different_sizes_are_drawn_over_images():
    (axes,) = plot_losses({"both": runs()}, "A sentence").axes
    first, second = axes.lines
    assert list(first.get_xdata()) == list(second.get_xdata()) == [32, 64]
    assert list(first.get_ydata()) == [1.5, 0.75]  # means over 32 images
    assert list(second.get_ydata()) == [1.4, 0.8]
    assert axes.get_xlabel() == "images seen"
    assert "nats" in axes.get_ylabel()
    assert [text.get_text() for text in axes.get_legend().texts] == ["16", "32"]


def test_panels_share_the_loss_axis_and_the_size_of_a_point():
    large = {"64": (64, [1.0])}
    left, right = plot_losses({"one": runs(), "other": large}, "A sentence").axes
    assert list(left.lines[0].get_xdata()) == [64]  # the largest of both panels
    assert left.get_ylim() == right.get_ylim()
    assert left.get_title(loc="left") == "one"


def test_a_run_shorter_than_a_point_is_refused():
    with pytest.raises(ValueError, match="short: 1 steps of 16 images are fewer"):
        plot_losses({"": {"short": (16, [1.0]), "32": (32, [1.0])}}, "A sentence")


def test_the_legend_of_losses_lies_below_the_lines():
    figure = plot_losses({"both": runs()}, "A sentence")
    figure.canvas.draw()
    (axes,) = figure.axes
    legend = axes.get_legend().get_window_extent()
    assert legend.y1 < axes.xaxis.label.get_window_extent().y0
    assert legend.y0 >= 0


def test_several_seeds_are_thin_lines_and_their_median():
    seeds = [[1.0, 4.0], [3.0, 2.0], [2.0, math.nan]]
    (axes,) = plot_losses({"": {"one": (8, [5.0, 5.0]), "three": (8, seeds)}}, "").axes
    _, middle, *each = axes.lines
    assert list(middle.get_ydata()) == [2.0, 4.0]  # NaN counts as worst
    drawn = [list(line.get_ydata()) for line in each]
    assert drawn == [[1.0, 4.0], [3.0, 2.0], [2.0, math.inf]]
    assert {line.get_color() for line in each} == {middle.get_color()}
    assert max(line.get_linewidth() for line in each) < middle.get_linewidth()
    assert [text.get_text() for text in axes.get_legend().texts] == ["one", "three"]


def test_three_steps_show_every_sample_once_in_the_batch_and_once_on_its_rank():
    (axes,) = plot_three_steps(3, 6).axes
    texts = [text.get_text() for text in axes.texts]
    assert sorted(t for t in texts if t.isdigit()) == sorted("012345" * 2)
    assert [t for t in texts if t.startswith("model")] == [
        f"model,\ncopy {rank}" for rank in range(3)
    ]
    assert texts.count("gradient\nof 2") == texts.count("the same\nstep") == 3


@pytest.mark.parametrize(("num_ranks", "samples"), [(1, 8), (2, 7), (5, 10), (2, 18)])
def test_three_steps_refuse_what_cannot_be_drawn(num_ranks, samples):
    with pytest.raises(ValueError, match="multiple of them up to 16"):
        plot_three_steps(num_ranks, samples)


def test_accumulation_adds_up_and_sends_with_the_last_micro_batch():
    (axes,) = plot_accumulation(2, 8, 3).axes
    words = [text for text in texts(axes) if text]
    assert words.count("8 images") == 2 * 3
    assert [t for t in words if t.isdigit()] == ["8", "16", "24"] * 2
    assert words.count("the same\nstep") == 2
    assert words.count("one\nall-\nreduce") == 1
    assert "2 x 8 x 3 = 48 images" in words[-1]
    over = {line.get_xdata()[0]: line.get_xdata()[-1] for line in axes.lines}
    assert over == {-0.43: 1.43, 1.57: 2.43}  # no_sync, and the last one
    (silent,) = [text for text in axes.texts if "no_sync" in text.get_text()]
    assert silent.get_position()[0] == 0.5  # over the first two


def test_one_micro_batch_has_nothing_to_wait_for():
    (axes,) = plot_accumulation(1, 64, 1).axes
    assert not [text for text in texts(axes) if "no_sync" in text]
    assert len(axes.lines) == 1
    assert axes.get_title("left").startswith("One micro-batch a step")


@pytest.mark.parametrize("sizes", [(0, 8, 4), (5, 8, 4), (2, 0, 4), (2, 8, 7)])
def test_accumulation_refuses_what_cannot_be_drawn(sizes):
    with pytest.raises(ValueError, match="1 to 4 ranks, 1 to 6 micro-batches"):
        plot_accumulation(*sizes)
    assert not pyplot.get_fignums()
