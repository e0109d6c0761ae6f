"""The exercises of notebook 01: what a rank holds, and how large its batches are."""

from collections.abc import Iterator
from typing import Any

from ddp_lab.exercises.exercise import (
    Exercise,
    Wrong,
    call_by_name,
    close,
    given_by_name,
    same,
)

__all__ = ["MEMORY_EXERCISES"]


# ---------------------------------------------------------------- fixed_bytes

_BYTES = 4  # of a number in float32


def _judge_fixed_bytes(case: Any, seen: list[Any]) -> Iterator[Wrong]:
    (got,) = seen
    one_copy = _BYTES * case["num_parameters"]
    alone = one_copy * (2 + case["num_remembered"])
    if case["world_size"] == 1:
        if not close(got, alone):
            rule = "it counts parameters, gradients and what the optimiser remembers"
            yield Wrong(rule=rule, rank=None, expected=alone, got=got)
        return
    expected = alone + one_copy
    if not close(got, expected):
        rule = "every rank holds all of it, and DDP's buckets: one more copy"
        yield Wrong(rule=rule, rank=None, expected=expected, got=got)


def _fixed(parameters: int, remembered: int, ranks: int) -> dict[str, int]:
    return {
        "num_parameters": parameters,
        "num_remembered": remembered,
        "world_size": ranks,
    }


_FIXED_BYTES = Exercise(
    name="fixed_bytes",
    signature="fixed_bytes(num_parameters, num_remembered, world_size)",
    task=(
        "Return the bytes that each rank holds whatever the batch is: the parameters, "
        "their gradients, and num_remembered numbers of the optimiser for each "
        "parameter. All numbers have 4 bytes. With world_size above 1 the model is "
        "wrapped in DDP, whose buckets are as large as all gradients together."
    ),
    cases=(
        _fixed(1000, 1, 1),
        _fixed(1000, 0, 1),  # plain SGD
        _fixed(1000, 2, 1),  # AdamW
        _fixed(1000, 1, 2),
        _fixed(7_000_000_000, 2, 8),
    ),
    call=call_by_name,
    judge=_judge_fixed_bytes,
    given=given_by_name,
    tried=(
        "Plain SGD, SGD with momentum and AdamW on one rank, and two and eight ranks "
        "with DDP."
    ),
    where="once",
)

# ---------------------------------------------------------------- global_batch_size


def _judge_global_batch(case: Any, seen: list[Any]) -> Iterator[Wrong]:
    (got,) = seen
    expected = 1
    for factor in case.values():
        expected *= factor
    if not same(got, expected):
        rule = "it counts every sample between two steps of the optimiser"
        yield Wrong(rule=rule, rank=None, expected=expected, got=got)


_GLOBAL_BATCH_SIZE = Exercise(
    name="global_batch_size",
    signature="global_batch_size(micro_batch_size, accumulation_steps, world_size)",
    task=(
        "Return the number of samples that one step of the optimiser sees, when each "
        "of world_size ranks holds micro_batch_size samples at once and accumulates "
        "gradients over accumulation_steps such micro-batches before it steps."
    ),
    cases=(
        {"micro_batch_size": 32, "accumulation_steps": 1, "world_size": 1},
        {"micro_batch_size": 32, "accumulation_steps": 4, "world_size": 1},
        {"micro_batch_size": 16, "accumulation_steps": 1, "world_size": 8},
        {"micro_batch_size": 8, "accumulation_steps": 5, "world_size": 3},
    ),
    call=call_by_name,
    judge=_judge_global_batch,
    given=given_by_name,
    tried="One GPU, accumulation alone, several ranks alone, and both together.",
    where="once",
)

# ---------------------------------------------------------------- micro_batches


def _judge_micro_batches(case: Any, seen: list[Any]) -> Iterator[Wrong]:
    (got,) = seen
    share = case["global_batch_size"] // case["world_size"]
    fits = case["free_bytes"] // case["bytes_per_sample"]
    steps = next(
        n for n in range(1, share + 1) if share % n == 0 and share // n <= fits
    )
    expected = (share // steps, steps)
    is_pair = isinstance(got, tuple | list) and len(got) == 2
    if not is_pair or not all(type(x) is int and x > 0 for x in got):
        rule = "it is a pair of whole numbers: micro-batch size, accumulation steps"
        yield Wrong(rule=rule, rank=None, expected=expected, got=got)
        return
    micro, got_steps = got
    if micro * got_steps * case["world_size"] != case["global_batch_size"]:
        rule = "micro-batch size x accumulation steps x ranks is the global batch size"
        yield Wrong(rule=rule, rank=None, expected=expected, got=got)
    if micro > fits:
        rule = f"a micro-batch fits: {micro} samples need more than the free bytes"
        yield Wrong(rule=rule, rank=None, expected=expected, got=got)
    if not same(got, expected):
        rule = "there are no more accumulation steps than needed: each costs time"
        yield Wrong(rule=rule, rank=None, expected=expected, got=got)


def _case(size: int, ranks: int, sample: int, free: int) -> dict[str, int]:
    return {
        "global_batch_size": size,
        "world_size": ranks,
        "bytes_per_sample": sample,
        "free_bytes": free,
    }


_MICRO_BATCHES = Exercise(
    name="micro_batches",
    signature=(
        "micro_batches(global_batch_size, world_size, bytes_per_sample, free_bytes)"
    ),
    task=(
        "Every rank has free_bytes of memory for activations, and one sample takes "
        "bytes_per_sample. Return (micro_batch_size, accumulation_steps), such that "
        "the optimiser sees exactly global_batch_size samples and a micro-batch fits, "
        "with as few accumulation steps as possible. The global batch size divides by "
        "the world size, and one sample always fits."
    ),
    cases=(
        _case(64, 2, 10, 1000),  # fits at once
        _case(64, 2, 10, 320),  # ... to the last byte
        _case(64, 1, 10, 320),  # two steps
        _case(64, 2, 10, 319),  # one byte too few
        _case(96, 2, 10, 70),  # 48 / 7 rounds up to 7 steps: only 8 x 6 comes out even
        _case(21, 3, 10, 60),  # a prime share: one by one
    ),
    call=call_by_name,
    judge=_judge_micro_batches,
    given=given_by_name,
    tried=(
        "Batches that fit at once, that fit to the last byte, that need several steps, "
        "and shares that do not divide by every number."
    ),
    where="once",
)

MEMORY_EXERCISES = (_FIXED_BYTES, _GLOBAL_BATCH_SIZE, _MICRO_BATCHES)
