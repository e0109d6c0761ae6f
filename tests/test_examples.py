"""What a learner takes home: plain PyTorch, which trains what the lab trains."""

import contextlib
import dataclasses
import difflib
import importlib
import io
import sys

import pytest
import torch
from torch.utils.data import Subset

from ddp_lab.datasets import load_dataset
from ddp_lab.loop import fit_on_rank
from ddp_lab.runs.record import Run
from ddp_lab.train import parse_arguments
from small_commands import run
from test_project import ROOT

EXAMPLES = ROOT / "examples"
NAMES = ("plain_common.py", "plain_single.py", "plain_ddp.py")
NUM_TRAIN, NUM_TEST = 100, 31  # 31 leaves one rank with more than the other
OPTIONS = ["--epochs", "2", "--global-batch-size", "24", "--lr", "0.02"]
LABS_OPTIONS = [  # what plain_common and the two scripts hold fixed
    *("--momentum", "0.9", "--no-nesterov", "--weight-decay", "0"),
    *("--schedule", "cosine", "--micro-batch-size", "6"),
    *("--mean", *[str(128 / 255)] * 3, "--std", *[str(64 / 255)] * 3),
]


def source(name):
    return (EXAMPLES / name).read_text()


def examples(name):
    """A script of the examples, as a module, and what it imports."""
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    return importlib.import_module(name), importlib.import_module("plain_common")


def run_script(name, path, *options):
    """Run a script on few digits; what it prints, and a checkpoint after each epoch."""
    script, common = examples(name)
    load_data, save = common.load_data, common.save

    def load_few(cifar10):
        train, test = load_data(cifar10)
        return Subset(train, range(NUM_TRAIN)), Subset(test, range(NUM_TEST))

    def save_and_keep(state, path):
        save(state, path)
        save(state, f"{path}-{state['epoch']}")

    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
        patch.setattr(common, "load_data", load_few)
        patch.setattr(common, "save", save_and_keep)
        arguments = [f"{name}.py", *OPTIONS, "--checkpoint", str(path), *options]
        patch.setattr(sys, "argv", arguments)
        script.main(common.parse_arguments())
    return said.getvalue().splitlines()


def train_the_same(config, folder):
    """The lab's run on these digits, in this folder."""
    data = load_dataset(config)
    data = dataclasses.replace(
        data,
        train=data.train.subset(list(range(NUM_TRAIN))),
        test=data.test.subset(list(range(NUM_TEST))),
    )
    fit_on_rank(config, folder, data)


def assert_same_weights(one, other):
    one, other = (torch.load(path)["model"] for path in (one, other))
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def test_short_and_without_the_lab():
    for name in NAMES:
        assert "ddp_lab" not in source(name)
        assert len(source(name).splitlines()) <= 80


def test_most_of_the_training_stays():
    """The difference is the lesson: what DDP adds to a training on one device."""
    single, ddp = (source(name).splitlines() for name in NAMES[1:])
    common = [line for line in difflib.ndiff(single, ddp) if line.startswith("  ")]
    code = [line for line in single if line.strip()]
    assert sum(bool(line.strip()) for line in common) > len(code) / 2


def test_the_digits_are_the_labs():
    data = load_dataset(parse_arguments([]))
    _, common = examples("plain_ddp")
    for own, labs in zip(common.load_data(None), (data.train, data.test), strict=True):
        images, labels = map(torch.stack, zip(*own, strict=True))
        assert torch.equal(images * 64 + 128, labs.images.float())
        assert torch.equal(labels, labs.labels)


def test_two_ranks_train_what_the_lab_trains(warm, tmp_path):
    """The same bits, with accumulation; resumed after an epoch, the same again."""
    path = tmp_path / "plain.pt"
    accumulate = ["--accumulate", "2"]
    said, nothing = warm.run(run_script, "plain_ddp", path, *accumulate)
    assert nothing == []
    config = parse_arguments([*OPTIONS, *LABS_OPTIONS])
    warm.run(train_the_same, config, tmp_path / "labs")
    assert_same_weights(path, tmp_path / "labs/checkpoint.pt")
    evals = Run(tmp_path / "labs").history.evals
    assert said == [
        f"epoch {line['epoch']}: {round(line['accuracy'] * NUM_TEST)} of 31 right"
        for line in evals
    ]

    stopped = tmp_path / "plain.pt-1"
    going_on, *again = warm.run(run_script, "plain_ddp", stopped, *accumulate)[0]
    assert going_on == f"{stopped}: going on after epoch 1"
    assert again == said[1:]
    assert_same_weights(path, stopped)


def test_one_device(tmp_path):
    path = tmp_path / "plain.pt"
    said = run_script("plain_single", path)
    assert [line.partition(":")[0] for line in said] == ["epoch 1", "epoch 2"]
    stopped = tmp_path / "plain.pt-1"
    going_on, *again = run_script("plain_single", stopped)
    assert going_on == f"{stopped}: going on after epoch 1"
    assert again == said[1:]
    assert_same_weights(path, stopped)
    with pytest.raises(SystemExit, match=r"24 does not divide into 1 ranks x 5 back"):
        run_script("plain_single", path, "--accumulate", "5")
    with pytest.raises(SystemExit, match="batch-size 101, of only 100 images"):
        run_script("plain_single", path, "--global-batch-size", "101")


def test_as_its_first_lines_say(tmp_path):
    """Started by torchrun, all of it; then by python alone, with nothing left to do."""
    assert "torchrun --standalone --nproc-per-node 2 plain_ddp.py" in source(NAMES[2])
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for start, said in ((torchrun, "epoch 1"), ([], "plain_ddp.pt")):
        command = [sys.executable, *start, str(EXAMPLES / "plain_ddp.py")]
        status, lines, complaints = run(
            [*command, "--epochs", "1"], tmp_path, OMP_NUM_THREADS="1"
        )
        assert status == 0, complaints
        assert [line.partition(":")[0] for line in lines] == [said]
        assert [path.name for path in tmp_path.iterdir()] == ["plain_ddp.pt"]
