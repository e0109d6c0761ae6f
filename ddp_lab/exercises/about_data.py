"""The exercises of notebooks 04 and 05: shards, and numbers of the whole run."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DistributedSampler

from ddp_lab.exercises.exercise import Exercise, Words, Wrong, close, same, tell

__all__ = ["DATA_EXERCISES"]

Answer = Callable[..., Any]

# ------------------------------------------------------------------ notebook 04


def _call_shard(fn: Answer, case: int, rank: int, world_size: int) -> Any:
    return [*fn(case, rank, world_size)]


def _judge_shard(case: int, seen: list[Any]) -> Iterator[Wrong]:
    for rank, got in enumerate(seen):
        sampler: DistributedSampler[Any] = DistributedSampler(
            range(case),  # type: ignore[arg-type]
            num_replicas=len(seen),
            rank=rank,
            shuffle=False,
        )
        expected = list(sampler)
        if len(got) != len(expected):
            rule = "all ranks get equally many: the first samples fill up the end"
            yield Wrong(rule=rule, rank=rank, expected=expected, got=got)
        if not same(got, expected):
            rule = "it is what DistributedSampler gives: every W-th sample"
            yield Wrong(rule=rule, rank=rank, expected=expected, got=got)


_SHARD_INDICES = Exercise(
    name="shard_indices",
    signature="shard_indices(num_samples, rank, world_size)",
    task=(
        "Return the list of sample numbers that DistributedSampler gives to a rank "
        "without shuffling: rank, rank + world_size, and so on. All ranks get equally "
        "many; if they do not divide, the samples start again from 0, as often as "
        "needed."
    ),
    cases=(12, 8, 7, 101, 1),
    call=_call_shard,
    judge=_judge_shard,
    given=lambda case, rank, world_size: f"{case}, {rank}, {world_size}",
    tried=(
        "12, 8, 7, 101 and 1 samples on 1, 2 and 3 ranks, as DistributedSampler deals "
        "them."
    ),
    where="here",
)

_NUM_SHUFFLED = 24
_EPOCHS = (0, 1, 2)


def _call_shuffled(fn: Answer, case: Any, rank: int, world_size: int) -> Any:
    shards: list[list[Any]] = []
    for epoch in (*_EPOCHS, *_EPOCHS):
        random.seed(len(shards) + rank)  # ranks have drawn other numbers before
        torch.manual_seed(len(shards) + rank)
        before = torch.get_rng_state()
        shards.append([*fn(_NUM_SHUFFLED, rank, world_size, epoch)])
        kept = bool(torch.equal(before, torch.get_rng_state()))
        torch.set_rng_state(before)
        if not kept:
            return {"shards": shards, "alone": [], "kept": False}
    alone = [[*fn(_NUM_SHUFFLED, 0, 1, epoch)] for epoch in _EPOCHS]
    return {"shards": shards, "alone": alone, "kept": True}


def _judge_shuffled(case: Any, seen: list[Any]) -> Iterator[Wrong]:
    everything = list(range(_NUM_SHUFFLED))
    for rank, saw in enumerate(seen):
        if not saw["kept"]:
            rule = "torch's global random state stays as it was (draw from a generator)"
            yield Wrong(
                rule=rule, rank=rank, expected=Words("unchanged"), got=Words("changed")
            )
            return
    for epoch in _EPOCHS:
        for rank, saw in enumerate(seen):
            first, again = saw["shards"][epoch], saw["shards"][epoch + len(_EPOCHS)]
            if first != again:
                rule = f"epoch {epoch} asked for again has the same order"
                yield Wrong(rule=rule, rank=rank, expected=first, got=again)
        dealt = [index for saw in seen for index in saw["shards"][epoch]]
        if sorted(map(str, dealt)) != sorted(map(str, everything)):
            rule = f"in epoch {epoch} each of {_NUM_SHUFFLED} samples is on one rank"
            missing = [index for index in everything if index not in dealt]
            got = Words(f"{len(dealt)} dealt out, missing: {tell(missing)}")
            yield Wrong(rule=rule, rank=None, expected=Words("each once"), got=got)
    for rank, saw in enumerate(seen):
        shards = saw["shards"]
        if len(shards[0]) * len(seen) != _NUM_SHUFFLED:
            rule = "all ranks get equally many"
            each = _NUM_SHUFFLED // len(seen)
            yield Wrong(rule=rule, rank=rank, expected=each, got=len(shards[0]))
        if shards[0] == sorted(shards[0]):
            rule = "epoch 0 is shuffled too"
            yield Wrong(rule=rule, rank=rank, expected=Words("mixed"), got=shards[0])
        for epoch in (1, 2):
            if shards[epoch] == shards[epoch - 1]:
                rule = f"epoch {epoch} has another order than epoch {epoch - 1}"
                yield Wrong(
                    rule=rule, rank=rank, expected=Words("another"), got=shards[epoch]
                )
            if len(seen) > 1 and set(shards[epoch]) == set(shards[epoch - 1]):
                rule = (
                    "a rank gets other samples in the next epoch, not just a new order"
                )
                own = sorted(shards[epoch])
                other = Words("other samples")
                yield Wrong(rule=rule, rank=rank, expected=other, got=own)
    yield from _judge_global_batches(seen)


def _judge_global_batches(seen: list[Any]) -> Iterator[Wrong]:
    """Place by place, the ranks together see what one rank alone would see."""
    world_size = len(seen)
    for epoch in _EPOCHS:
        order = seen[0]["alone"][epoch]
        for place in range(_NUM_SHUFFLED // world_size):
            expected = sorted(order[place * world_size : (place + 1) * world_size])
            got = sorted(saw["shards"][epoch][place] for saw in seen)
            if got != expected:
                rule = (
                    f"the ranks' samples number {place} of epoch {epoch} are together "
                    "what one rank alone would see next: a global batch does not "
                    "depend on the number of ranks"
                )
                yield Wrong(rule=rule, rank=None, expected=expected, got=got)
                return


_SHUFFLED_SHARD = Exercise(
    name="shuffled_shard",
    signature="shuffled_shard(num_samples, rank, world_size, epoch)",
    task=(
        "Return the list of sample numbers that a rank sees in an epoch. The samples "
        "are shuffled alike on all ranks, anew in each epoch, and then dealt out, so "
        "that each one is on exactly one rank. The ranks' first samples are together "
        "the ones that a single rank would see first, then their second samples the "
        "next ones, and so on: so the k-th global batch is the same on any number of "
        "ranks. The order of an epoch can be had again. Draw from a torch.Generator of "
        "your own: the global random state is needed for dropout. num_samples divides "
        "by world_size."
    ),
    cases=(None,),
    call=_call_shuffled,
    judge=_judge_shuffled,
    given=lambda case, rank, world_size: (
        f"{_NUM_SHUFFLED} samples, {world_size} rank(s), epochs 0, 1 and 2"
    ),
    tried=(
        "Three epochs, each twice, on 1, 2 and 3 ranks: each sample once, another "
        "order in each epoch, the same one when asked for again, and the same global "
        "batches on any number of ranks."
    ),
    where="here",
)


def _evaluated(case: int, rank: int, world_size: int) -> tuple[Any, Any]:
    """Predictions and labels of a rank's share of `case` samples, uneven."""
    labels = torch.arange(case) % 10
    wrong = torch.arange(case) % 3 == 1
    predictions = torch.where(wrong, labels + 1, labels)
    return predictions[rank::world_size], labels[rank::world_size]


def _call_accuracy(fn: Answer, case: int, rank: int, world_size: int) -> Any:
    return fn(*_evaluated(case, rank, world_size))


def _judge_accuracy(case: int, seen: list[Any]) -> Iterator[Wrong]:
    predictions, labels = _evaluated(case, 0, 1)
    expected = (predictions == labels).sum().item() / case
    yield from _same_number(
        seen, expected, f"it is the share of all {case} samples, each counted once"
    )


def _same_number(seen: list[Any], expected: float, rule: str) -> Iterator[Wrong]:
    for rank, got in enumerate(seen):
        if not close(got, expected):
            yield Wrong(rule=rule, rank=rank, expected=expected, got=got)


def _given_evaluated(case: int, rank: int, world_size: int) -> str:
    predictions, labels = _evaluated(case, rank, world_size)
    return f"{predictions.tolist()}, {labels.tolist()}"


_EXACT_ACCURACY = Exercise(
    name="exact_accuracy",
    signature="exact_accuracy(predictions, labels)",
    task=(
        "Every rank calls it with the predictions and the labels of its own share of "
        "the test samples, two tensors of whole numbers. Shares differ in length, and "
        "one may be empty. Return the accuracy (0 to 1) over the samples of all ranks "
        "together, the same number on every rank."
    ),
    cases=(12, 7, 2),
    call=_call_accuracy,
    judge=_judge_accuracy,
    given=_given_evaluated,
    tried="12, 7 and 2 samples on 1, 2 and 3 ranks: even, uneven and empty shares.",
)

# ------------------------------------------------------------------ notebook 05


def _tally(case: str, rank: int, world_size: int) -> tuple[float, int]:
    """Sum of the losses and number of samples of a rank."""
    if case == "uneven":
        return 2.0 * (rank + 1) ** 2, 4 + 4 * rank
    if rank == world_size - 1 > 0:
        return 0.0, 0
    return 3.0, 4


def _call_loss(fn: Answer, case: str, rank: int, world_size: int) -> Any:
    return fn(*_tally(case, rank, world_size))


def _judge_loss(case: str, seen: list[Any]) -> Iterator[Wrong]:
    tallies = [_tally(case, rank, len(seen)) for rank in range(len(seen))]
    expected = sum(s for s, _ in tallies) / sum(n for _, n in tallies)
    yield from _same_number(
        seen, expected, "it is the mean over the samples of all ranks"
    )


_GLOBAL_LOSS = Exercise(
    name="global_loss",
    signature="global_loss(loss_sum, num_samples)",
    task=(
        "Every rank calls it with two numbers: the losses of its samples, summed, and "
        "how many samples these were. Return the mean loss over the samples of all "
        "ranks, the same number on every rank. Ranks may have different numbers of "
        "samples, and one may have none."
    ),
    cases=("uneven", "one has none"),
    call=_call_loss,
    judge=_judge_loss,
    given=lambda case, rank, world_size: str(_tally(case, rank, world_size))[1:-1],
    tried="On 1, 2 and 3 ranks, with uneven numbers of samples, and with none on one.",
)


def _wish(case: str, rank: int, world_size: int) -> bool:
    last = world_size - 1
    return {"nobody": False, "first": rank == 0, "last": rank == last}.get(case, True)


def _call_stop(fn: Answer, case: str, rank: int, world_size: int) -> Any:
    return fn(_wish(case, rank, world_size))


def _judge_stop(case: str, seen: list[Any]) -> Iterator[Wrong]:
    expected = case != "nobody"
    rule = (
        "all ranks stop as soon as one wants to"
        if expected
        else "nobody stops if nobody wants to"
    )
    for rank, got in enumerate(seen):
        is_flag = isinstance(got, bool) or (
            isinstance(got, torch.Tensor)
            and got.numel() == 1
            and got.dtype == torch.bool
        )
        if not is_flag:
            kind = "the answer is a bool"
            yield Wrong(rule=kind, rank=rank, expected=expected, got=got)
        elif bool(got) is not expected:
            yield Wrong(rule=rule, rank=rank, expected=expected, got=got)


_SHOULD_STOP = Exercise(
    name="should_stop",
    signature="should_stop(wants_to_stop)",
    task=(
        "Every rank calls it with a bool: whether this rank wants to stop, because its "
        "loss is NaN or its time is over. Return True on every rank if one or more "
        "want to, False on every rank otherwise, so that nobody waits for a rank that "
        "has left the loop."
    ),
    cases=("nobody", "first", "last", "everybody"),
    call=_call_stop,
    judge=_judge_stop,
    given=lambda case, rank, world_size: str(_wish(case, rank, world_size)),
    tried="On 1, 2 and 3 ranks, with nobody, the first, the last, and everybody.",
)

DATA_EXERCISES = (
    _SHARD_INDICES,
    _SHUFFLED_SHARD,
    _EXACT_ACCURACY,
    _GLOBAL_LOSS,
    _SHOULD_STOP,
)
