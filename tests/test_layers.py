"""Imports go downhill only, and every module says what it offers."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import ddp_lab

PACKAGE = Path(ddp_lab.__file__).parent

FLOORS = [
    {"errors", "config", "record", "progress", "slurm"},
    {
        "world",
        "meeting",
        "preempt",
        "data",
        "datasets",
        "model",
        "payload",
        "output",
        "sync_batch_norm",
    },
    {
        "by_hand",
        "cells",
        "checkpoint",
        "cuda_finder",
        "inside",
        "launch",
        "magics",
        "process",
        "ranks",
        "refuse",
        "start",
        "stuck",
        "verdict",
        "workers",
    },
    {
        "checks",
        "compare",
        "comparison",
        "curves",
        "diagrams",
        "differences",
        "drawing",
        "exercise",
        "exercises_curve",
        "exercises_data",
        "exercises_failures",
        "exercises_hosts",
        "exercises_model",
        "exercises_ranks",
        "loop",
        "messages",
        "plots",
        "recovery",
        "resume",
        "side_by_side",
        "step",
        "training",
        "trial",
    },
    {"train"},
]
FLOOR_OF = {name: floor for floor, names in enumerate(FLOORS) for name in names}
MODULES = sorted(p.stem for p in PACKAGE.glob("*.py") if p.stem != "__init__")


def imports_of(module: str) -> set[str]:
    """Modules of the package that a module imports anywhere, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse((PACKAGE / f"{module}.py").read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "ddp_lab":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            top, _, name = node.module.partition(".")
            found |= {name} if top == "ddp_lab" else set()
        elif isinstance(node, ast.Import):
            names = (alias.name.partition(".") for alias in node.names)
            found |= {name for top, _, name in names if top == "ddp_lab" and name}
    return found & set(MODULES)


def test_every_module_has_a_floor():
    assert set(MODULES) <= set(FLOOR_OF), set(MODULES) - set(FLOOR_OF)


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_downhill(module):
    upward = {m for m in imports_of(module) if FLOOR_OF[m] > FLOOR_OF[module]}
    assert not upward, f"{module} imports from a floor above: {upward}"


def test_no_circle():
    done: set[str] = set()
    while len(done) < len(MODULES):
        ready = {m for m in MODULES if m not in done and imports_of(m) <= done}
        assert ready, f"these import each other: {sorted(set(MODULES) - done)}"
        done |= ready


@pytest.mark.parametrize("module", MODULES)
def test_all_is_true(module):
    loaded = importlib.import_module(f"ddp_lab.{module}")
    names = loaded.__all__  # ruff keeps them sorted
    assert all(hasattr(loaded, name) for name in names)
    public = {
        node.name
        for node in ast.parse((PACKAGE / f"{module}.py").read_text()).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
    }
    assert public <= set(names), f"public, but not in __all__: {public - set(names)}"


@pytest.mark.parametrize("module", MODULES)
def test_public_names_are_documented(module):
    loaded = importlib.import_module(f"ddp_lab.{module}")
    assert loaded.__doc__
    for name in loaded.__all__:
        thing = getattr(loaded, name)
        if callable(thing) and getattr(thing, "__module__", "").startswith("ddp_lab"):
            assert thing.__doc__, f"{module}.{name} has no docstring"


def test_import_is_cheap():
    """Each spawned rank pays for it, and CUDA must stay untouched."""
    code = (
        "import sys, ddp_lab, ddp_lab.launch; import torch; "
        "heavy = {'matplotlib', 'torchvision', 'sklearn', 'IPython', 'tyro'}; "
        "print(sorted(heavy & set(sys.modules)), torch.cuda.is_initialized())"
    )
    said = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert said.strip() == "[] False"


def test_train_defines_no_class():
    """`python -m` runs it as __main__; a rank would not know its classes."""
    tree = ast.parse((PACKAGE / "train.py").read_text())
    assert not [n.name for n in ast.walk(tree) if isinstance(n, ast.ClassDef)]
