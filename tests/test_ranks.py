"""A set of ranks runs many calls, and knows when it cannot run another."""

import os
import socket
import time

import psutil
import pytest
import torch
import torch.distributed as dist

from ddp_lab.errors import LabError, RankFailed, RanksStuck
from ddp_lab.payload import pack_call
from ddp_lab.ranks import Ranks
from ddp_lab.start import host_store, threads_per_rank


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
    with Ranks(2) as ranks:
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
    with Ranks(2) as ranks:
        pids = run(ranks, os.getpid)
        with pytest.raises(RanksStuck):
            run(ranks, wait_for_nobody, stuck_after_s=1.0)
        assert not ranks.alive
        assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_set_that_is_forgotten_ends_with_its_owner():
    ranks = Ranks(1)
    ranks.start()
    (pid,) = run(ranks, os.getpid)
    del ranks
    end = time.monotonic() + 5.0
    while psutil.pid_exists(pid) and time.monotonic() < end:
        time.sleep(0.05)
    assert not psutil.pid_exists(pid)


def test_a_machine_that_lets_nobody_connect(monkeypatch):
    def refuse(address, timeout):
        assert address[0] == "127.0.0.1"
        raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(socket, "create_connection", refuse)
    with pytest.raises(LabError, match=r"Network is unreachable.*loopback"):
        host_store()


def test_threads_per_rank(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [threads_per_rank(n) for n in (1, 2, 3, 16)] == [8, 4, 2, 1]
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert threads_per_rank(2) == 5
