"""What can be imported from ddp_lab itself, and the commands of the lab."""

import ast
import importlib
import subprocess
import sys
import types
from pathlib import Path

import pytest

import ddp_lab
from ddp_lab.__main__ import main

HOMES = {name: home for home, names in ddp_lab._HOMES.items() for name in names.split()}


def python(code: str) -> str:
    """What a new interpreter prints."""
    return subprocess.check_output([sys.executable, "-c", code], text=True).strip()


@pytest.mark.parametrize("name", ddp_lab.__all__)
def test_a_name_is_the_thing_itself(name):
    home = importlib.import_module(f"ddp_lab.{HOMES[name]}")
    thing = getattr(ddp_lab, name)
    assert thing is getattr(home, name)
    assert not isinstance(thing, types.ModuleType)
    assert name in dir(ddp_lab)


def test_the_three_lists_are_one():
    """What is loaded, what ``import *`` gives, and what editors and mypy see."""
    source = ast.parse(Path(ddp_lab.__file__).read_text())
    [block] = [
        node
        for node in source.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    typed = {
        (node.module.removeprefix("ddp_lab."), alias.name)
        for node in block.body
        for alias in node.names
    }
    assert typed == {(home, name) for name, home in HOMES.items()}
    assert set(ddp_lab.__all__) == set(HOMES)


def test_notebooks_and_readme_use_the_face():
    root = Path(ddp_lab.__file__).parents[1]
    sources = [*(root / "notebooks" / "src").glob("*.py"), root / "README.md"]
    assert len(sources) > 5
    for path in sources:
        for line in path.read_text().splitlines():
            words = line.split()
            if words[:1] == ["from"] and words[1].startswith("ddp_lab."):
                # the command's own entry point, for those who run it from Python
                assert line.strip() == "from ddp_lab.train import main", path


def test_train_is_the_function_whatever_was_imported_before():
    for first in ("ddp_lab.train", "ddp_lab.ranks.launch", "ddp_lab"):
        code = (
            f"import {first}, sys; from ddp_lab import train, launch; import ddp_lab; "
            "print(train.__name__, launch.__name__, ddp_lab.train is train, "
            "sys.modules['ddp_lab.train'].main.__name__)"
        )
        assert python(code) == "train launch True main"


def test_importing_the_package_loads_nothing():
    code = (
        "import sys; before = set(sys.modules); import ddp_lab; "
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}; "
        "print(sorted(new - set(sys.stdlib_module_names)))"
    )
    assert python(code) == "['ddp_lab']"


def test_a_name_that_is_not_there():
    with pytest.raises(AttributeError, match="no attribute 'lunch'"):
        _ = ddp_lab.lunch


def test_commands_are_listed(capsys):
    assert main([]) == main(["--help"]) == 0
    text = capsys.readouterr().out
    assert "train      train an image classifier" in text
    assert "bandwidth  measure the network" in text
    assert main(["--version"]) == 0
    assert ddp_lab.__version__ in capsys.readouterr().out


def test_unknown_command_is_one_line(capsys):
    assert main(["trian"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == (
        "ddp_lab: there is no command 'trian': did you mean train? "
        "choose one of train, bandwidth\n"
    )


@pytest.mark.parametrize("command", [[sys.executable, "-m", "ddp_lab"], ["ddp-lab"]])
def test_train_by_its_command(command):
    """The same as ``python -m ddp_lab.train``: options, words and exit status."""
    bin_ = Path(sys.executable).parent
    command = [str(bin_ / command[0]), *command[1:]]
    done = subprocess.run(
        [*command, "train", "--epochs", "0"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == "ddp_lab.train: epochs 0 must be 1 or more; see --help\n"
