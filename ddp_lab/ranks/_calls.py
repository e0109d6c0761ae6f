"""What goes between the parent and a rank: a call, and how it ended."""

from dataclasses import dataclass

from ddp_lab.errors import Failure

__all__ = ["Call", "Outcome"]


@dataclass(frozen=True, kw_only=True)
class Call:
    """What the parent asks of a rank; the packed function follows as bytes."""

    env: dict[str, str]
    num_threads: int
    init: bool
    device: str
    sources: dict[str, list[str]]
    """Lines of cells, by the name in tracebacks."""
    fork_loaders: bool
    """DataLoader workers are forks, unless the user has chosen another way."""
    num_shared: int
    """Handles of shared storages that follow."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a call ended on one rank: returned, failed, or not meant for this rank.

    What the function returned follows as bytes.
    """

    failure: Failure | None = None
    """How it failed; None if it returned."""
    exception: bytes | None = None
    """The exception, packed, when it can travel."""
    at_s: float = 0.0
    """When it failed, on the clock that all processes of a machine share."""
    collective: str = "-"
    """The last one that the rank entered."""
    group_open: bool = False
    """The process group outlives the call, and needs its store."""
    left_out: bool = False
    """The call was for other ranks only."""
