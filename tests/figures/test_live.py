"""LiveCurve: how often it draws, what it shows at last, and that it is silent."""

import base64
import json
import math

import matplotlib
import nbclient
import nbformat
import pytest

from ddp_lab.config import TrainConfig
from ddp_lab.figures import loss as curves
from ddp_lab.figures.loss import LiveCurve, plot_loss
from ddp_lab.loop import fit_on_rank
from ddp_lab.ranks.launch import launch, send_record
from small_commands import SMALL_MODEL

pytestmark = pytest.mark.timeout(300)


class Clock:
    """Seconds that pass only when a test says so; a drawing may take some."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class Events:
    def __init__(self):
        self.callbacks = []

    def register(self, event, callback):
        assert event == "post_execute"
        self.callbacks.append(callback)

    def unregister(self, event, callback):
        self.callbacks.remove(callback)

    def end_the_cell(self):
        for callback in list(self.callbacks):
            callback()


class Shell:
    """As much of IPython's shell as a live curve uses."""

    kernel = object()

    def __init__(self):
        self.events = Events()
        self.display_pub = self
        self.shown = []

    def publish(self, data, metadata, transient, update):
        self.shown.append((data, transient["display_id"], update))


@pytest.fixture
def shell(monkeypatch):
    matplotlib.use("Agg")
    shell = Shell()
    monkeypatch.setattr(curves, "_shell", lambda: shell)
    return shell


def feed(curve, steps, num_ranks=2, **more):
    for step in steps:
        for rank in range(num_ranks):
            curve(rank, {"step": step, "loss": (1 + rank) / step, **more})


def png_of(shell):
    return base64.b64decode(shell.shown[-1][0]["image/png"])


def test_at_most_four_updates_a_second(shell):
    clock = Clock()
    curve = LiveCurve(clock=clock)
    for step in range(1, 101):  # 10 seconds
        feed(curve, [step])
        clock.now += 0.1
    assert 20 <= len(shell.shown) <= 40


def test_a_slow_picture_is_drawn_less_often(shell, monkeypatch):
    clock = Clock()
    curve = LiveCurve(clock=clock)

    def slow_png():
        clock.now += 1.0
        return ""

    monkeypatch.setattr(curve, "_png", slow_png)
    for step in range(1, 101):
        feed(curve, [step])
        clock.now += 0.1
    seconds = clock.now - 100
    assert len(shell.shown) * 1.0 <= 0.25 * seconds + 1


def test_one_picture_that_is_replaced(shell):
    clock = Clock()
    curve = LiveCurve(clock=clock)
    for step in range(1, 6):
        feed(curve, [step])
        clock.now += 10
    texts, ids, updates = zip(
        *((data["text/plain"], i, u) for data, i, u in shell.shown), strict=True
    )
    assert len(set(ids)) == 1
    assert updates == (False, True, True, True, True)[: len(updates)]
    assert len(set(texts)) == 1  # nbval compares it
    assert all(set(data) == {"image/png", "text/plain"} for data, _, _ in shell.shown)


def test_the_last_picture_is_the_complete_one(shell):
    curve = LiveCurve("All of it", clock=Clock())  # the time stands still
    feed(curve, range(1, 30))
    assert len(shell.shown) == 1
    shell.events.end_the_cell()
    assert len(shell.shown) == 2
    shell.events.end_the_cell()
    assert len(shell.shown) == 2  # nothing new, nothing drawn
    assert shell.events.callbacks == []
    picture = png_of(shell)
    assert picture.startswith(b"\x89PNG")
    assert b"Software" not in picture
    whole = LiveCurve("All of it")
    feed(whole, range(1, 30))
    assert picture == base64.b64decode(whole._png())


def test_a_second_launch_goes_on_in_the_same_picture(shell):
    curve = LiveCurve(clock=Clock())
    feed(curve, range(1, 4))
    shell.events.end_the_cell()
    feed(curve, range(1, 3))  # from step 1 again: another run
    shell.events.end_the_cell()
    assert [line["step"] for line in curve.history.steps] == [1, 2]
    assert len({display_id for _, display_id, _ in shell.shown}) == 1


def test_the_runs_loss_is_the_mean_over_ranks():
    curve = LiveCurve()
    feed(curve, [1, 2, 4], accuracy=0.5)
    curve(0, {"step": 5, "loss": 9.0, "accuracy": 1.0})  # rank 1 is not there yet
    steps = curve.history.steps
    assert [line["step"] for line in steps] == [1, 2, 4]
    assert [line["loss"] for line in steps] == [1.5, 0.75, 0.375]
    assert [own["loss"] for own in steps[1]["local"]] == [0.5, 1.0]
    assert steps[0]["accuracy"] == 0.5
    top = plot_loss(curve.history).axes[0]
    drawn = {line.get_label(): line.get_ydata() for line in top.lines}
    assert drawn["training, all ranks"].tolist() == [1.5, 0.75, 0.375]
    assert drawn["rank 1, local"].tolist() == [2.0, 1.0, 0.5]


def test_it_takes_the_lines_of_a_history(shell):
    curve = LiveCurve(clock=Clock())
    line = {"kind": "step", "epoch": 1, "step": 1, "loss": 2.0, "accuracy": 0.1}
    curve(0, {**line, "local": [{"loss": 1.0}, {"loss": 3.0}]})
    curve(0, {**line, "kind": "eval", "num_samples": 9, "num_correct": 1})
    assert len(curve.history.steps) == len(curve.history.evals) == 1
    curve(0, {"temperature": 7})  # of something else
    assert len(curve.history.lines) == 2


def test_outside_of_a_notebook_it_only_collects(capfd):
    curve = LiveCurve()
    feed(curve, range(1, 4))
    curve.finish()
    assert capfd.readouterr() == ("", "")
    assert len(curve.history.steps) == 3


@pytest.mark.parametrize("losses", [[0.0, -1.0], [math.nan, math.inf], [1.0, math.nan]])
def test_strange_losses_are_drawn_too(losses):
    curve = LiveCurve()
    for step, loss in enumerate(losses):
        curve(0, {"step": step, "loss": loss})
    assert base64.b64decode(curve._png()).startswith(b"\x89PNG")


CELL = """
import os
from ddp_lab.ranks.launch import launch, send_record
from ddp_lab.figures import LiveCurve

def work():
    for step in range(1, 41):
        send_record(step=step, loss=2 / step + int(os.environ["RANK"]))

curve = LiveCurve("Two ranks")
launch(work, num_ranks=2, on_record=curve)
print(len(curve.history.steps), "steps")
"""


def test_in_a_real_kernel_one_picture_stays(tmp_path):
    cell = nbformat.v4.new_code_cell(CELL)
    notebook = nbformat.v4.new_notebook(cells=[cell])
    client = nbclient.NotebookClient(notebook, kernel_name="python3", timeout=200)
    client.execute()
    pictures = [o for o in cell.outputs if "image/png" in o.get("data", {})]
    texts = [o.text for o in cell.outputs if o.output_type == "stream"]
    assert "".join(texts) == "40 steps\n"
    whole = LiveCurve("Two ranks")
    for step in range(1, 41):
        for rank in range(2):
            whole(rank, {"step": step, "loss": 2 / step + rank})
    (picture,) = pictures
    assert picture.data["image/png"].strip() == whole._png()


def test_training_sends_its_history(tmp_path, monkeypatch):
    """The lines that reach the notebook are those of history.jsonl."""
    config = TrainConfig(
        epochs=1, image_size=16, limit_train=128, limit_test=64, device="cpu"
    )
    curve = LiveCurve()
    folder = tmp_path / "run"
    monkeypatch.setenv("PYTHONPATH", SMALL_MODEL)
    launch(
        fit_on_rank,
        config,
        folder,
        num_ranks=2,
        num_threads=1,
        on_record=curve,
        on_line=send_record,
    )
    written = (folder / "history.jsonl").read_text().splitlines()
    assert [json.loads(text) for text in written] == curve.history.lines
    assert len(curve.history.steps) == 2
    assert len(curve.history.steps[0]["local"]) == 2
