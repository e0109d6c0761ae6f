"""SyncBatchNorm on 1 to 4 ranks equals one process's BatchNorm on the whole batch.

`_measure` runs on every rank, once for each world size, with shards of one batch, and
brings back all that the tests look at. The tests put the shards together again and
compare with `nn.BatchNorm` in this process.

In float64 the two differ by the order of additions only, `_EXACT` (measured: 2e-15).
In float32 one rounding costs 6e-8 of a value, and a parameter's gradient adds up some
hundred of both signs: `_SINGLE`, against float64 on the same input (measured: 2e-6).
"""

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_lab import by_hand
from ddp_lab.by_hand.sync_batch_norm import SyncBatchNorm, all_reduce_sum
from ddp_lab.ranks.workers import Workers
from ddp_lab.world import join_world

_EXACT = {"rtol": 1e-12, "atol": 1e-12}
_SINGLE = {"rtol": 1e-5, "atol": 1e-5}
_NUM_SAMPLES = 12  # on all ranks together
_C = 5
_SHARDS = {  # samples on each rank, by world size
    "even": {1: [12], 2: [6, 6], 3: [4, 4, 4], 4: [3, 3, 3, 3]},
    "uneven": {1: [12], 2: [1, 11], 3: [1, 2, 9], 4: [1, 2, 3, 6]},
    "empty": {1: [12], 2: [0, 12], 3: [5, 0, 7], 4: [0, 5, 7, 0]},
}
_LAYERS: dict[str, tuple[Callable[[], nn.Module], list[int]]] = {  # and (D, H, W)
    "1d, no length": (lambda: nn.BatchNorm1d(_C), []),
    "1d": (lambda: nn.BatchNorm1d(_C), [7]),
    "2d": (lambda: nn.BatchNorm2d(_C, eps=1e-2, momentum=0.3), [3, 4]),
    "3d": (lambda: nn.BatchNorm3d(_C), [2, 3, 2]),
    "plain average": (lambda: nn.BatchNorm2d(_C, momentum=None), [3, 4]),
    "not affine": (lambda: nn.BatchNorm2d(_C, affine=False), [3, 4]),
    "not tracking": (lambda: nn.BatchNorm2d(_C, track_running_stats=False), [3, 4]),
}

_CASES = [
    *((name, kind, torch.float64) for name in _LAYERS for kind in _SHARDS),
    *(("2d", kind, torch.float32) for kind in _SHARDS),
]
_OFFSETS = {torch.float64: 1e8, torch.float32: 1e4}

# ---- what one process and each rank do alike ---------------------------------


def _layer(name: str, dtype: torch.dtype) -> nn.Module:
    layer = _LAYERS[name][0]().to(dtype)
    generator = torch.Generator().manual_seed(1)
    for parameter in layer.parameters():
        parameter.data = torch.randn(_C, generator=generator).to(dtype)
    return layer


def _batch(name: str, step: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A batch, and the gradient that comes from above; channels differ, samples too.

    The values grow from sample to sample, so that shards differ in mean and variance.
    In memory the channels come last: nothing here may count on contiguous tensors.
    """
    generator = torch.Generator().manual_seed(2 + step)
    shape = (_NUM_SAMPLES, *_LAYERS[name][1], _C)
    scale = 1 + torch.arange(_C)
    drift = torch.arange(_NUM_SAMPLES).view(-1, *[1] * (len(shape) - 1))
    x = (torch.randn(shape, generator=generator) + drift + step) * scale - 3
    gradient = torch.randn(shape, generator=generator) * (1 + drift)
    return x.movedim(-1, 1).to(dtype), gradient.movedim(-1, 1).to(dtype)


def _run_layer(layer: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> dict:
    found = {}
    for step, (x, gradient) in enumerate(batches):
        x = x.detach().requires_grad_()
        y = layer(x)
        assert y.dtype == x.dtype
        (y * gradient).sum().backward()
        found[f"output {step}"], found[f"input's gradient {step}"] = y.detach(), x.grad
    for parameter_name, parameter in layer.named_parameters():
        found[f"gradient of {parameter_name}"] = parameter.grad
    return {**found, **{k: v.clone() for k, v in layer.named_buffers()}}


def _net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 4, 3, stride=2),
        nn.BatchNorm2d(4, momentum=None),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(4 * 2 * 2, 3),
        nn.BatchNorm1d(3),
    ).double()


def _train(
    net: nn.Module, mine: slice, world_size: int, num_micro_batches: int
) -> dict[str, Tensor]:
    """Train on a part of each batch; the loss is the mean over the whole batch."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(4)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        for k in range(num_micro_batches):
            images = torch.randn(_NUM_SAMPLES, 2, 7, 7, generator=generator).double()
            images += torch.arange(_NUM_SAMPLES).view(-1, 1, 1, 1) / 4
            labels = torch.randint(3, (_NUM_SAMPLES,), generator=generator)
            quiet = isinstance(net, DistributedDataParallel)
            quiet = quiet and k < num_micro_batches - 1
            with net.no_sync() if quiet else nullcontext():
                loss = F.cross_entropy(net(images[mine]), labels[mine], reduction="sum")
                loss = loss / _NUM_SAMPLES / num_micro_batches
                (loss * world_size).backward()  # DDP's average divides it again
            losses.append(loss.detach())
        optimizer.step()
    net.eval()
    state = {k.removeprefix("module."): v for k, v in net.state_dict().items()}
    scores = net(torch.ones(2, 2, 7, 7).double()).detach()
    return {"losses": torch.stack(losses), "scores": scores, **state}


# ---- what runs on the ranks --------------------------------------------------


def _shard(kind: str) -> slice:
    counts = _SHARDS[kind][dist.get_world_size()]
    start = sum(counts[: dist.get_rank()])
    return slice(start, start + counts[dist.get_rank()])


def _layer_on_a_shard(name: str, kind: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """A layer on this rank's shards; parameters' gradients are summed by hand."""
    mine = _shard(kind)
    batches = [_batch(name, step, dtype) for step in range(2)]
    shards = [(x[mine], gradient[mine]) for x, gradient in batches]
    layer = SyncBatchNorm.convert_sync_batchnorm(_layer(name, dtype))
    found = _run_layer(layer, shards)
    for key in found:
        if key.startswith("gradient of"):
            dist.all_reduce(found[key])
    return found


def _trainings() -> dict[tuple[str, int], dict[str, Tensor]]:
    results = {}
    for kind in _SHARDS:
        for num_micro_batches in (1, 2):
            net = SyncBatchNorm.convert_sync_batchnorm(_net())
            wrapped = DistributedDataParallel(net)
            found = _train(
                wrapped, _shard(kind), dist.get_world_size(), num_micro_batches
            )
            results[kind, num_micro_batches] = found
    return results


def _far_from_zero(dtype: torch.dtype, offset: float) -> Tensor:
    x = torch.randn(_NUM_SAMPLES, _C, generator=torch.Generator().manual_seed(5))
    layer = SyncBatchNorm(_C, affine=False, dtype=dtype)
    return layer((x.to(dtype) + offset)[_shard("uneven")])


def _one_value() -> str:
    """Rank 0 has one value a channel, the others have none."""
    layer = SyncBatchNorm(_C)
    try:
        layer(torch.ones(1 if dist.get_rank() == 0 else 0, _C))
    except ValueError as error:
        return str(error)
    return "nothing was raised"


def _one_value_each() -> Tensor:
    generator = torch.Generator().manual_seed(6 + dist.get_rank())
    x = torch.randn(1, _C, generator=generator)
    return torch.stack([x, SyncBatchNorm(_C)(x).detach()])


def _no_values() -> dict[str, Tensor]:
    layer = SyncBatchNorm(_C)
    x = torch.ones(0, _C, 2, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    return {"y": y.detach(), "weight": layer.weight.grad, **dict(layer.named_buffers())}


@contextmanager
def _watched() -> Iterator[list[int]]:
    """The bytes of each all-reduce inside the block."""
    sizes: list[int] = []

    def watched(tensor: Tensor, **kwargs: Any) -> Any:
        sizes.append(tensor.nbytes)
        return original(tensor, **kwargs)

    original = dist.all_reduce
    with mock.patch.object(dist, "all_reduce", watched):
        yield sizes


def _messages() -> dict[str, list[int]]:
    layer = SyncBatchNorm(_C)
    x = torch.randn(2, _C, 3, requires_grad=True)
    with _watched() as forward:
        loss = layer(x).square().sum()
    with _watched() as backward:
        loss.backward()
    with _watched() as evaluation:
        layer.eval()(x).sum().backward()
        untracked = SyncBatchNorm(_C, track_running_stats=False)
        untracked.eval()(x).sum().backward()
    return {"forward": forward, "backward": backward, "evaluation": evaluation}


def _groups() -> dict[str, Tensor]:
    """Rank 0 on its own, and the others together."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    groups = [dist.new_group([0]), dist.new_group(list(range(1, world_size)))]
    x = torch.randn(2, _C, generator=torch.Generator().manual_seed(7 + rank))
    net = nn.Sequential(nn.BatchNorm1d(_C))
    net = SyncBatchNorm.convert_sync_batchnorm(net, groups[min(rank, 1)])
    return {"x": x, "y": net(x).detach()}


def _half_precision() -> dict[str, Tensor]:
    """A layer in float32 whose input comes as bfloat16, as under autocast."""
    layer = SyncBatchNorm.convert_sync_batchnorm(_layer("2d", torch.float32))
    x, _ = _batch("2d", 0, torch.bfloat16)
    y = layer(x[_shard("uneven")])
    y.sum().backward()
    return {"y": y.detach(), "running_var": layer.running_var}


def _cubed(total: Tensor, rank: int) -> Tensor:
    """A loss that differs from rank to rank, of something that all ranks share."""
    return (total**3).sum() * (1 + rank)


def _addend(rank: int) -> Tensor:
    """Not contiguous."""
    generator = torch.Generator().manual_seed(8 + rank)
    return torch.randn(4, 3, generator=generator).t().double().requires_grad_()


def _derivatives() -> dict[str, Tensor]:
    """A sum over ranks, a gradient through it, and a gradient through that."""
    x = _addend(dist.get_rank())
    total = all_reduce_sum(x)
    loss = _cubed(total, dist.get_rank())
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    (second,) = torch.autograd.grad(gradient.square().sum(), x)
    return {"value": total.detach(), "gradient": gradient.detach(), "second": second}


def _penalty(layer: nn.Module, x: Tensor) -> Tensor:
    """Differentiate through a gradient, as a gradient penalty does."""
    x = x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(
        layer(x).square().square().sum(), x, create_graph=True
    )
    return torch.autograd.grad(gradient.square().sum(), x)[0]


def _measure() -> dict[str, Any]:
    x, _ = _batch("2d", 0, torch.float64)
    penalised = SyncBatchNorm.convert_sync_batchnorm(_layer("2d", torch.float64))
    found = {
        "layers": {case: _layer_on_a_shard(*case) for case in _CASES},
        "trainings": _trainings(),
        "far": {d: _far_from_zero(d, offset) for d, offset in _OFFSETS.items()},
        "one value": _one_value(),
        "no values": _no_values(),
        "messages": _messages(),
        "half": _half_precision(),
        "derivatives": _derivatives(),
        "penalty": _penalty(penalised, x[_shard("uneven")]),
    }
    if dist.get_world_size() > 1:
        found |= {"one value each": _one_value_each(), "groups": _groups()}
    return found


def _measure_in_a_world_of(world_size: int) -> dict[str, Any]:
    """Some of the ranks that are there make a world of their own."""
    os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(world_size)
    with join_world(device="cpu"):
        return _measure()


# ---- what the ranks brought back ---------------------------------------------


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    """Ranks for the largest world; the smaller ones are made of the first of them."""
    with Workers(4, num_threads=1) as workers:
        yield workers


@pytest.fixture(scope="module", params=[1, 2, 3, 4], ids=lambda w: f"{w} ranks")
def ranks(request: pytest.FixtureRequest, workers: Workers) -> list[dict[str, Any]]:
    """What every rank measured, in rank order."""
    world_size = request.param
    measured = workers.run(
        _measure_in_a_world_of, world_size, only=list(range(world_size))
    )
    assert len(measured) == world_size
    return measured


def _put_together(ranks: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Shards one after the other; what all ranks must agree on, once."""
    whole = {}
    for key, first in ranks[0].items():
        parts = [rank[key] for rank in ranks]
        if key.startswith(("output", "input")):
            whole[key] = torch.cat(parts)
        elif key == "losses":
            whole[key] = torch.stack(parts).sum(0)
        else:
            assert all(torch.equal(part, first) for part in parts), key
            whole[key] = first
    return whole


def _check_close(ours: dict, expected: dict, tolerance: dict[str, float]) -> None:
    assert ours.keys() == expected.keys()
    for key, tensor in expected.items():
        torch.testing.assert_close(
            ours[key].to(tensor.dtype),
            tensor,
            **tolerance,
            msg=lambda m, key=key: f"{key}: {m}",
        )


@pytest.mark.parametrize(("name", "kind", "dtype"), _CASES)
def test_equals_batch_norm_on_the_whole_batch(ranks, name, kind, dtype):
    """Outputs, all gradients, running statistics, after two batches."""
    tolerance = _EXACT if dtype == torch.float64 else _SINGLE
    ours = _put_together([rank["layers"][name, kind, dtype] for rank in ranks])
    batches = [_batch(name, step, dtype) for step in range(2)]
    batches = [(x.double(), gradient.double()) for x, gradient in batches]
    expected = _run_layer(_layer(name, dtype).double(), batches)
    _check_close(ours, expected, tolerance)


@pytest.mark.parametrize("num_micro_batches", [1, 2])
@pytest.mark.parametrize("kind", _SHARDS)
def test_ddp_trains_as_one_process_does(ranks, kind, num_micro_batches):
    """Losses, weights, statistics, evaluation; also with accumulation by no_sync."""
    found = [rank["trainings"][kind, num_micro_batches] for rank in ranks]
    expected = _train(_net(), slice(None), 1, num_micro_batches)
    _check_close(_put_together(found), expected, _EXACT)
    assert not torch.equal(expected["0.weight"], _net().state_dict()["0.weight"])


@pytest.mark.parametrize("dtype", _OFFSETS)
def test_a_large_mean_costs_no_digits_of_the_variance(ranks, dtype):
    """All that may be lost is the last digit of the mean."""
    offset = _OFFSETS[dtype]
    x = torch.randn(_NUM_SAMPLES, _C, generator=torch.Generator().manual_seed(5))
    held = (x.to(dtype) + offset).double() - offset  # what of x is left at that offset
    expected = nn.BatchNorm1d(_C, affine=False).double()(held)
    last_digit = offset * torch.finfo(dtype).eps
    ours = torch.cat([rank["far"][dtype] for rank in ranks]).double()
    torch.testing.assert_close(ours, expected, rtol=0, atol=2 * last_digit)


def test_one_value_in_all_is_an_error_on_all(ranks):
    with pytest.raises(ValueError, match="more than 1 value per channel") as torchs:
        nn.BatchNorm1d(_C)(torch.ones(1, _C))
    sentence = str(torchs.value).partition(" torch.Size")[0]
    for rank in ranks:
        assert rank["one value"].startswith(sentence)
    assert str(torchs.value) in ranks[0]["one value"]


def test_one_value_on_each_rank_is_a_batch(ranks):
    if len(ranks) == 1:
        assert "one value each" not in ranks[0]
        return
    x, ours = torch.cat([rank["one value each"] for rank in ranks], dim=1)
    expected = nn.BatchNorm1d(_C)(x).detach()
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


def test_no_value_anywhere_changes_nothing(ranks):
    for rank in ranks:
        found = rank["no values"]
        assert found["y"].shape == (0, _C, 2)
        assert torch.equal(found["weight"], torch.zeros(_C))
        assert torch.equal(found["running_mean"], torch.zeros(_C))
        assert torch.equal(found["running_var"], torch.ones(_C))
        assert found["num_batches_tracked"] == 1  # as in BatchNorm


def test_sends_what_its_docstring_says(ranks):
    sums, squares = 8 * (_C + 1), 8 * _C
    for rank in ranks:
        assert rank["messages"]["evaluation"] == []
        alone = len(ranks) == 1
        assert rank["messages"]["forward"] == ([] if alone else [sums, squares])
        assert rank["messages"]["backward"] == ([] if alone else [squares, sums])


def test_a_process_group_keeps_to_itself(ranks):
    if len(ranks) == 1:
        assert "groups" not in ranks[0]
        return
    for group in (ranks[:1], ranks[1:]):
        x = torch.cat([rank["groups"]["x"] for rank in group])
        ours = torch.cat([rank["groups"]["y"] for rank in group])
        expected = nn.BatchNorm1d(_C)(x).detach()
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


def test_half_precision_input(ranks):
    """The output is rounded to bfloat16, statistics are not."""
    x, _ = _batch("2d", 0, torch.bfloat16)
    layer = _layer("2d", torch.float32)
    expected = layer(x.float()).detach()
    ours = torch.cat([rank["half"]["y"] for rank in ranks])
    assert ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours.float(), expected, rtol=2**-8, atol=1e-5)
    for rank in ranks:
        torch.testing.assert_close(
            rank["half"]["running_var"], layer.running_var, **_SINGLE
        )


def test_all_reduce_sum_is_differentiable(ranks):
    """The loss is the sum over ranks, and so is whatever is made from gradients."""
    world_size = len(ranks)
    addends = [_addend(rank) for rank in range(world_size)]
    total = torch.stack(addends).sum(0)
    loss = sum(_cubed(total, rank) for rank in range(world_size))
    gradients = torch.autograd.grad(loss, addends, create_graph=True)
    seconds = torch.autograd.grad(sum(g.square().sum() for g in gradients), addends)
    for rank in range(world_size):
        expected = {"gradient": gradients[rank].detach(), "second": seconds[rank]}
        expected["value"] = total.detach()
        _check_close(ranks[rank]["derivatives"], expected, _EXACT)


def test_gradient_of_a_gradient(ranks):
    x, _ = _batch("2d", 0, torch.float64)
    expected = _penalty(_layer("2d", torch.float64), x)
    ours = torch.cat([rank["penalty"] for rank in ranks])
    torch.testing.assert_close(ours, expected, **_EXACT)


# ---- without ranks -----------------------------------------------------------


@pytest.mark.parametrize("name", _LAYERS)
def test_without_a_group_it_is_batch_norm(name):
    batches = [_batch(name, step, torch.float32) for step in range(2)]
    layer = SyncBatchNorm.convert_sync_batchnorm(_layer(name, torch.float32))
    ours, theirs = _run_layer(layer, batches), _layer(name, torch.float32)
    _check_close(ours, _run_layer(theirs, batches), {"rtol": 0, "atol": 0})
    x = batches[0][0]
    assert torch.equal(layer.eval()(x), theirs.eval()(x))
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        SyncBatchNorm(_C)(torch.ones(1, _C))


def test_convert_replaces_every_batch_norm_and_copies_nothing():
    shared = nn.BatchNorm1d(3)
    net = nn.ModuleDict(
        {
            "deep": nn.Sequential(nn.Sequential(nn.BatchNorm2d(4, momentum=None))),
            "cube": nn.BatchNorm3d(2, eps=0.5, affine=False),
            "plain": nn.BatchNorm1d(6, track_running_stats=False),
            "other": nn.GroupNorm(1, 3),
            "one name": shared,
            "another name": shared,
        }
    )
    net["cube"].eval()
    before = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    names = ["deep.0.0", "cube", "plain", "one name"]
    old = {name: net.get_submodule(name) for name in names}
    settings = {k: (m.eps, m.momentum, m.training) for k, m in old.items()}
    keys = list(net.state_dict())
    result = SyncBatchNorm.convert_sync_batchnorm(net)
    assert result is net
    kinds = [type(m) for m in net.modules()]
    assert kinds.count(SyncBatchNorm) == 4
    assert not {nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d} & set(kinds)
    assert net["one name"] is net["another name"]
    after = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)
    assert list(net.state_dict()) == keys
    for name, (eps, momentum, training) in settings.items():
        new = net.get_submodule(name)
        assert (new.eps, new.momentum, new.training) == (eps, momentum, training)
    copied = copy.deepcopy(net)
    copied.load_state_dict(net.state_dict())
    assert isinstance(copied["cube"], SyncBatchNorm)


def test_convert_of_a_layer_returns_the_new_one():
    layer = nn.BatchNorm2d(4).eval()
    new = SyncBatchNorm.convert_sync_batchnorm(layer)
    assert type(new) is SyncBatchNorm
    assert new.weight is layer.weight
    assert not new.training


def test_wrong_shapes():
    for shape in ((2,), (2, _C + 1), (2, _C - 1, 3)):
        with pytest.raises(ValueError, match=r"expected input \(N, 5, ...\), got"):
            SyncBatchNorm(_C)(torch.ones(shape))


def test_by_hand_offers_it():
    assert by_hand.SyncBatchNorm is SyncBatchNorm
