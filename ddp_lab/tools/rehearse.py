"""Rehearse a failure: a signal on one rank, after so many optimiser steps.

    with rehearse_failure(signal.SIGKILL, rank=1, step=11):
        train()

Whoever has never seen their run come back does not know whether it would.
"""

import contextlib
import itertools
import os
from collections.abc import Iterator
from typing import Any

from ddp_lab.world import read_ranks

__all__ = ["rehearse_failure"]


@contextlib.contextmanager
def rehearse_failure(
    number: int, *, rank: int, step: int | None, life: int = 0
) -> Iterator[None]:
    """Raise a signal on one rank, after an optimiser step of the block.

    The signal comes when the weights have made the step, before the training loop has
    noted it. All other ranks, and other lives, run as ever.

    Args:
        number: the signal: ``signal.SIGKILL`` for a crash, ``SIGTERM`` to ask.
        rank: who gets it.
        step: after this many optimiser steps in the block, from 1; None for never.
        life: how often the launcher has started the program before, as torchrun
            (``TORCHELASTIC_RESTART_COUNT``) and Slurm (``SLURM_RESTART_COUNT``) count.
    """
    from torch.optim.optimizer import register_optimizer_step_post_hook

    own = (read_ranks() or {"rank": 0})["rank"]
    names = "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"
    lives = [int(os.environ[name]) for name in names if os.environ.get(name)]
    if step is None or own != rank or max(lives, default=0) != life:
        yield
        return
    steps = itertools.count(1)

    def strike(*_: Any) -> None:
        if next(steps) == step:
            os.kill(os.getpid(), number)

    hook = register_optimizer_step_post_hook(strike)
    try:
        yield
    finally:
        hook.remove()
