"""The exercises of notebooks 00 and 02: who is who, sending and receiving.

Inputs are small whole numbers, so that sums are exact and a reader can follow them.
"""

import os
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ddp_lab.exercises.exercise import Exercise, Wrong, close, same, tell

__all__ = ["RANK_EXERCISES"]

Answer = Callable[..., Any]


# ------------------------------------------------------------------ notebook 00


def _brought(case: tuple[int, ...], rank: int) -> Tensor:
    """A tensor of this shape that is another one on each rank."""
    numbers = torch.arange(1, 1 + torch.Size(case).numel(), dtype=torch.float32)
    return (numbers * 6 * (1 + rank) ** 2).reshape(case)


def _call_mean(fn: Answer, case: Any, rank: int, world_size: int) -> Any:
    tensor = _brought(case, rank)
    return {"result": fn(tensor), "argument": tensor}


def _judge_mean(case: Any, seen: list[Any]) -> Iterator[Wrong]:
    brought = [_brought(case, rank) for rank in range(len(seen))]
    mean = torch.stack(brought).mean(0)
    for rank, saw in enumerate(seen):
        if not close(saw["result"], mean):
            rule = "every rank gets the mean over all ranks"
            yield Wrong(rule=rule, rank=rank, expected=mean, got=saw["result"])
    yield from _argument_is_kept(brought, seen)


def _argument_is_kept(brought: list[Tensor], seen: list[Any]) -> Iterator[Wrong]:
    for rank, (tensor, saw) in enumerate(zip(brought, seen, strict=True)):
        if not same(saw["argument"], tensor):
            rule = "the argument keeps its values: the caller may still need them"
            yield Wrong(rule=rule, rank=rank, expected=tensor, got=saw["argument"])


def _given_tensor(case: Any, rank: int, world_size: int) -> str:
    return tell(_brought(case, rank))


_MEAN_OVER_RANKS = Exercise(
    name="mean_over_ranks",
    signature="mean_over_ranks(tensor)",
    task=(
        "Every rank calls it with a tensor of its own, of the same shape. Return the "
        "mean of all ranks' tensors, on every rank, for any number of ranks. Leave the "
        "argument as it is. The process group is open already."
    ),
    cases=((3,), (2, 2), ()),
    call=_call_mean,
    judge=_judge_mean,
    given=_given_tensor,
    tried=(
        "On 1, 2 and 3 ranks, every rank got the mean of tensors of three shapes, and "
        "the arguments kept their values."
    ),
)


def _call_who_am_i(fn: Answer, case: Any, rank: int, world_size: int) -> Any:
    # as if each rank had a machine of its own: the local rank is another number
    with mock.patch.dict(os.environ, LOCAL_RANK="0", LOCAL_WORLD_SIZE="1"):
        return fn()


def _judge_who_am_i(case: Any, seen: list[Any]) -> Iterator[Wrong]:
    for rank, saw in enumerate(seen):
        expected = (rank, len(seen))
        if isinstance(saw, tuple | list) and any(isinstance(x, str) for x in saw):
            rule = "both are whole numbers: the environment holds text"
            yield Wrong(rule=rule, rank=rank, expected=expected, got=saw)
        if not same(saw, expected):
            rule = "it is the pair of rank and world size"
            yield Wrong(rule=rule, rank=rank, expected=expected, got=saw)


_WHO_AM_I = Exercise(
    name="who_am_i",
    signature="who_am_i()",
    task=(
        "Return the rank of this process and the world size, as a pair of whole "
        "numbers. Read them from the environment variables that the launcher sets; the "
        "ranks need not meet for that."
    ),
    cases=(None,),
    call=_call_who_am_i,
    judge=_judge_who_am_i,
    given=lambda case, rank, world_size: f"RANK={rank}, WORLD_SIZE={world_size}",
    tried="On 1, 2 and 3 ranks, each knew its number and how many there are.",
    where="ranks",
)

# ------------------------------------------------------------------ notebook 02


def _judge_collect(case: Any, seen: list[Any]) -> Iterator[Wrong]:
    brought = [_brought(case, rank) for rank in range(len(seen))]
    for rank, saw in enumerate(seen):
        got = saw["result"]
        if rank == 0 and not same(got, brought):
            rule = "rank 0 gets the list of all tensors, in the order of the ranks"
            yield Wrong(rule=rule, rank=0, expected=brought, got=got)
        if rank > 0 and got is not None:
            rule = "the other ranks get None"
            yield Wrong(rule=rule, rank=rank, expected=None, got=got)
    yield from _argument_is_kept(brought, seen)


_COLLECT_ON_RANK_0 = Exercise(
    name="collect_on_rank_0",
    signature="collect_on_rank_0(tensor)",
    task=(
        "Every rank calls it with a tensor of its own, of the same shape. Return, on "
        "rank 0, the list of all ranks' tensors in the order of the ranks, and None on "
        "the other ranks. Any way of sending is fine."
    ),
    cases=((2,), (2, 3)),
    call=_call_mean,
    judge=_judge_collect,
    given=_given_tensor,
    tried=(
        "On 1, 2 and 3 ranks, rank 0 got the tensors of all in order, the others None."
    ),
)


def _source(case: str, world_size: int) -> int:
    return 0 if case == "first" else world_size - 1


def _call_broadcast(fn: Answer, case: str, rank: int, world_size: int) -> Any:
    tensor = _brought((2,), rank)
    fn(tensor, _source(case, world_size))
    return tensor


def _judge_broadcast(case: str, seen: list[Any]) -> Iterator[Wrong]:
    src = _source(case, len(seen))
    expected = _brought((2,), src)
    for rank, got in enumerate(seen):
        if not same(got, expected):
            rule = (
                "the source keeps its values"
                if rank == src
                else f"the tensor itself now holds the values of rank {src}"
            )
            yield Wrong(rule=rule, rank=rank, expected=expected, got=got)


def _given_broadcast(case: str, rank: int, world_size: int) -> str:
    return f"{_given_tensor((2,), rank, world_size)}, src={_source(case, world_size)}"


_BROADCAST_BY_HAND = Exercise(
    name="broadcast_by_hand",
    signature="broadcast_by_hand(tensor, src)",
    task=(
        "Every rank calls it with a tensor of the same shape. Afterwards each rank's "
        "tensor itself holds the values of rank src. Use dist.send and dist.recv (or "
        "isend and irecv) only."
    ),
    cases=("first", "last"),
    call=_call_broadcast,
    judge=_judge_broadcast,
    given=_given_broadcast,
    tried="On 1, 2 and 3 ranks, from the first and from the last, by messages alone.",
    allowed=("send", "recv", "isend", "irecv", "batch_isend_irecv"),
)


def _judge_place(case: dict[str, str], seen: list[Any]) -> Iterator[Wrong]:
    (got,) = seen
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    expected = tuple(int(case.get(n, "01"[n == "WORLD_SIZE"])) for n in names)
    if isinstance(got, tuple | list) and any(isinstance(x, str) for x in got):
        rule = "all three are whole numbers: the environment holds text"
        yield Wrong(rule=rule, rank=None, expected=expected, got=got)
    if not same(got, expected):
        rule = (
            "it is (rank, local rank, world size)"
            if case
            else "a process that nobody launched is rank 0 of 1"
        )
        yield Wrong(rule=rule, rank=None, expected=expected, got=got)


def _torchrun(rank: int, local_rank: int, world_size: int) -> dict[str, str]:
    numbers = {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": world_size}
    return {name: str(number) for name, number in numbers.items()}


_PLACE_FROM_ENVIRONMENT = Exercise(
    name="place_from_environment",
    signature="place_from_environment(environ)",
    task=(
        "environ is what torchrun's processes find in os.environ: texts by name. "
        "Return (rank, local rank, world size), as whole numbers. A process nobody "
        "launched has none of these variables: it is rank 0, local rank 0, of 1."
    ),
    cases=(
        _torchrun(1, 1, 2),
        _torchrun(0, 0, 8),
        _torchrun(5, 1, 8),  # the second machine of two: ranks 4 to 7
        _torchrun(10, 2, 12),
        {},
    ),
    call=lambda fn, case, rank, world_size: fn(dict(case)),
    judge=_judge_place,
    given=lambda case, rank, world_size: str(case),
    tried="One machine, two machines, numbers of two digits, and nobody launched it.",
    where="once",
)

RANK_EXERCISES = (
    _MEAN_OVER_RANKS,
    _WHO_AM_I,
    _COLLECT_ON_RANK_0,
    _BROADCAST_BY_HAND,
    _PLACE_FROM_ENVIRONMENT,
)
