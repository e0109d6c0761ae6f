#!/usr/bin/env python
"""Turn notebooks/src/NN_name.py into notebooks/NN_name.ipynb, executed.

    python scripts/build_notebooks.py              build what is not fresh
    python scripts/build_notebooks.py 03 05        build these two, if not fresh
    python scripts/build_notebooks.py --force 03   execute it again in any case
    python scripts/build_notebooks.py --check      only say what is not fresh

People edit the source, never the notebook: what was changed there is overwritten. The
source is a Python file in jupytext's percent format: ``# %%`` starts a code cell,
``# %% [markdown]`` a text cell, and ``# %% tags=["nbval-ignore-output"]`` gives a cell
tags. A magic is written as a comment, ``# %load_ext ddp_lab``.

An exercise is written solved, with the stub beside it in comments::

    def average(tensor):
        # BEGIN SOLUTION
        dist.all_reduce(tensor)
        return tensor / dist.get_world_size()
        # STUB
        # raise NotImplementedError("sum over ranks, then divide")
        # END SOLUTION

The lesson gets the stub, ``notebooks/solutions/NN_name.ipynb`` the solution; both are
executed. Without the STUB part the stub is ``raise NotImplementedError``. The solutions
hold the title, what the exercises need of the lesson, which is tagged ``setup``, and
all from the heading ``## Exercises`` on. A cell tagged ``solution`` is in the solutions
only, where the reasons for an answer belong.

A notebook is fresh when its cells are those of the source, all code was executed, and
the code in ddp_lab is the one that it was executed with. The first two decide over
``--check``; whether outputs still come out is the business of ``pytest --nbval``. When
only text has changed, outputs are kept and nothing is executed. A notebook whose
execution fails stays as it was, and the failing cell is shown.
"""

import argparse
import base64
import difflib
import hashlib
import os
import re
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# The kernel of this Python, also where the user has another one named python3.
os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"

import jupytext
import nbformat.v4
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, DeadKernelError
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parent.parent
METADATA = {
    "kernelspec": {
        "display_name": "Python 3 (ipykernel)",
        "language": "python",
        "name": "python3",
    },
    # Without the version of the Python that built it, which would be noise.
    "language_info": {
        "file_extension": ".py",
        "mimetype": "text/x-python",
        "name": "python",
        "pygments_lexer": "ipython3",
    },
}
NAVIGATION_TAG = "navigation"
SETUP_TAG, SOLUTION_TAG = "setup", "solution"
EXERCISES = re.compile(r"(?m)^## Exercises$")
DEFAULT_STUB = "raise NotImplementedError"


class BuildError(Exception):
    """A source that cannot be built, or a cell that failed; the message says which."""


@dataclass(frozen=True)
class Target:
    """One notebook to build: a lesson, or the solutions of one."""

    source: Path
    is_solution: bool

    @property
    def name(self) -> str:
        return self.source.stem

    @property
    def folder(self) -> Path:
        lessons = self.source.parent.parent
        return lessons / "solutions" if self.is_solution else lessons

    @property
    def path(self) -> Path:
        return self.folder / f"{self.name}.ipynb"

    @property
    def label(self) -> str:
        return f"solutions/{self.name}" if self.is_solution else self.name


# ---- from source to cells ----------------------------------------------------


def find_targets(notebooks: Path) -> list[Target]:
    """List what the sources in `notebooks`/src make, in the order of the course."""
    targets = []
    for source in sorted((notebooks / "src").glob("*.py")):
        targets.append(Target(source, is_solution=False))
        if "# BEGIN SOLUTION" in source.read_text(encoding="utf-8"):
            targets.append(Target(source, is_solution=True))
    return targets


def render(target: Target) -> NotebookNode:
    """Make the notebook of a source, without outputs and without cell ids."""
    title_of(target.source)  # complain before anything is executed
    text = target.source.read_text(encoding="utf-8")
    cells = []
    taught = target.is_solution  # and so left out
    for cell in jupytext.reads(text, fmt="py:percent").cells:
        if cell.cell_type not in ("code", "markdown"):
            raise BuildError(f"a {cell.cell_type} cell has no place in a lesson")
        tags = cell.metadata.get("tags", [])
        source = cell.source
        is_title = cell.cell_type == "markdown" and source.startswith("# ")
        if taught and (heading := EXERCISES.search(source)):
            taught, source = False, source[heading.start() :]
        if taught and not is_title and SETUP_TAG not in tags:
            continue
        if SOLUTION_TAG in tags and not target.is_solution:
            continue
        if cell.cell_type == "code":
            source = choose_variant(source, target)
        elif target.is_solution:
            source = move_links_up(source)
        cells.append(new_cell(cell.cell_type, source, tags))
    if line := navigation_line(target):
        cells.insert(0, new_cell("markdown", line, [NAVIGATION_TAG]))
        cells.append(new_cell("markdown", line, [NAVIGATION_TAG]))
    notebook = nbformat.v4.new_notebook(cells=cells, metadata=deepcopy(METADATA))
    notebook.nbformat_minor = 5
    return notebook


def new_cell(kind: str, source: str, tags: list[str]) -> NotebookNode:
    make = {
        "code": nbformat.v4.new_code_cell,
        "markdown": nbformat.v4.new_markdown_cell,
    }
    return make[kind](source, metadata={"tags": tags} if tags else {})


def choose_variant(source: str, target: Target) -> str:
    """Keep the solution or the stub of each exercise in a code cell."""
    kept: list[str] = []
    solution: list[str] = []
    stub: list[str] = []
    part, indent = "", ""
    for line in source.splitlines():
        marker = line.strip()
        expected = {"": "# BEGIN SOLUTION", "solution": "# STUB", "stub": ""}[part]
        if marker == "# BEGIN SOLUTION" == expected:
            part, indent = "solution", line[: len(line) - len(line.lstrip())]
            solution, stub = [], []
        elif marker == "# STUB" == expected:
            part = "stub"
        elif marker == "# END SOLUTION" and part:
            stub = stub or [indent + DEFAULT_STUB]
            kept += solution if target.is_solution else stub
            part = ""
        elif marker in ("# BEGIN SOLUTION", "# STUB", "# END SOLUTION"):
            raise BuildError(f"{target.source.name}: {marker[2:]} is out of place")
        elif part == "stub":
            if marker != "#" and not marker.startswith("# "):
                raise BuildError(
                    f"{target.source.name}: in a stub, {marker!r} is not a comment"
                )
            stub.append(line.replace("# ", "", 1) if marker != "#" else "")
        else:
            (solution if part else kept).append(line)
    if part:
        raise BuildError(f"{target.source.name}: BEGIN SOLUTION without END SOLUTION")
    return "\n".join(kept)


def move_links_up(text: str) -> str:
    """Let the relative links of a lesson work one folder further down."""
    return re.sub(r"(\]\()(?!https?:|#|/|mailto:)", r"\1../", text)


def title_of(source: Path) -> str:
    for line in source.read_text(encoding="utf-8").splitlines():
        if line.startswith("# # "):
            return line[4:].strip()
    raise BuildError(f"{source.name} has no title: a text line starting with '# # '")


def navigation_line(target: Target) -> str:
    """Link to the neighbours of a lesson, or from solutions back to their lesson."""
    if target.is_solution:
        title = title_of(target.source)
        return f"Solutions. Back to the lesson: [{title}](../{target.name}.ipynb)"
    sources = sorted(target.source.parent.glob("*.py"))
    here = sources.index(target.source)
    links = []
    if here > 0:
        before = sources[here - 1]
        links.append(f"← [{title_of(before)}]({before.stem}.ipynb)")
        links.append(f"[Contents]({sources[0].stem}.ipynb)")
    if here + 1 < len(sources):
        after = sources[here + 1]
        links.append(f"[{title_of(after)}]({after.stem}.ipynb) →")
    return " · ".join(links)


# ---- what is there already ---------------------------------------------------


def read(path: Path) -> NotebookNode | None:
    return nbformat.read(path, as_version=4) if path.exists() else None


def first_difference(new: NotebookNode, old: NotebookNode | None) -> str | None:
    """Say how the notebook on disk departs from its source, if it does."""
    if old is None:
        return "there is no notebook yet"
    for number, (ours, theirs) in enumerate(zip(new.cells, old.cells, strict=False)):
        for part in ("cell_type", "source", "metadata"):
            if ours[part] != theirs.get(part):
                return f"cell {number} differs in its {part.replace('cell_', '')}"
    if len(new.cells) != len(old.cells):
        return f"{len(old.cells)} cells instead of {len(new.cells)}"
    for number, cell in enumerate(old.cells):
        if cell.cell_type == "code" and cell.execution_count is None:
            return f"cell {number} was not executed"
    if {k: old.metadata.get(k) for k in METADATA} != METADATA:
        return "its metadata differs"
    return None


def keep_ids(new: NotebookNode, old: NotebookNode | None) -> None:
    """Give every cell the id that it had before; a new cell gets one from its text."""
    before = old.cells if old is not None else []
    match = difflib.SequenceMatcher(
        a=[cell.cell_type + cell.source for cell in before],
        b=[cell.cell_type + cell.source for cell in new.cells],
        autojunk=False,
    )
    for cell in new.cells:
        cell.id = ""
    for _, a_start, a_end, b_start, b_end in match.get_opcodes():
        # In a changed stretch the first cell is taken for the first, and so on.
        pairs = zip(before[a_start:a_end], new.cells[b_start:b_end], strict=False)
        for earlier, cell in pairs:
            if earlier.cell_type == cell.cell_type:
                cell.id = earlier.get("id", "")
    taken = {cell.id for cell in new.cells}
    for cell in new.cells:
        salt = 0
        while not cell.id:
            digest = hashlib.sha256(f"{salt}{cell.source}".encode()).hexdigest()[:8]
            cell.id, salt = ("" if digest in taken else digest), salt + 1
        taken.add(cell.id)


def hash_of_package(root: Path = ROOT) -> str:
    digest = hashlib.sha256()
    for file in sorted((root / "ddp_lab").rglob("*.py")):
        digest.update(file.relative_to(root).as_posix().encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def package_of(notebook: NotebookNode | None) -> str:
    """The package hash that a notebook was executed with."""
    return notebook.metadata.get("ddp_lab", {}).get("package", "") if notebook else ""


def keep_outputs(new: NotebookNode, old: NotebookNode | None) -> bool:
    """Take over the outputs if all code is the same; return whether it was."""
    ours, theirs = (
        [c for c in notebook.cells if c.cell_type == "code"] if notebook else []
        for notebook in (new, old)
    )
    if old is None or [c.source for c in ours] != [c.source for c in theirs]:
        return False
    if any(cell.execution_count is None for cell in theirs):
        return False
    for cell, earlier in zip(ours, theirs, strict=True):
        cell.outputs, cell.execution_count = earlier.outputs, earlier.execution_count
    return True


# ---- execution ---------------------------------------------------------------


def execute(notebook: NotebookNode, target: Target, timeout_s: float) -> None:
    """Run all cells in a fresh kernel and leave tidy outputs in `notebook`."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    progress = Progress(target.label, len(code))
    target.folder.mkdir(parents=True, exist_ok=True)
    client = NotebookClient(
        notebook,
        timeout=timeout_s,
        kernel_name=METADATA["kernelspec"]["name"],
        record_timing=False,
        extra_arguments=["--log-level=CRITICAL"],
        resources={"metadata": {"path": str(target.folder)}},
        on_cell_execute=progress.show,
    )
    with tempfile.TemporaryDirectory() as ipython_dir:
        try:
            client.execute(env=kernel_environment(ipython_dir))
        except CellExecutionError as error:
            cell = next(c for c in code if has_failed(c))
            raise BuildError(failure_text(target, notebook, cell, str(error))) from None
        except (DeadKernelError, TimeoutError) as error:
            cell = code[max(progress.number - 1, 0)]
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise BuildError(failure_text(target, notebook, cell, reason)) from None
        finally:
            progress.close()
    for cell in code:
        cell.outputs = list(tidy(cell.outputs))
    # The kernel has written the version of its Python here.
    notebook.metadata = nbformat.from_dict(deepcopy(METADATA))


class Progress:
    """Which cell is running, in a terminal; elsewhere only that it has begun."""

    def __init__(self, label: str, num_cells: int) -> None:
        self.label, self.num_cells, self.number = label, num_cells, 0
        self.in_terminal = sys.stderr.isatty()
        if not self.in_terminal:
            print(f"{label}: executing {num_cells} cells", file=sys.stderr, flush=True)

    def show(self, cell: NotebookNode, cell_index: int) -> None:
        if cell.cell_type != "code":
            return
        self.number += 1
        head = next(iter(cell.source.splitlines()), "")
        line = f"{self.label}: cell {self.number} of {self.num_cells}: {head}"
        if self.in_terminal:
            print(f"\r\033[K{line[:78]}", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self.in_terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def kernel_environment(ipython_dir: str) -> dict[str, str]:
    """Make the kernel independent of the user's settings, and like nbval's kernel."""
    environment = {k: v for k, v in os.environ.items() if k != "MPLBACKEND"}
    environment["IPYTHONDIR"] = ipython_dir
    # With this variable ipykernel leaves file descriptors 1 and 2 alone, so that what
    # other processes print by themselves stays out of the cell, as it does under nbval.
    environment["PYTEST_CURRENT_TEST"] = "build_notebooks"
    return environment


def has_failed(cell: NotebookNode) -> bool:
    expected = "raises-exception" in cell.metadata.get("tags", [])
    return not expected and any(o.output_type == "error" for o in cell.outputs)


def failure_text(
    target: Target, notebook: NotebookNode, cell: NotebookNode, reason: str
) -> str:
    number = notebook.cells.index(cell)
    if not sys.stderr.isatty():
        reason = re.sub(r"\x1b\[[0-9;]*m", "", reason)
    if cell.source not in reason:
        reason = f"{cell.source}\n------------------\n{reason}"
    indented = textwrap.indent(reason.strip(), "    ")
    return f"cell {number} failed; the notebook is left as it was\n{indented}"


def tidy(outputs: list[NotebookNode]) -> Iterator[NotebookNode]:
    """Leave nothing in outputs that differs by chance or tells of this machine.

    The pieces in which a stream arrived are joined, tracebacks lose their paths, and
    pictures the name and version of what drew them.
    """
    last = None
    for output in outputs:
        if output.output_type == "stream":
            if last is not None and last.name == output.name:
                last.text += output.text
                continue
            last = output
        else:
            last = None
        if output.output_type == "error":
            output.traceback = [without_paths(text) for text in output.traceback]
        if "image/png" in output.get("data", {}):
            png = base64.b64decode(output.data["image/png"])
            output.data["image/png"] = base64.b64encode(without_notes(png)).decode()
        yield output


def without_notes(png: bytes) -> bytes:
    """Drop the chunks of a PNG that hold text or times and no part of the picture."""
    kept, position = png[:8], 8
    while position < len(png):
        end = position + 12 + int.from_bytes(png[position : position + 4], "big")
        if png[position + 4 : position + 8] not in (b"tEXt", b"zTXt", b"iTXt", b"tIME"):
            kept += png[position:end]
        position = end
    return kept


def without_paths(text: str) -> str:
    """Shorten file names to how they read from the repository or site-packages."""
    text = re.sub(r"[^\s'\"(]*/site-packages/", "", text)
    text = re.sub(r"[^\s'\"(]*/lib/python3\.\d+/", "", text)
    return text.replace(f"{ROOT}{os.sep}", "")


# ---- the command -------------------------------------------------------------


def write(notebook: NotebookNode, path: Path) -> None:
    """Replace a file in one step, so that nobody ever finds half a notebook."""
    nbformat.validate(notebook)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")
    temporary.replace(path)


def build(target: Target, *, force: bool, timeout_s: float) -> str:
    """Bring one notebook up to date and say in a few words what was done."""
    new, old = render(target), read(target.path)
    package = hash_of_package()
    fresh = first_difference(new, old) is None and package_of(old) == package
    if fresh and not force:
        return "fresh"
    keep_ids(new, old)
    kept = not force and package_of(old) == package and keep_outputs(new, old)
    started_s = time.monotonic()
    if not kept:
        execute(new, target, timeout_s)
    new.metadata["ddp_lab"] = {"package": package}
    write(new, target.path)
    size_kb = target.path.stat().st_size / 1024
    if kept:
        return f"text changed, outputs kept, {size_kb:.0f} KB"
    return f"executed in {time.monotonic() - started_s:.1f} s, {size_kb:.0f} KB"


def check(targets: list[Target], notebooks: Path) -> int:
    """Report every notebook that is not its source's; execute nothing."""
    num_stale = 0
    for target in targets:
        old = read(target.path)
        difference = first_difference(render(target), old)
        if difference is not None:
            num_stale += 1
            print(f"{target.label}: stale: {difference}")
        elif package_of(old) != hash_of_package():
            print(f"{target.label}: fresh; executed with an earlier ddp_lab")
    expected = {target.path for target in find_targets(notebooks)}
    for folder in (notebooks, notebooks / "solutions"):
        for path in sorted(set(folder.glob("*.ipynb")) - expected):
            num_stale += 1
            print(f"{path.relative_to(notebooks)}: has no source")
    if num_stale:
        print(f"{num_stale} stale: run scripts/build_notebooks.py")
    else:
        print(f"all fresh ({len(targets)} notebooks)")
    return 1 if num_stale else 0


def select(targets: list[Target], names: list[str]) -> list[Target]:
    """Pick targets by name or by the beginning of it: 03, 03_wrap, src/03_wrap.py."""
    if not names:
        return targets
    chosen = []
    for name in names:
        found = [t for t in targets if t.name.startswith(Path(name).stem)]
        if not found:
            known = ", ".join(t.name for t in targets if not t.is_solution) or "none"
            raise BuildError(f"no source is called {name}; there are: {known}")
        chosen += [target for target in found if target not in chosen]
    return chosen


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add: Any = parser.add_argument
    add("names", nargs="*", metavar="NAME", help="which ones, e.g. 03; default: all")
    add("--check", action="store_true", help="execute nothing, exit 1 if any is stale")
    add("--force", action="store_true", help="execute again even what is fresh")
    add("--timeout", type=float, default=300, metavar="S", help="seconds for a cell")
    add(
        "--notebooks",
        type=Path,
        default=ROOT / "notebooks",
        metavar="DIR",
        help="folder that holds src/ (default: notebooks)",
    )
    options = parser.parse_args(arguments)
    notebooks = options.notebooks.resolve()
    try:
        targets = select(find_targets(notebooks), options.names)
        if options.check:
            return check(targets, notebooks)
    except BuildError as error:
        print(error, file=sys.stderr)
        return 2
    num_failed = 0
    for target in targets:
        try:
            done = build(target, force=options.force, timeout_s=options.timeout)
            print(f"{target.label}: {done}", flush=True)
        except BuildError as error:
            num_failed += 1
            print(f"{target.label}: {error}", file=sys.stderr, flush=True)
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
