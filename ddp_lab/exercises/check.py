"""Check the answer to an exercise, on 1, 2 and 3 ranks.

    check("mean_over_ranks")                     # what is to be written?
    check(mean_over_ranks, "mean_over_ranks")    # is it right?

A right answer gets one line that says what was tried. A wrong one fails the cell with
the property that does not hold, the rank, what was expected and what came. A stub that
still raises NotImplementedError gets a line, and the notebook runs on.

Three processes are enough for all three world sizes: the first one alone is a world of
1, the first two are a world of 2. Each world meets, does its cases, and parts again.
"""

import functools
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from ddp_lab.errors import BadInput, CheckFailed, RankFailed, RanksStuck
from ddp_lab.exercises.about_curve import CURVE_EXERCISES
from ddp_lab.exercises.about_data import DATA_EXERCISES
from ddp_lab.exercises.about_failures import FAILURE_EXERCISES
from ddp_lab.exercises.about_hosts import HOST_EXERCISES
from ddp_lab.exercises.about_memory import MEMORY_EXERCISES
from ddp_lab.exercises.about_model import MODEL_EXERCISES
from ddp_lab.exercises.about_ranks import RANK_EXERCISES
from ddp_lab.exercises.exercise import Exercise, Words, Wrong, tell
from ddp_lab.exercises.on_ranks import WORLD_SIZES, Seen, try_here, try_on_ranks
from ddp_lab.ranks.launch import launch

__all__ = ["EXERCISES", "check", "check_many", "describe"]

EXERCISES: dict[str, Exercise] = {
    exercise.name: exercise
    for exercise in (
        *RANK_EXERCISES,
        *MEMORY_EXERCISES,
        *MODEL_EXERCISES,
        *DATA_EXERCISES,
        *CURVE_EXERCISES,
        *FAILURE_EXERCISES,
        *HOST_EXERCISES,
    )
}
"""Every exercise by its name, in the order of the course."""

_PATIENCE_S = 10.0  # the functions take milliseconds: after that, nobody comes
_LIMIT_S = 120.0
_MOST_LINES = 10  # of what the learner prints

Run = Callable[..., list[Any]]


def check(fn: Callable[..., Any] | str, name: str | None = None) -> None:
    """Check a function that is the answer to an exercise, or tell the task.

    Args:
        fn: the function; or the name of an exercise alone, to read its task.
        name: of the exercise.

    Raises:
        CheckFailed: it does not do what the exercise asks for; the message says which
            property fails, on which rank, what was expected and what came.
        BadInput: there is no such exercise.

    **Cost**: about two seconds, to start three ranks; an exercise without ranks takes
    no time, nor does a stub.
    """
    __tracebackhide__ = True
    if isinstance(fn, str):
        return describe(fn)
    exercise = _find(name if name is not None else fn.__name__)
    if not callable(fn):
        raise BadInput(f"check needs the function itself: check({name}, {name!r})")
    verdict = None
    if not _is_stub(fn):
        run = functools.partial(
            launch,
            num_ranks=max(WORLD_SIZES),
            echo=False,
            timeout_s=_LIMIT_S,
            stuck_after_s=2 * _PATIENCE_S,
        )
        (verdict,) = check_many([(exercise.name, fn)], run=run)
    if isinstance(verdict, CheckFailed):
        raise verdict
    print(verdict or f"{exercise.name}: not written yet; {_hint(exercise)}")
    return None


def describe(name: str) -> None:
    """Print the task of an exercise.

    Raises:
        BadInput: there is no such exercise.
    """
    exercise = _find(name)
    print(f"{exercise.signature}\n\n{textwrap.fill(exercise.task, 80)}")


def check_many(
    answers: Sequence[tuple[str, Callable[..., Any]]],
    *,
    run: Run,
    patience_s: float = _PATIENCE_S,
) -> list[str | CheckFailed | None]:
    """Judge several answers with one set of ranks.

    Args:
        answers: pairs of an exercise's name and a function.
        run: runs a function with its arguments on 3 ranks and returns their values,
            like `launch` or ``Workers(3).run``.
        patience_s: seconds after which a rank that waits is told that nobody comes.

    Returns:
        For each answer a line of praise, or what is wrong, or None for a stub.
    """
    sent = [(name, fn) for name, fn in answers if _find(name).where in _ON_RANKS]
    seen: list[list[dict[int, Seen]]] = [[] for _ in sent]
    try:
        if sent:
            trials = [(_find(name), fn) for name, fn in sent]
            by_rank = run(try_on_ranks, trials, patience_s)
            seen = [list(rows) for rows in zip(*by_rank, strict=True)]
    except (RankFailed, RanksStuck) as error:
        if len(sent) > 1:
            raise
        return [_broke_down(_find(sent[0][0]), error)]
    verdicts: list[str | CheckFailed | None] = []
    rest = iter(seen)
    for name, fn in answers:
        exercise = _find(name)
        here = exercise.where not in _ON_RANKS
        ranks = try_here(exercise, fn) if here else next(rest)
        verdicts.append(_verdict(exercise, ranks))
    return verdicts


_ON_RANKS = ("group", "ranks")


def _find(name: str) -> Exercise:
    if name not in EXERCISES:
        raise BadInput(f"no exercise {name!r}: choose {', '.join(EXERCISES)}")
    return EXERCISES[name]


def _hint(exercise: Exercise) -> str:
    return f"check({exercise.name!r}) tells the task"


def _is_stub(fn: Any) -> bool:
    """Whether the function does nothing but raise NotImplementedError."""
    code = getattr(fn, "__code__", None)
    return code is not None and code.co_names == ("NotImplementedError",)


# ------------------------------------------------------------------ the verdict


def _verdict(
    exercise: Exercise, by_rank: list[dict[int, Seen]]
) -> str | CheckFailed | None:
    for world_size in by_rank[0]:
        ranks = [by_rank[rank][world_size] for rank in range(world_size)]
        if any(seen.is_stub for seen in ranks):
            return None
        found = _judged(exercise, ranks) or _failed(exercise, ranks)
        if found:
            case, wrong = found
            return _complain(exercise, case, wrong, ranks)
    return f"{exercise.name}: right. {exercise.tried}"


def _failed(exercise: Exercise, ranks: list[Seen]) -> tuple[int, Wrong] | None:
    """The rank whose function did not come to its end, if there is one."""
    causes = [seen for seen in ranks if seen.error and not seen.is_consequence]
    causes.sort(key=lambda seen: seen.is_stuck)  # it may wait for one that raised
    causes += [seen for seen in ranks if seen.is_consequence]
    if not causes:
        return None
    seen, rank = causes[0], ranks.index(causes[0])
    if seen.is_forbidden:
        rule = f"only {' and '.join(exercise.allowed[:2])} communicate"
        return len(seen.values), Wrong(
            rule=rule,
            rank=rank,
            expected=Words("nothing else"),
            got=Words(seen.error),
        )
    got = seen.error
    if seen.is_stuck or seen.is_consequence:
        got = "it waits for a message that never comes, or not in that form"
    return len(seen.values), Wrong(
        rule="it returns on every rank",
        rank=rank,
        expected=Words("no error"),
        got=Words(got),
    )


def _judged(exercise: Exercise, ranks: list[Seen]) -> tuple[int, Wrong] | None:
    num_done = min(len(seen.values) for seen in ranks)
    for k, case in enumerate(exercise.cases[:num_done]):
        wrong = next(exercise.judge(case, [seen.values[k] for seen in ranks]), None)
        if wrong is not None:
            return k, wrong
    return None


def _complain(
    exercise: Exercise, k: int, wrong: Wrong, ranks: list[Seen]
) -> CheckFailed:
    world_size = len(ranks)
    if exercise.where == "once":
        where = ""
    elif wrong.rank is None:
        where = f", on {world_size} rank" + ("s" if world_size > 1 else "")
    else:
        where = f", on rank {wrong.rank} of {world_size}"
    rank = wrong.rank or 0
    given = exercise.given(exercise.cases[k], rank, world_size)
    message = (
        f"{exercise.name} is not right yet{where}.\n"
        f"  property: {wrong.rule}\n"
        f"  given:    {given}\n"
        f"  expected: {tell(wrong.expected)}\n"
        f"  got:      {tell(wrong.got)}"
    )
    report = ranks[rank].report
    if printed := ranks[rank].printed.splitlines()[-_MOST_LINES:]:
        report += f"it printed on rank {rank}:\n"
        report += "".join(f"  {line}\n" for line in printed)
    return CheckFailed(message, report=report)


def _broke_down(exercise: Exercise, error: RankFailed | RanksStuck) -> CheckFailed:
    """The function took its whole process with it, or never came back."""
    never = "ranks that do not come to an end"
    got = f"{error}" if isinstance(error, RankFailed) else never
    return CheckFailed(
        f"{exercise.name} is not right yet.\n"
        "  property: it returns on every rank\n"
        "  expected: an answer on every rank\n"
        f"  got:      {got}",
        report=error.report if isinstance(error, RankFailed) else f"{error}",
    )
