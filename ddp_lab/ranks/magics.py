"""Run notebook cells on ranks: ``%ranks``, ``%%ranks``, ``%push``, ``%pull``.

    %load_ext ddp_lab
    %ranks 2                      # start two ranks; they join a process group

    %%ranks                       # this cell runs on both
    x = torch.full((2,), float(rank))
    dist.all_reduce(x)
    x                             # the last expression is shown for each rank

    %%ranks 0                     # this one on rank 0 alone; or 0,2 or 0:2
    y = x + 1

    %pull y 0                     # the notebook's y is now rank 0's
    %ranks off

Each rank has a namespace of its own that persists from cell to cell, as the notebook's
does. In it stand from the start ``rank``, ``world_size``, ``device``, ``dist`` and
``torch``. The notebook's own variables are not there: `%push` sends some.

What `launch` promises holds for a cell too: all output in rank order, every traceback,
a table instead of a deadlock. It builds on `Workers`.
"""

import argparse
import ast
import contextlib
import linecache
import re
import shlex
import sys
import traceback
import warnings
from collections.abc import Iterator
from typing import Any, NoReturn

from IPython.core.magic import Magics, line_cell_magic, line_magic, magics_class

from ddp_lab.errors import BadInput, signal_name
from ddp_lab.ranks import _cells as cells
from ddp_lab.ranks._arguments import check_which
from ddp_lab.ranks._interrupts import hold_interrupts
from ddp_lab.ranks.workers import Workers

__all__ = ["PerRank", "RankMagics", "load_ipython_extension"]

_MAGIC_LINE = re.compile(r"\s*(?:[\w.,\s]+=\s*)?([%!?][^\s(]*)")


def load_ipython_extension(shell: Any) -> None:
    """Register the magics; ``%load_ext ddp_lab`` comes here."""
    shell.register_magics(RankMagics(shell))


class PerRank:
    """The last expression of a cell, as text, by rank.

    Args:
        texts: what each rank shows, by rank.
    """

    def __init__(self, texts: dict[int, str]) -> None:
        self.texts = texts

    def __repr__(self) -> str:
        width = max(len(f"rank {rank}: ") for rank in self.texts)
        return "\n".join(
            f"rank {rank}: ".ljust(width) + text.replace("\n", "\n" + " " * width)
            for rank, text in self.texts.items()
        )


@magics_class
class RankMagics(Magics):
    """The ranks of one notebook, and the magics that talk to them."""

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        self._shell = shell
        self._workers: Workers | None = None
        self._places: list[tuple[str, str]] = []  # each rank's device and backend

    @line_cell_magic
    def ranks(self, line: str, cell: str | None = None) -> PerRank | None:
        """Start ranks, or run a cell on them.

        %ranks 4            start 4 ranks and join them in a process group
        %ranks 4 --device cpu --threads 1
        %ranks              show them: alive, device, memory, process id
        %ranks off          end them

        %%ranks             run the cell on all ranks
        %%ranks 0,2         ... on ranks 0 and 2;  0:2 is ranks 0 and 1
        %%ranks --stuck-after 5 --timeout 60
                            seconds until waiting ranks, or all ranks, are stopped

        Names persist on each rank from cell to cell. Preset are rank, world_size,
        device, dist and torch; %push sends the notebook's variables, %pull fetches.
        The cell is plain Python: no magics, no top-level await. A last expression is
        shown for each rank; end it with a semicolon to hide it.
        """
        __tracebackhide__ = True
        with _in_one_line():
            if cell is None:
                self._line(line)
                return None
            return self._cell(line, cell)

    @line_magic
    def push(self, line: str) -> None:
        """Copy variables of the notebook to all ranks.

        %push model data

        Each rank gets its own copy, and tensors arrive on the CPU. A function takes
        along the notebook's values of the names that it uses; rank, world_size,
        device, dist and torch it finds on the rank.
        """
        __tracebackhide__ = True
        with _in_one_line():
            names = line.replace(",", " ").split()
            if not names:
                raise BadInput("%push needs names of variables: %push model data")
            known = self._shell.user_ns
            if missing := [name for name in names if name not in known]:
                raise BadInput(f"`{missing[0]}` is not defined in the notebook")
            values = {name: known[name] for name in names}
            self._running().run(cells.take, **values)

    @line_magic
    def pull(self, line: str) -> None:
        """Copy a variable of the ranks into the notebook.

        %pull loss          the notebook's loss is then a list, one value a rank
        %pull loss 1        ... is rank 1's value

        Tensors arrive on the CPU.
        """
        __tracebackhide__ = True
        with _in_one_line():
            words = line.split()
            if len(words) not in (1, 2) or not words[0].isidentifier():
                raise BadInput("%pull needs one name, and perhaps a rank: %pull loss 1")
            name = words[0]
            workers = self._running()
            only = _which(words[1], workers.num_ranks) if len(words) == 2 else None
            found = workers.run(cells.has, name, only=only, echo=False)
            asked = only if only is not None else range(workers.num_ranks)
            if missing := [r for r, has in zip(asked, found, strict=True) if not has]:
                where = ", ".join(map(str, missing))
                raise BadInput(f"`{name}` is not defined on rank {where}")
            values = workers.run(cells.give, name, only=only)
            one = len(words) == 2 and len(values) == 1
            self._shell.user_ns[name] = values[0] if one else values

    def close(self) -> None:
        """End the ranks, if there are any."""
        if self._workers is not None:
            self._workers.close()
            self._workers = None

    def _running(self) -> Workers:
        if self._workers is None:
            raise BadInput("no ranks are running: start some with %ranks 2")
        return self._workers

    def _line(self, line: str) -> None:
        __tracebackhide__ = True
        parser = _Parser("%ranks")
        parser.add_argument("what", nargs="?")
        parser.add_argument("--device", default="auto")
        parser.add_argument("--threads", type=int)
        options = parser.parse(line)
        if options.what is None:
            self._table()
        elif options.what == "off":
            self._off()
        else:
            if not re.fullmatch(r"-?\d+", options.what):
                raise BadInput(
                    f"%ranks {options.what}: say how many, as in %ranks 2, or off"
                )
            self._on(int(options.what), options.device, options.threads)

    def _on(self, num_ranks: int, device: str, num_threads: int | None) -> None:
        __tracebackhide__ = True
        # an interrupt between "ranks started" and "ranks noted" would leave them behind
        with hold_interrupts():
            workers = Workers(
                num_ranks,
                init=True,
                device=device,
                num_threads=num_threads,
                setup=cells.preset,
                name="%ranks",
            )
            self.close()  # only now: a mistake in the line costs nothing
            try:
                self._places = workers.run(cells.place, echo=False)
            except BaseException:
                workers.close()
                raise
            self._workers = workers
        device, backend = self._places[0]
        kind = device.partition(":")[0]
        many = f"{num_ranks} ranks are" if num_ranks > 1 else "1 rank is"
        print(f"{many} ready on {kind}, joined by {backend}, with {cells.PRESET}")

    def _off(self) -> None:
        num_ranks = self._running().num_ranks
        self.close()
        print(f"{num_ranks} rank{'s' if num_ranks > 1 else ''} ended")

    def _table(self) -> None:
        """Tell of each rank. Numbers that vary are in a form that tests can hide."""
        workers = self._running()
        gpu_mb: list[float | None] = [None] * workers.num_ranks
        alive = workers.exit_codes == [None] * workers.num_ranks
        if alive and self._places[0][0].startswith("cuda"):
            gpu_mb = workers.run(cells.gpu_mb, echo=False)
        for rank, code in enumerate(workers.exit_codes):
            device = self._places[rank][0]
            line = f"rank {rank}  {_state(code):<7}  {device}"
            if code is None:
                pid = workers.pids[rank]
                line += f"  memory ~ {_memory_mb(pid)} MB"
                if gpu_mb[rank] is not None:
                    line += f"  on the GPU ~ {gpu_mb[rank]:.0f} MB"
                line += f"  pid {pid}"
            print(line)
        if not alive:
            print("the next %%ranks cell starts new ranks")

    def _cell(self, line: str, cell: str) -> PerRank | None:
        __tracebackhide__ = True
        parser = _Parser("%%ranks")
        parser.add_argument("which", nargs="*")
        parser.add_argument("--stuck-after", type=float, default=30.0)
        parser.add_argument("--timeout", type=float)
        options = parser.parse(line)
        workers = self._running()
        only = _which(",".join(options.which), workers.num_ranks)
        # the magic's own line comes first, so that numbers are those of the cell
        source = f"# %%ranks {line}".rstrip() + f"\n{cell}"
        name = self._remember(source)
        _check(source, name)
        values = workers.run(
            cells.run_cell,
            source,
            name,
            only=only,
            stuck_after_s=options.stuck_after,
            timeout_s=options.timeout,
        )
        asked = only if only is not None else range(workers.num_ranks)
        texts = {
            rank: text
            for rank, text in zip(asked, values, strict=True)
            if text is not None
        }
        return PerRank(texts) if texts else None

    def _remember(self, source: str) -> str:
        """Keep the cell's lines for tracebacks; return its name in them."""
        lines = source.splitlines(keepends=True)
        number = 1
        name = unique = self._cell_name()
        # without history (nbval) every cell is In[1]: keep their sources apart
        while linecache.getlines(unique) not in ([], lines):
            number += 1
            unique = f"{name} ({number})"
        linecache.cache[unique] = (len(source), None, lines, unique)
        return unique

    def _cell_name(self) -> str:
        """What IPython calls the cell that is running."""
        frame = sys._getframe()
        while frame.f_back is not None:
            frame = frame.f_back
            if parts := self._shell.compile.format_code_name(frame.f_code.co_filename):
                return " ".join(parts)
        return f"Cell In[{self._shell.execution_count}]"


@contextlib.contextmanager
def _in_one_line() -> Iterator[None]:
    """Let a notebook show what the user did without our frames around it."""
    __tracebackhide__ = True
    try:
        yield
    except (BadInput, KeyboardInterrupt) as error:
        text = ": ".join(filter(None, [type(error).__name__, str(error)]))
        vars(error).setdefault("_render_traceback_", lambda: [text])
        raise


class _Parser(argparse.ArgumentParser):
    def __init__(self, prog: str) -> None:
        super().__init__(prog=prog, add_help=False, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        # not IPython's UsageError: that only prints, and tests of the notebook pass
        raise BadInput(f"{self.prog}: {message} (%ranks? shows what there is)")

    def parse(self, line: str) -> argparse.Namespace:
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            self.error(str(error).lower())
        return self.parse_args(words)


def _which(text: str, num_ranks: int) -> list[int] | None:
    """The ranks that "0,2" or "0:2" names; None for all."""
    if not text or text == "all":
        return None
    chosen: set[int] = set()
    for part in filter(None, text.split(",")):
        if re.fullmatch(r"\d+", part):
            chosen.add(int(part))
        elif re.fullmatch(r"\d*:\d*(:[1-9]\d*)?", part):
            bounds = [int(number) if number else None for number in part.split(":")]
            chosen |= set(range(num_ranks)[slice(*bounds)])
        else:
            raise BadInput(f"{part!r} names no ranks: write 0,2 or 0:2, or nothing")
    if not chosen:
        raise BadInput(f"{text!r} names none of the {num_ranks} ranks")
    check_which(sorted(chosen), num_ranks)
    return sorted(chosen)


def _check(source: str, name: str) -> None:
    """Refuse a cell that cannot run, before anything is sent."""
    __tracebackhide__ = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the ranks will warn
        try:
            compile(source, name, "exec", dont_inherit=True)
            return
        except SyntaxError as error:
            problem = error
        with contextlib.suppress(SyntaxError):
            flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
            compile(source, name, "exec", flags, dont_inherit=True)
            raise BadInput(
                f"{name}, line {problem.lineno}: top-level await needs the notebook's "
                "event loop, which the ranks do not have: use asyncio.run(...)"
            )
    magic = _MAGIC_LINE.match(source.splitlines()[(problem.lineno or 1) - 1])
    if magic:
        raise BadInput(
            f"{name}, line {problem.lineno}: {magic[1]} is a notebook command, and the "
            "ranks run plain Python: put it in a cell of its own"
        )
    refused = BadInput(f"{name}, line {problem.lineno}: SyntaxError: {problem.msg}")
    lines = "".join(traceback.format_exception_only(problem)).splitlines()
    lines[0] = f"  {name}, line {problem.lineno}"
    vars(refused)["_render_traceback_"] = lambda: lines
    raise refused


def _state(exit_code: int | None) -> str:
    if exit_code is None:
        return "alive"
    if exit_code < 0:
        return f"dead ({signal_name(-exit_code)})"
    return f"dead (exit code {exit_code})"


def _memory_mb(pid: int) -> str:
    """What a process holds in memory, with what it shares with others."""
    try:
        import psutil

        return f"{psutil.Process(pid).memory_info().rss / 2**20:.0f}"
    except Exception:
        return "?"
