"""Ten ways to get stuck: the right rank, the right line, soon; and no false alarm."""

import inspect
import socket
import time
from functools import partial

import pytest

import rank_functions
from ddp_lab import inside
from ddp_lab.errors import RankFailed, RanksStuck
from ddp_lab.launch import launch as spawn
from ddp_lab.stuck import Sight, Watch, sight_from_dump, user_line
from ddp_lab.verdict import failure_error, stuck_error
from rank_functions import compute_long

STUCK_AFTER_S = 2.0
SOON_S = STUCK_AFTER_S + 2.0  # what is promised, from the last move to the verdict
launch = partial(spawn, start_method="forkserver")  # imports torch once for all tests


def line_of(fn, mark="# HERE"):
    """The line of ``fn`` that ends with the mark, as a table shows it."""
    lines, first = inspect.getsourcelines(fn)
    (offset,) = [i for i, line in enumerate(lines) if line.rstrip().endswith(mark)]
    return f"rank_functions.py, line {first + offset}: {lines[offset].strip()}"


W, F = "waiting", "finished"
SHAPES = {
    # name: state and last collective of each rank
    "rank_0_only": [(W, "all_reduce #1"), (F, "-")],
    "barrier_missed": [(W, "barrier #2"), (F, "all_reduce #1")],
    "other_order": [(W, "all_reduce #1"), (W, "broadcast #1")],
    "returned_early": [(W, "all_reduce #3"), (F, "all_reduce #2")],
    "sleeping_loader": [(W, "all_reduce #1"), ("idle", "-")],
    "recv_without_send": [(W, "recv"), (F, "-")],
}


def stuck(fn, *args, **kwargs):
    with pytest.raises(RanksStuck) as caught:
        launch(fn, *args, stuck_after_s=STUCK_AFTER_S, **kwargs)
    print(caught.value)  # pytest -s shows the tables
    return caught.value


@pytest.fixture
def found_after_s(monkeypatch):
    """Seconds from the last rank's last move to the verdict."""
    seconds = []

    def note(why, outcomes, watch):
        seconds.append(time.monotonic() - max(watch._moved_at))
        return stuck_error(why, outcomes, watch)

    monkeypatch.setattr("ddp_lab.ranks.stuck_error", note)
    return seconds


@pytest.fixture
def failed_at_s(monkeypatch):
    """When the verdict on a failed rank came, on the clock that all processes share."""
    moments = []

    def note(outcomes, watch):
        moments.append(time.monotonic())
        return failure_error(outcomes, watch)

    monkeypatch.setattr("ddp_lab.ranks.failure_error", note)
    return moments


@pytest.mark.parametrize("name", SHAPES)
def test_shape(name, found_after_s, failed_at_s):
    fn = getattr(rank_functions, name)
    told = []
    error = stuck(fn, on_record=lambda rank, fields: told.append(fields["now_s"]))
    if name == "returned_early":  # its group was closed: known at once
        assert failed_at_s[0] - told[0] < SOON_S
    else:
        assert STUCK_AFTER_S <= found_after_s[0] < SOON_S
    rows = [(row.state, row.collective) for row in error.rows]
    assert rows == SHAPES[name]
    assert error.rows[0].where == line_of(fn)
    if name == "other_order":
        assert error.rows[1].where == line_of(fn, "# HERE TOO")
        assert "different collectives" in str(error)
    elif name == "sleeping_loader":
        assert error.rows[1].where == line_of(
            rank_functions.SleepyDataset.__getitem__, "# HERE TOO"
        )
        assert "wait for rank 1" in str(error)
    else:
        assert "rank 1 returned without it" in str(error)


def test_uneven_number_of_batches(found_after_s):
    error = stuck(rank_functions.uneven_batches)
    assert STUCK_AFTER_S <= found_after_s[0] < SOON_S
    assert [row.state for row in error.rows] == [W, F]
    assert error.rows[0].where == line_of(rank_functions.uneven_batches)
    assert error.rows[0].collective == "all_reduce #8"  # of DDP


@pytest.mark.parametrize("name", ["other_place", "other_world_size"])
def test_ranks_that_never_meet(name):
    fn = getattr(rank_functions, name)
    with socket.socket() as taken:  # bound but not listening: nobody answers there
        taken.bind(("127.0.0.1", 0))
        args = [taken.getsockname()[1]] if name == "other_place" else []
        error = stuck(fn, *args)
    assert [row.state for row in error.rows] == [W, W]
    assert error.rows[0].collective == "init_process_group"
    assert error.rows[0].where == line_of(fn)
    assert "leave RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as they" in str(error)


def test_endless_loop_ends_with_the_time_limit():
    before = time.monotonic()
    error = stuck(rank_functions.endless_loop, timeout_s=12.0)
    assert time.monotonic() - before < 14.0  # the limit plus 2 s
    assert "timeout_s=12 is over" in str(error)
    assert [row.state for row in error.rows] == [W, "running"]
    fn = rank_functions.endless_loop
    assert error.rows[0].where == line_of(fn)
    loop = ("step += 1  # HERE TOO", "while dist.get_rank() == 1:")
    assert error.rows[1].where.endswith(loop)


def failed(fn):
    """The error of a failed rank, and when the ranks made their mistake."""
    told = []
    with pytest.raises(RankFailed) as caught:
        launch(
            fn,
            stuck_after_s=STUCK_AFTER_S,
            on_record=lambda rank, fields: told.append(fields["now_s"]),
        )
    print(caught.value, caught.value.report)
    return caught, max(told)


def test_shapes_differ(failed_at_s):
    """gloo ends the process itself; the launch still says which line it was."""
    caught, mistake_at_s = failed(rank_functions.shapes_differ)
    assert failed_at_s[0] - mistake_at_s < SOON_S
    assert caught.match("tensors of different sizes")
    line = line_of(rank_functions.shapes_differ)
    assert caught.value.failures[0].where == line
    assert line in caught.value.others[0]


def test_one_rank_raised(failed_at_s):
    caught, mistake_at_s = failed(rank_functions.raised)
    assert failed_at_s[0] - mistake_at_s < SOON_S
    failure = caught.value.failures[0]
    assert (failure.rank, failure.message) == (1, "cannot read the data")
    assert failure.where == line_of(rank_functions.raised, "# HERE TOO")
    waiting = line_of(rank_functions.raised)
    assert caught.value.others == (f"rank 0: waiting, {waiting}",)


def test_torchs_own_time_limit_is_no_riddle():
    with pytest.raises(RanksStuck, match="cannot go on: gave up waiting") as caught:
        launch(rank_functions.give_up_after, 1.0)
    assert [row.state for row in caught.value.rows] == [W, W]
    assert "Timed out" in caught.value.stacks


def test_a_rank_that_holds_the_interpreter_lock():
    """It cannot answer a thread's question; a signal handler still tells its line."""
    error = stuck(rank_functions.hold_the_lock, timeout_s=15.0)
    assert error.rows[0].state == W
    assert error.rows[1].where.endswith("ctypes.PyDLL(None).sleep(3600)")
    assert "timeout_s=15" in str(error)  # for all we know, it computes


def test_computing_is_not_stuck():
    assert launch(compute_long, 3.0, stuck_after_s=0.5) == [1, 1]


def test_a_failure_is_told_though_others_have_waited_for_long():
    with pytest.raises(RankFailed, match=r"rank 1 .* cannot write the result"):
        launch(rank_functions.raised_late, stuck_after_s=0.5)


# The rule itself, without processes ----------------------------------------------


def sight(mark=1, cpu_s=0.0, collective="-", in_collective=False):
    return Sight(
        where="here",
        stack="",
        mark=(("file", mark),),
        cpu_s=cpu_s,
        collective=collective,
        in_collective=in_collective,
    )


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("ddp_lab.stuck.time.monotonic", lambda: now[0])
    return now


def watch_twice(clock, first, second, after_s=3.0):
    watch = Watch(2, stuck_after_s=2.0)
    watch.saw(0, first)
    watch.saw(1, sight(in_collective=True))
    clock[0] = after_s
    watch.saw(0, second)
    watch.saw(1, sight(in_collective=True))
    return watch.stuck([0, 1], some_ended=False)


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        (sight(), True),
        (sight(cpu_s=0.06), True),  # helper threads
        (sight(cpu_s=0.5), False),  # computes
        (sight(mark=2), False),  # is elsewhere
        (sight(collective="barrier #2"), False),
    ],
)
def test_what_counts_as_progress(clock, second, expected):
    assert watch_twice(clock, sight(), second) is expected


def test_not_before_the_time(clock):
    assert not watch_twice(clock, sight(), sight(), after_s=1.9)


def test_output_counts_as_progress(clock):
    watch = Watch(1, stuck_after_s=2.0)
    watch.saw(0, sight(in_collective=True))
    clock[0] = 1.5
    watch.moved(0)
    clock[0] = 3.0
    watch.saw(0, sight(in_collective=True))
    assert not watch.stuck([0], some_ended=True)
    clock[0] = 3.6
    assert watch.stuck([0], some_ended=True)


def test_sleeping_alone_is_no_deadlock(clock):
    watch = Watch(1, stuck_after_s=2.0)
    watch.saw(0, sight())
    clock[0] = 5.0
    watch.saw(0, sight())
    assert not watch.stuck([0], some_ended=False)
    assert watch.stuck([0], some_ended=True)


def test_user_line_is_not_a_librarys():
    import torch

    lines = [
        ("/home/me/train.py", 3, "train"),
        (torch.__file__, 10, "f"),
        ("<frozen runpy>", 1, "g"),
    ]
    assert user_line(lines) == "train.py, line 3"
    born = [("<string>", 1, "<module>"), (inside.__file__, 5, "rank_main")]
    assert user_line([*born, *lines]) == "train.py, line 3"
    assert user_line(born) == "before the function started"


def test_faulthandlers_text():
    import torch.distributed.distributed_c10d as c10d

    text = (
        "Fatal Python error: Aborted\n\nThread 0x01 (most recent call first):\n"
        f'  File "{c10d.__file__}", line 5 in all_reduce\n'
        '  File "Cell In[9]", line 7 in shape\n'
        f'  File "{inside.__file__}", line 1 in rank_main\n\n'
        "Current thread 0x02 (most recent call first):\n  <no Python frame>\n"
    )
    found = sight_from_dump(text)
    assert found is not None
    assert found.where == "Cell In[9], line 7"
    assert found.in_collective
    assert sight_from_dump("") is None
