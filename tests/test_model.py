import dataclasses

import pytest
import torch
from torch import nn

from ddp_lab.by_hand.sync_batch_norm import SyncBatchNorm
from ddp_lab.config import TrainConfig
from ddp_lab.errors import BadInput
from ddp_lab.model import build_model, check_model, wrap_model
from ddp_lab.world import join_world
from worlds import cpu_world


def test_article_model_is_torchvisions_own():
    """Stock ResNet-18, for 10 classes: 11,181,642 parameters."""
    from torchvision.models import resnet18

    model = build_model(TrainConfig(seed=5), 10)
    torch.manual_seed(5)
    stock = resnet18(num_classes=10)
    assert [(n, tuple(p.shape)) for n, p in model.named_parameters()] == [
        (n, tuple(p.shape)) for n, p in stock.named_parameters()
    ]
    assert all(
        torch.equal(a, b)
        for a, b in zip(model.parameters(), stock.parameters(), strict=True)
    )
    assert sum(p.numel() for p in model.parameters()) == 11_181_642


def test_building_leaves_the_random_state_alone():
    before = torch.get_rng_state()
    build_model(TrainConfig(seed=1), 10)
    assert torch.equal(torch.get_rng_state(), before)


def test_group_norm_replaces_every_batch_norm():
    model = build_model(TrainConfig(norm="group"), 10)
    kinds = [type(m) for m in model.modules()]
    assert nn.BatchNorm2d not in kinds
    assert kinds.count(nn.GroupNorm) == 20
    groups = {m.num_groups for m in model.modules() if isinstance(m, nn.GroupNorm)}
    assert groups == {32}
    scores = model(
        torch.zeros(1, 3, 32, 32)
    )  # one image is enough without a batch norm
    assert scores.shape == (1, 10)


def test_a_model_that_cannot_be_built_without_memory():
    check_model(TrainConfig(model="regnet_y_400mf", image_size=32), 7, 2)


@pytest.mark.parametrize(
    "name", ["googlenet", "mobilenet_v3_small", "shufflenet_v2_x0_5"]
)
def test_other_classifiers_give_plain_scores(name):
    config = TrainConfig(model=name, image_size=64)
    check_model(config, 7, 2)
    with torch.device("meta"):
        model = build_model(config, 7)
        assert model(torch.empty(2, 3, 64, 64)).shape == (2, 7)


@pytest.mark.parametrize(
    ("settings", "micro", "message"),
    [
        ({"model": "resnet19"}, 4, "did you mean .*resnet18.*choose one of alexnet,"),
        ({"model": "inception_v3"}, 4, "32 x 32 pixels.*larger --image-size"),
        ({"model": "resnet18"}, 1, "1 images .*--micro-batch-size"),
    ],
)
def test_models_that_cannot_work(settings, micro, message):
    with pytest.raises(BadInput, match=message) as caught:
        check_model(TrainConfig(**settings), 10, micro)
    assert "\n" not in str(caught.value)


def test_wrapped_model_keeps_its_gradients_in_the_buckets():
    config = TrainConfig(model="squeezenet1_1", image_size=32)
    with join_world(device="cpu") as world:
        model = wrap_model(build_model(config, 3), world)
        model(torch.rand(2, 3, 32, 32)).sum().backward()
        assert isinstance(model, nn.parallel.DistributedDataParallel)
        assert all(p.grad is not None for p in model.parameters())
        assert all(p.grad._is_view() for p in model.parameters())


@pytest.mark.parametrize(
    ("device", "kind"), [("cpu", SyncBatchNorm), ("cuda", nn.SyncBatchNorm)]
)
def test_sync_norm_is_ours_on_the_cpu_and_torchs_on_gpus(device, kind, monkeypatch):
    """There need be no GPU: all that is wrapped here is recorded, not done."""
    wrapped = []
    monkeypatch.setattr(
        "ddp_lab.model.DistributedDataParallel", lambda m, **_: wrapped.append(m)
    )
    monkeypatch.setattr(nn.Module, "to", lambda module, _device: module)
    world = dataclasses.replace(cpu_world(0, 2), device=torch.device(device))
    wrap_model(build_model(TrainConfig(norm="sync"), 10), world, norm="sync")
    kinds = [type(m) for m in wrapped[0].modules()]
    assert kinds.count(kind) == 20
    assert nn.BatchNorm2d not in kinds


def test_sync_norm_counts_the_images_of_all_ranks():
    """In a ResNet-18, images of 32 x 32 pixels end as one value a channel each."""
    config = TrainConfig(norm="sync")
    check_model(config, 10, 1, world_size=2)
    with pytest.raises(BadInput, match=r"1 images .*--micro-batch-size"):
        check_model(config, 10, 1, world_size=1)
    with pytest.raises(BadInput, match=r"1 images .*--micro-batch-size"):
        check_model(dataclasses.replace(config, norm="batch"), 10, 1, world_size=2)
