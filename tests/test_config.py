import dataclasses
import json
import typing
from pathlib import Path

import pytest

from ddp_lab.config import RECIPES, Free, Local, TrainConfig, mix_seed
from ddp_lab.errors import BadInput


def test_article_recipe_is_the_article():
    article = dataclasses.asdict(RECIPES["article"])
    expected = {
        "dataset": "cifar10",
        "model": "resnet18",
        "norm": "batch",
        "image_size": 32,
        "crop_padding": 4,
        "flip": True,
        "mean": (0.4914, 0.4822, 0.4465),
        "std": (0.2023, 0.1994, 0.2010),
        "epochs": 20,
        "global_batch_size": 1024,
        "lr": 0.002,
        "momentum": 0.9,
        "weight_decay": 1e-4,
        "nesterov": True,
        "schedule": "constant",
    }
    assert {name: article[name] for name in expected} == expected


def test_recipes_name_themselves():
    assert {name: config.recipe for name, config in RECIPES.items()} == {
        "default": "default",
        "article": "article",
        "fast": "fast",
    }


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dataset": "mnist"}, "digits, fashion-mnist, cifar10, cifar100 or folder"),
        ({"norm": "layer"}, "batch, sync or group"),
        ({"schedule": "linear"}, "constant, cosine or onecycle"),
        ({"checkpoint_every": 0}, "checkpoint_every 0 must be 1 or more"),
        ({"keep_checkpoints": 0}, "keep_checkpoints 0 must be 1 or more"),
        ({"clip_grad_norm": 0.0}, "clip_grad_norm 0.0 must be a positive number"),
        ({"warmup_epochs": 9.0}, "warmup_epochs 9.0 must be at most the epochs"),
        ({"warmup_epochs": -1.0}, "warmup_epochs -1.0 must be 0 or a positive"),
        ({"warmup_epochs": 1.0}, "onecycle warms up by itself; use --schedule cosine"),
        ({"epochs": 0}, "epochs 0 must be 1 or more"),
        ({"global_batch_size": -64}, "global_batch_size -64 must be 1 or more"),
        ({"micro_batch_size": 0}, "micro_batch_size 0 must be 1 or more"),
        ({"num_ranks": -1}, "num_ranks -1 must be 1 or more"),
        ({"limit_train": 0}, "limit_train 0 must be 1 or more"),
        ({"num_workers": -1}, "num_workers -1 must be 0 or more"),
        ({"lr": 0.0}, "lr 0.0 must be a positive number"),
        ({"lr": float("nan")}, "lr nan must be a positive number"),
        ({"lr": float("inf")}, "lr inf must be a positive number"),
        ({"momentum": 1.0}, "momentum 1.0 must be at least 0 and below 1"),
        ({"weight_decay": float("nan")}, "weight_decay nan must be 0 or a positive"),
        ({"momentum": 0.0}, "use --no-nesterov"),
        ({"std": (0.2, 0.0, 0.2)}, "above 0 in each channel"),
    ],
)
def test_wrong_values_are_refused(settings, message):
    with pytest.raises(BadInput, match=message) as caught:
        TrainConfig(**settings)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("total", "micro", "world_size", "expected"),
    [
        (64, None, 1, (64, 1)),
        (64, None, 2, (32, 1)),
        (64, 8, 2, (8, 4)),
        (96, 16, 3, (16, 2)),
    ],
)
def test_batches(total, micro, world_size, expected):
    config = TrainConfig(global_batch_size=total, micro_batch_size=micro)
    assert config.batches(world_size) == expected


@pytest.mark.parametrize(
    ("total", "micro", "world_size", "nearest"),
    [
        (64, None, 3, "63 or 66"),
        (1, None, 2, "2"),
        (100, 16, 2, "96 or 128"),
        (8, 8, 2, "16"),
    ],
)
def test_batches_name_the_nearest(total, micro, world_size, nearest):
    config = TrainConfig(global_batch_size=total, micro_batch_size=micro)
    with pytest.raises(BadInput, match=f"nearest that does is {nearest}$"):
        config.batches(world_size)


@pytest.mark.parametrize(
    ("rule", "expected"), [("none", 0.1), ("linear", 1.6), ("sqrt", 0.4)]
)
def test_learning_rate_for_sixteen_times_the_batch(rule, expected):
    config = TrainConfig(
        lr=0.1, lr_scaling=rule, lr_batch_size=32, global_batch_size=512
    )
    assert config.scaled_lr == pytest.approx(expected)


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_rates_are_for_their_own_batch(recipe):
    config = dataclasses.replace(RECIPES[recipe], lr_scaling="linear")
    assert config.scaled_lr == config.lr


@pytest.mark.parametrize("recipe", RECIPES)
def test_json_and_back(recipe):
    config = dataclasses.replace(RECIPES[recipe], out=Path("runs/x"), limit_train=9)
    text = json.dumps(config.to_json())
    assert TrainConfig.from_json(json.loads(text)) == config


def test_json_of_another_version():
    with pytest.raises(BadInput, match="does not know: \\['speed'\\]"):
        TrainConfig.from_json({"speed": 3})


def test_seeds_do_not_run_together():
    """Epoch 11 of seed 1 is not epoch 1 of seed 11, nor (1, 1) (11,)."""
    numbers = [(1, 11), (11, 1), (1, 1, 1), (111,), (0, 1), (1, 0), (0,)]
    assert len({mix_seed(*n) for n in numbers}) == len(numbers)
    assert mix_seed(1, 11) == mix_seed(1, 11)


# ----------------------------------- in what a resumed run, or a rank, may differ

FREE = {
    *("recipe", "limit_test", "epochs", "timeout_s", "auto_resume", "resume_anyway"),
    *("checkpoint_every", "keep_checkpoints", "log_every"),
}
LOCAL = {
    *("data_dir", "download", "num_ranks", "device", "num_threads", "num_workers"),
    *("out", "resume"),
}


def marked(kind):
    (mark,) = kind.__metadata__
    hints = typing.get_type_hints(TrainConfig, include_extras=True)
    return {n for n, hint in hints.items() if mark in getattr(hint, "__metadata__", ())}


def test_marks_are_those_that_are_meant():
    """Each is a decision: a setting that loses its mark, or gains one, shows here."""
    assert marked(Free) == FREE
    assert marked(Local) == LOCAL


def test_a_setting_without_a_mark_is_compared():
    """On resume and between ranks; so nobody has to think of it."""
    more = dataclasses.make_dataclass(
        "More",
        [("speed", int, 1), ("also", Free[int], 1)],
        bases=(TrainConfig,),
        frozen=True,
        kw_only=True,
    )
    assert more().differing(more(speed=2)) == ["speed"]
    assert more(speed=2).for_all_ranks()["speed"] == 2


@pytest.mark.parametrize("name", sorted(FREE | LOCAL))
def test_a_mark_lets_a_resumed_run_differ(name):
    config, other = (TrainConfig(schedule="constant") for _ in range(2))
    object.__setattr__(other, name, "another value")
    assert config.differing(other) == []
    assert (name in config.for_all_ranks()) == (name in FREE)


def test_what_has_no_mark_makes_another_run():
    fields = {field.name for field in dataclasses.fields(TrainConfig)}
    for name in fields - FREE - LOCAL:
        other = TrainConfig()
        object.__setattr__(other, name, "another value")
        assert TrainConfig().differing(other) == [name]
        assert name in TrainConfig().for_all_ranks()


@pytest.mark.parametrize(
    ("schedule", "differing"),
    [("constant", []), ("cosine", ["epochs"]), ("onecycle", ["epochs"])],
)
def test_epochs_may_change_where_no_schedule_was_laid_out_for_them(schedule, differing):
    config = TrainConfig(schedule=schedule, epochs=8)
    assert dataclasses.replace(config, epochs=9).differing(config) == differing
