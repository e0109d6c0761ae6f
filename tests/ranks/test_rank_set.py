"""One call of spawn makes a set of ranks; it runs many calls, and knows when it cannot.

What a rank is born with, and what is left if it is not born, is told here too.
"""

import gc
import multiprocessing
import os
import socket
import textwrap

import psutil
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing

import rank_functions as on_ranks
from ddp_lab.errors import LabError, RankFailed, RanksStuck
from ddp_lab.ranks._environment import (
    no_start_method_chosen,
    num_cores,
    threads_per_rank,
)
from ddp_lab.ranks._main import rank_main
from ddp_lab.ranks._pickling import pack_call
from ddp_lab.ranks._rank_set import RankSet
from ddp_lab.ranks.launch import launch
from ddp_lab.ranks.workers import Workers
from ddp_lab.rendezvous.store import host_store
from kernel import wait_gone


def run(ranks, fn, *args, **options):
    return ranks.call(pack_call(fn, args, {}), **options)


def open_group():
    dist.init_process_group("gloo")


def use_group():
    """A second group needs the store that the first one was opened with."""
    group = dist.new_group([0, 1])
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    return total.item(), os.environ["MASTER_PORT"]


def close_group():
    dist.destroy_process_group()
    return os.environ["MASTER_PORT"]


def fail_on_rank_1():
    if os.environ["RANK"] == "1":
        raise ValueError("boom")


def wait_for_nobody():
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("gloo")
    dist.recv(torch.ones(1), 1 - dist.get_rank())


def talk():
    print("hello")


@pytest.fixture(scope="module")
def ranks():
    with RankSet(2) as ranks:
        yield ranks


def test_the_same_processes_run_every_call(ranks):
    first = run(ranks, os.getpid)
    assert run(ranks, os.getpid) == first
    assert os.getpid() not in first


def test_output_belongs_to_its_call(ranks, capsys):
    for _ in range(2):
        run(ranks, talk)
        assert capsys.readouterr().out == "hello\n[rank 1] hello\n"


def test_a_group_may_stay_open_between_calls(ranks):
    run(ranks, open_group)
    (total, port), (_, same_port) = run(ranks, use_group)
    assert total == 2.0
    assert port == same_port
    assert run(ranks, close_group) == [port, port]
    run(ranks, open_group)  # a new group, a new store
    assert run(ranks, close_group)[0] != port


def test_a_failure_that_ends_leaves_the_set_usable(ranks):
    with pytest.raises(RankFailed, match="rank 1 of 2 failed: ValueError: boom"):
        run(ranks, fail_on_rank_1)
    assert ranks.alive
    assert len(run(ranks, os.getpid)) == 2


def test_a_stuck_set_is_gone():
    with RankSet(2) as ranks:
        pids = run(ranks, os.getpid)
        with pytest.raises(RanksStuck):
            run(ranks, wait_for_nobody, stuck_after_s=0.5)
        assert not ranks.alive
        assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_set_that_is_forgotten_ends_with_its_owner():
    ranks = RankSet(1)
    ranks.start()
    (pid,) = run(ranks, os.getpid)
    process = psutil.Process(pid)
    del ranks
    assert wait_gone([process]) == []


def test_a_machine_that_lets_nobody_connect(monkeypatch):
    def refuse(address, timeout):
        assert address[0] == "127.0.0.1"
        raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(socket, "create_connection", refuse)
    with pytest.raises(LabError, match=r"Network is unreachable.*loopback"):
        host_store()


@pytest.mark.parametrize(
    ("quota", "cores"),
    [
        ("max 100000", 8),
        ("150000 100000", 1),
        ("50000 100000", 1),
        ("300000 100000", 3),
    ],
)
def test_cores_of_a_container(monkeypatch, tmp_path, quota, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    file = tmp_path / "cpu.max"
    assert num_cores(str(file)) == 8
    file.write_text(quota + "\n")
    assert num_cores(str(file)) == cores


def test_how_the_users_loaders_start_is_the_users_choice(monkeypatch):
    methods = multiprocessing.get_all_start_methods()
    for chosen, open_ in [(None, True), (methods[0], True), (methods[1], False)]:
        monkeypatch.setattr(
            multiprocessing, "get_start_method", lambda allow_none, name=chosen: name
        )
        assert no_start_method_chosen() is open_


def test_threads_per_rank(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [threads_per_rank(n) for n in (1, 2, 3, 16)] == [8, 4, 2, 1]
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert threads_per_rank(2) == 5


# The start -------------------------------------------------------------------------


@pytest.fixture
def spawned(monkeypatch):
    """The calls of spawn, each with what it was given and returned."""
    calls = []

    def note(fn, args=(), **options):
        context = spawn(fn, args, **options)
        calls.append((fn, options, context.pids()))
        return context

    spawn = torch.multiprocessing.spawn
    monkeypatch.setattr(torch.multiprocessing, "spawn", note)
    return calls


def test_launch_is_one_call_of_spawn(spawned):
    pids = launch(os.getpid, num_ranks=2)
    assert spawned == [(rank_main, {"nprocs": 2, "join": False}, pids)]


def test_workers_are_one_call_of_spawn(spawned):
    with Workers(2) as workers:
        assert spawned == [(rank_main, {"nprocs": 2, "join": False}, workers.pids)]
        assert workers.run(os.getpid) == workers.pids
        assert len(spawned) == 1


def test_nothing_is_left_of_a_start_that_fails(monkeypatch):
    """One rank was started, and then there is no memory for the other."""
    started = []

    def fail(fn, args, nprocs, join):
        started.extend(spawn(fn, args, 1, join).processes)
        raise OSError("Cannot allocate memory")

    spawn = torch.multiprocessing.spawn
    launch(int, num_ranks=1)  # opens what stays open
    gc.collect()  # what tests before this one have left to be closed
    before = psutil.Process().num_fds(), dict(os.environ)
    monkeypatch.setattr(torch.multiprocessing, "spawn", fail)
    for start in (Workers, lambda: launch(int)):
        with pytest.raises(OSError, match="Cannot allocate memory"):
            start()
        (process,) = started
        process.join(60)  # by itself
        assert process.exitcode is not None
        started.clear()
    del process
    gc.collect()
    assert (psutil.Process().num_fds(), dict(os.environ)) == before


# Runs in every new Python process, before anything else.
LOOK_AT_TORCH = """
    import os, sys

    class Look:
        def find_spec(self, name, path=None, target=None):
            if name == "torch":
                with open(os.path.join(os.environ["FOLDER"], "threads"), "w") as file:
                    file.write(os.environ.get("OMP_NUM_THREADS", "not set"))

    sys.meta_path.insert(0, Look())
"""


@pytest.mark.parametrize(
    ("users", "num_threads", "expected"), [(None, 1, 1), ("3", None, 3), ("3", 2, 2)]
)
def test_threads_are_set_before_torch_is_imported(
    users, num_threads, expected, tmp_path, monkeypatch
):
    """OpenMP reads the variable once; the parent's own stays as it was."""
    (tmp_path / "sitecustomize.py").write_text(textwrap.dedent(LOOK_AT_TORCH))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("FOLDER", str(tmp_path))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if users is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", users)
    before = dict(os.environ)
    (seen,) = launch(on_ranks.environment, num_ranks=1, num_threads=num_threads)
    assert dict(os.environ) == before
    assert (tmp_path / "threads").read_text() == str(expected)
    assert seen["threads"] == expected
