"""Who used CUDA first? An opt-in hook that names the import or the line.

A forked process cannot use CUDA once its parent has ("Cannot re-initialize CUDA in
forked subprocess"), and the message does not say what in the parent did. Often it is
an innocent import. `launch` spawns and does not mind; other tools fork:

    from ddp_lab.tools import cuda_finder
    cuda_finder.install()        # first cell
    ...
    print(cuda_finder.first_use())
    # import of bitsandbytes, at Cell In[2], line 1: import bitsandbytes
"""

import sys
from types import FrameType
from typing import Any

from ddp_lab.ranks.stacks import user_line

__all__ = ["first_use", "install"]

_first: str | None = None


def install() -> None:
    """Note who calls torch's CUDA initialisation first; costs nothing until then."""
    import torch

    original: Any = torch.cuda._lazy_init
    if getattr(original, "is_ddp_lab_finder", False):
        return

    def noting(*args: Any, **kwargs: Any) -> Any:
        global _first
        if _first is None and not torch.cuda.is_initialized():
            _first = _caller()
        return original(*args, **kwargs)

    noting.is_ddp_lab_finder = True  # type: ignore[attr-defined]
    torch.cuda._lazy_init = noting


def first_use() -> str:
    """Say what initialised CUDA in this process.

    Returns:
        The line of the user's code, with the module whose import did it, if any; or
        that nothing has, or that it happened before `install`.
    """
    import torch

    if _first is not None:
        return _first
    if torch.cuda.is_initialized():
        return "CUDA was initialised before install() was called"
    return "nothing has initialised CUDA"


def _caller() -> str:
    frame: FrameType | None = sys._getframe(2)
    lines: list[tuple[str, int, str]] = []
    module = imported = None
    while frame is not None:  # from the call outwards
        code = frame.f_code
        if code.co_filename.startswith("<frozen importlib"):
            imported = module  # in the end, of the outermost import
            lines.clear()  # what it runs is not the user's line: the import is
        elif code.co_name == "<module>":
            module = frame.f_globals.get("__name__")
        lines.append((code.co_filename, frame.f_lineno, code.co_name))
        frame = frame.f_back
    where = user_line(reversed(lines))
    return f"import of {imported}, at {where}" if imported else where
