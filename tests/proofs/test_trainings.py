"""Losses of a training on warm ranks, and of a small net with several seeds."""

import math
from dataclasses import replace

import pytest
import torch

from ddp_lab.config import TrainConfig
from ddp_lab.errors import BadInput
from ddp_lab.proofs.trainings import losses_by_seed, losses_of, small_net
from ddp_lab.proofs.world_sizes import compare_world_sizes
from ddp_lab.ranks.workers import Workers
from small_commands import SMALL_MODEL

CONFIG = TrainConfig(
    norm="group",
    precision="float64",
    image_size=16,
    epochs=2,
    global_batch_size=12,
    limit_train=24,
    limit_test=9,
    lr=1e-3,
    schedule="constant",
    device="cpu",
)
SMALL = TrainConfig(
    image_size=8,
    epochs=10,
    lr=0.01,
    lr_batch_size=16,
    schedule="constant",
    weight_decay=0.0,
    nesterov=False,
    device="cpu",
)


@pytest.fixture(scope="module")
def workers():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", SMALL_MODEL)  # of the ranks
        with Workers(2, num_threads=1) as workers:
            yield workers


def test_losses_are_those_of_the_run_on_any_number_of_ranks(workers):
    one, two = losses_of(workers, 1, CONFIG), losses_of(workers, 2, CONFIG)
    assert len(one) == len(two) == 4
    assert one == pytest.approx(two, rel=1e-10)
    own = replace(CONFIG, norm="batch")  # each rank's own, so they must be two
    assert losses_of(workers, 1, own) != losses_of(workers, 2, own)
    assert losses_of(workers, 1, replace(CONFIG, log_every=3)) == one


def test_world_sizes_are_compared_on_ranks_that_are_warm(workers):
    pids = workers.pids
    same = compare_world_sizes((1, 2), CONFIG, workers=workers)
    assert same.is_rounding
    assert list(same.curves[0].losses) == losses_of(workers, 1, CONFIG)
    assert workers.pids == pids  # and they stay
    with pytest.raises(BadInput, match=r"\[1, 4\] need 4 ranks, .* workers have 2"):
        compare_world_sizes((1, 4), CONFIG, workers=workers)


@pytest.mark.parametrize("world_size", [0, 3])
def test_world_sizes_that_there_are_no_ranks_for(workers, world_size):
    with pytest.raises(BadInput, match="must be 1 to 2, the ranks that"):
        losses_of(workers, world_size, CONFIG)


# ------------------------------------------------------------------------- seeds


def test_seeds_differ_and_come_out_again():
    config = replace(SMALL, epochs=1, global_batch_size=256)
    first, second = losses_by_seed(config, seeds=(0, 1))
    assert len(first) == len(second) == 5
    assert first != second
    assert losses_by_seed(config, seeds=(1,)) == [second]


def test_one_thread_computes_and_the_others_come_back():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        losses_by_seed(replace(SMALL, epochs=1, global_batch_size=1024), seeds=(0,))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_training_that_diverges_ends():
    config = replace(SMALL, epochs=2, global_batch_size=256, lr=1e6)
    (losses,) = losses_by_seed(config, seeds=(0,))
    assert len(losses) == 10
    assert losses[0] < 10
    assert set(losses[-5:]) == {math.inf}


def test_the_small_net_starts_as_its_seed_says():
    weights = [
        torch.cat([p.flatten() for p in small_net(10, 8, seed).parameters()])
        for seed in (0, 0, 1)
    ]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert small_net(10, 8, 0)(torch.zeros(5, 3, 8, 8)).shape == (5, 10)


def test_warm_up_is_needed_at_a_rate_that_new_weights_cannot_bear():
    """What notebook 06 shows: 16 times the batch, and the linear rule."""
    large = replace(SMALL, lr=0.0035, epochs=6, global_batch_size=256)
    large = replace(large, lr_scaling="linear")
    without, warm = (
        losses_by_seed(replace(large, warmup_epochs=epochs)) for epochs in (0, 2)
    )
    ends = [sorted(sum(row[-2:]) / 2 for row in rows) for rows in (without, warm)]
    assert ends[0][1] > 2 * ends[1][1]  # measured: 1.2 and 0.2, the medians
    assert max(ends[1]) < 0.5
    assert max(map(max, without)) > 1.2 * max(map(max, warm))  # at the beginning
