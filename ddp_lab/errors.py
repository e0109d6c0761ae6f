"""Every error that ddp_lab raises on purpose.

    Exception
    └── LabError              one clear line: which rank or setting, what, the cure
        ├── BadInput          a setting, file or argument that cannot work
        │   └── NotSendable   an argument of launch() that cannot travel to a process
        ├── RankFailed        a rank raised, exited or was killed
        ├── RanksStuck        ranks wait for each other and cannot go on
        ├── RanksDisagree     the ranks were about to train different things
        ├── Diverged          the loss became NaN or infinite
        ├── Stopped           a signal asked the run to stop; it is saved
        └── CheckFailed       a learner's function does not do what the exercise asks

``python -m ddp_lab.train`` prints the message of a `LabError` as one line, without a
traceback, and exits with the status in ``exit_status``.
"""

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = [
    "STOP_SIGNALS",
    "BadInput",
    "CheckFailed",
    "Diverged",
    "Failure",
    "LabError",
    "NotSendable",
    "RankFailed",
    "RanksDisagree",
    "RanksStuck",
    "Stopped",
    "lab_error_inside",
    "signal_name",
]

STOP_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name)
)
"""Ask a run to save and stop, which ends it with `Stopped`."""


def signal_name(number: int) -> str:
    """``SIGTERM`` for 15; ``signal 99`` for one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class LabError(Exception):
    """An error with a message written for the person who runs the lab."""

    exit_status = 1


class BadInput(LabError, ValueError):
    """A setting, a file or an argument that cannot work; nothing was started."""

    exit_status = 2


class NotSendable(BadInput):
    """An argument of `launch` that cannot travel to another process, by name."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """How one rank failed."""

    rank: int
    kind: str
    """Name of the exception or of the signal; ``exit`` if the process just ended."""
    message: str
    traceback: str = ""
    """As Python prints it, without the lab's own frames; empty for a killed rank."""
    where: str = ""
    """The user's line: ``Cell In[3], line 4: loss.backward()``."""
    consequence: bool = False
    """The connection to another rank broke: that one failed before."""
    exit_code: int | None = None
    """Of ``sys.exit`` or of the process; minus the signal's number if it was killed."""
    exception: BaseException | None = None
    """The exception itself, when it could travel."""

    @property
    def headline(self) -> str:
        """``ValueError: the message``."""
        return f"{self.kind}: {self.message}" if self.message else self.kind


class RankFailed(LabError):
    """A rank raised an exception, exited early or was killed.

    Attributes:
        failures: one `Failure` for each rank that failed, the first cause first.
        others: one line for each other rank: what it was doing.
    """

    def __init__(
        self,
        message: str,
        *,
        failures: Sequence[Failure] = (),
        others: Sequence[str] = (),
    ) -> None:
        super().__init__(message)
        self.failures = tuple(failures)
        self.others = tuple(others)

    @property
    def report(self) -> str:
        """The first failing rank's traceback, then the others, one line each."""
        parts = []
        if self.failures and self.failures[0].traceback:
            parts.append(f"On rank {self.failures[0].rank}:")
            parts.append(self.failures[0].traceback.rstrip())
        if self.others:
            parts += ["", *self.others] if parts else self.others
        return "\n".join(parts)

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows: the rank's traceback, not how it got here."""
        return [f"RankFailed: {self}", "", *self.report.splitlines()]


def lab_error_inside(error: LabError) -> LabError:
    """The error that a rank raised on purpose, if that is why it failed."""
    for failure in error.failures if isinstance(error, RankFailed) else ():
        if isinstance(failure.exception, LabError):
            return failure.exception
    return error


class RanksStuck(LabError):
    """Ranks wait for each other, or for ever, and were stopped.

    The message holds a table: each rank, its state, its last collective, its line.

    Attributes:
        rows: the table's rows, one a rank.
        stacks: the whole Python stack of each stopped rank, as text.
    """

    def __init__(
        self, message: str, *, rows: Sequence[Any] = (), stacks: str = ""
    ) -> None:
        super().__init__(message)
        self.rows = tuple(rows)
        self.stacks = stacks

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows: the table, then the stacks."""
        return [*f"RanksStuck: {self}".splitlines(), "", *self.stacks.splitlines()]


class RanksDisagree(LabError):
    """The ranks hold different models, data or settings, found before step 1."""

    exit_status = 2


class Diverged(LabError):
    """The loss is no longer a finite number, so training on makes no sense."""


class Stopped(LabError):
    """A signal asked the run to stop: it is saved, and can go on where it was.

    The exit status is EX_TEMPFAIL of sysexits.h: not done, run it again.
    """

    exit_status = 75


class CheckFailed(LabError):
    """An exercise's function was run and does not have the property asked for.

    Attributes:
        report: the learner's lines on which it failed, and what they printed.
    """

    def __init__(self, message: str, *, report: str = "") -> None:
        super().__init__(message)
        self.report = report

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows: the message, and no line of the lab's own."""
        return [*f"CheckFailed: {self}".splitlines(), "", *self.report.splitlines()]
