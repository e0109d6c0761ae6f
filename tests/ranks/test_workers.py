"""Workers: what stays between calls, and what is replaced, and that it is told."""

import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch
import torch.distributed as dist

import rank_functions as on_ranks
from ddp_lab.errors import BadInput, RankFailed, RanksStuck
from ddp_lab.ranks import workers
from ddp_lab.ranks.workers import Workers
from kernel import wait_gone


@pytest.fixture(scope="module")
def joined():
    """The group is open in every call."""
    with Workers(2, init=True) as workers:
        yield workers


def test_processes_and_their_state_stay(warm):
    def remember(value):
        os.environ["REMEMBERED"] = value

    pids = warm.run(os.getpid)
    warm.run(remember, "yes")
    assert warm.run(os.getenv, "REMEMBERED") == ["yes", "yes"]
    assert warm.run(os.getpid) == pids == warm.pids
    assert warm.run(on_ranks.who_am_i) == [(0, 2), (1, 2)]


def test_the_same_function_twice(warm):
    """A group that it leaves open is closed: launch's functions run unchanged."""
    assert warm.run(on_ranks.meet_and_sum) == [1.0, 1.0]
    assert warm.run(on_ranks.meet_and_sum) == [1.0, 1.0]
    assert warm.run(dist.is_initialized) == [False, False]


def test_each_call_has_its_own_output(warm, capsys):
    for _ in range(2):
        warm.run(print, "hello")
        assert capsys.readouterr().out == "hello\n[rank 1] hello\n"


def test_only_some_ranks(warm, capsys):
    assert warm.run(on_ranks.who_am_i, only=[1]) == [(1, 2)]
    warm.run(print, "hello", only=[1])
    assert capsys.readouterr().out == "[rank 1] hello\n"
    with pytest.raises(RankFailed) as caught:
        warm.run(lambda: 1 / 0, only=[1])
    assert str(caught.value).startswith("rank 1 of 2 failed: ZeroDivisionError")
    assert caught.value.others == ()


def test_an_exception_costs_nothing(warm, capsys):
    pids = warm.pids
    with pytest.raises(RankFailed, match="rank 0 of 2 failed: Unpicklable: 1 and 2"):
        warm.run(on_ranks.fail_alike)
    with pytest.raises(RankFailed, match="SystemExit: 3"):
        warm.run(sys.exit, 3)
    assert warm.run(on_ranks.meet_and_sum) == [1.0, 1.0]
    assert warm.pids == pids
    assert capsys.readouterr().out == ""


def test_a_stuck_set_is_replaced(warm, capsys):
    with pytest.raises(RanksStuck) as caught:
        warm.run(on_ranks.rank_0_only, stuck_after_s=0.5)
    assert [row.state for row in caught.value.rows] == ["waiting", "finished"]
    with pytest.raises(RanksStuck, match=r"timeout_s=0\.1 is over"):
        warm.run(time.sleep, 600, timeout_s=0.1)
    assert warm.run(on_ranks.meet_and_sum) == [1.0, 1.0]
    line = "Workers: 2 new ranks, because the last call did not come to an end; "
    assert capsys.readouterr().out.count(line) == 2


def test_a_rank_that_dies_while_idle(warm, capsys):
    os.kill(warm.pids[1], signal.SIGKILL)
    while warm.exit_codes[1] is None:
        time.sleep(0.01)
    assert warm.exit_codes == [None, -signal.SIGKILL]
    assert warm.run(on_ranks.meet_and_sum) == [1.0, 1.0]
    assert "because rank 1 was ended by SIGKILL" in capsys.readouterr().out


def test_not_closed_while_another_thread_calls(warm, tmp_path):
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(warm.run, on_ranks.sleep_until, tmp_path / "enough")
        while not warm._busy.locked():
            time.sleep(0.01)
        with pytest.raises(BadInput, match="run a call already, from another thread"):
            warm.close()
        (tmp_path / "enough").touch()
        assert call.result() == [None, None]
    assert warm.run(on_ranks.who_am_i) == [(0, 2), (1, 2)]


def test_values_are_the_callers(warm):
    values = warm.run(torch.ones, 3)
    kept = weakref.ref(values[0])
    del values
    gc.collect()
    assert kept() is None


def test_a_name_that_torch_no_longer_has_hides_no_error():
    def fail():
        workers._num_collectives = None
        raise ValueError("the learner's own")

    with Workers(1, init=True) as ranks:
        with pytest.raises(RankFailed, match="ValueError: the learner's own"):
            ranks.run(fail)
        assert ranks.run(on_ranks.sum_of_ranks) == [0.0]


def test_the_group_stays(joined):
    assert joined.run(on_ranks.sum_of_ranks) == [1.0, 1.0]
    groups = joined.run(lambda: id(dist.group.WORLD))
    with pytest.raises(RankFailed, match="ZeroDivisionError"):
        joined.run(lambda: 1 / 0)
    assert joined.run(lambda: id(dist.group.WORLD)) == groups
    assert joined.run(on_ranks.sum_of_ranks) == [1.0, 1.0]


def fail_out_of_step():
    """Rank 0 has entered a collective that rank 1 never will."""
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1), async_op=True)
    raise ValueError("both ranks")


def test_a_group_out_of_step_is_replaced(joined, capsys):
    """Else rank 1's next all_reduce would add what rank 0 gave to this one."""
    pids = joined.pids
    with pytest.raises(RankFailed, match="both ranks"):
        joined.run(fail_out_of_step)
    assert joined.run(on_ranks.sum_of_ranks) == [1.0, 1.0]
    assert joined.pids == pids
    joined.run(dist.destroy_process_group)
    assert joined.run(on_ranks.sum_of_ranks) == [1.0, 1.0]
    assert capsys.readouterr().out == (
        "Workers: a new process group, because rank 0 failed between two collectives; "
        "wrap DDP models again\n"
        "Workers: a new process group, because a rank has closed the last one; "
        "wrap DDP models again\n"
    )


def test_a_collective_without_all_ranks(joined):
    with pytest.raises(RanksStuck) as caught:
        joined.run(on_ranks.sum_of_ranks, only=[0], stuck_after_s=0.5)
    first, second = caught.value.rows
    assert (first.state, second.state) == ("waiting", "left out")
    assert first.where.endswith("dist.all_reduce(total)")
    assert "rank 1 did not run this" in str(caught.value)
    assert joined.run(on_ranks.sum_of_ranks) == [1.0, 1.0]


def test_only_the_loopback_listens(joined):
    joined.run(on_ranks.sum_of_ranks)
    listeners = {
        connection.laddr.ip
        for process in map(psutil.Process, [os.getpid(), *joined.pids])
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listeners <= {"127.0.0.1", "::1"}


def test_setup_runs_once_on_new_ranks(capsys):
    def setup():
        print("prepared, group open:", dist.is_initialized())

    with Workers(1, init=True, setup=setup) as workers:
        for _ in range(2):
            workers.run(int)
        assert capsys.readouterr().out == "prepared, group open: True\n"
        with pytest.raises(RankFailed):
            workers.run(os._exit, 1)
        workers.run(int)
    assert capsys.readouterr().out == (
        "Workers: 1 new rank, because rank 0 ended with exit code 1; "
        "what the old held is gone\nprepared, group open: True\n"
    )


async def coroutine():
    """Not something a rank can run."""


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"num_ranks": 0}, "num_ranks must be a whole number from 1 on, not 0"),
        ({"device": "tpu"}, "device 'tpu' is unknown"),
        ({"num_threads": 0}, "num_threads must be above 0"),
        ({"setup": 3}, "setup needs a function, not 'int'"),
    ],
)
def test_refused_before_a_process_starts(kwargs, message, monkeypatch):
    monkeypatch.setattr(
        "ddp_lab.ranks.workers.RankSet", None
    )  # starting one would fail
    with pytest.raises(BadInput, match=re.escape(message)):
        Workers(**kwargs)


def test_calls_that_cannot_work(warm, tmp_path):
    pids = warm.pids
    for fn, options, message in [
        (3, {}, "run needs a function, not 'int'"),
        (coroutine, {}, "coroutine is a coroutine function"),
        (int, {"only": [2]}, "there is no rank 2: the ranks are 0 to 1"),
        (int, {"only": []}, "`only` must name at least one rank"),
        (int, {"timeout_s": 0}, "timeout_s must be above 0"),
        (lambda: pids, {"x": threading.Lock()}, "`x` is a lock"),
    ]:
        with pytest.raises(BadInput, match=message):
            warm.run(fn, **options)
    go = tmp_path / "go"
    thread = threading.Thread(target=warm.run, args=(on_ranks.wait_for, go))
    thread.start()
    while not warm._busy.locked():
        time.sleep(0.01)
    with pytest.raises(BadInput, match="run a call already, from another thread"):
        warm.run(int)
    go.touch()
    thread.join()
    assert warm.pids == pids


def test_the_thread_that_made_them_may_end(tmp_path):
    """Also during a call: Linux would interrupt the ranks, if they had not declined."""
    made = []
    is_gone = threading.Event()

    def make():
        made.append(Workers(1))
        on_ranks.wait_for(tmp_path / "rank0")

    def follow():
        maker.join()
        while number in {thread.id for thread in psutil.Process().threads()}:
            time.sleep(0.01)  # Python's thread has ended, but not yet the system's
        is_gone.set()
        (tmp_path / "go").touch()

    maker = threading.Thread(target=make)
    maker.start()
    number = maker.native_id
    while not made:
        time.sleep(0.01)
    with made[0] as workers:
        pids = workers.pids
        follower = threading.Thread(target=follow)
        follower.start()
        assert workers.run(on_ranks.lie_in_wait, tmp_path) == [None]
        assert is_gone.is_set()
        follower.join()
        assert workers.run(os.getpid) == pids  # and afterwards


def test_closed_is_closed():
    workers = Workers(1)
    (process,) = map(psutil.Process, workers.pids)
    workers.close()
    workers.close()
    assert workers.exit_codes[0] is not None
    assert not process.is_running()
    with pytest.raises(BadInput, match="closed"):
        workers.run(int)


SCRIPT = """
from ddp_lab.ranks.workers import Workers
workers = Workers(1)
print(*workers.pids, flush=True)
workers.run(int)
print("idle", flush=True)
{end}
"""


@pytest.mark.parametrize("end", ["", "import os; os.kill(os.getpid(), 9)"])
def test_idle_ranks_end_with_their_parent(end):
    """At its end, also when nobody has called close, and when it is killed."""
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(end=end)],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        first = process.stdout.readline()
        ranks = [psutil.Process(int(pid)) for pid in first.split()]
        assert process.stdout.readline() == "idle\n"
        process.wait()
        assert process.returncode == (-9 if end else 0)
    assert wait_gone(ranks) == []
