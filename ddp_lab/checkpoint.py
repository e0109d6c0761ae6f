"""Checkpoints: written whole or not at all, read without running anybody's code.

A checkpoint is one file of plain tensors and numbers:

    {"format": 1, "model": ..., "optimizer": ..., "schedule": ..., "progress": ...,
     "config": ...}

``model`` has no ``module.`` prefix, so plain torch loads it:
``model.load_state_dict(torch.load(path, weights_only=True)["model"])``.
"""

import pickle
from pathlib import Path
from typing import Any

import torch

from ddp_lab.errors import BadInput
from ddp_lab.record import atomic_file

__all__ = ["FORMAT", "load", "save"]

FORMAT = 1
_KEYS = {"format", "model", "optimizer", "schedule", "progress", "config"}


def save(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint so that the file is always whole: the old one or the new one.

    Call it on rank 0 only: several ranks writing one path tear it.

    Args:
        path: file to write; a neighbour with ``.tmp`` appended is used on the way.
        state: everything of the format above but ``format`` itself.

    Raises:
        OSError: the disk is full or read-only; the old file is still there.
    """
    state = {"format": FORMAT, **state}
    assert set(state) == _KEYS, sorted(set(state) ^ _KEYS)
    with atomic_file(path) as file:
        torch.save(state, file)


def load(path: Path) -> dict[str, Any]:
    """Read a checkpoint onto the CPU.

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
    except (
        OSError,
        RuntimeError,
        EOFError,
        ValueError,
        pickle.UnpicklingError,
    ) as error:
        raise BadInput(
            f"checkpoint {path} is damaged or none of ours: start the run anew, or "
            "resume from another one"
        ) from error
    if not isinstance(state, dict) or not isinstance(state.get("format"), int):
        raise BadInput(f"{path} was not written by ddp_lab: resume from a run of it")
    if state["format"] > FORMAT:
        raise BadInput(
            f"checkpoint {path} has format {state['format']}, this version reads up to "
            f"{FORMAT}: update ddp_lab"
        )
    if missing := sorted(_KEYS - set(state)):
        raise BadInput(f"checkpoint {path} lacks {missing}: it was not written whole")
    return state
