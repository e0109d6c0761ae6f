"""The conventions of the notebooks, each a function from a notebook to complaints.

`LESSON_RULES` hold for notebooks/NN_name.ipynb, `SOLUTION_RULES` for the solutions,
which are the same lessons once more. test_notebooks.py applies them, and shows of each
one that it can complain.
"""

import ast
import base64
import re
import socket
import struct
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import nbformat
from nbformat import NotebookNode

Rule = Callable[[NotebookNode, Path], Iterator[str]]

MIN_CELLS, MAX_CELLS = 25, 45
MAX_WORDS = 2_000
MAX_LINES, MAX_LINES_WORKER = 20, 25
MAX_BYTES = 500_000
MIN_PIXELS, MAX_PIXELS = 300, 1_100
MIME_TYPES = {"text/plain", "image/png"}
TAGS = {"navigation", "setup", "solution", "nbval-ignore-output", "raises-exception"}
MAGICS = {"load_ext", "ranks", "push", "pull", "time", "timeit", "bash"}
MAGICS |= {"writefile", "run"}
LINK = re.compile(r"(!?)\[[^\]]*\]\(([^)\s]+)[^)]*\)")
TEMPORARY = re.compile(r"(?:/private)?(?:/tmp|/var/tmp|/var/folders)/\S*")
ABSOLUTE = re.compile(r"(?<![\w.:/~*-])(?:/[\w.+-]+){2,}|\b[A-Za-z]:\\\w+")


def _code(notebook: NotebookNode) -> list[tuple[int, NotebookNode]]:
    cells = enumerate(notebook.cells)
    return [(n, cell) for n, cell in cells if cell.cell_type == "code"]


def _text(notebook: NotebookNode) -> list[tuple[int, NotebookNode]]:
    """Text cells that somebody wrote, so without the navigation."""
    cells = enumerate(notebook.cells)
    return [
        (n, cell)
        for n, cell in cells
        if cell.cell_type == "markdown" and "navigation" not in _tags(cell)
    ]


def _tags(cell: NotebookNode) -> list[str]:
    return list(cell.metadata.get("tags", []))


def _outputs(notebook: NotebookNode) -> Iterator[tuple[int, NotebookNode]]:
    for number, cell in _code(notebook):
        for output in cell.outputs:
            yield number, output


def _output_texts(cell: NotebookNode) -> Iterator[str]:
    """Everything in a code cell's outputs that a reader reads."""
    for output in cell.outputs:
        if output.output_type == "stream":
            yield output.text
        elif output.output_type == "error":
            yield re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(output.traceback))
            yield f"{output.ename}: {output.evalue}"
        else:
            yield output.data.get("text/plain", "")


def _pictures(notebook: NotebookNode) -> Iterator[tuple[int, bytes]]:
    for number, output in _outputs(notebook):
        if "image/png" in output.get("data", {}):
            yield number, base64.b64decode(output.data["image/png"])


# ---- executed, and in a form that can be compared ----------------------------


def is_valid(notebook: NotebookNode, path: Path) -> Iterator[str]:
    try:
        nbformat.validate(notebook)
    except nbformat.ValidationError as error:
        yield str(error).splitlines()[0]


def was_executed_in_order(notebook: NotebookNode, path: Path) -> Iterator[str]:
    counts = [cell.execution_count for _, cell in _code(notebook)]
    if not counts or counts != list(range(1, len(counts) + 1)):
        yield f"execution counts are not 1..N but {counts}"


def has_no_stderr(notebook: NotebookNode, path: Path) -> Iterator[str]:
    for number, output in _outputs(notebook):
        if output.output_type == "stream" and output.name != "stdout":
            yield f"cell {number} wrote to {output.name}"


def has_text_and_png_only(notebook: NotebookNode, path: Path) -> Iterator[str]:
    for number, output in _outputs(notebook):
        for mime in sorted(set(output.get("data", {})) - MIME_TYPES):
            yield f"cell {number} shows {mime}"


def has_plain_pictures(notebook: NotebookNode, path: Path) -> Iterator[str]:
    for number, png in _pictures(notebook):
        if not png.startswith(b"\x89PNG\r\n\x1a\n"):
            yield f"cell {number}: not a PNG"
            continue
        width, height = struct.unpack(">II", png[16:24])
        if not (MIN_PIXELS <= width <= MAX_PIXELS and height <= MAX_PIXELS):
            yield f"cell {number}: a picture of {width} x {height} pixels"
        if b"tEXtSoftware" in png:
            yield f"cell {number}: the picture names the software that made it"


def has_no_semicolon_at_the_end(notebook: NotebookNode, path: Path) -> Iterator[str]:
    for number, cell in _code(notebook):
        if cell.source.rstrip().endswith(";"):
            yield f"cell {number} ends with a semicolon"


def has_no_absolute_path(notebook: NotebookNode, path: Path) -> Iterator[str]:
    for number, cell in _code(notebook):
        for text in _output_texts(cell):
            for found in ABSOLUTE.findall(TEMPORARY.sub("", text)):
                yield f"cell {number} shows the path {found}"
    for number, cell in enumerate(notebook.cells):
        for found in re.findall(r"/(?:home|root|Users)/\S*", cell.source):
            yield f"cell {number} contains the path {found}"


def names_no_machine(notebook: NotebookNode, path: Path) -> Iterator[str]:
    machine = socket.gethostname()
    texts = [cell.source for cell in notebook.cells]
    texts += [text for _, cell in _code(notebook) for text in _output_texts(cell)]
    # A machine may be called "lab" or "runner", which are words like any other.
    is_a_word = re.fullmatch(r"[a-z]{1,9}", machine)
    if not is_a_word and re.search(rf"\b{re.escape(machine)}\b", "\n".join(texts)):
        yield f"it contains the name of this machine, {machine}"
    known = {"name": "python3", "language": "python"}
    kernel = dict(notebook.metadata.get("kernelspec", {}))
    if kernel.pop("display_name", "") != "Python 3 (ipykernel)" or kernel != known:
        yield "its kernel is not the usual one"


def has_known_tags(notebook: NotebookNode, path: Path) -> Iterator[str]:
    for number, cell in enumerate(notebook.cells):
        for tag in sorted(set(_tags(cell)) - TAGS):
            yield f"cell {number} has the tag {tag}"
        if "NBVAL_" in cell.source:
            yield f"cell {number} speaks to nbval in a comment; use a tag"


def has_known_magics(notebook: NotebookNode, path: Path) -> Iterator[str]:
    """An unknown magic only prints, and the rest of its cell is skipped."""
    for number, cell in _code(notebook):
        for line in cell.source.splitlines():
            if magic := re.match(r"\s*%{1,2}(\w*)", line):
                if magic[1] not in MAGICS:
                    yield f"cell {number} uses the magic {magic[0].strip()}"
            elif line.lstrip().startswith("!"):
                yield f"cell {number}: a failing command after ! goes unnoticed"


def has_an_assert_at_each_tilde(notebook: NotebookNode, path: Path) -> Iterator[str]:
    for number, cell in _code(notebook):
        if "nbval-ignore-output" in _tags(cell) or "assert " in cell.source:
            continue
        for text in _output_texts(cell):
            if found := re.search(r"~ ?[-+]?\d\S*", text):
                yield f"cell {number} prints {found[0]} with no assert beside it"


def has_no_marker_left(notebook: NotebookNode, path: Path) -> Iterator[str]:
    for number, cell in enumerate(notebook.cells):
        if re.search(r"# (BEGIN SOLUTION|END SOLUTION|STUB)\b", cell.source):
            yield f"cell {number} still has the marks of an exercise"


def is_small_enough(notebook: NotebookNode, path: Path) -> Iterator[str]:
    size = len(nbformat.writes(notebook).encode())
    if size > MAX_BYTES:
        yield f"{size} bytes, at most {MAX_BYTES}"


def has_links_that_resolve(notebook: NotebookNode, path: Path) -> Iterator[str]:
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type != "markdown":
            continue
        for _, target in LINK.findall(cell.source):
            if re.match(r"https://[\w.-]+\.\w+(/|$)", target):
                continue
            if re.match(r"\w+:", target):
                yield f"cell {number}: the link {target} is not https"
                continue
            file, _, anchor = target.partition("#")
            goal = path.parent / file if file else path
            if file and not goal.exists():
                yield f"cell {number}: the link {target} leads nowhere"
            elif anchor and anchor not in _anchors(notebook if not file else goal):
                yield f"cell {number}: the link {target} leads to no heading"


def _anchors(where: NotebookNode | Path) -> set[str]:
    """Headings as JupyterLab and GitHub make links of them."""
    if isinstance(where, Path):
        if where.suffix == ".ipynb":
            where = nbformat.read(where, as_version=4)
        else:
            lines = where.read_text(encoding="utf-8").splitlines()
    if not isinstance(where, Path):
        lines = [line for _, c in _text(where) for line in c.source.splitlines()]
    headings = [line.lstrip("#").strip() for line in lines if re.match(r"#+ ", line)]
    github = {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in headings
    }
    return github | {heading.replace(" ", "-") for heading in headings}


# ---- readable ----------------------------------------------------------------


def has_a_fair_length(notebook: NotebookNode, path: Path) -> Iterator[str]:
    if not MIN_CELLS <= len(notebook.cells) <= MAX_CELLS:
        yield f"{len(notebook.cells)} cells, not {MIN_CELLS} to {MAX_CELLS}"
    num_words = sum(len(cell.source.split()) for _, cell in _text(notebook))
    if num_words > MAX_WORDS:
        yield f"{num_words} words, at most {MAX_WORDS}"


def has_short_code_cells(notebook: NotebookNode, path: Path) -> Iterator[str]:
    for number, cell in _code(notebook):
        num_lines = len(cell.source.strip().splitlines())
        limit = MAX_LINES_WORKER if _is_one_function(cell.source) else MAX_LINES
        if num_lines == 0:
            yield f"cell {number} is empty"
        if num_lines > limit:
            yield f"cell {number} has {num_lines} lines, at most {limit}"


def _is_one_function(source: str) -> bool:
    """A worker function alone in its cell, with the imports that it needs."""
    try:
        body = ast.parse(source).body
    except SyntaxError:  # a magic
        return False
    rest = [s for s in body if not isinstance(s, ast.Import | ast.ImportFrom)]
    return len(rest) == 1 and isinstance(rest[0], ast.FunctionDef)


def has_text_between_code(notebook: NotebookNode, path: Path) -> Iterator[str]:
    """Only the `check` of an exercise may follow its stub at once."""
    for (number, cell), (_, following) in pairwise(enumerate(notebook.cells)):
        if cell.cell_type == following.cell_type == "code":
            is_check = re.fullmatch(r"check\(.*\)", following.source.strip(), re.DOTALL)
            if not is_check:
                yield f"no text between the code cells {number} and {number + 1}"


def has_a_head(notebook: NotebookNode, path: Path) -> Iterator[str]:
    text = _text(notebook)
    first = text[0][1].source if text else ""
    if not first.startswith("# "):
        yield "the first text cell has no title"
    if not re.search(r"\bable to\b", first):
        yield "the first text cell does not say what you will be able to do"
    if not re.search(r"\b\d+ minutes\b", first):
        yield "the first text cell does not say how many minutes it takes"


def has_an_end(notebook: NotebookNode, path: Path) -> Iterator[str]:
    found = [
        name.lower()
        for _, cell in _text(notebook)
        for name in re.findall(
            r"^##+ (summary|exercises|next)\b", cell.source, re.MULTILINE | re.I
        )
    ]
    if found[-3:] != ["summary", "exercises", "next"]:
        yield f"it does not end with Summary, Exercises, Next, but with {found[-3:]}"


SOLUTION_RULES: list[Rule] = [
    is_valid,
    was_executed_in_order,
    has_no_stderr,
    has_text_and_png_only,
    has_plain_pictures,
    has_no_semicolon_at_the_end,
    has_no_absolute_path,
    names_no_machine,
    has_known_tags,
    has_known_magics,
    has_an_assert_at_each_tilde,
    has_no_marker_left,
    has_links_that_resolve,
    is_small_enough,
]
LESSON_RULES: list[Rule] = [
    *SOLUTION_RULES,
    has_a_fair_length,
    has_short_code_cells,
    has_text_between_code,
    has_a_head,
    has_an_end,
]
