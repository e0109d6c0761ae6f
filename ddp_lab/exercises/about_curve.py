"""The exercises of notebook 06: one curve on any number of ranks, at any batch size."""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from ddp_lab.exercises.exercise import Exercise, Words, Wrong, close, same

__all__ = ["CURVE_EXERCISES"]

Answer = Callable[..., Any]

# ---------------------------------------------------------------- loss_weight

_COUNTS = ((3, 3, 3), (5, 2, 4), (1, 0, 6), (64, 63, 63))  # rank by rank


def _call_weight(fn: Answer, case: Any, rank: int, world_size: int) -> Any:
    return fn(case[rank])


def _judge_weight(case: Any, seen: list[Any]) -> Iterator[Wrong]:
    world_size = len(seen)
    counts = case[:world_size]
    expected = world_size / sum(counts)
    values = []
    for rank, got in enumerate(seen):
        number = got.item() if isinstance(got, Tensor) and got.numel() == 1 else got
        if isinstance(number, bool) or not isinstance(number, int | float):
            rule = "it is a number"
            yield Wrong(rule=rule, rank=rank, expected=expected, got=got)
            return
        values.append(float(number))
    for rank, value in enumerate(values):
        if not close(value, values[0]):
            rule = "it is the same on all ranks: every sample counts the same"
            yield Wrong(rule=rule, rank=rank, expected=expected, got=value)
    for rank, value in enumerate(values):
        if not close(value * sum(counts) / world_size, 1.0):
            rule = (
                "the mean over ranks of weight x loss sum is the mean over all samples"
            )
            yield Wrong(rule=rule, rank=rank, expected=expected, got=value)


_LOSS_WEIGHT = Exercise(
    name="loss_weight",
    signature="loss_weight(num_samples)",
    task=(
        "Each rank has num_samples samples of the global batch, some more and some "
        "fewer, some perhaps none. It will multiply the *sum* of its samples' losses "
        "by what you return, and call backward; DDP takes the mean of the gradients "
        "over ranks. Return the number that makes this the gradient of the mean loss "
        "over the global batch. The process group is open."
    ),
    cases=_COUNTS,
    call=_call_weight,
    judge=_judge_weight,
    given=lambda case, rank, world_size: f"{case[rank]} of {sum(case[:world_size])}",
    tried="Equal and unequal shares, and one that is empty, on 1, 2 and 3 ranks.",
)

# ---------------------------------------------------------------- splits


def _call_splits(fn: Answer, case: int, rank: int, world_size: int) -> Any:
    return fn(case, world_size)


def _judge_splits(case: int, seen: list[Any]) -> Iterator[Wrong]:
    world_size, got = len(seen), seen[0]
    share, rest = divmod(case, world_size)
    sizes = [n for n in range(share, 0, -1) if share % n == 0 and not rest]
    expected = [(micro, share // micro) for micro in sizes]

    def wrong(rule: str, found: Any = got, wanted: Any = expected) -> Wrong:
        return Wrong(rule=rule, rank=None, expected=wanted, got=found)

    if not isinstance(got, list | tuple) or not all(_is_pair(pair) for pair in got):
        yield wrong("it is a list of pairs of whole numbers: micro-batch size, steps")
        return
    pairs = [tuple(pair) for pair in got]
    for micro, steps in pairs:
        if world_size * micro * steps != case:
            rule = "ranks x micro-batch size x steps is the global batch size"
            product = f"{world_size} x {micro} x {steps}"
            yield wrong(rule, Words(product), Words(f"a product of {case}"))
        elif micro < 1 or steps < 1:
            yield wrong("both numbers are 1 or more", (micro, steps))
    if set(pairs) != set(expected) or len(pairs) != len(expected):
        yield wrong("every way is in the list, once", pairs)
    if not same(pairs, expected):
        yield wrong("the largest micro-batch comes first", pairs)


def _is_pair(pair: Any) -> bool:
    is_pair = isinstance(pair, list | tuple) and len(pair) == 2
    return is_pair and all(type(number) is int for number in pair)


_SPLITS = Exercise(
    name="splits",
    signature="splits(global_batch_size, world_size)",
    task=(
        "List all ways to train with this global batch on world_size ranks, as pairs "
        "(micro_batch_size, num_steps): the images that a rank holds at once, and over "
        "how many such micro-batches it accumulates gradients. The largest micro-batch "
        "comes first. If the batch does not divide by the ranks, there is no way."
    ),
    cases=(12, 64, 7, 30, 1),
    call=_call_splits,
    judge=_judge_splits,
    given=lambda case, rank, world_size: f"{case}, {world_size}",
    tried="Global batches of 1, 7, 12, 30 and 64 on 1, 2 and 3 ranks.",
    where="here",
)

# ---------------------------------------------------------------- warm_up

_LR, _LR_BATCH_SIZE = 0.1, 256


def _call_warm_up(fn: Answer, case: Any, rank: int, world_size: int) -> Any:
    batch, num_warm = case
    steps = (*range(num_warm + 1), num_warm + 100)
    return [fn(s, _LR, _LR_BATCH_SIZE, batch, num_warm) for s in steps]


def _judge_warm_up(case: Any, seen: list[Any]) -> Iterator[Wrong]:
    (rates,) = seen
    batch, num_warm = case
    full = _LR * batch / _LR_BATCH_SIZE

    def wrong(rule: str, expected: float, got: Any) -> Wrong:
        return Wrong(rule=rule, rank=None, expected=expected, got=got)

    for got in rates:
        if isinstance(got, bool) or not isinstance(got, int | float):
            yield wrong("it is a number", full, got)
            return
    if not close(rates[-1], full):
        rule = "in the end the rate is lr x global_batch_size / lr_batch_size"
        yield wrong(rule, full, rates[-1])
    if not close(rates[num_warm], full):
        rule = "the full rate is reached after num_warmup_steps steps, and is kept"
        yield wrong(rule, full, rates[num_warm])
    if not close(rates[0], _LR if num_warm else full):
        rule = "with warm-up, the first step takes lr itself, without it the full rate"
        yield wrong(rule, _LR if num_warm else full, rates[0])
    for step in range(1, num_warm):
        expected = _LR + (full - _LR) * step / num_warm
        if not close(rates[step], expected):
            rule = "in between the rate rises by equal amounts"
            yield wrong(rule, expected, rates[step])


_WARM_UP = Exercise(
    name="warm_up",
    signature="warm_up(step, lr, lr_batch_size, global_batch_size, num_warmup_steps)",
    task=(
        "Return the learning rate of a step, counted from 0. `lr` was chosen for "
        "lr_batch_size images; for global_batch_size it is scaled by the linear rule. "
        "Step 0 takes lr itself; from there the rate rises in a straight line and has "
        "its full value at step num_warmup_steps and ever after. No warm-up (0 steps): "
        "the full value at once."
    ),
    cases=((1024, 10), (256, 4), (8192, 1), (512, 0)),
    call=_call_warm_up,
    judge=_judge_warm_up,
    given=lambda case, rank, world_size: (
        f"{_LR}, {_LR_BATCH_SIZE}, {case[0]}, {case[1]}; each step, and 100 later"
    ),
    tried="Every step of warm-ups of 0, 1, 4 and 10 steps, and one long after.",
    where="once",
)

CURVE_EXERCISES = (_LOSS_WEIGHT, _SPLITS, _WARM_UP)
