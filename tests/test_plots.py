import matplotlib
import pytest
from matplotlib import pyplot

from ddp_lab.plots import RANK_COLOURS, plot_loss, save_picture, style
from ddp_lab.record import History


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


@pytest.fixture(autouse=True)
def no_screen():
    matplotlib.use("Agg")
    yield
    pyplot.close("all")


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


def test_picture_is_the_same_bytes_each_time(tmp_path):
    pictures = []
    for name in ("a.png", "b.png"):
        save_picture(plot_loss(history()), tmp_path / name)
        pictures.append((tmp_path / name).read_bytes())
    assert pictures[0] == pictures[1]
    assert pictures[0].startswith(b"\x89PNG")
    assert b"Software" not in pictures[0]
    assert not pyplot.get_fignums()


def test_style_is_readable_on_a_dark_page():
    assert style()["figure.facecolor"] == "white"
    assert len(set(RANK_COLOURS)) == len(RANK_COLOURS)
