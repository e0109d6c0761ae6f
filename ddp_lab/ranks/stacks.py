"""Stacks and tracebacks in the user's words: cells by their name, no plumbing.

Between the start of a rank's process and the user's function stand frames of Python,
of torch and of this package. Nobody looks for a mistake there, so they are left out.
"""

import linecache
import os
import re
import sysconfig
import traceback
from collections.abc import Iterable, Sequence

__all__ = [
    "PACKAGE",
    "PLUMBING",
    "Line",
    "short_name",
    "stack_text",
    "traceback_text",
    "user_line",
]

Line = tuple[str, int, str]  # file name, line number, function

PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
"""Folder of this package, with all that is below it."""
PLUMBING = tuple(
    os.path.join(PACKAGE, "ranks", name)
    for name in ("_cells.py", "_main.py", "_pickling.py", "_watch.py")
)
"""Files whose frames stand between a rank's start and the user's code."""

_LIBRARIES = tuple(
    path + os.sep
    for path in {sysconfig.get_paths()[k] for k in ("stdlib", "purelib", "platlib")}
)


def user_line(lines: Iterable[Line]) -> str:
    """The innermost line that the user wrote, of frames given outermost first."""
    frames = [line for line in lines if not line[0].startswith("<frozen")]
    born = (i for i, line in enumerate(frames) if line[0] in PLUMBING)
    frames = frames[next(born, 0) :]  # before it, only how the process was started
    for skip in ((*_LIBRARIES, PACKAGE), (*_LIBRARIES, *PLUMBING)):
        for filename, number, _ in reversed(frames):
            if not filename.startswith(skip):
                return _line_text(filename, number)
    return "before the function started"


def _line_text(filename: str, number: int) -> str:
    name = filename if filename.startswith("Cell In[") else os.path.basename(filename)
    source = linecache.getline(filename, number).strip()
    return f"{name}, line {number}" + (f": {source}" if source else "")


def stack_text(lines: Sequence[Line]) -> str:
    """The stack from the user's function inwards, with source lines."""
    first = max(
        (i + 1 for i, line in enumerate(lines) if line[0] in PLUMBING), default=0
    )
    text = ""
    for filename, number, function in lines[first:]:
        source = linecache.getline(filename, number).strip()
        text += f"  {short_name(filename)}, line {number}, in {function}\n"
        text += f"    {source}\n" if source else ""
    return text


def short_name(filename: str) -> str:
    """A file's name without the part that differs between machines."""
    for root in (*_LIBRARIES, os.path.dirname(PACKAGE[:-1]) + os.sep):
        if filename.startswith(root):
            return filename[len(root) :]
    return filename


def traceback_text(error: BaseException) -> str:
    """Format an exception as Python does, with cells named and our frames left out."""
    inside = error.__traceback__
    while inside is not None and inside.tb_frame.f_code.co_filename in PLUMBING:
        inside = inside.tb_next
    linecache.checkcache()
    text = "".join(traceback.format_exception(type(error), error, inside))
    return re.sub(r'File "([^"]+)"', _file_text, text)


def _file_text(match: re.Match[str]) -> str:
    name = match[1]
    return name if name.startswith("Cell In[") else f'File "{short_name(name)}"'
