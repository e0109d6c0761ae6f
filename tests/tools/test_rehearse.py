"""A failure that is rehearsed comes on one rank, in one life, after one step."""

import signal

import pytest
import torch

from ddp_lab.tools.rehearse import rehearse_failure


@pytest.fixture
def struck(monkeypatch):
    """Signals that have come, each with the number of steps that were done."""
    came, steps = [], []
    before = signal.signal(signal.SIGUSR2, lambda *_: came.append(len(steps)))
    weight = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def train(num_steps):
        for _ in range(num_steps):
            steps.append(1)
            optimizer.step()
        return came

    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "1")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    yield train
    signal.signal(signal.SIGUSR2, before)


def test_it_comes_once_after_the_step_and_not_after_the_block(struck):
    with rehearse_failure(signal.SIGUSR2, rank=1, step=3):
        assert struck(5) == [3]
    assert struck(5) == [3]


@pytest.mark.parametrize("other", [{"rank": 0}, {"step": None}, {"life": 1}])
def test_other_ranks_and_other_lives_are_left_alone(struck, other):
    with rehearse_failure(signal.SIGUSR2, **{"rank": 1, "step": 3, **other}):
        assert struck(5) == []


@pytest.mark.parametrize("name", ["TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"])
def test_lives_are_counted_as_the_launcher_does(struck, monkeypatch, name):
    monkeypatch.setenv(name, "1")
    with rehearse_failure(signal.SIGUSR2, rank=1, step=2):
        assert struck(5) == []
    with rehearse_failure(signal.SIGUSR2, rank=1, step=2, life=1):
        assert struck(5) == [7]


def test_a_block_that_fails_leaves_nothing_behind(struck):
    with pytest.raises(ZeroDivisionError):
        with rehearse_failure(signal.SIGUSR2, rank=1, step=1):
            _ = 1 / 0
    assert struck(2) == []
