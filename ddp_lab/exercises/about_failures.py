"""The exercises of notebook 09: what survives a failure, and how often to save."""

import contextlib
import functools
import io
import math
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from ddp_lab.exercises.exercise import Exercise, Words, Wrong, same

__all__ = ["FAILURE_EXERCISES"]

Answer = Callable[..., Any]

# ---------------------------------------------------------------- save_atomically

# Each is there on some systems only.
_FLUSHES = [name for name in ("fsync", "fdatasync") if hasattr(os, name)]
_WRITE_THROUGH = [
    getattr(os, name) for name in ("O_SYNC", "O_DSYNC") if hasattr(os, name)
]


class _Spy:
    """Watches a folder while a function saves into it, and can break the saving.

    ``torch.save`` writes half of its bytes, then the spy looks at the folder, as one
    would after a kill at that moment; then it writes the rest, or fails.
    """

    def __init__(self, path: Path, disk_is_full: bool) -> None:
        self.path = path
        self.disk_is_full = disk_is_full
        self.names: list[str] = []  # what could be read at `path`, moment by moment
        self.flushed: dict[int, int] = {}  # inode -> size, when it was last flushed
        self.through: set[int] = set()  # inodes whose writes go to the disk at once
        self.renamed = ""  # "" | "torn" | "unflushed" | "elsewhere" | "whole"
        self._save, self._open = torch.save, os.open
        self._replace, self._rename = os.replace, os.rename
        self._flush = {name: getattr(os, name) for name in _FLUSHES}

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Stand in for what saves, flushes and renames, in the block."""
        with contextlib.ExitStack() as at_the_end:
            put = functools.partial(self._put, at_the_end)
            put(torch, "save", self.save)
            put(os, "open", self.open)
            put(os, "replace", self.replace)
            put(os, "rename", self.rename)
            for name in _FLUSHES:
                put(os, name, functools.partial(self.flush, name))
            put(os, "sync", self.sync)
            yield

    @staticmethod
    def _put(stack: contextlib.ExitStack, owner: Any, name: str, by: Any) -> None:
        stack.enter_context(mock.patch.object(owner, name, by))

    def look(self) -> None:
        self.names.append(_read(self.path))

    def save(self, state: Any, file: Any, *args: Any, **options: Any) -> None:
        whole = _bytes_of(state, self._save)
        if isinstance(file, str | os.PathLike):
            with open(file, "wb") as opened:
                self._write(opened, whole)
        else:
            self._write(file, whole)

    def _write(self, file: Any, whole: bytes) -> None:
        file.write(whole[: len(whole) // 2])
        file.flush()
        self.look()
        if self.disk_is_full:
            raise OSError(28, "No space left on device")
        file.write(whole[len(whole) // 2 :])

    def flush(self, name: str, file: Any) -> None:
        self._flush[name](file)
        number = file if isinstance(file, int) else file.fileno()
        facts = os.fstat(number)
        self.flushed[facts.st_ino] = facts.st_size

    def sync(self) -> None:
        """Of all files; noted only, as it may take long on this machine."""
        for file in self.path.parent.iterdir():
            facts = file.stat()
            self.flushed[facts.st_ino] = facts.st_size

    def open(self, path: Any, flags: int, *args: Any, **options: Any) -> int:
        number = self._open(path, flags, *args, **options)
        if any(flags & flag == flag for flag in _WRITE_THROUGH):
            self.through.add(os.fstat(number).st_ino)
        return number

    def replace(self, source: Any, target: Any, **options: Any) -> None:
        self._note(Path(source), Path(target))
        self._replace(source, target, **options)

    def rename(self, source: Any, target: Any, **options: Any) -> None:
        self._note(Path(source), Path(target))
        self._rename(source, target, **options)

    def _note(self, source: Path, target: Path) -> None:
        if target.name != self.path.name or not source.exists():
            return
        self.look()
        facts = source.stat()
        if source.resolve().parent != self.path.resolve().parent:
            self.renamed = "elsewhere"
        elif _read(source) != "new":
            self.renamed = "torn"
        elif (
            self.flushed.get(facts.st_ino) != facts.st_size
            and facts.st_ino not in self.through
        ):
            self.renamed = "unflushed"
        else:
            self.renamed = "whole"


def _bytes_of(state: Any, save: Callable[..., Any]) -> bytes:
    buffer = io.BytesIO()
    save(state, buffer)
    return buffer.getvalue()


def _state(name: str) -> dict[str, Any]:
    return {"name": name, "weight": torch.arange(1000.0)}


def _read(path: Path) -> str:
    """What a resumed run would find: ``old``, ``new``, ``nothing`` or ``torn``."""
    if not path.exists():
        return "nothing"
    try:
        state = torch.load(path, weights_only=True)
        return str(state["name"])
    except Exception:  # whatever torch makes of half a file
        return "torn"


def _call_save(fn: Answer, case: str, rank: int, world_size: int) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint.pt"
        if case != "first":
            torch.save(_state("old"), path)
        spy = _Spy(path, disk_is_full=case == "full")
        raised = False
        with spy.watching():
            if case == "full":
                with contextlib.suppress(OSError):
                    raised = True
                    fn(_state("new"), path)
                    raised = False
            else:
                fn(_state("new"), path)
        spy.look()
        left = sorted(item.name for item in Path(folder).iterdir())
        return {
            "found": spy.names,
            "renamed": spy.renamed,
            "raised": raised,
            "left": left,
        }


def _judge_save(case: str, seen: list[Any]) -> Iterator[Wrong]:
    (saw,) = seen
    before = "nothing" if case == "first" else "old"
    *during, after = saw["found"]
    for found in during:
        if found not in (before, "new"):
            yield Wrong(
                rule="at every moment the path holds a whole file: the old or the new",
                rank=None,
                expected=Words(f"the {before} one" if before == "old" else before),
                got=Words({"torn": "a torn file"}.get(found, found)),
            )
    if case == "full":
        if after != "old":
            yield Wrong(
                rule="a save that fails leaves the old file as it was",
                rank=None,
                expected=Words("the old one"),
                got=Words({"torn": "a torn file"}.get(after, after)),
            )
        if not saw["raised"]:
            yield Wrong(
                rule="the caller learns that it could not be saved",
                rank=None,
                expected=Words("an OSError"),
                got=Words("no error"),
            )
        return
    if after != "new":
        yield Wrong(
            rule="afterwards the path holds the new state",
            rank=None,
            expected=Words("the new one"),
            got=Words({"old": "the old one", "torn": "a torn file"}.get(after, after)),
        )
    problems = {
        "": ("the new file takes its name in one step, by os.replace", "no os.replace"),
        "elsewhere": (
            "the temporary file is in the same folder: a rename does not work across "
            "disks",
            "a file in another folder",
        ),
        "torn": ("the file is whole before it gets its name", "a torn file"),
        "unflushed": (
            "the file is flushed to the disk (flush, then os.fsync, or a file opened "
            "with O_SYNC) before it gets its name",
            "bytes that a power cut would take",
        ),
    }
    if problem := problems.get(saw["renamed"]):
        rule, got = problem
        expected = Words("a whole, flushed neighbour, renamed")
        yield Wrong(rule=rule, rank=None, expected=expected, got=Words(got))
    if saw["left"] != ["checkpoint.pt"]:
        rule = "nothing else is left in the folder"
        expected_left = ["checkpoint.pt"]
        yield Wrong(rule=rule, rank=None, expected=expected_left, got=saw["left"])


_SITUATIONS = {
    "first": "no file there yet",
    "second": "an older checkpoint at the path",
    "full": "an older checkpoint, and a disk that is full half-way",
}

_SAVE_ATOMICALLY = Exercise(
    name="save_atomically",
    signature="save_atomically(state, path)",
    task=(
        "Write a state to the file `path`, a pathlib.Path, with torch.save, such that "
        "at every moment there is a whole file at that path: the old one or the new "
        "one (or none, before the first). Write to another name in the same folder, "
        "flush it to the disk, and let it take its name in one step. If the disk is "
        "full, the old file stays, and the error goes on to the caller."
    ),
    cases=("first", "second", "full"),
    call=_call_save,
    judge=_judge_save,
    given=lambda case, rank, world_size: _SITUATIONS[case],
    tried=(
        "The first save, a second one over it, and one that fails half-way; the file "
        "was looked at in the middle of each."
    ),
    where="once",
)

# ---------------------------------------------------------------- resume_position

_BATCH = 12  # divides by 1, 2 and 3 ranks


def _call_position(fn: Answer, case: Any, rank: int, world_size: int) -> Any:
    step, num_samples = case
    return fn(step, num_samples, _BATCH, world_size)


def _judge_position(case: Any, seen: list[Any]) -> Iterator[Wrong]:
    step, num_samples = case
    epoch, into = divmod(step, num_samples // _BATCH)
    expected = (epoch, into * _BATCH // len(seen))
    for rank, got in enumerate(seen):
        is_pair = isinstance(got, tuple | list) and len(got) == 2
        if not is_pair or not all(type(x) is int for x in got):
            rule = "it is a pair of whole numbers: epoch, samples to skip"
            yield Wrong(rule=rule, rank=rank, expected=expected, got=got)
            return
        if got[0] != epoch:
            rule = (
                "the epoch is the number of whole epochs done; the last, smaller batch "
                "is dropped"
            )
            yield Wrong(rule=rule, rank=rank, expected=expected, got=got)
        if got[1] * len(seen) != into * _BATCH:
            rule = (
                "the ranks together skip what this epoch has trained on: "
                f"{into * _BATCH} samples"
            )
            yield Wrong(rule=rule, rank=rank, expected=expected, got=got)
        if not same(tuple(got), expected):
            rule = "it is a pair of whole numbers: epoch, samples to skip"
            yield Wrong(rule=rule, rank=rank, expected=expected, got=got)


_RESUME_POSITION = Exercise(
    name="resume_position",
    signature="resume_position(step, num_samples, global_batch_size, world_size)",
    task=(
        "A run was saved after `step` optimiser steps and goes on with `world_size` "
        "ranks, perhaps not as many as before. Return (epoch, skip): the number of "
        "the epoch under way, from 0, and how many samples each rank skips at the "
        "beginning of its shard of that epoch. Each step takes global_batch_size "
        "samples, which divide by the ranks; what is left at an epoch's end is "
        "dropped. After an epoch's last step, the next one is under way, at its start."
    ),
    cases=((0, 96), (5, 96), (8, 96), (19, 96), (9, 50), (8, 50)),
    call=_call_position,
    judge=_judge_position,
    given=lambda case, rank, world_size: (
        f"{case[0]}, {case[1]}, {_BATCH}, {world_size}"
    ),
    tried=(
        "0 to 19 steps, at the start, the end and in the middle of epochs of 96 and 50 "
        "samples, for 1, 2 and 3 ranks."
    ),
    where="here",
)

# ---------------------------------------------------------------- steps_between_saves

_HOUR = 3600.0
_DAY = 24 * _HOUR


def _call_steps(fn: Answer, case: Any, rank: int, world_size: int) -> Any:
    return fn(*case)


def _judge_steps(case: Any, seen: list[Any]) -> Iterator[Wrong]:
    (got,) = seen
    save_s, step_s, machine_mtbf_s, num_machines = case
    best = math.sqrt(2 * save_s * machine_mtbf_s / num_machines) / step_s
    expected = max(1, round(best))
    if type(got) is not int:
        rule = "it is a whole number of steps"
        yield Wrong(rule=rule, rank=None, expected=expected, got=got)
    elif got < 1:
        rule = "it is 1 or more: a run cannot save more often than it steps"
        yield Wrong(rule=rule, rank=None, expected=expected, got=got)
    elif abs(got - best) > 1 and got != expected:
        rule = (
            "it is sqrt(2 x save time x mean time between failures of the whole run), "
            "in steps"
        )
        yield Wrong(rule=rule, rank=None, expected=expected, got=got)


_STEPS_BETWEEN_SAVES = Exercise(
    name="steps_between_saves",
    signature="steps_between_saves(save_s, step_s, machine_mtbf_s, num_machines)",
    task=(
        "A save takes save_s seconds, an optimiser step step_s. One machine fails "
        "every machine_mtbf_s seconds on average, and the run fails as soon as one of "
        "its num_machines machines does, so that much more often. Return how many "
        "steps to make between two saves, a whole number, 1 or more, so that least "
        "time is lost (Young's rule)."
    ),
    cases=(
        (60.0, 2.0, 30 * _DAY, 1),
        (60.0, 2.0, 30 * _DAY, 100),
        (0.5, 0.1, 10 * _DAY, 8),
        (0.5, 30.0, 2 * _HOUR, 64),  # less than half a step
    ),
    call=_call_steps,
    judge=_judge_steps,
    given=lambda case, rank, world_size: ", ".join(f"{x:.9g}" for x in case),
    tried="1 to 100 machines, long and short saves, and steps longer than the answer.",
    where="once",
)

FAILURE_EXERCISES = (_SAVE_ATOMICALLY, _RESUME_POSITION, _STEPS_BETWEEN_SAVES)
