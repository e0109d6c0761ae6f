"""What is built by hand in by_hand/ equals torch's own, on 1, 2 and 3 ranks.

`_measure` runs on every rank, once for each world size, and brings back everything that
the tests look at; the tests then compare in the parent, where all ranks are seen.

Where torch adds in the same order, the results are equal to the last bit: always with
one or two ranks, since a + b = b + a. With three, (a + b) + c may differ from
a + (b + c) in the last digit, and `_TOLERANCE` holds.
"""

import copy
import os
from collections.abc import Callable, Iterator
from functools import reduce
from operator import add
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ddp_lab import by_hand
from ddp_lab.by_hand import BucketDDP, NaiveDDP, assign_buckets, ring_all_reduce
from ddp_lab.errors import LabError
from ddp_lab.ranks.workers import Workers
from ddp_lab.world import join_world

_TOLERANCE = {"rtol": 1e-5, "atol": 1e-7}
_NUM_STEPS = 4
_NUM_SAMPLES = 6  # on a rank
_NUM_FEATURES = 8
_TINY_MB = 100 / 2**20  # so that even these models need several buckets

# ---- models ------------------------------------------------------------------


class _Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(_NUM_FEATURES, _NUM_FEATURES)
        self.middle = nn.Linear(_NUM_FEATURES, _NUM_FEATURES)
        self.last = nn.Linear(_NUM_FEATURES, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


class _Tied(_Plain):
    def __init__(self) -> None:
        super().__init__()
        self.middle.weight = self.first.weight


class _Frozen(_Plain):
    def __init__(self) -> None:
        super().__init__()
        self.middle.requires_grad_(False)


class _Normed(_Plain):
    """Has buffers, which every forward in training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(_NUM_FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


class _Unused(_Plain):
    """`never` is used by no rank, `sometimes` by rank 0 only."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(2, 2)
        self.sometimes = nn.Linear(_NUM_FEATURES, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + self.sometimes(x) if dist.get_rank() == 0 else y


class _Strided(_Plain):
    """A parameter that is dense but not contiguous, as in channels_last models."""

    def __init__(self) -> None:
        super().__init__()
        self.middle.weight = nn.Parameter(torch.randn(_NUM_FEATURES, _NUM_FEATURES).t())


_MODELS: dict[str, type[_Plain]] = {
    "plain": _Plain,
    "tied": _Tied,
    "frozen": _Frozen,
    "normed": _Normed,
    "unused": _Unused,
    "strided": _Strided,
}

# ---- wrappers: each turns a model into one that trains on all ranks ----------


class _ReducesParameters(NaiveDDP):
    """A well-known mistake: it averages the weights, so gradients stay local."""

    def average_gradients(self) -> None:
        for parameter in self.module.parameters():
            if parameter.requires_grad:
                dist.all_reduce(parameter.data)
                parameter.data /= dist.get_world_size()


def _wrap(kind: str, model: nn.Module) -> nn.Module:
    unused = isinstance(model, _Unused)
    if kind == "torch":
        return DistributedDataParallel(model, find_unused_parameters=unused)
    if kind == "bucket":
        return BucketDDP(
            model,
            bucket_cap_mb=3 * _TINY_MB,
            first_bucket_mb=_TINY_MB,
            find_unused_parameters=unused,
        )
    if kind == "naive, ring":
        return NaiveDDP(model, all_reduce=ring_all_reduce)
    return {"naive": NaiveDDP, "mistake": _ReducesParameters}[kind](model)


_BY_HAND = ("naive", "naive, ring", "bucket")

# ---- what runs on the ranks --------------------------------------------------


def _build(name: str) -> nn.Module:
    torch.manual_seed(100 + dist.get_rank())  # different weights: they must be copied
    return _MODELS[name]()


def _batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    x = torch.randn(_NUM_SAMPLES, _NUM_FEATURES, generator=generator)
    return x, torch.randint(3, (_NUM_SAMPLES,), generator=generator)


def _gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {
        name.removeprefix("module."): None if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters()
    }


def _state(model: nn.Module) -> dict[str, Tensor]:
    state = model.state_dict()
    return {k.removeprefix("module."): v.clone() for k, v in state.items()}


def _backward(model: nn.Module, step: int) -> Tensor:
    x, y = _batch(step)
    output = model(x)
    F.cross_entropy(output, y).backward()
    if isinstance(model, NaiveDDP):
        model.average_gradients()
    return output.detach()


def _train(kind: str, name: str) -> dict[str, Any]:
    """Train with one wrapper, and beside it take the local gradients of step 0."""
    model = _wrap(kind, _build(name))
    start = _state(model)
    local = copy.deepcopy(model.module)
    for parameter in local.parameters():
        parameter._post_accumulate_grad_hooks = None
    _backward(local, 0)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01
    )
    result: dict[str, Any] = {"start": start, "local gradients": _gradients(local)}
    for step in range(_NUM_STEPS):
        optimizer.zero_grad()
        output = _backward(model, step)
        if step == 0:
            result["output"] = output
            result["gradients"] = _gradients(model)
            result["after reduce"] = {k: p.clone() for k, p in _state(model).items()}
        optimizer.step()
    return {**result, "end": _state(model)}


def _accumulate(kind: str) -> dict[str, Any]:
    """Two micro-batches without a message, then one with."""
    model = _wrap(kind, _build("plain"))
    with model.no_sync():
        _backward(model, 0)
        _backward(model, 1)
    before = _gradients(model)
    _backward(model, 2)
    return {"before": before, "after": _gradients(model)}


class _Branch(_Plain):
    """Uses one layer only while `is_on`."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Linear(_NUM_FEATURES, 3)
        self.is_on = True

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (self.branch(x) if self.is_on else 0)


def _accumulate_branch(kind: str) -> dict[str, Tensor | None]:
    """A layer that only the micro-batch inside no_sync reached is still averaged."""
    torch.manual_seed(0)
    make = BucketDDP if kind == "bucket" else DistributedDataParallel
    model = make(_Branch(), find_unused_parameters=True)
    with model.no_sync():
        _backward(model, 0)
    model.module.is_on = False
    _backward(model, 1)
    return _gradients(model)


def _reduce_tensors() -> dict[str, dict[str, Tensor]]:
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    tensors = {
        f"length {n}": torch.randn(n, generator=generator)
        for n in (0, 1, 2, 3, 5, 12, 1000)
    }
    tensors["scalar"] = torch.tensor(rank + 0.5)
    tensors["cube"] = torch.randn(2, 3, 5, generator=generator)
    tensors["not contiguous"] = torch.randn(4, 7, generator=generator).t()
    tensors["integers"] = torch.arange(7) * (rank + 1)
    tensors["double"] = torch.randn(9, generator=generator, dtype=torch.float64)
    results = {}
    for name, tensor in tensors.items():
        by_hand_result = tensor.clone()
        returned = ring_all_reduce(by_hand_result)
        assert returned is by_hand_result
        by_torch = tensor.clone().contiguous()
        dist.all_reduce(by_torch)
        results[name] = {"in": tensor, "by hand": by_hand_result, "torch": by_torch}
    return results


def _count_messages(num_elements: int) -> tuple[int, int]:
    """The number of messages and bytes that this rank sends in one ring all-reduce."""
    sent: list[int] = []

    def counted(messages: list[dist.P2POp]) -> list[dist.Work]:
        sent.extend(m.tensor.nbytes for m in messages if m.op is dist.isend)
        return original(messages)

    original, dist.batch_isend_irecv = dist.batch_isend_irecv, counted
    try:
        ring_all_reduce(torch.zeros(num_elements))
    finally:
        dist.batch_isend_irecv = original
    return len(sent), sum(sent)


def _watch_overlap() -> list[str]:
    """In which order BucketDDP sends buckets and the first layer gets its gradient."""
    model = _wrap("bucket", _build("plain"))
    assert isinstance(model, BucketDDP)
    log: list[str] = []

    def logged(tensor: Tensor, **kwargs: Any) -> Any:
        log.append("send" if kwargs == {"async_op": True} else f"wrong: {kwargs}")
        return original(tensor, **kwargs)

    model.module.first.weight.register_hook(lambda grad: log.append("first layer"))
    original, dist.all_reduce = dist.all_reduce, logged
    try:
        _backward(model, 0)
    finally:
        dist.all_reduce = original
    return log


def _message_of(action: Callable[[], Any]) -> str:
    try:
        action()
    except LabError as error:
        return str(error)
    return "nothing was raised"


class _Reentrant(_Plain):
    """Adds to the gradient of `middle` twice in one backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.middle, x, use_reentrant=True)
        return self.last(x)


def _recover_after_error() -> bool:
    """Is the step after a backward pass that failed half-way a whole one?"""
    failing, fine = _wrap("bucket", _build("plain")), _wrap("bucket", _build("plain"))

    def fail(grad: Tensor) -> None:
        raise RuntimeError("planted")

    handle = failing.module.first.weight.register_hook(fail)
    with pytest.raises(RuntimeError, match="planted"):
        _backward(failing, 0)
    handle.remove()
    failing.zero_grad()
    _backward(failing, 1)
    _backward(fine, 1)
    ours, expected = _gradients(failing), _gradients(fine)
    return all(torch.equal(ours[name], expected[name]) for name in expected)


def _bucket_bytes() -> dict[str, list[int]]:
    """The sizes of the buckets of a larger model, ours and torch's."""
    width = 300  # a layer of 300 * 300 floats is 0.34 MB, the first bucket takes 1 MB
    ours = nn.Sequential(*[nn.Linear(width, width) for _ in range(10)])
    theirs = DistributedDataParallel(copy.deepcopy(ours))
    by_us = BucketDDP(ours)
    told: list[int] = []

    def tell(_: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        told.append(bucket.buffer().nbytes)
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    theirs.register_comm_hook(None, tell)
    for _ in range(2):  # torch regroups after the first backward
        told.clear()
        theirs(torch.ones(1, width)).sum().backward()
    parameters = dict(ours.named_parameters())
    return {
        "torch": told,
        "ours": [
            sum(parameters[name].nbytes for name in names)
            for names in by_us.bucket_names
        ],
    }


def _measure() -> dict[str, Any]:
    torch.set_num_threads(1)
    trainings = {
        (kind, name): _train(kind, name)
        for kind in ("torch", *_BY_HAND)
        for name in _MODELS
    }
    unused, reentrant = BucketDDP(_build("unused")), BucketDDP(_Reentrant())
    return {
        "rings": _reduce_tensors(),
        "messages": _count_messages(12),
        "trainings": trainings,
        "mistake": _train("mistake", "plain"),
        "accumulated": {kind: _accumulate(kind) for kind in ("torch", "bucket")},
        "branch": {kind: _accumulate_branch(kind) for kind in ("torch", "bucket")},
        "overlap": _watch_overlap(),
        "recovered": _recover_after_error(),
        "bucket bytes": _bucket_bytes(),
        "unused": _message_of(lambda: _backward(unused, 0)),
        "twice": _message_of(lambda: _backward(reentrant, 0)),
    }


def _measure_in_a_world_of(world_size: int) -> dict[str, Any]:
    """Some of the ranks that are there make a world of their own."""
    os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(world_size)
    with join_world(device="cpu"):
        return _measure()


# ---- what is compared in the parent ------------------------------------------


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    """Ranks for the largest world; the smaller ones are made of the first of them."""
    with Workers(3, num_threads=1) as workers:
        yield workers


@pytest.fixture(scope="module", params=[1, 2, 3], ids=lambda w: f"{w} ranks")
def ranks(request: pytest.FixtureRequest, workers: Workers) -> list[dict[str, Any]]:
    """What every rank measured, in rank order."""
    world_size = request.param
    measured = workers.run(
        _measure_in_a_world_of, world_size, only=list(range(world_size))
    )
    assert len(measured) == world_size
    return measured


def _check_equal(ours: Any, expected: Any, world_size: int) -> None:
    """Demand equal tensors in two dicts of the same names, at least one of them."""
    assert ours.keys() == expected.keys()
    assert ours
    for name, tensor in expected.items():
        exact = {"rtol": 0, "atol": 0} if world_size <= 2 else _TOLERANCE
        if tensor is None:
            assert ours[name] is None, name
        else:
            torch.testing.assert_close(
                ours[name], tensor, **exact, msg=lambda m, n=name: f"{n}: {m}"
            )


def test_ring_adds_in_the_order_of_the_ring(ranks: list[dict[str, Any]]) -> None:
    world_size = len(ranks)
    for name in ranks[0]["rings"]:
        inputs = [rank["rings"][name]["in"].flatten() for rank in ranks]
        pieces = []
        for chunk in range(world_size):  # chunk c starts its round at rank c
            order = [(chunk + k) % world_size for k in range(world_size)]
            terms = [inputs[r].tensor_split(world_size)[chunk] for r in order]
            pieces.append(reduce(add, terms))
        for rank in ranks:
            assert torch.equal(
                rank["rings"][name]["by hand"].flatten(), torch.cat(pieces)
            )


def test_ring_equals_torch_all_reduce(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        ours = {name: r["by hand"] for name, r in rank["rings"].items()}
        theirs = {name: r["torch"] for name, r in rank["rings"].items()}
        _check_equal(ours, theirs, len(ranks))


def test_ring_sends_what_its_docstring_says(ranks: list[dict[str, Any]]) -> None:
    world_size, num_bytes = len(ranks), 12 * 4
    for rank in ranks:
        num_messages, sent_bytes = rank["messages"]
        assert num_messages == 2 * (world_size - 1)
        assert sent_bytes == 2 * (world_size - 1) * num_bytes // world_size


@pytest.mark.parametrize("name", _MODELS)
@pytest.mark.parametrize("kind", _BY_HAND)
def test_training_equals_torch(
    ranks: list[dict[str, Any]], kind: str, name: str
) -> None:
    for rank in ranks:
        ours, theirs = (rank["trainings"][k, name] for k in (kind, "torch"))
        _check_equal(ours["start"], theirs["start"], len(ranks))
        assert torch.equal(ours["output"], theirs["output"])
        _check_equal(ours["gradients"], theirs["gradients"], len(ranks))
        if kind == "bucket" or name != "normed":
            _check_equal(ours["end"], theirs["end"], len(ranks))
        # weights did move, and those of the ranks together
        moved = [k for k, v in ours["end"].items() if not v.equal(ours["start"][k])]
        assert "last.weight" in moved
        _check_equal(
            {k: ours["end"][k] for k in moved if "running" not in k},
            {
                k: ranks[0]["trainings"][kind, name]["end"][k]
                for k in moved
                if "running" not in k
            },
            world_size=1,
        )


@pytest.mark.parametrize("kind", _BY_HAND)
def test_all_ranks_start_from_rank_0(ranks: list[dict[str, Any]], kind: str) -> None:
    for rank in ranks:
        _check_equal(
            rank["trainings"][kind, "plain"]["start"],
            ranks[0]["trainings"][kind, "plain"]["start"],
            world_size=1,
        )


@pytest.mark.parametrize("kind", _BY_HAND)
def test_it_is_the_gradient_that_is_averaged(
    ranks: list[dict[str, Any]], kind: str
) -> None:
    runs = [rank["trainings"][kind, "plain"] for rank in ranks]
    for name in runs[0]["gradients"]:
        local = torch.stack([run["local gradients"][name] for run in runs])
        assert len(runs) == 1 or not local[0].equal(local[1])
        for run in runs:
            torch.testing.assert_close(
                run["gradients"][name], local.mean(dim=0), **_TOLERANCE
            )
            assert torch.equal(run["after reduce"][name], run["start"][name])


def test_averaging_weights_instead_is_noticed(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        wrong, right = rank["mistake"], rank["trainings"]["torch", "plain"]
        if len(ranks) == 1:
            _check_equal(wrong["end"], right["end"], 1)
        else:
            assert not torch.equal(
                wrong["gradients"]["last.weight"], right["gradients"]["last.weight"]
            )
            assert not torch.allclose(
                wrong["end"]["last.weight"], right["end"]["last.weight"], rtol=1e-3
            )


def test_tied_frozen_and_unused_parameters(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        for kind in _BY_HAND:
            tied = rank["trainings"][kind, "tied"]
            assert "middle.weight" not in tied["gradients"]
            assert tied["end"]["middle.weight"].equal(tied["end"]["first.weight"])
            frozen = rank["trainings"][kind, "frozen"]
            assert frozen["gradients"]["middle.weight"] is None
            assert frozen["end"]["middle.weight"].equal(
                frozen["start"]["middle.weight"]
            )
            unused = rank["trainings"][kind, "unused"]
            assert unused["gradients"]["never.weight"] is None
            assert unused["gradients"]["sometimes.weight"].abs().sum() > 0


def test_no_sync_accumulates_on_the_rank(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        ours, theirs = (rank["accumulated"][kind] for kind in ("bucket", "torch"))
        _check_equal(ours["before"], theirs["before"], world_size=1)
        _check_equal(ours["after"], theirs["after"], len(ranks))
    for name in ranks[0]["accumulated"]["bucket"]["before"]:
        before, after = (
            torch.stack([rank["accumulated"]["bucket"][when][name] for rank in ranks])
            for when in ("before", "after")
        )
        assert (after == after[0]).all()
        assert len(ranks) == 1 or not (before == before[0]).all()


def test_what_only_no_sync_reached_is_averaged(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        ours, theirs = (rank["branch"][kind] for kind in ("bucket", "torch"))
        _check_equal(ours, theirs, len(ranks))
        assert ours["branch.weight"].equal(
            ranks[0]["branch"]["bucket"]["branch.weight"]
        )


def test_buckets_leave_before_backward_is_over(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["overlap"] == ["send", "send", "first layer", "send"]


def test_an_unreached_parameter_is_named(ranks: list[dict[str, Any]]) -> None:
    for number, rank in enumerate(ranks):
        message = rank["unused"]
        assert message.startswith(f"rank {number}: ")
        assert "never.weight" in message
        assert "first.weight" not in message
        assert ("sometimes.weight" in message) == (number != 0)
        assert "find_unused_parameters=True" in message


def test_a_gradient_that_comes_twice_is_named(ranks: list[dict[str, Any]]) -> None:
    for number, rank in enumerate(ranks):
        assert rank["twice"].startswith(f"rank {number}: the gradient of middle.")
        assert "use_reentrant=False" in rank["twice"]


def test_the_step_after_a_failed_backward_is_whole(ranks: list[dict[str, Any]]) -> None:
    assert all(rank["recovered"] is True for rank in ranks)


def test_buckets_are_those_of_torch(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        sizes = rank["bucket bytes"]
        assert sizes["ours"] == sizes["torch"]
        assert len(sizes["ours"]) > 1


@pytest.mark.parametrize("seed", range(20))
def test_assign_buckets_equals_torch(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 300, (40,), generator=generator).tolist()
    dtypes = [torch.float32, torch.float64] if seed % 2 else [torch.float32]
    tensors = [
        torch.empty(n, dtype=dtypes[i * 7 % 3 % len(dtypes)])
        for i, n in enumerate(lengths)
    ]
    reversed_buckets, _ = dist._compute_bucket_assignment_by_size(
        tensors[::-1], [500, 2000]
    )
    expected = [[len(tensors) - 1 - i for i in bucket] for bucket in reversed_buckets]
    ours = assign_buckets(
        tensors, bucket_cap_mb=2000 / 2**20, first_bucket_mb=500 / 2**20
    )
    assert ours == expected
    assert len(ours) > 5


def test_assign_buckets_of_nothing_and_of_one() -> None:
    assert assign_buckets([]) == []
    assert assign_buckets([torch.empty(3)]) == [[0]]


def test_all_is_sorted_and_real() -> None:
    assert by_hand.__all__ == sorted(by_hand.__all__)
    assert all(hasattr(by_hand, name) for name in by_hand.__all__)
