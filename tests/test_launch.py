"""launch: functions run on real processes, and whatever happens there is told."""

import pytest
from rank_functions import sum_of_ranks, who_am_i

from ddp_lab.errors import BadInput
from ddp_lab.launch import launch


def test_values_come_back_in_rank_order():
    assert launch(who_am_i, num_ranks=3) == [(0, 3), (1, 3), (2, 3)]


def test_init_joins_the_group():
    assert launch(sum_of_ranks, init=True) == [1.0, 1.0]


@pytest.mark.parametrize("num_ranks", [0, -1, 1.5, True, "two"])
def test_senseless_number_of_ranks(num_ranks):
    with pytest.raises(BadInput, match="num_ranks must be"):
        launch(who_am_i, num_ranks=num_ranks)
