"""The loop on real ranks, which are started once and shared by all world sizes.

Between world sizes the same training is compared in float64. There rounding is 1e-16,
and 15 steps of this model let it grow to 1e-12 or so: the tolerance of 1e-9 leaves room
for that and for nothing else. (In float32 the losses agree to 1e-7 for ten steps or so;
then a ReLU or a max-pooling somewhere flips over a rounding difference, and the curves
are 1e-4 apart.)
"""

import dataclasses
import itertools
import json
import subprocess
import sys
import time
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from ddp_lab import loop
from ddp_lab.config import TrainConfig
from ddp_lab.data import eval_loader, train_loader
from ddp_lab.datasets import ImagesInMemory, load_dataset
from ddp_lab.errors import BadInput, Diverged, LabError
from ddp_lab.loop import fit, train_epoch
from ddp_lab.model import wrap_model
from ddp_lab.proofs.trainings import in_world_of
from ddp_lab.ranks.launch import launch
from ddp_lab.ranks.workers import Workers
from ddp_lab.runs import checkpoint, state
from ddp_lab.runs.record import Run
from ddp_lab.runs.state import check_batches, check_fits, start_training
from ddp_lab.step import evaluate, train_step
from ddp_lab.world import join_world

TOLERANCE = 1e-9

CONFIG = TrainConfig(
    norm="group",
    image_size=16,
    epochs=3,
    global_batch_size=12,
    limit_train=70,
    limit_test=41,
    crop_padding=2,
    flip=True,
    lr=0.001,
    device="cpu",
)


def weights(folder):
    state = torch.load(Run(folder).checkpoint_file, weights_only=True)
    return torch.cat([v.double().flatten() for v in state["model"].values()])


def without_times(run):
    times = ("time_s", "images_per_s")
    return [
        {k: v for k, v in line.items() if k not in times} for line in run.history.lines
    ]


def build_model(config, num_classes):
    """A small model in place of torchvision's: it is the loop that is tested."""
    group = config.norm == "group"
    norm = partial(nn.GroupNorm, 4) if group else nn.BatchNorm2d
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return nn.Sequential(
            nn.Conv2d(3, 16, 3, stride=2),
            norm(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Dropout(0.0 if group else 0.5),
            nn.Linear(32, num_classes),
        )


class Stopped(Exception):
    pass


# ------------------------------------------------- what the ranks do, in one launch


def on_each_world_size(folder):
    """Train, train in micro-batches, and count 101 samples."""
    data = load_dataset(CONFIG)
    found = {}
    loop.build_model = build_model
    with join_world(device="cpu") as world:
        name = f"{world.world_size} ranks"
        found["evaluation"] = evaluate_101(world)
        lines = found["lines"] = []
        found["whole"] = fit(
            CONFIG,
            data,
            world,
            folder / name,
            on_line=lambda **line: lines.append(line),
        )
        double = dataclasses.replace(CONFIG, precision="float64")
        fit(double, data, world, folder / f"{name} in double")
        split = dataclasses.replace(double, micro_batch_size=2)
        fit(split, data, world, folder / f"{name} in double, micro-batches")
    return found


def evaluate_101(world):
    data = load_dataset(TrainConfig(limit_test=101, limit_train=16))
    model = build_model(CONFIG, 10)
    return evaluate(model, eval_loader(data, CONFIG, world, 16), world.device)


def on_two_ranks(folder):
    """Everything else that needs ranks."""
    loop.build_model = build_model
    data = load_dataset(CONFIG)
    found = {}
    with join_world(device="cpu") as world:
        noisy = dataclasses.replace(CONFIG, norm="batch")  # and dropout
        for config, name in ((CONFIG, "2 ranks"), (noisy, "noisy")):
            if config is noisy:
                fit(config, data, world, folder / name)
            fit(config, data, world, folder / f"{name} again")
            resume_after_a_crash(config, data, world, folder / f"{name} crashed")
        found["disagree"] = {
            name: disagree(name, data, world)
            for name in ("setting", "data", "model", "batches", "code")
        }
        found["nan"] = become_nan(data, world, folder / "nan")
        for which in ("weights", "loss"):
            name = f"wrecked {which}"
            found[name] = wreck(which, data, world, folder / name)
        found["set aside"] = save_wrecked(data, world, folder / "set aside")
        found["saved when back"] = look_at_once(data, world, folder / "slow")
        found["buckets"] = count_buckets(data, world)
        found["batch norm"] = batch_norm_statistics(data, world)
        found["dropout"] = random_states(data, world)
    return found


def random_states(data, world):
    """What dropout draws from, in the first two steps."""
    model = build_model(CONFIG, 10)
    training = start_training(CONFIG, model, world, len(data.train))
    steps = train_epoch(training, train_loader(data, CONFIG, world, 6), CONFIG)
    return [torch.initial_seed() for _ in itertools.islice(steps, 2)]


def resume_after_a_crash(config, data, world, folder):
    """Die in the last evaluation, after the last epoch's lines were written."""
    calls = []

    def third_time_unlucky(*args):
        calls.append(1)
        if len(calls) == 3:
            raise Stopped
        return evaluate(*args)

    loop.evaluate = third_time_unlucky
    try:
        fit(config, data, world, folder)
    except Stopped:
        pass
    finally:
        loop.evaluate = evaluate
    torch.distributed.barrier()  # rank 0 has written all it will
    fit(dataclasses.replace(config, resume=folder), data, world, folder)


def disagree(name, data, world):
    config, odd = CONFIG, world.rank == 1
    code = state._code
    if name == "setting" and odd:
        config = dataclasses.replace(CONFIG, lr=0.02)
    if name == "data" and odd:
        labels = data.train.labels.clone()
        labels[0] = (labels[0] + 1) % 10
        data = dataclasses.replace(
            data, train=ImagesInMemory(data.train.images, labels)
        )
    if name == "model" and odd:
        loop.build_model = lambda config, _: build_model(config, 11)
    if name == "code" and odd:
        state._code = lambda: "another"
    if name == "batches" and odd:
        loop.train_loader = lambda data, *rest: train_loader(
            dataclasses.replace(data, train=data.train.subset(list(range(48)))), *rest
        )
    try:
        fit(config, data, world)
    except LabError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        loop.build_model, loop.train_loader = build_model, train_loader
        state._code = code
    return "trained"


def fit_until_diverged(step, config, data, world, folder, evaluation=evaluate):
    """Train with another step than ours; what is said when it diverges."""
    loop.train_step, loop.evaluate = step, evaluation
    try:
        fit(config, data, world, folder)
    except Diverged as error:
        return str(error)
    finally:
        loop.train_step, loop.evaluate = train_step, evaluate
    return "trained"


def become_nan(data, world, folder):
    """On rank 1 alone, the loss of step 8 is not a number: the 3rd of epoch 2."""
    steps = []

    def poisoned(*args, **settings):
        tally = train_step(*args, **settings)
        steps.append(1)
        if len(steps) == 8 and world.rank == 1:
            tally[0] = float("nan")
        return tally

    config = dataclasses.replace(CONFIG, log_every=3)
    return fit_until_diverged(poisoned, config, data, world, folder)


def wreck(which, data, world, folder):
    """The last step of an epoch spoils the weights, or what is made of them."""
    steps = []

    def spoiled(model, *args, **settings):
        tally = train_step(model, *args, **settings)
        steps.append(1)
        if len(steps) == 5 and which == "weights":
            with torch.no_grad():
                next(model.parameters()).view(-1)[0] = float("inf")
        return tally

    def not_a_number(*args):
        return {**evaluate(*args), "loss": float("nan")}

    evaluation = not_a_number if which == "loss" else evaluate
    return fit_until_diverged(spoiled, CONFIG, data, world, folder, evaluation)


def save_wrecked(data, world, folder):
    """Step 5's loss is not a number on any rank, and step 4 has been saved."""
    steps = []

    def poisoned(*args, **settings):
        tally = train_step(*args, **settings)
        steps.append(1)
        return tally * float("nan") if len(steps) == 5 else tally

    every = dataclasses.replace(CONFIG, checkpoint_every=1, keep_checkpoints=3)
    return fit_until_diverged(poisoned, every, data, world, folder)


def look_at_once(data, world, folder):
    """Rank 0 saves slowly."""

    def slow_save(*args, **settings):
        time.sleep(0.3)
        return save(*args, **settings)

    save = checkpoint.save
    checkpoint.save = slow_save
    try:
        fit(CONFIG, data, world, folder)
    finally:
        checkpoint.save = save
    return checkpoint.load_latest(folder)["progress"]["epoch"]


def count_buckets(data, world):
    """How often gradients travel in one step of 1 and of 4 micro-batches."""
    counts = []
    for num_micro_batches in (1, 4):
        model = wrap_model(build_model(CONFIG, 10), world)
        sent = []
        model.register_comm_hook(
            None,
            lambda _, bucket, sent=sent: (sent.append(1), allreduce_hook(None, bucket))[
                1
            ],
        )
        batches = iter(train_loader(data, CONFIG, world, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train_step(
            model,
            batches,
            optimizer,
            8 * num_micro_batches,
            num_micro_batches=num_micro_batches,
        )
        counts.append(len(sent))
    return counts


def batch_norm_statistics(data, world):
    """Plain BatchNorm: each rank's running statistics, before and after evaluating."""
    config = dataclasses.replace(CONFIG, norm="batch")
    model = wrap_model(build_model(config, 10), world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train_step(model, iter(train_loader(data, config, world, 8)), optimizer, 16)
    statistics = dict(model.module.named_buffers())["1.running_mean"]
    before = statistics.tolist()
    result = evaluate(model.module, eval_loader(data, config, world, 8), world.device)
    return before, statistics.tolist(), result


@pytest.fixture(scope="module")
def workers():
    with Workers(3, num_threads=1) as workers:
        yield workers


@pytest.fixture(scope="module")
def trained(tmp_path_factory, workers):
    folder = tmp_path_factory.mktemp("trained")
    found = {
        n: workers.run(in_world_of, n, on_each_world_size, folder, only=range(n))
        for n in (1, 2, 3)
    }
    return folder, found


@pytest.fixture(scope="module")
def on_two(trained):
    """In new processes: "2 ranks again" is another start of the same training."""
    folder, _ = trained
    return folder, launch(on_two_ranks, folder, num_ranks=2, num_threads=1)


# ----------------------------------------------------------------------- the tests


@pytest.mark.parametrize(
    "other",
    ["2 ranks in double", "3 ranks in double"]
    + [f"{n} ranks in double, micro-batches" for n in (1, 2, 3)],
)
def test_one_curve(trained, other):
    folder, _ = trained
    alone, others = Run(folder / "1 ranks in double"), Run(folder / other)
    assert len(alone.history.steps) == len(others.history.steps) == 3 * 5
    for one, same in zip(alone.history.lines, others.history.lines, strict=True):
        assert same["loss"] == pytest.approx(one["loss"], rel=TOLERANCE)
        assert same["accuracy"] == one["accuracy"]
    assert (weights(alone.folder) - weights(others.folder)).abs().max() < TOLERANCE
    assert one["loss"] != alone.history.steps[0]["loss"]


def test_float32_starts_on_the_same_curve(trained):
    """Before the first flip; a wrong average would be off by far more at step 2."""
    folder, _ = trained
    alone, two = Run(folder / "1 ranks").history, Run(folder / "2 ranks").history
    for one, other in zip(alone.steps[:3], two.steps[:3], strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-5)


@pytest.mark.parametrize("name", ["2 ranks", "noisy"])
def test_same_world_size_same_bits(on_two, name):
    """Also with dropout, and BatchNorm's statistics; "2 ranks" in another launch."""
    folder, _ = on_two
    assert torch.equal(weights(folder / name), weights(folder / f"{name} again"))
    first, again = Run(folder / name), Run(folder / f"{name} again")
    assert without_times(first) == without_times(again)


@pytest.mark.parametrize("name", ["2 ranks", "noisy"])
def test_resumed_run_is_the_uninterrupted_one(on_two, name):
    folder, _ = on_two
    assert torch.equal(weights(folder / name), weights(folder / f"{name} crashed"))
    whole, resumed = Run(folder / name), Run(folder / f"{name} crashed")
    assert without_times(whole) == without_times(resumed)
    times = [line["time_s"] for line in resumed.history.steps]
    assert times == sorted(times)


def test_evaluation_counts_every_sample_once(trained):
    _, found = trained
    results = [own["evaluation"] for n in found for own in found[n]]
    assert len(results) == 1 + 2 + 3
    assert {result["num_samples"] for result in results} == {101}
    assert len({result["num_correct"] for result in results}) == 1
    for result in results:
        assert result["loss"] == pytest.approx(results[0]["loss"], rel=1e-6)
        assert result["accuracy"] == result["num_correct"] / 101


def test_ranks_return_the_runs_numbers(trained):
    _, found = trained
    one, other = (own["whole"] for own in found[2])
    for key in ("accuracy", "loss", "num_correct", "num_samples", "epochs"):
        assert one[key] == other[key]
    assert one["num_samples"] == 41


def test_who_looks_on_gets_the_lines_of_the_history(trained):
    """From rank 0, and from no other."""
    folder, found = trained
    for n, (first, *others) in found.items():
        assert first["lines"] == Run(folder / f"{n} ranks").history.lines
        assert len(first["lines"]) == 3 * (5 + 1)
        assert [own["lines"] for own in others] == [[]] * (n - 1)


def test_the_loop_knows_no_launcher():
    """Neither itself nor what it imports: any launcher's ranks can call it."""
    look = "import sys, ddp_lab.loop; print(*sys.modules)"
    found = subprocess.check_output([sys.executable, "-c", look], text=True).split()
    assert "ddp_lab.loop" in found
    assert [name for name in found if name.startswith("ddp_lab.ranks")] == []


def test_a_line_is_the_mean_of_its_local_parts(trained):
    folder, _ = trained
    for line in Run(folder / "2 ranks").history.steps:
        assert len(line["local"]) == 2
        for key in ("loss", "accuracy"):
            mean = sum(own[key] for own in line["local"]) / 2
            assert line[key] == pytest.approx(mean)


def test_what_a_run_leaves_behind(trained):
    folder, _ = trained
    run = Run.open(folder / "2 ranks")
    assert sorted(p.name for p in run.folder.iterdir()) == [
        "checkpoint-00000010.pt",
        "checkpoint-00000015.pt",
        "checkpoint.pt",
        "classes.json",
        "config.json",
        "environment.json",
        "history.jsonl",
    ]
    assert run.config == CONFIG
    assert run.environment["world_size"] == 2
    assert run.environment["backend"] == "gloo"
    lines = [json.loads(text) for text in run.history_file.read_text().splitlines()]
    assert set(lines[0]) == {
        "kind",
        "epoch",
        "step",
        "loss",
        "accuracy",
        "lr",
        "images_per_s",
        "time_s",
        "local",
    }
    assert [line["epoch"] for line in run.history.evals] == [1, 2, 3]
    assert [line["step"] for line in run.history.steps] == list(range(1, 16))
    assert run.history.steps[-1]["lr"] < run.history.steps[3]["lr"]  # one cycle


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("setting", "rank 0 has setting lr = 0.001, rank 1 has setting lr = 0.02"),
        ("data", "rank 0 has training data: 70 images, sha256"),
        (
            "model",
            "rank 0 has parameter 8.weight of shape (10, 32), "
            "rank 1 has parameter 8.weight of shape (11, 32)",
        ),
        ("code", ", rank 1 has ddp_lab of sha256: another; give all ranks the same"),
        (
            "batches",
            "rank 0 has batches an epoch: 5, rank 1 has batches an epoch: 4",
        ),
    ],
)
def test_ranks_that_disagree_stop(on_two, name, message):
    _, found = on_two
    said = [own["disagree"][name] for own in found]
    assert said[0] == said[1]
    assert said[0].startswith("RanksDisagree: the ranks disagree: ")
    assert message in said[0]


def test_nan_stops_all_ranks_and_keeps_the_checkpoint(on_two):
    folder, found = on_two
    said, other = (own["nan"] for own in found)
    assert said.startswith(
        "the loss became nan at step 8, in epoch 2: try a lower --lr"
    )
    assert said.endswith(
        "; the checkpoint before is of step 5, and --resume "
        f"{folder / 'nan'} --resume-anyway --lr LOWER goes on from it"
    )
    assert other.startswith("the loss became nan at step 8, in epoch 2")
    run = Run(folder / "nan")
    state = torch.load(run.checkpoint_file, weights_only=True)
    assert state["progress"]["epoch"] == 1
    assert all(v.isfinite().all() for v in state["model"].values())
    # three steps a line, and a shorter one at the end of the epoch
    assert [line["step"] for line in run.history.steps] == [3, 5]


@pytest.mark.parametrize("which", ["weights", "loss"])
def test_a_model_wrecked_by_an_epochs_last_step_is_no_success(on_two, which):
    """No later step would tell; nothing is saved, and the history stays JSON."""
    folder, found = on_two
    words = {
        "weights": "step 5 left weights that are no finite numbers: try a lower --lr",
        "loss": "after step 5, the last of epoch 1, the loss on the test images is nan"
        ": try a lower --lr",
    }[which]
    assert [own[f"wrecked {which}"] for own in found] == [words, words]
    run = Run(folder / f"wrecked {which}")
    assert not run.checkpoint_file.exists()
    lines = run.history_file.read_text().splitlines()
    assert [json.loads(line, parse_constant=pytest.fail)["step"] for line in lines] == [
        *range(1, 6)
    ]


def test_a_checkpoint_of_wrecked_weights_is_set_aside(on_two):
    """Step 4 was saved; the loss of step 5 tells that its weights were no good."""
    folder, found = on_two
    assert found[0]["set aside"].startswith("the loss became nan at step 5, in epoch 1")
    assert "the checkpoint before is of step 3, and --resume" in found[0]["set aside"]
    here = folder / "set aside"
    assert (here / "checkpoint-00000004.pt.diverged").exists()
    assert checkpoint.saved_steps(here) == [3, 2]
    assert checkpoint.load(here / "checkpoint.pt")["progress"]["step"] == 3


def test_who_comes_back_finds_the_run_saved(on_two):
    """On every rank: rank 0 writes it, and the others wait for that."""
    _, found = on_two
    assert [own["saved when back"] for own in found] == [CONFIG.epochs] * 2


def test_gradients_travel_once_a_step(on_two):
    _, found = on_two
    for own in found:
        once, accumulated = own["buckets"]
        assert once == accumulated >= 1


def test_evaluation_is_of_one_model(on_two):
    """BatchNorm's running statistics are local until rank 0's are taken by all."""
    _, found = on_two
    (before_0, after_0, result_0), (before_1, after_1, result_1) = (
        own["batch norm"] for own in found
    )
    assert before_0 != before_1
    assert after_0 == after_1 == before_0
    assert result_0 == result_1


@pytest.mark.parametrize(
    ("settings", "world_size", "message"),
    [
        (
            {"limit_train": 2, "global_batch_size": 3},
            3,
            "2 training images are too few",
        ),
        ({"limit_train": 20, "global_batch_size": 32}, 2, "choose 20 or less"),
        ({"global_batch_size": 32}, 3, "nearest that does is 30 or 33"),
        (
            {"limit_train": 65, "global_batch_size": 16, "drop_last": False},
            2,
            "leaves a rank with one, .* use --norm group, or --drop-last",
        ),
        (
            {"limit_train": 66, "global_batch_size": 16, "drop_last": False},
            2,
            "leaves a rank with one, .* use --norm group or sync, or --drop-last",
        ),
    ],
)
def test_runs_that_cannot_fit(settings, world_size, message):
    config = TrainConfig(**settings)
    with pytest.raises(BadInput, match=message):
        check_fits(config, load_dataset(config), world_size)


@pytest.mark.parametrize(
    ("norm", "num_images", "image_size"),
    [("sync", 66, 32), ("sync", 65, 64), ("group", 65, 32)],
)
def test_a_small_last_batch_that_fits(norm, num_images, image_size):
    """Of one image of 64 pixels the last layers still see 2 x 2 places."""
    settings = {"limit_train": num_images, "norm": norm, "image_size": image_size}
    config = TrainConfig(**settings, global_batch_size=16, drop_last=False)
    data = load_dataset(config)
    check_fits(config, data, 2)
    check_batches(config, data, 2)


def test_a_last_batch_of_one_image_in_all():
    config = TrainConfig(
        limit_train=65, global_batch_size=16, drop_last=False, norm="sync"
    )
    message = "all ranks together with one image, and model resnet18 cannot take 1"
    with pytest.raises(BadInput, match=message):
        check_batches(config, load_dataset(config), 2)


def test_dropout_draws_other_numbers_on_each_rank_and_in_each_step(on_two):
    _, found = on_two
    seeds = [seed for own in found for seed in own["dropout"]]
    assert len(set(seeds)) == len(seeds) == 4
