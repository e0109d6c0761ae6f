"""The build script: what it makes of a source, what it keeps, and how it fails.

Executing is replaced here by a count, except where execution itself is the matter;
test_notebooks.py builds and compares a lesson for real.
"""

import io
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode

from test_notebooks import builder

_FIRST = """\
# %% [markdown]
# # First lesson

# %% tags=["setup"]
# %load_ext ddp_lab
x = 1

# %% [markdown]
# This takes long.

# %%
taught = 1

# %% [markdown]
# In the end:
#
# ## Exercises
#
# See [the readme](../README.md), [a part](#first-lesson), [torch](https://pytorch.org).

# %% tags=["nbval-ignore-output"]
def double(x):
    # BEGIN SOLUTION
    y = 2 * x
    return y
    # STUB
    # # multiply
    #
    # if x:
    #     return None
    # END SOLUTION


# %% [markdown] tags=["solution"]
# Because 2x = x + x.

# %%
if True:
    # BEGIN SOLUTION
    print(double(x))
    # END SOLUTION
"""
_SECOND = """\
# %% [markdown]
# # Second lesson

# %%
1 + 1
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "00_first.py").write_text(_FIRST)
    (tmp_path / "src" / "01_second.py").write_text(_SECOND)
    return tmp_path


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The labels of what was executed, in order; executing itself is only played."""
    labels: list[str] = []

    def play(notebook: NotebookNode, target: object, timeout_s: float) -> None:
        labels.append(target.label)
        for count, cell in enumerate(_code(notebook), start=1):
            cell.execution_count = count
            text = f"run {len(labels)}\n"
            cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text=text)]

    monkeypatch.setattr(builder, "execute", play)
    return labels


def _build(folder: Path, *arguments: str) -> int:
    return builder.main([*arguments, "--notebooks", str(folder)])


def _read(folder: Path, name: str) -> NotebookNode:
    notebook = nbformat.read(folder / f"{name}.ipynb", as_version=4)
    nbformat.validate(notebook)
    return notebook


def _code(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def _edit(folder: Path, old: str, new: str, name: str = "00_first") -> None:
    source = folder / "src" / f"{name}.py"
    text = source.read_text()
    assert text.count(old) == 1
    source.write_text(text.replace(old, new))


def _ids(notebook: NotebookNode) -> list[str]:
    return [cell.id for cell in notebook.cells]


# ---- what is made of a source ------------------------------------------------


def test_lesson_and_solutions_come_from_one_source(
    folder: Path, executed: list[str]
) -> None:
    assert _build(folder) == 0
    assert executed == ["00_first", "solutions/00_first", "01_second"]
    lesson, solutions = _read(folder, "00_first"), _read(folder, "solutions/00_first")
    stub, solution = _code(lesson)[2], _code(solutions)[1]
    assert stub.source == (
        "def double(x):\n    # multiply\n\n    if x:\n        return None"
    )
    assert solution.source == "def double(x):\n    y = 2 * x\n    return y"
    assert stub.metadata["tags"] == ["nbval-ignore-output"]
    assert _code(lesson)[3].source == "if True:\n    raise NotImplementedError"
    assert _code(solutions)[2].source == "if True:\n    print(double(x))"
    texts, solution_texts = (
        [cell.source for cell in notebook.cells] for notebook in (lesson, solutions)
    )
    taught = ["This takes long.", "taught = 1"]
    assert all(cell in texts and cell not in solution_texts for cell in taught)
    assert solution_texts[1] == "# First lesson"
    assert [t.partition("\n")[0] for t in texts].count("In the end:") == 1
    assert solution_texts[3].startswith("## Exercises\n\nSee ")
    assert "Because 2x = x + x." in solution_texts
    assert "Because 2x = x + x." not in texts
    assert _code(lesson)[0].source == "%load_ext ddp_lab\nx = 1"
    assert _code(solutions)[0].source == "%load_ext ddp_lab\nx = 1"
    assert not (folder / "solutions" / "01_second.ipynb").exists()


def test_links_of_solutions_lead_to_where_those_of_the_lesson_lead(
    folder: Path, executed: list[str]
) -> None:
    _build(folder)
    text = "\n".join(cell.source for cell in _read(folder, "solutions/00_first").cells)
    assert "](../../README.md)" in text
    assert "](#first-lesson)" in text
    assert "](https://pytorch.org)" in text


def test_navigation(folder: Path, executed: list[str]) -> None:
    _build(folder)
    first, second = _read(folder, "00_first"), _read(folder, "01_second")
    assert first.cells[0].source == "[Second lesson](01_second.ipynb) →"
    assert second.cells[0].source == (
        "← [First lesson](00_first.ipynb) · [Contents](00_first.ipynb)"
    )
    back = _read(folder, "solutions/00_first").cells[0].source
    assert back == "Solutions. Back to the lesson: [First lesson](../00_first.ipynb)"
    for notebook in (first, second):
        assert notebook.cells[-1].source == notebook.cells[0].source


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("    # END SOLUTION\n\n\n", "\n\n", "BEGIN SOLUTION without END SOLUTION"),
        ("    # STUB\n", "    # STUB\n    # STUB\n", "STUB is out of place"),
        ("    y = 2 * x\n", "    # BEGIN SOLUTION\n", "BEGIN SOLUTION is out of place"),
        ("x = 1\n", "# END SOLUTION\n", "END SOLUTION is out of place"),
        ("    # # multiply\n", "    pass\n", "in a stub, 'pass' is not a comment"),
        ("# # First lesson", "# First lesson", "00_first.py has no title"),
        ("# %% [markdown]\n# # F", "# %% [raw]\n# # F", "a raw cell has no place"),
    ],
)
def test_a_source_that_makes_no_sense_is_refused(
    folder: Path,
    executed: list[str],
    capsys: pytest.CaptureFixture[str],
    old: str,
    new: str,
    told: str,
) -> None:
    _edit(folder, old, new)
    assert _build(folder, "00") == 1
    assert told in capsys.readouterr().err
    assert executed == []


# ---- what is kept ------------------------------------------------------------


def test_what_is_fresh_is_left_alone(
    folder: Path, executed: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    _build(folder)
    before = {path: path.read_bytes() for path in folder.rglob("*.ipynb")}
    assert _build(folder) == 0
    assert len(executed) == 3
    assert "01_second: fresh" in capsys.readouterr().out
    assert _build(folder, "--force", "01") == 0
    assert executed[3:] == ["01_second"]
    del before[folder / "01_second.ipynb"]
    assert all(path.read_bytes() == content for path, content in before.items())


def test_a_change_of_text_keeps_the_outputs(folder: Path, executed: list[str]) -> None:
    _build(folder)
    before = _read(folder, "00_first")
    _edit(folder, "See [the readme]", "Please see [the readme]")
    assert _build(folder, "--check") == 1
    assert _build(folder) == 0
    assert len(executed) == 3
    after = _read(folder, "00_first")
    assert "Please see" in after.cells[5].source
    assert _code(after) == _code(before)
    assert _build(folder, "--check") == 0


def test_a_change_of_code_executes_that_notebook_again(
    folder: Path, executed: list[str]
) -> None:
    _build(folder)
    _edit(folder, "1 + 1", "1 + 2", "01_second")
    assert _build(folder) == 0
    assert executed[3:] == ["01_second"]
    assert _code(_read(folder, "01_second"))[0].outputs[0].text == "run 4\n"


def test_a_change_of_the_package_executes_all_but_is_no_fault(
    folder: Path,
    executed: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _build(folder)
    monkeypatch.setattr(builder, "hash_of_package", lambda: "another")
    assert _build(folder, "--check") == 0
    assert (
        "01_second: fresh; executed with an earlier ddp_lab" in capsys.readouterr().out
    )
    assert len(executed) == 3
    _build(folder)
    assert len(executed) == 6


def test_the_package_hash_follows_the_code(tmp_path: Path) -> None:
    (tmp_path / "ddp_lab").mkdir()
    file = tmp_path / "ddp_lab" / "x.py"
    file.write_text("x = 1")
    before = builder.hash_of_package(tmp_path)
    assert builder.hash_of_package(tmp_path) == before
    file.write_text("x = 2")
    assert builder.hash_of_package(tmp_path) != before


def test_cells_keep_their_ids(folder: Path, executed: list[str]) -> None:
    _build(folder)
    before = _ids(_read(folder, "00_first"))
    assert len(set(before)) == len(before)
    _edit(folder, "x = 1", "x = 10")
    _build(folder)
    assert _ids(_read(folder, "00_first")) == before
    _edit(
        folder,
        "# %% [markdown]\n# This",
        "# %% [markdown]\n# New.\n\n# %%\nx\n\n# %% [markdown]\n# This",
    )
    _build(folder)
    after = _ids(_read(folder, "00_first"))
    assert len(set(after)) == len(after) == len(before) + 2
    assert after[:3] == before[:3]
    assert after[5:] == before[3:]


def test_ids_do_not_depend_on_chance(folder: Path, executed: list[str]) -> None:
    _build(folder)
    before = (folder / "00_first.ipynb").read_bytes()
    (folder / "00_first.ipynb").unlink()
    executed.clear()
    _build(folder, "00")
    assert (folder / "00_first.ipynb").read_bytes() == before


def test_a_hand_edited_notebook_is_found_and_overwritten(
    folder: Path, executed: list[str]
) -> None:
    _build(folder)
    notebook = _read(folder, "01_second")
    _code(notebook)[0].source = "1 + 3"
    nbformat.write(notebook, folder / "01_second.ipynb")
    assert _build(folder, "--check") == 1
    assert _build(folder) == 0
    assert _code(_read(folder, "01_second"))[0].source == "1 + 1"


def test_notebooks_are_chosen_by_name(
    folder: Path, executed: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert _build(folder, "notebooks/src/01_second.py") == 0
    assert executed == ["01_second"]
    assert _build(folder, "00") == 0
    assert executed[1:] == ["00_first", "solutions/00_first"]
    assert _build(folder, "07") == 2
    assert "no source is called 07; there are: 00_first, 01_second" in (
        capsys.readouterr().err
    )


# ---- execution ---------------------------------------------------------------

_SPOKEN = """\
# %% [markdown]
# # Spoken

# %%
import json
import os
import sys

from IPython.display import display

print("one")
print("two", flush=True)
sys.stdout.flush()
print("three")
display(4)
print("five")
_ = os.system("echo another process")

# %% tags=["raises-exception"]
json.loads("{")
"""


def test_outputs_are_tidy(folder: Path) -> None:
    (folder / "src" / "02_spoken.py").write_text(_SPOKEN)
    assert _build(folder, "02") == 0
    notebook = _read(folder, "02_spoken")
    speaks, fails = _code(notebook)
    assert [o.get("text", "shown") for o in speaks.outputs] == [
        "one\ntwo\nthree\n",
        "shown",
        "five\n",
    ]
    traceback = "\n".join(fails.outputs[0].traceback)
    assert "json/decoder.py" in traceback
    assert sys.prefix not in traceback
    assert "/lib/" not in traceback
    assert [speaks.execution_count, fails.execution_count] == [1, 2]
    assert all("execution" not in cell.metadata for cell in notebook.cells)
    assert "version" not in notebook.metadata["language_info"]
    before = (folder / "02_spoken.ipynb").read_bytes()
    assert _build(folder, "02", "--force") == 0
    assert (folder / "02_spoken.ipynb").read_bytes() == before


def test_pictures_lose_their_notes_and_nothing_else() -> None:
    from matplotlib import image, pyplot

    written, again = io.BytesIO(), io.BytesIO()
    figure, axes = pyplot.subplots()
    axes.plot([1, 3, 2])
    figure.savefig(written, metadata={"Software": "a version", "Author": "somebody"})
    figure.savefig(again, metadata={"Software": None})
    pyplot.close(figure)
    bare = builder.without_notes(written.getvalue())
    assert b"a version" in written.getvalue()
    assert bare == builder.without_notes(again.getvalue())
    assert b"tEXt" not in bare
    before = image.imread(io.BytesIO(written.getvalue()))
    assert (image.imread(io.BytesIO(bare)) == before).all()


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("import os; os._exit(3)", "DeadKernelError"),
        ("while True:\n    pass", "CellTimeoutError"),
    ],
)
def test_a_failing_cell_is_shown_and_the_notebook_stays(
    folder: Path, capsys: pytest.CaptureFixture[str], code: str, told: str
) -> None:
    notebook = folder / "01_second.ipynb"
    _edit(folder, "1 + 1", f"'fine'\n\n# %%\n{code}", "01_second")
    notebook.write_text(nbformat.writes(nbformat.v4.new_notebook()))
    before = notebook.read_bytes()
    assert _build(folder, "01", "--timeout", "4") == 1
    error = capsys.readouterr().err
    assert "01_second: cell 3 failed" in error
    assert code.splitlines()[-1] in error
    assert told in error
    assert "\x1b" not in error
    assert notebook.read_bytes() == before
    assert sorted(p.name for p in folder.iterdir()) == ["01_second.ipynb", "src"]


def test_the_help_explains_exercises(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        builder.main(["--help"])
    assert stop.value.code == 0
    told = capsys.readouterr().out
    for word in ("# BEGIN SOLUTION", "# STUB", "# END SOLUTION", "--check", "--force"):
        assert word in told
