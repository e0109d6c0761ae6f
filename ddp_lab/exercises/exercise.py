"""What an exercise is: a task in words, how to call the answer, and how to judge it.

An exercise is tried on *cases*, each on 1, 2 and 3 ranks. On every rank ``call`` makes
the input of that rank, calls the learner's function and returns what was *seen*: the
result, and whatever else matters, such as the argument afterwards. What all ranks have
seen comes to ``judge``, which yields the first property that fails.

    rank 0   call(fn, case, 0, 2)  ── seen ──┐
                                             ├──▶  judge(case, [seen, seen])
    rank 1   call(fn, case, 1, 2)  ── seen ──┘
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

__all__ = [
    "Exercise",
    "Something",
    "Words",
    "Wrong",
    "call_by_name",
    "close",
    "given_by_name",
    "plain",
    "same",
    "tell",
]


@dataclass(frozen=True, kw_only=True)
class Wrong:
    """One property that does not hold."""

    rule: str
    """The property, as a sentence."""
    rank: int | None
    """On which rank; None if no rank is to blame alone, or there are no ranks."""
    expected: Any
    got: Any


@dataclass(frozen=True, kw_only=True)
class Exercise:
    """A task whose answer is one function."""

    name: str
    """Also the name of the function to write."""
    signature: str
    """``mean_over_ranks(tensor)``."""
    task: str
    """What the function is to do, on every rank and in the odd cases."""
    cases: tuple[Any, ...]
    call: Callable[[Callable[..., Any], Any, int, int], Any]
    """``call(fn, case, rank, world_size)`` on a rank; returns what was seen."""
    judge: Callable[[Any, list[Any]], Iterator[Wrong]]
    """``judge(case, seen)`` with one entry of ``seen`` a rank."""
    given: Callable[[Any, int, int], str]
    """``given(case, rank, world_size)``: the input in words."""
    tried: str
    """For a right answer: what was tried."""
    where: str = "group"
    """``group``: on ranks with an open process group; ``ranks``: on ranks without one;
    ``here``: for each rank and world size in the notebook's own process; ``once``:
    likewise, but ranks play no role."""
    allowed: tuple[str, ...] = ()
    """If given, the only functions of torch.distributed that may communicate."""


@dataclass(frozen=True)
class Something:
    """Stands for a result of a type that no exercise asks for."""

    kind: str


class Words(str):
    """A text that `tell` tells as it is, without quotes."""

    def __repr__(self) -> str:
        return str(self)


def plain(value: Any) -> Any:
    """A copy that can travel and be compared: numbers, texts, tensors, containers."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, range):
        return list(value)
    if isinstance(value, list | tuple):
        items = [plain(item) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if hasattr(value, "tolist"):  # numpy
        return plain(value.tolist())
    return Something(type(value).__name__)


def same(got: Any, expected: Any) -> bool:
    """Equal to the last bit, in type, shape and dtype too."""
    if isinstance(expected, Tensor):
        return (
            isinstance(got, Tensor)
            and got.dtype == expected.dtype
            and got.shape == expected.shape
            and bool((got == expected).all())
        )
    if isinstance(expected, list | tuple):
        return (
            isinstance(got, list | tuple)
            and len(got) == len(expected)
            and all(same(g, e) for g, e in zip(got, expected, strict=True))
        )
    return type(got) is type(expected) and bool(got == expected)


def close(got: Any, expected: Any, tolerance: float = 1e-5) -> bool:
    """Equal but for rounding; a tensor of one element passes for a number."""
    if isinstance(expected, Tensor):
        return (
            isinstance(got, Tensor)
            and got.shape == expected.shape
            and bool(((got - expected).abs() <= tolerance).all())
        )
    if isinstance(got, Tensor) and got.numel() == 1:
        got = got.item()
    if isinstance(got, bool) or not isinstance(got, int | float):
        return False
    return bool(abs(got - expected) <= tolerance * max(1.0, abs(expected)))


def call_by_name(fn: Callable[..., Any], case: Any, rank: int, world_size: int) -> Any:
    """For ``Exercise.call``: a case that is a dict of arguments."""
    return fn(**case)


def given_by_name(case: Any, rank: int, world_size: int) -> str:
    """For ``Exercise.given``: the same arguments, as the learner would write them."""
    return ", ".join(f"{name}={value!r}" for name, value in case.items())


def tell(value: Any) -> str:
    """A value in words, alike on every machine."""
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        kind = "" if dtype in ("float32", "int64") else f", {dtype}"
        return f"tensor({_numbers(value.tolist())}{kind})"
    if isinstance(value, Something):
        return f"an object of type {value.kind}"
    if isinstance(value, float):
        return _numbers(value)
    if isinstance(value, list):
        return "[" + ", ".join(map(tell, value)) + "]"
    if isinstance(value, tuple):
        comma = "," if len(value) == 1 else ""
        return "(" + ", ".join(map(tell, value)) + comma + ")"
    return repr(value)


def _numbers(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(map(_numbers, value)) + "]"
    if isinstance(value, float) and not value.is_integer():
        return f"{value:.7g}"
    return str(value)
