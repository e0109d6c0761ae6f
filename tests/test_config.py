import dataclasses
import json
from pathlib import Path

import pytest

from ddp_lab.config import RECIPES, TrainConfig
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
