"""Every error that ddp_lab raises on purpose.

    Exception
    └── LabError              one clear line: which rank or setting, what, the cure
        ├── BadInput          a setting, file or argument that cannot work
        │   └── NotSendable   an argument of launch() that cannot travel to a process
        ├── RankFailed        a rank raised, exited or was killed
        ├── RanksStuck        ranks wait for each other and cannot go on
        ├── RanksDisagree     the ranks were about to train different things
        ├── Diverged          the loss became NaN or infinite
        └── CheckFailed       a learner's function does not do what the exercise asks

``python -m ddp_lab.train`` prints the message of a `LabError` as one line, without a
traceback, and exits with the status in ``exit_status``.
"""

__all__ = [
    "BadInput",
    "CheckFailed",
    "Diverged",
    "LabError",
    "NotSendable",
    "RankFailed",
    "RanksDisagree",
    "RanksStuck",
]


class LabError(Exception):
    """An error with a message written for the person who runs the lab."""

    exit_status = 1


class BadInput(LabError, ValueError):
    """A setting, a file or an argument that cannot work; nothing was started."""

    exit_status = 2


class NotSendable(BadInput):
    """An argument of `launch` that cannot travel to another process, by name."""


class RankFailed(LabError):
    """A rank raised an exception, exited early or was killed."""


class RanksStuck(LabError):
    """Ranks wait for each other, or for ever, and were stopped."""


class RanksDisagree(LabError):
    """The ranks hold different models, data or settings, found before step 1."""

    exit_status = 2


class Diverged(LabError):
    """The loss is no longer a finite number, so training on makes no sense."""


class CheckFailed(LabError):
    """An exercise's function was run and does not have the property asked for."""
