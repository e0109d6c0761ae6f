"""Which rank's failure is the cause, told from what became of all of them."""

import signal

import pytest

from ddp_lab.errors import Failure
from ddp_lab.ranks._calls import Outcome
from ddp_lab.ranks._report import died, failure_error
from ddp_lab.ranks._watch import Watch


def failed(rank, at_s, kind="ValueError", where="line 1", consequence=False):
    failure = Failure(
        rank=rank, kind=kind, message="", where=where, consequence=consequence
    )
    return Outcome(failure=failure, at_s=at_s)


@pytest.mark.parametrize(
    ("outcomes", "order"),
    [
        # the same mistake on all: whoever was faster, the lowest rank speaks
        ([failed(0, at_s=2.0), failed(1, at_s=1.0)], [0, 1]),
        # different mistakes: the first one
        ([failed(0, at_s=2.0), failed(1, at_s=1.0, kind="KeyError")], [1, 0]),
        ([failed(0, at_s=2.0), failed(1, at_s=1.0, where="line 2")], [1, 0]),
        # a broken connection is never the cause, even if it was told first
        ([failed(0, at_s=1.0, consequence=True), failed(1, at_s=2.0)], [1, 0]),
    ],
)
def test_who_was_first(outcomes, order):
    error = failure_error(outcomes, Watch(2, 30.0))
    assert [failure.rank for failure in error.failures] == order
    assert str(error).startswith(f"rank {order[0]} of 2 failed: ")


def test_a_rank_that_nccl_ended_while_it_waited_is_not_the_cause():
    """Its words are those of torch's library; nccl itself has not run here."""
    words = "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5"
    waited = died(0, -signal.SIGABRT, None, words)
    assert waited.failure.consequence
    error = failure_error([waited, failed(1, at_s=1e12)], Watch(2, 30.0))
    assert [failure.rank for failure in error.failures] == [1, 0]


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("SIGKILL", "killed from outside, most likely because memory ran out"),
        ("SIGSEGV", "it crashed in native code"),
        ("SIGBUS", "most likely /dev/shm is full"),
        ("SIGABRT", "native code gave up"),
        ("SIGTERM", "ended from outside"),
        ("SIGUSR1", "the process was killed"),
    ],
)
def test_what_a_signal_says(name, cause):
    number = signal.Signals[name]
    failure = died(1, -number, None, "").failure
    assert failure.rank == 1
    assert failure.exit_code == -number
    assert failure.headline.startswith(f"{name}: {cause}")
