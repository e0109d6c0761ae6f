"""What `%%ranks` does in a rank: run a cell in a namespace that stays.

The namespace is the rank's ``__main__``. Pickle looks there for what cells define, so
``torch.save(model)`` and DataLoader workers find their classes.
"""

import ast
import linecache
import pprint
import sys
import types
from typing import Any

__all__ = [
    "PRESET",
    "end_of_cell_is_hidden",
    "give",
    "gpu_mb",
    "has",
    "place",
    "preset",
    "run_cell",
    "take",
]

PRESET = "rank, world_size, device, dist, torch"
"""The names that every rank has from the start."""


def preset() -> None:
    """Give a new rank the names in `PRESET`; its process group is open."""
    import torch
    import torch.distributed as dist

    device, _ = place()
    _names().update(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        device=torch.device(device),
        dist=dist,
        torch=torch,
    )


def place() -> tuple[str, str]:
    """Tell where this rank computes, and who carries its collectives."""
    import torch
    import torch.distributed as dist

    backend = str(dist.get_backend())
    if backend != "nccl":
        return "cpu", backend
    return f"cuda:{torch.cuda.current_device()}", backend


def run_cell(source: str, name: str) -> str | None:
    """Run a cell, and return its last expression as text, if there is one to show.

    Args:
        source: plain Python.
        name: what tracebacks call the cell.
    """
    lines = source.splitlines(keepends=True)
    linecache.cache[name] = (len(source), None, lines, name)
    tree = ast.parse(source, name)
    last = tree.body[-1] if tree.body else None
    if not isinstance(last, ast.Expr) or end_of_cell_is_hidden(source, last):
        exec(compile(tree, name, "exec", dont_inherit=True), _names())
        return None
    tree.body.pop()
    exec(compile(tree, name, "exec", dont_inherit=True), _names())
    expression = ast.Expression(last.value)
    value = eval(compile(expression, name, "eval", dont_inherit=True), _names())
    if value is None:
        return None
    if isinstance(value, str):
        return repr(value)  # pprint would break a long line into pieces
    return pprint.pformat(value, width=80, compact=True, sort_dicts=False)


def end_of_cell_is_hidden(source: str, last: ast.stmt) -> bool:
    """Whether a semicolon follows the last statement."""
    rest = source.encode().splitlines()[(last.end_lineno or 1) - 1]
    return rest[last.end_col_offset or 0 :].lstrip().startswith(b";")


def take(**values: Any) -> None:
    """Add variables to the namespace."""
    names = _names()
    names.update(values)
    for value in values.values():
        # a function that came by value has globals of its own
        if isinstance(value, types.FunctionType) and value.__module__ == "__main__":
            for name in PRESET.split(", "):
                value.__globals__.setdefault(name, names[name])


def has(name: str) -> bool:
    """Whether the namespace has this variable."""
    return name in _names()


def give(name: str) -> Any:
    """Return a variable of the namespace."""
    return _names()[name]


def gpu_mb() -> float:
    """Memory that PyTorch holds on this rank's GPU, in MB of 2^20 bytes."""
    import torch

    return torch.cuda.memory_reserved() / 2**20


def _names() -> dict[str, Any]:
    return vars(sys.modules["__main__"])
