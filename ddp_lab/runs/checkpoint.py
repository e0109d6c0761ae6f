"""Checkpoints: written whole or not at all, read without running anybody's code.

A checkpoint is one file of plain tensors and numbers:

    {"format": 1, "model": ..., "optimizer": ..., "schedule": ..., "progress": ...,
     "config": ..., "data": ...}

``model`` has no ``module.`` prefix, so plain torch loads it:
``model.load_state_dict(torch.load(path, weights_only=True)["model"])``.

A run's folder holds the last few by optimiser step, ``checkpoint-00000120.pt``, and
``checkpoint.pt``, which is the newest of them under a fixed name.
"""

import contextlib
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ddp_lab.errors import BadInput
from ddp_lab.runs.record import atomic_file

__all__ = [
    "FORMAT",
    "NewerFormat",
    "load",
    "load_latest",
    "save",
    "saved_steps",
    "set_aside",
    "tidy",
]

FORMAT = 1
_KEYS = {"format", "model", "optimizer", "schedule", "progress", "config", "data"}
_NEWEST = "checkpoint.pt"


def save(folder: Path, state: dict[str, Any], *, keep: int = 2) -> Path:
    """Write a checkpoint so that at any moment the folder holds a whole one.

    The file goes to a temporary name, is flushed to the disk, and then renamed; older
    ones are removed after that. Call it on one rank a disk: several ranks writing one
    path tear it.

    Args:
        folder: of the run.
        state: everything of the format above but ``format`` itself.
        keep: how many to keep, 1 or more, this one included.

    Returns:
        The file.

    Raises:
        BadInput: the disk is full or read-only; the checkpoints before are still there.
    """
    state = {"format": FORMAT, **state}
    assert set(state) == _KEYS, sorted(set(state) ^ _KEYS)
    step = state["progress"]["step"]
    path = folder / f"checkpoint-{step:08d}.pt"
    try:
        with atomic_file(path) as file:
            torch.save(state, file)
        _link(path, folder / _NEWEST)
    except (OSError, RuntimeError) as error:  # torch turns the first into the second
        cause: BaseException = error
        while not isinstance(cause, OSError) and cause.__context__:
            cause = cause.__context__
        reason = getattr(cause, "strerror", None) or str(cause).splitlines()[0]
        older = [s for s in saved_steps(folder) if s < step]
        kept = f"; the one after step {older[0]} is still there" if older else ""
        raise BadInput(
            f"cannot write the checkpoint {path}: {reason}{kept}; make room and go on "
            f"with --resume {folder}"
        ) from error
    tidy(folder, step, keep)
    return path


def tidy(folder: Path, step: int, keep: int) -> None:
    """Remove what a run that is at this optimiser step needs no more.

    That is done after each save, and when a run goes on: it may have been killed
    between the two. What is newer belongs to a future that a resumed run has left.
    """
    steps = saved_steps(folder)
    for other in set(steps) - set([s for s in steps if s <= step][:keep]):
        (folder / f"checkpoint-{other:08d}.pt").unlink(missing_ok=True)
    for left_over in folder.glob("checkpoint*.tmp"):  # of a process that was killed
        left_over.unlink(missing_ok=True)


def set_aside(folder: Path, step: int) -> None:
    """Give the checkpoint of a step another name, by which nobody goes on from it.

    It ends in ``.diverged``, and is there to be looked at. ``checkpoint.pt`` is then
    the one before.
    """
    path = folder / f"checkpoint-{step:08d}.pt"
    if path.exists():
        path.rename(path.with_name(path.name + ".diverged"))
        (folder / _NEWEST).unlink(missing_ok=True)
        if older := saved_steps(folder):
            _link(folder / f"checkpoint-{older[0]:08d}.pt", folder / _NEWEST)


def saved_steps(folder: Path) -> list[int]:
    """List the optimiser steps after which a run was saved, newest first."""
    names = (path.stem.partition("-")[2] for path in folder.glob("checkpoint-*.pt"))
    return sorted((int(name) for name in names if name.isdigit()), reverse=True)


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=3)  # where `load_latest` was called


def load_latest(
    folder: Path, *, warn: Callable[[str], None] = _warn
) -> dict[str, Any] | None:
    """Read the newest checkpoint of a run that can be read, onto the CPU.

    A file that is torn, truncated or not one of ours is skipped with a warning, and the
    one before it is taken.

    Args:
        folder: of the run.
        warn: is told of each file that is skipped (unless said: by a warning).

    Returns:
        What was given to `save`, and ``format``; None if the folder holds no checkpoint
        or does not exist.

    Raises:
        BadInput: there are files, but none can be read, or the newest was written by a
            newer version.
    """
    paths = [folder / f"checkpoint-{step:08d}.pt" for step in saved_steps(folder)]
    newest = folder / _NEWEST
    if newest.is_file() and not any(newest.samefile(path) for path in paths):
        paths.append(newest)  # somebody copied it here, or cleared the others away
    problems = []
    for path in paths:
        try:
            return load(path)
        except NewerFormat:
            raise
        except BadInput as error:
            problems.append(str(error))
            if path is not paths[-1]:
                warn(f"{error}; trying the one before")
    if problems:
        raise BadInput(problems[-1])
    return None


def load(path: Path) -> dict[str, Any]:
    """Read one checkpoint onto the CPU.

    Args:
        path: a file that `save` wrote.

    Raises:
        BadInput: it is missing, damaged, of a newer format, or something else.
    """
    if not path.is_file():
        raise BadInput(
            f"no checkpoint at {path}: name the folder of a run that has one"
        )
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # what a reader of damaged bytes meets is anything
        raise BadInput(
            f"checkpoint {path} is damaged or none of ours: start the run anew, or "
            "resume from another one"
        ) from error
    if not isinstance(state, dict) or not isinstance(state.get("format"), int):
        raise BadInput(f"{path} was not written by ddp_lab: resume from a run of it")
    if state["format"] > FORMAT:
        raise NewerFormat(
            f"checkpoint {path} has format {state['format']}, this version reads up to "
            f"{FORMAT}: update ddp_lab"
        )
    if missing := sorted(_KEYS - set(state)):
        raise BadInput(f"checkpoint {path} lacks {missing}: it was not written whole")
    return state


class NewerFormat(BadInput):
    """Nothing is wrong with this file, so it must not be passed over."""


def _link(path: Path, name: Path) -> None:
    """Let a second name stand for a file; at any moment it stands for a whole one."""
    temporary = name.with_name(name.name + ".tmp")
    with contextlib.suppress(FileNotFoundError):
        temporary.unlink()
    try:
        os.link(path, temporary)
    except OSError:  # a file system without links
        shutil.copyfile(path, temporary)
    temporary.replace(name)
