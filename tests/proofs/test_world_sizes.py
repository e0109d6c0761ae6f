"""Measured on real ranks once; what is said about it, on numbers made up for that."""

import tempfile
from dataclasses import replace

import matplotlib
import pytest
import torch
from matplotlib import pyplot
from matplotlib.colors import to_rgba

from ddp_lab.config import TrainConfig
from ddp_lab.errors import BadInput, RankFailed
from ddp_lab.figures import plot_comparison
from ddp_lab.figures.drawing import RANK_COLOURS
from ddp_lab.model import build_model
from ddp_lab.proofs import world_sizes as module
from ddp_lab.proofs.comparison import Comparison, Curve
from ddp_lab.proofs.world_sizes import compare_world_sizes
from small_commands import SMALL_MODEL

# 34 images: two global batches of 12, and one of 10. Four steps reach the next epoch.
CONFIG = TrainConfig(
    norm="group",
    precision="float64",
    image_size=16,
    epochs=2,
    global_batch_size=12,
    limit_train=34,
    limit_test=9,
    drop_last=False,
    lr=1e-4,
    device="cpu",
)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A comparison, what it left behind, and what one that failed left behind."""
    folder = tmp_path_factory.mktemp("temporary")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(folder))
        patch.setenv("PYTHONPATH", SMALL_MODEL)  # of the ranks
        same = compare_world_sizes([1, 2], CONFIG, num_steps=4)
        left = list(folder.glob("ddp_lab*"))  # torch caches something there too
        with pytest.raises(RankFailed, match=r"the loss became (nan|inf) at step"):
            compare_world_sizes([1, 2], replace(CONFIG, lr=1e300))
        return same, left, list(folder.glob("ddp_lab*"))


def test_ranks_agree_to_rounding(measured):
    """Measured: 1e-16 in weights, 1e-15 in losses; and a wrong gradient is at 1e-6."""
    same, _, _ = measured
    one, two = same.curves
    assert (one.world_size, two.world_size, same.num_steps) == (1, 2, 4)
    assert len(two.losses) == len(two.weight_differences) == 4
    assert two.losses == pytest.approx(one.losses, rel=1e-12)
    assert 0 < max(two.weight_differences) < 1e-12
    assert max(two.loss_differences) < 1e-12
    assert min(one.movements) > 1e-6  # it did train
    assert one.movements[0] != one.movements[-1]
    assert same.largest_weight >= 1  # GroupNorm's weights begin there
    assert same.is_rounding
    assert same.what_is_left.startswith("rounding: the ranks add the same numbers in")


def test_control_is_the_same_bits(measured):
    same, _, _ = measured
    assert same.control.world_size == 1
    assert same.control.losses == same.curves[0].losses
    assert set(same.control.weight_differences) == {0.0}
    assert same.control.evals == same.curves[0].evals


def test_evaluations_count_alike(measured):
    """After the first epoch, and where it stopped."""
    same, _, _ = measured
    for curve in same.curves:
        assert [result["num_samples"] for result in curve.evals] == [9, 9]
    one, two = ([r["num_correct"] for r in curve.evals] for curve in same.curves)
    assert one == two


def test_nothing_is_left_behind(measured):
    _, after_success, after_failure = measured
    assert after_success == after_failure == []


def test_table(measured):
    same, _, _ = measured
    lines = str(same).splitlines()
    assert lines[0] == (
        "4 steps of resnet18 on digits, global batch 12, norm group, float64, on cpu"
    )
    assert [line[:13].strip() for line in lines[3:6]] == [
        "1 rank",
        "1 rank, again",
        "2 ranks",
    ]
    assert lines[4].split()[3:6] == ["0", "0", "0"]
    assert f"{max(same.curves[1].weight_differences):.1e}" in lines[5]
    assert lines[5].endswith("of 9")
    assert lines[6] == f"what is left: {same.what_is_left}"


# ------------------------------------------------------------- refused before a start


@pytest.mark.parametrize(
    ("world_sizes", "settings", "num_steps", "message"),
    [
        ([2], {}, 1, "must be two or more"),
        ([2, 2], {}, 1, "each another one"),
        ([0, 2], {}, 1, "0 must be 1 or more"),
        ([1, 5], {}, 1, "global_batch_size 12 does not divide into 5 ranks"),
        ([1, 2], {}, 0, "num_steps 0 must be 1 or more"),
        ([1, 2], {"device": "cuda"}, 1, "device cuda: "),
        ([1, 2], {"global_batch_size": 36}, 1, "more than the 34 training images"),
        ([1, 2], {"model": "resnet99"}, 1, "resnet99"),
        (
            [1, 2],
            {"epochs": 20},
            None,
            r"of 60 steps are 5\.0 GB in .* 4\.0 GB is the most: use num_steps=48 or",
        ),
    ],
)
def test_refusals(monkeypatch, world_sizes, settings, num_steps, message):
    def never(*args, **kwargs):
        raise AssertionError("ranks were started")

    monkeypatch.setattr(module, "Workers", never)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(BadInput, match=message) as refused:
        compare_world_sizes(
            world_sizes, replace(CONFIG, **settings), num_steps=num_steps
        )
    assert "\n" not in str(refused.value)


# ------------------------------------------------------------ what is said to be left


def curve(world_size, weights=(0.0, 0.0, 0.0), losses=(0.0, 0.0, 0.0)):
    return Curve(
        world_size=world_size,
        losses=(2.0, 1.5, 1.0),
        loss_differences=losses,
        weight_differences=weights,
        movements=(0.1, 0.2, 0.3),
        evals=({"num_correct": 5, "num_samples": 9, "loss": 1.0},),
    )


def comparison(*others, precision="float64", control=None, causes=()):
    return Comparison(
        config=replace(CONFIG, precision=precision),
        curves=(curve(1), *others),
        control=control or curve(1),
        largest_weight=1.0,
        causes=causes,
    )


@pytest.mark.parametrize(
    ("same", "is_rounding", "left"),
    [
        (comparison(curve(2)), True, "nothing, these are the same bits"),
        (comparison(curve(2, (1e-16, 1e-15, 2e-15))), True, "in float64 (2.2e-16)"),
        (
            comparison(curve(2, (1e-16, 1e-12, 1e-7))),
            True,
            "training amplified it from 1.0e-16 to 1.0e-07",
        ),
        (
            comparison(curve(2, (1e-16, 1e-15, 1e-5))),
            False,
            "no rounding: after step 3 2 ranks are 1.0e-05 away in weights that moved",
        ),
        (comparison(curve(2, losses=(1e-3, 0.0, 0.0))), False, "after step 1 2 ranks"),
        (
            comparison(curve(2, (1e-8, 1e-2, 0.3)), precision="float32"),
            True,
            'precision="float64" shows whether that is all',
        ),
        (
            comparison(curve(2, (0.05, 0.1, 0.3)), precision="float32"),
            False,
            "no rounding: after step 1",
        ),
        (
            comparison(curve(2, (0.1, 0.1, 0.1)), causes=("BatchNorm: reason",)),
            False,
            "BatchNorm: reason",
        ),
        (
            comparison(curve(2), control=curve(1, (1e-9, 1e-9, 1e-9))),
            True,
            "two runs with 1 rank differ by 1.0e-09 already",
        ),
    ],
)
def test_what_is_left(same, is_rounding, left):
    assert same.is_rounding == is_rounding
    assert left in same.what_is_left
    assert str(same).endswith(same.what_is_left)


@pytest.mark.parametrize(
    ("settings", "causes"),
    [
        ({}, []),
        ({"norm": "batch"}, ["statistics of its own 12, 6 or 3 images"]),
        (
            {"norm": "batch", "micro_batch_size": 3},
            ["statistics of its own 3 images"],
        ),
        ({"norm": "sync"}, []),
        ({"norm": "sync", "micro_batch_size": 3}, ["statistics of 3, 6 or 12 images"]),
        ({"model": "squeezenet1_1"}, ["dropout"]),
        ({"model": "squeezenet1_1", "norm": "batch"}, ["dropout"]),  # it has no norm
        (
            {"model": "mobilenet_v3_small", "norm": "batch"},
            ["statistics of its own 12", "dropout"],
        ),
    ],
)
def test_causes_come_from_settings_and_model(settings, causes):
    config = replace(CONFIG, **settings)
    found = module._causes(config, build_model(config, 10), (1, 2, 4))
    assert len(found) == len(causes)
    assert all(part in cause for part, cause in zip(causes, found, strict=True))


# ---------------------------------------------------------------------- the picture


@pytest.fixture
def draw():
    matplotlib.use("Agg")
    yield plot_comparison
    pyplot.close("all")


def test_picture_holds_the_numbers(draw):
    two = curve(2, (0.0, 1e-15, 1e-14), (0.0, 0.0, 1e-15))
    figure = draw(comparison(two, curve(4, (1e-15, 1e-13, 1e-12))))
    left, right = figure.axes
    assert [line.get_label() for line in left.lines] == ["1 rank", "2 ranks", "4 ranks"]
    assert list(left.lines[2].get_ydata()) == [2.0, 1.5, 1.0]
    lines = {line.get_label(): line for line in right.lines}
    assert right.get_yscale() == "log"
    assert list(lines["2 ranks, weights"].get_xdata()) == [2, 3]  # 0 is not on the axis
    assert list(lines["2 ranks, weights"].get_ydata()) == [1e-15, 1e-14]
    assert list(lines["2 ranks, loss"].get_ydata()) == [1e-15]
    assert to_rgba(lines["4 ranks, weights"].get_color()) == to_rgba(RANK_COLOURS[1])
    assert "1 rank, once more: 0, the same bits" in lines
    (legend,) = figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert len(names) == 6
    assert "spacing of float64 at the largest weight" in names
    assert not right.texts  # which the curves would cross
    assert figure.get_suptitle() == (
        "After each of 3 steps no weight is further than 1e-12 from the one of 1 rank"
    )


def test_picture_of_equal_bits(draw):
    figure = draw(comparison(curve(2)))
    _, right = figure.axes
    assert right.get_yscale() == "linear"
    assert figure.get_suptitle() == "After 3 steps all weights are the same bits"
    assert draw(comparison(curve(2)), "Mine").get_suptitle() == "Mine"
