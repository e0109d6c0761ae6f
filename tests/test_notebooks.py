"""The notebooks keep their conventions, and each check here can fail.

The first part looks at the notebooks of the course. The second plants every fault that
the rules and nbval are there for, in a small lesson that has none, and demands that it
is found; it does not depend on the course.
"""

import base64
import copy
import importlib.util
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import nbformat
import pytest
from nbformat import NotebookNode
from nbval.plugin import get_sanitize_patterns

import notebook_rules as rules

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = ROOT / "notebooks"
BUILDER = ROOT / "scripts" / "build_notebooks.py"
SANITIZER = NOTEBOOKS / "sanitize.cfg"
# What scripts/check.sh runs over the notebooks, with a shorter limit for a dead kernel.
NBVAL = ("--nbval", "--nbval-current-env", f"--nbval-sanitize-with={SANITIZER}")


def _load_builder() -> ModuleType:
    spec = importlib.util.spec_from_file_location(BUILDER.stem, BUILDER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[BUILDER.stem] = module  # its dataclass looks itself up there
    spec.loader.exec_module(module)
    return module


builder = _load_builder()


def _relative(path: Path) -> str:
    return str(path.relative_to(NOTEBOOKS))


def _run(
    *command: str | Path, cwd: Path = ROOT, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, command)],
        capture_output=True,
        text=True,
        timeout=250,
        cwd=cwd,
        env={**os.environ, **environment},
    )


# ---- the notebooks of the course ---------------------------------------------


@pytest.mark.parametrize("rule", rules.LESSON_RULES, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=_relative)
def test_lesson(path: Path, rule: rules.Rule) -> None:
    assert list(rule(nbformat.read(path, as_version=4), path)) == []


@pytest.mark.parametrize("rule", rules.SOLUTION_RULES, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize(
    "path", sorted(NOTEBOOKS.glob("solutions/*.ipynb")), ids=_relative
)
def test_solutions(path: Path, rule: rules.Rule) -> None:
    assert list(rule(nbformat.read(path, as_version=4), path)) == []


def test_every_notebook_is_that_of_its_source(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert builder.main(["--check"]) == 0, capsys.readouterr().out


# ---- the rules find what they are there for ----------------------------------

_PNG = base64.b64encode(
    b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"
    + (640).to_bytes(4, "big")
    + (400).to_bytes(4, "big")
).decode()


def _small_lesson() -> NotebookNode:
    """A lesson that keeps every rule."""
    text, code = nbformat.v4.new_markdown_cell, nbformat.v4.new_code_cell
    output = nbformat.v4.new_output
    cells = [
        text("[Contents](other.ipynb)", metadata={"tags": ["navigation"]}),
        text("# Add up\n\nYou will be able to add. About 5 minutes."),
        code("%load_ext ddp_lab"),
        text("How much is 1 + 1? See [the other](other.ipynb#a-heading-to-link)."),
        code("print(1 + 1)", outputs=[output("stream", name="stdout", text="2\n")]),
        text("It is 2. And how long does it take? See [below](#summary)."),
        code(
            "seconds = measure()\nassert seconds < 1\nprint(f'~ {seconds:.2f}')",
            outputs=[output("stream", name="stdout", text="~ 0.13\n")],
        ),
        text("Not long. [PyTorch](https://pytorch.org) is faster. A picture:"),
        code(
            "plt.show()",
            outputs=[output("display_data", {"image/png": _PNG, "text/plain": "<F>"})],
        ),
        text("## Summary\n\nIt adds up.\n\n## Exercises\n\nNow you."),
        code("def add(a, b):\n    raise NotImplementedError"),
        code('check(add, "add")'),
    ]
    for _ in range(7):
        cells += [text("And again?"), code("pass")]
    cells += [text("## Next\n\nSubtraction.")]
    notebook = nbformat.v4.new_notebook(cells=cells)
    notebook.nbformat_minor = 5
    for count, cell in enumerate(_code(notebook), start=1):
        cell.execution_count = count
    notebook.metadata["kernelspec"] = {
        "display_name": "Python 3 (ipykernel)",
        "language": "python",
        "name": "python3",
    }
    return notebook


def _code(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def _print(text: str, name: str = "stdout") -> Callable[[NotebookNode], None]:
    """Let the first code cell have this output."""

    def plant(notebook: NotebookNode) -> None:
        stream = nbformat.v4.new_output("stream", name=name, text=text)
        _code(notebook)[0].outputs = [stream]

    return plant


def _show(mime: str) -> Callable[[NotebookNode], None]:
    def plant(notebook: NotebookNode) -> None:
        display = nbformat.v4.new_output("display_data", {mime: "..."})
        _code(notebook)[0].outputs = [display]

    return plant


def _picture(png: bytes) -> Callable[[NotebookNode], None]:
    def plant(notebook: NotebookNode) -> None:
        data = {"image/png": base64.b64encode(png).decode()}
        _code(notebook)[0].outputs = [nbformat.v4.new_output("display_data", data)]

    return plant


def _write(source: str, cell: int = 3) -> Callable[[NotebookNode], None]:
    """Replace the text of a cell; 3 is a text cell, 4 a code cell."""

    def plant(notebook: NotebookNode) -> None:
        notebook.cells[cell].source = source

    return plant


def _tag(tag: str) -> Callable[[NotebookNode], None]:
    def plant(notebook: NotebookNode) -> None:
        notebook.cells[4].metadata["tags"] = [tag]

    return plant


def _strip(notebook: NotebookNode) -> None:
    for cell in _code(notebook):
        cell.outputs, cell.execution_count = [], None


def _run_out_of_order(notebook: NotebookNode) -> None:
    _code(notebook)[1].execution_count = 17


def _drop_cells(notebook: NotebookNode) -> None:
    del notebook.cells[-6:-1]


def _drop_text(notebook: NotebookNode) -> None:
    del notebook.cells[5]


def _forget_an_id(notebook: NotebookNode) -> None:
    notebook.cells[5].id = "not a valid id!"


_MACHINE = "node-17.cluster"


def _name_another_kernel(notebook: NotebookNode) -> None:
    notebook.metadata["kernelspec"]["name"] = ".venv"


def _name_the_machine(notebook: NotebookNode) -> None:
    notebook.cells[3].source += f" It ran on {_MACHINE}."


_FAULTS: list[tuple[rules.Rule, Callable[[NotebookNode], None]]] = [
    (rules.is_valid, _forget_an_id),
    (rules.was_executed_in_order, _strip),
    (rules.was_executed_in_order, _run_out_of_order),
    (rules.has_no_stderr, _print("a warning\n", "stderr")),
    (rules.has_text_and_png_only, _show("image/svg+xml")),
    (rules.has_text_and_png_only, _show("text/html")),
    (rules.has_text_and_png_only, _show("application/vnd.jupyter.widget-view+json")),
    (rules.has_plain_pictures, _picture(b"GIF89a")),
    (
        rules.has_plain_pictures,
        _picture(base64.b64decode(_PNG) + b"\0\0\0\x1atEXtSoftware\0Matplotlib"),
    ),
    (
        rules.has_plain_pictures,
        _picture(
            base64.b64decode(_PNG).replace(
                (640).to_bytes(4, "big"), (4000).to_bytes(4, "big")
            )
        ),
    ),
    (rules.has_no_semicolon_at_the_end, _write("plt.plot([1]);", 4)),
    (rules.has_no_absolute_path, _print("File /home/ann/lab/x.py\n")),
    (rules.has_no_absolute_path, _print("saved to '/opt/runs/loss.png'\n")),
    (rules.has_no_absolute_path, _print("saved to C:\\Users\\ann\n")),
    (rules.has_no_absolute_path, _write("sys.path.append('/home/ann/lab')", 4)),
    (rules.names_no_machine, _name_the_machine),
    (rules.names_no_machine, _name_another_kernel),
    (rules.has_known_tags, _tag("nbval-skip")),
    (rules.has_known_tags, _write("# NBVAL_SKIP\nprint(1)", 4)),
    (rules.has_known_magics, _write("%no_such_magic\nprint(1)", 4)),
    (rules.has_known_magics, _write("%%rank\nprint(1)", 4)),
    (rules.has_known_magics, _write("!torchrun train.py", 4)),
    (rules.has_an_assert_at_each_tilde, _print("loss ~ 0.25\n")),
    (rules.has_no_marker_left, _write("# BEGIN SOLUTION\npass", 4)),
    (rules.has_links_that_resolve, _write("[gone](gone.ipynb)")),
    (rules.has_links_that_resolve, _write("![gone](gone.png)")),
    (rules.has_links_that_resolve, _write("[gone](other.ipynb#gone)")),
    (rules.has_links_that_resolve, _write("[gone](#gone)")),
    (rules.has_links_that_resolve, _write("[insecure](http://pytorch.org)")),
    (rules.is_small_enough, _print("x" * 500_000)),
    (rules.has_a_fair_length, _drop_cells),
    (rules.has_a_fair_length, _write("word " * 2_000)),
    (rules.has_short_code_cells, _write("x = 1\n" * 21, 4)),
    (rules.has_short_code_cells, _write("def f():\n" + "    x = 1\n" * 25, 4)),
    (rules.has_short_code_cells, _write("", 4)),
    (rules.has_text_between_code, _drop_text),
    (rules.has_a_head, _write("Add up: you will be able to add, in 5 minutes", 1)),
    (rules.has_a_head, _write("# Add up\n\nYou will be able to add.", 1)),
    (rules.has_a_head, _write("# Add up\n\nIt takes 5 minutes.", 1)),
    (rules.has_an_end, _write("## Summary\n\nNo exercises.", 9)),
    (rules.has_an_end, _write("The end.", -1)),
]


@pytest.fixture
def small_lesson(tmp_path: Path) -> tuple[NotebookNode, Path]:
    text = nbformat.v4.new_markdown_cell("## A heading to link")
    nbformat.write(nbformat.v4.new_notebook(cells=[text]), tmp_path / "other.ipynb")
    return _small_lesson(), tmp_path / "small.ipynb"


@pytest.mark.parametrize("rule", rules.LESSON_RULES, ids=lambda rule: rule.__name__)
def test_a_good_lesson_passes(
    small_lesson: tuple[NotebookNode, Path], rule: rules.Rule
) -> None:
    assert list(rule(*small_lesson)) == []


@pytest.mark.parametrize(
    ("rule", "plant"), _FAULTS, ids=[rule.__name__ for rule, _ in _FAULTS]
)
def test_a_planted_fault_is_found(
    small_lesson: tuple[NotebookNode, Path],
    monkeypatch: pytest.MonkeyPatch,
    rule: rules.Rule,
    plant: Callable[[NotebookNode], None],
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: _MACHINE)
    notebook, path = copy.deepcopy(small_lesson[0]), small_lesson[1]
    plant(notebook)
    complaints = list(rule(notebook, path))
    assert complaints
    assert all(isinstance(complaint, str) for complaint in complaints)


def test_every_rule_has_a_planted_fault() -> None:
    assert {rule for rule, _ in _FAULTS} == set(rules.LESSON_RULES)


# ---- the sanitizer hides what may differ, and nothing else -------------------


def _sanitize(text: str) -> str:
    for pattern, replacement in get_sanitize_patterns(SANITIZER.read_text()):
        text = re.sub(pattern, replacement, text)
    return text


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("loss ~ 0.2413", "loss ~ 0.2417"),
        ("it took ~12 s", "it took ~9.5 s"),
        ("error ~ 1.2e-07", "error ~ 3e-8"),
        ("~ 1,234 images/s", "~ 987 images/s"),
        ("<Net object at 0x7f3a1c2b4d90>", "<Net object at 0x7f3a00000d90>"),
        ("in /tmp/tmpab12/run_1/x.pt.", "in /var/folders/x1/T/tmpq/x.pt."),
        ("127.0.0.1:40321", "127.0.0.1:5021"),
        ("MASTER_PORT=40321", "MASTER_PORT=29500"),
        ("listens on port 40321", "listens on port 29501"),
        ("worker, pid 4711, is gone", "worker, pid 12, is gone"),
        ("Cell In[7], line 3: x", "Cell In[1] (2), line 3: x"),
    ],
)
def test_the_sanitizer_hides_what_may_differ(one: str, other: str) -> None:
    assert one != other
    assert _sanitize(one) == _sanitize(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("loss 0.2413", "loss 0.2417"),
        ("loss ~ 0.2413 on 2 ranks", "loss ~ 0.2413 on 3 ranks"),
        ("~ 0.24 s", "~ 0.24 ms"),
        ("~ 0.24", "~ nan"),
        ("rank 0: 17", "rank 1: 17"),
        ("torch.Size([64, 10])", "torch.Size([64, 12])"),
        ("0xff", "0xfe"),
        ("runs/first/loss.png", "runs/other/loss.png"),
        ("12:30", "12:31"),
        ("support 40321", "support 40322"),
        ("rapid 12", "rapid 13"),
        ("Cell In[7], line 3: x", "Cell In[7], line 4: x"),
    ],
)
def test_the_sanitizer_hides_nothing_else(one: str, other: str) -> None:
    assert _sanitize(one) != _sanitize(other)


# ---- nbval and the builder find what they are there for ----------------------

_SOURCE = """\
# %% [markdown]
# # A small lesson

# %%
import os
import random

import matplotlib.pyplot as plt

print("always the same")

# %%
print(f"~ {random.random()}, pid {os.getpid()}")

# %%
plt.figure().add_subplot().plot([1, 2])
plt.show()

# %% [markdown]
# ## Exercises

# %%
def answer():
    # BEGIN SOLUTION
    return 42
    # STUB
    # return None
    # END SOLUTION


print(answer())
"""


def _nbval(
    folder: Path, *names: str, timeout_s: int = 60, **environment: str
) -> dict[str, set[str]]:
    """Run nbval and return, for each notebook, how its cells came out."""
    result = _run(
        *("-m", "pytest", *NBVAL, "-rA", "--tb=short"),
        f"--nbval-cell-timeout={timeout_s}",
        *("-p", "no:cacheprovider", "-c", ROOT / "pyproject.toml"),
        f"--rootdir={folder}",
        f"--confcutdir={folder}",
        *names,
        cwd=folder,
        **environment,
    )
    cells = re.findall(
        r"^(PASSED|FAILED|XFAIL|XPASS|ERROR|SKIPPED) (\S+\.ipynb)::Cell",
        result.stdout,
        re.MULTILINE,
    )
    outcomes: dict[str, set[str]] = {name: set() for name in names}
    for outcome, path in cells:
        outcomes[path].add(outcome)
    assert all(outcomes.values()), result.stdout + result.stderr
    assert (result.returncode == 0) == (set.union(*outcomes.values()) == {"PASSED"})
    return outcomes


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a good lesson and its solutions, built from their source."""
    folder = tmp_path_factory.mktemp("notebooks")
    (folder / "conftest.py").write_text((NOTEBOOKS / "conftest.py").read_text())
    (folder / "src").mkdir()
    (folder / "src" / "00_small.py").write_text(_SOURCE)
    result = _run(BUILDER, "--notebooks", folder, MPLBACKEND="Agg")
    assert result.returncode == 0, result.stderr
    assert re.search(r"^00_small: executed in", result.stdout, re.MULTILINE)
    return folder


def _spoil(source: Path, name: str, change: Callable[[NotebookNode], Any]) -> str:
    notebook = nbformat.read(source, as_version=4)
    change(notebook)
    nbformat.write(notebook, source.with_name(name))
    return name


def test_a_good_notebook_passes_strict_nbval_twice(built: Path) -> None:
    names = ["00_small.ipynb", "solutions/00_small.ipynb"]
    assert _nbval(built, *names) == {name: {"PASSED"} for name in names}
    assert _nbval(built, *names, MPLBACKEND="Agg") == {
        name: {"PASSED"} for name in names
    }


def test_nbval_finds_planted_faults(built: Path) -> None:
    def change_a_word(notebook: NotebookNode) -> None:
        _code(notebook)[0].outputs[0].text = "always the sane\n"

    def change_an_answer(notebook: NotebookNode) -> None:
        _code(notebook)[3].outputs[0].text = "43\n"

    def lose_an_output(notebook: NotebookNode) -> None:
        _code(notebook)[2].outputs = []

    def raise_an_error(notebook: NotebookNode) -> None:
        _code(notebook)[1].source = "raise ValueError"

    good = built / "00_small.ipynb"
    changes = (change_a_word, change_an_answer, lose_an_output, raise_an_error)
    names = [_spoil(good, f"{c.__name__}.ipynb", c) for c in changes]
    outcomes = _nbval(built, *names)
    for name in names:
        (built / name).unlink()
        assert outcomes[name] == {"FAILED", "PASSED"}, name  # only the cell concerned


def test_nbval_finds_a_kernel_that_dies(built: Path) -> None:
    def kill_the_kernel(notebook: NotebookNode) -> None:
        _code(notebook)[0].source = "import os\n\nos._exit(1)"

    name = _spoil(built / "00_small.ipynb", "dead.ipynb", kill_the_kernel)
    outcomes = _nbval(built, name, timeout_s=3)
    (built / name).unlink()
    assert "FAILED" in outcomes[name]
    assert "PASSED" not in outcomes[name]


def test_nbval_alone_would_not_find_a_stripped_notebook(
    built: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """So there is a rule on execution counts, and --check finds it as well."""
    good = built / "00_small.ipynb"
    before = good.read_text()
    try:
        _spoil(good, good.name, _strip)
        assert _nbval(built, good.name) == {good.name: {"PASSED"}}
        stripped = nbformat.read(good, as_version=4)
        assert list(rules.was_executed_in_order(stripped, good))
        assert builder.main(["--notebooks", str(built), "--check"]) == 1
        assert "was not executed" in capsys.readouterr().out
    finally:
        good.write_text(before)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("always the same", "always the sane", "00_small: stale: cell 1 differs"),
        ("# # A small", "# # A smaller", "00_small: stale: cell 0 differs"),
        ("return 42", "return 43", "solutions/00_small: stale: cell"),
        ("# return None", "# return 0", "00_small: stale: cell 5 differs"),
    ],
)
def test_a_stale_source_is_found(
    built: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, told: str
) -> None:
    source = built / "src" / "00_small.py"
    arguments = ["--notebooks", str(built), "--check"]
    assert builder.main(arguments) == 0
    try:
        source.write_text(_SOURCE.replace(old, new))
        assert builder.main(arguments) == 1
    finally:
        source.write_text(_SOURCE)
    assert re.search(f"^{told}", capsys.readouterr().out, re.MULTILINE)


def test_a_notebook_without_a_source_is_found(
    built: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stray = built / "99_stray.ipynb"
    stray.write_text((built / "00_small.ipynb").read_text())
    assert builder.main(["--notebooks", str(built), "--check"]) == 1
    stray.unlink()
    assert "99_stray.ipynb: has no source" in capsys.readouterr().out
