"""Imports go downhill only, packages keep their machinery to themselves, and every
module says what it offers."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import ddp_lab

PACKAGE = Path(ddp_lab.__file__).parent

# From the ground up: a module imports from floors below it, or from its own package.
FLOORS = [
    {"errors"},
    {"config", "rendezvous", "by_hand"},
    {"world"},
    {"model", "datasets", "ranks", "step"},
    {"data"},
    {"runs"},
    {"loop"},
    {"proofs", "exercises"},
    {"figures"},
    {"tools"},
    {"train"},
    {"__main__"},
]
FLOOR_OF = {name: floor for floor, names in enumerate(FLOORS) for name in names}
MODULES = sorted(
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
    for path in PACKAGE.rglob("*.py")
    if path != PACKAGE / "__init__.py"
)


def source_of(module: str) -> ast.Module:
    path = PACKAGE.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text())


def imports_of(module: str) -> set[str]:
    """Modules of the package that a module imports anywhere, also inside functions."""
    found = set()
    for node in ast.walk(source_of(module)):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {n if n[8:] in MODULES else node.module for n in names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name.removeprefix("ddp_lab.") for name in found} & set(MODULES)


def place(module: str) -> str:
    """The package, or the module at the top, that a module belongs to."""
    return module.partition(".")[0]


def test_every_module_has_a_floor():
    assert {place(module) for module in MODULES} == set(FLOOR_OF)


def test_the_reading_path_stands_alone_at_the_top():
    path = [
        "world",
        "model",
        "data",
        "step",
        "loop",
        "train",
        "config",
        "datasets",
        "errors",
    ]
    at_the_top = {module for module in MODULES if not (PACKAGE / module).is_dir()}
    assert {module for module in at_the_top if "." not in module} == {
        *path,
        "errors",
        "__main__",
    }


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_downhill(module):
    floor = FLOOR_OF[place(module)]
    others = {m for m in imports_of(module) if place(m) != place(module)}
    upward = {m for m in others if FLOOR_OF[place(m)] >= floor}
    assert not upward, f"{module} imports from its own floor or above: {upward}"


@pytest.mark.parametrize("module", MODULES)
def test_no_package_reaches_into_anothers_private_modules(module):
    others = {m for m in imports_of(module) if place(m) != place(module)}
    private = {m for m in others if "._" in m}
    assert not private, f"{module} imports what is private: {private}"


@pytest.mark.parametrize("package", sorted(n for n in FLOOR_OF if "." not in n))
def test_a_package_says_what_is_in_it(package):
    if not (PACKAGE / package).is_dir():
        return
    text = ast.get_docstring(source_of(package)) or ""
    inside = [m.partition(".")[2] for m in MODULES if m.startswith(f"{package}.")]
    missing = [
        name
        for name in inside
        if not name.startswith("_")
        and f"{name}.py" not in text
        and f"{name.partition('_')[0]}_*.py" not in text
    ]
    assert not missing, f"{package}/__init__.py does not name {missing}"


def test_no_circle():
    done: set[str] = set()
    while len(done) < len(MODULES):
        ready = {m for m in MODULES if m not in done and imports_of(m) <= done}
        assert ready, f"these import each other: {sorted(set(MODULES) - done)}"
        done |= ready


@pytest.mark.parametrize("module", MODULES)
def test_all_is_true(module):
    loaded = importlib.import_module(f"ddp_lab.{module}")
    names = getattr(loaded, "__all__", [])  # ruff keeps them sorted
    assert all(hasattr(loaded, name) for name in names)
    public = {
        node.name
        for node in source_of(module).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
    }
    assert public <= set(names), f"public, but not in __all__: {public - set(names)}"


@pytest.mark.parametrize("module", MODULES)
def test_public_names_are_documented(module):
    loaded = importlib.import_module(f"ddp_lab.{module}")
    assert loaded.__doc__
    for name in getattr(loaded, "__all__", []):
        thing = getattr(loaded, name)
        if callable(thing) and getattr(thing, "__module__", "").startswith("ddp_lab"):
            assert thing.__doc__, f"{module}.{name} has no docstring"


def test_import_is_cheap():
    """Each spawned rank pays for it, and CUDA must stay untouched."""
    code = (
        "import sys, ddp_lab; from ddp_lab import launch; import torch; "
        "heavy = {'matplotlib', 'torchvision', 'sklearn', 'IPython', 'tyro'}; "
        "print(sorted(heavy & set(sys.modules)), torch.cuda.is_initialized())"
    )
    said = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert said.strip() == "[] False"


def test_train_defines_no_class():
    """`python -m` runs it as __main__; a rank would not know its classes."""
    classes = [n for n in ast.walk(source_of("train")) if isinstance(n, ast.ClassDef)]
    assert not classes
