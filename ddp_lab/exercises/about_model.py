"""The exercises of notebook 03: N copies of a model stay one model."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ddp_lab.exercises.exercise import Exercise, Words, Wrong, close, same

__all__ = ["MODEL_EXERCISES"]

Answer = Callable[..., Any]


def _net(seed: int) -> nn.Module:
    """Two layers with BatchNorm between them: parameters and buffers."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))


def _state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def _gradients(rank: int) -> dict[str, torch.Tensor | None]:
    """Made-up gradients, other ones on each rank; the last bias is frozen."""
    found: dict[str, torch.Tensor | None] = {}
    for k, (name, parameter) in enumerate(_net(0).named_parameters()):
        numbers = torch.arange(parameter.numel(), dtype=torch.float32) + k
        frozen = name == "2.bias"
        found[name] = None if frozen else (numbers * 6 * (1 + rank)).view_as(parameter)
    return found


class _Messages(TorchDispatchMode):
    """Count what goes to other ranks, however torch.distributed is called."""

    num_sent = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.num_sent += func.namespace == "c10d"
        return func(*args, **(kwargs or {}))


def _call_average(fn: Answer, case: Any, rank: int, world_size: int) -> Any:
    model = _net(0)
    for name, parameter in model.named_parameters():
        parameter.grad = _gradients(rank)[name]
        parameter.requires_grad = name != "2.bias"
    with _Messages() as messages:  # type: ignore[no-untyped-call]
        fn(model)
    return {
        "gradients": {name: p.grad for name, p in model.named_parameters()},
        "state": _state(model),
        "num_sent": messages.num_sent,
    }


def _judge_average(case: Any, seen: list[Any]) -> Iterator[Wrong]:
    for rank, saw in enumerate(seen):
        for name, value in _net(0).state_dict().items():
            got = saw["state"][name]
            if not same(got, value):
                rule = f"the gradients change, the parameters do not ({name})"
                yield Wrong(rule=rule, rank=rank, expected=value, got=got)
    of_ranks = [_gradients(rank) for rank in range(len(seen))]
    for rank, saw in enumerate(seen):
        for name in of_ranks[0]:
            own = [gradients[name] for gradients in of_ranks]
            got = saw["gradients"][name]
            known = [gradient for gradient in own if gradient is not None]
            if not known:
                if got is not None:
                    rule = f"what has no gradient on any rank still has none ({name})"
                    yield Wrong(rule=rule, rank=rank, expected=None, got=got)
                continue
            mean = torch.stack(known).mean(0)
            if not close(got, mean):
                rule = f"each gradient is the mean over all ranks ({name})"
                yield Wrong(rule=rule, rank=rank, expected=mean, got=got)
    for rank, saw in enumerate(seen):
        if saw["num_sent"] > 1 and len(seen) > 1:
            rule = "all gradients travel in one message: one call of torch.distributed"
            got = saw["num_sent"]
            yield Wrong(rule=rule, rank=rank, expected=1, got=got)


_AVERAGE_GRADIENTS = Exercise(
    name="average_gradients",
    signature="average_gradients(model)",
    task=(
        "Every rank has the same model and, after its own backward, its own gradients. "
        "Replace the gradient of each parameter by its mean over all ranks, with one "
        "message: call torch.distributed once. A frozen parameter has no gradient "
        "(None) on any rank; leave it so, and leave the parameters as they are."
    ),
    cases=(None,),
    call=_call_average,
    judge=_judge_average,
    given=lambda case, rank, world_size: (
        f"a model of 6 parameters, one frozen, with gradients {6 * (rank + 1)} x "
        "(0, 1, 2, ...)"
    ),
    tried=(
        "On 1, 2 and 3 ranks, every gradient became the mean in one message, the "
        "parameters stayed, and the frozen one kept no gradient."
    ),
)


def _call_copy(fn: Answer, case: Any, rank: int, world_size: int) -> Any:
    model = _net(seed=10 + rank)
    for buffer in model.buffers():
        buffer.add_(rank + 1)
    model[2].bias.requires_grad = False  # type: ignore[index]
    before = list(map(id, model.parameters()))
    fn(model)
    return {
        "state": _state(model),
        "same objects": before == list(map(id, model.parameters())),
        "trainable": [name for name, p in model.named_parameters() if p.requires_grad],
    }


def _judge_copy(case: Any, seen: list[Any]) -> Iterator[Wrong]:
    original = _net(seed=10)
    for buffer in original.buffers():
        buffer.add_(1)
    parameters = dict(original.named_parameters())
    for rank, saw in enumerate(seen):
        for name, value in original.state_dict().items():
            got = saw["state"][name]
            if not same(got, value):
                kind = "parameter" if name in parameters else "buffer"
                rule = f"every {kind} is that of rank 0 ({name})"
                yield Wrong(rule=rule, rank=rank, expected=value, got=got)
        if not saw["same objects"]:
            rule = "parameters change in place: an optimiser holds on to them"
            yield Wrong(
                rule=rule,
                rank=rank,
                expected=Words("the same objects"),
                got=Words("new ones"),
            )
        trainable = [name for name in parameters if name != "2.bias"]
        if saw["trainable"] != trainable:
            rule = "requires_grad stays as it was"
            yield Wrong(rule=rule, rank=rank, expected=trainable, got=saw["trainable"])


_BROADCAST_MODEL = Exercise(
    name="broadcast_model",
    signature="broadcast_model(model)",
    task=(
        "Every rank has a model of the same shape with other weights. Overwrite, in "
        "place, all parameters and all buffers (BatchNorm has some) by those of rank 0."
    ),
    cases=(None,),
    call=_call_copy,
    judge=_judge_copy,
    given=lambda case, rank, world_size: f"a model with weights of seed {10 + rank}",
    tried=(
        "On 1, 2 and 3 ranks, parameters and buffers became those of rank 0, in place."
    ),
)


_DIFFERENCES = {
    "equal": "equal models",
    "one weight": "models of which the last rank's differs in one weight",
    "in the middle": "models of which rank 1's differs in one weight, on 3 ranks",
    "last bit": "models of which the last rank's differs in the last bit of a weight",
    "swapped": "models of which the last rank's has two weights swapped",
    "cancel": "models that differ, but whose mean is that of rank 0",
}


def _replica(case: str, rank: int, world_size: int) -> nn.Module:
    model = nn.Linear(2, 2)
    weight, is_last = model.weight, rank == world_size - 1 > 0
    with torch.no_grad():
        weight.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        model.bias.zero_()
        if case == "one weight" and is_last:
            weight[0, 1] += 1
        if case == "in the middle" and 0 < rank < world_size - 1:
            weight[0, 1] += 1
        if case == "last bit" and is_last:
            weight[0, 1] += 2**-22
        if case == "swapped" and is_last:
            weight.copy_(torch.tensor([[2.0, 1.0], [3.0, 4.0]]))
        if case == "cancel" and rank > 0:
            weight[0, 1] += 1 if is_last else -1
    return model


def _call_agree(fn: Answer, case: str, rank: int, world_size: int) -> Any:
    model = _replica(case, rank, world_size)
    return {"result": fn(model), "state": _state(model)}


def _judge_agree(case: str, seen: list[Any]) -> Iterator[Wrong]:
    world_size = len(seen)
    equal = case == "equal" or world_size == 1
    expected = equal or (case == "in the middle" and world_size == 2)
    for rank, saw in enumerate(seen):
        got = saw["result"]
        if isinstance(got, torch.Tensor) and got.numel() == 1:
            got = bool(got)
        if got is not expected:
            rule = (
                "it is True on every rank if all copies are equal"
                if expected
                else "it is False on every rank if two copies differ"
            )
            yield Wrong(rule=rule, rank=rank, expected=expected, got=saw["result"])
    for rank, saw in enumerate(seen):
        for name, value in _replica(case, rank, world_size).state_dict().items():
            if not same(saw["state"][name], value):
                rule = "it only looks: the weights stay as they are"
                got = saw["state"][name]
                yield Wrong(rule=rule, rank=rank, expected=value, got=got)


_REPLICAS_AGREE = Exercise(
    name="replicas_agree",
    signature="replicas_agree(model)",
    task=(
        "Return True, on every rank, if the parameters of all ranks' models are equal "
        "to the last bit, and False, on every rank, if any two differ. Change nothing."
    ),
    cases=tuple(_DIFFERENCES),
    call=_call_agree,
    judge=_judge_agree,
    given=lambda case, rank, world_size: _DIFFERENCES[case],
    tried=(
        "On 1, 2 and 3 ranks: equal models, one weight that differs, on the last rank "
        "or in the middle, one bit, two weights swapped, and differences that cancel."
    ),
)

MODEL_EXERCISES = (_AVERAGE_GRADIENTS, _BROADCAST_MODEL, _REPLICAS_AGREE)
