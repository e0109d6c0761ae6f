import contextlib
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ddp_lab.errors import BadInput, RankFailed
from ddp_lab.proofs.trainings import in_world_of
from ddp_lab.ranks.workers import Workers
from ddp_lab.world import (
    agree_any,
    check_same,
    gather_json,
    gather_over_ranks,
    join_world,
    pick_device,
    read_ranks,
    sum_over_ranks,
)


def ranks(rank, local_rank, world_size, local_world_size):
    return {
        "rank": rank,
        "local_rank": local_rank,
        "world_size": world_size,
        "local_world_size": local_world_size,
    }


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"SLURM_PROCID": "0"}, None),  # inside an allocation, but not under srun
        # one task alone, like JupyterLab under srun, starts ranks of its own
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, None),
        (
            {
                "RANK": "5",
                "LOCAL_RANK": "1",
                "WORLD_SIZE": "8",
                "LOCAL_WORLD_SIZE": "4",
            },
            ranks(5, 1, 8, 4),
        ),
        ({"RANK": "1", "WORLD_SIZE": "2"}, ranks(1, 1, 2, 2)),
        ({"WORLD_SIZE": "1", "PMI_SIZE": ""}, None),
        (
            {
                "SLURM_PROCID": "3",
                "SLURM_LOCALID": "1",
                "SLURM_STEP_NUM_TASKS": "4",
                "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
            },
            ranks(3, 1, 4, 2),
        ),
        (
            {
                "SLURM_PROCID": "3",
                "SLURM_LOCALID": "0",
                "SLURM_NODEID": "1",
                "SLURM_STEP_NUM_TASKS": "4",
                "SLURM_STEP_TASKS_PER_NODE": "3,1",
            },
            ranks(3, 0, 4, 1),
        ),
    ],
)
def test_read_ranks(environ, expected):
    assert read_ranks(environ) == expected


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "0"}, "WORLD_SIZE is 'missing'"),
        ({"RANK": "zero", "WORLD_SIZE": "2"}, "RANK is 'zero'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 must be below WORLD_SIZE=2"),
        ({"RANK": "", "WORLD_SIZE": "2"}, "RANK is 'missing'"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK is '-1'"),
        ({"RANK": "\u00b2", "WORLD_SIZE": "4"}, "RANK is '\u00b2'"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "RANK=0 must be below WORLD_SIZE=0"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 speaks of several .* RANK is missing"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "OMPI_COMM_WORLD_SIZE=4 speaks of several"),
        ({"PMI_SIZE": "4"}, "PMI_SIZE=4 speaks of several"),
        (
            {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PTY_PORT": "4"},
            "an interactive srun shell of 2 tasks",
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "2"}
            | {"LOCAL_WORLD_SIZE": "2"},
            "LOCAL_RANK=2 must be below the number of ranks on this machine, 2, of 4",
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "4"},
            "on this machine, 4, of 2 in all",
        ),
    ],
)
def test_read_ranks_refuses(environ, message):
    with pytest.raises(BadInput, match=message):
        read_ranks(environ)


@pytest.mark.parametrize(
    ("num_gpus", "device", "local_world_size", "expected"),
    [
        (0, "auto", 2, "cpu"),
        (1, "auto", 2, "cpu"),
        (2, "auto", 2, "cuda:1"),
        (4, "cpu", 2, "cpu"),
        (4, "cuda", 4, "cuda:1"),
    ],
)
def test_pick_device(monkeypatch, num_gpus, device, local_world_size, expected):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    assert str(pick_device(device, 1, local_world_size)) == expected


@pytest.mark.parametrize(
    ("num_gpus", "device", "local_rank", "expected"),
    [
        (1, "auto", 1, "cuda:0"),  # a GPU of its own, the only one that it sees
        (1, "cuda", 1, "cuda:0"),
        (4, "auto", 3, "cuda:3"),
        (0, "auto", 1, "cpu"),
        (1, "cpu", 1, "cpu"),
    ],
)
def test_device_under_a_launcher(monkeypatch, num_gpus, device, local_rank, expected):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    assert str(pick_device(device, local_rank, 4, joined=True)) == expected


def test_gpus_are_not_left_idle_in_silence(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(BadInput, match="4 ranks on this machine, but only 2 GPU"):
        pick_device("auto", 3, 4, joined=True)


@pytest.mark.parametrize(
    ("num_gpus", "device", "message"),
    [
        (0, "cuda", "no GPU"),
        (1, "cuda", "2 ranks on this machine, but only 1 GPU"),
        (0, "tpu", "choose auto, cpu or cuda"),
    ],
)
def test_pick_device_refuses(monkeypatch, num_gpus, device, message):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    with pytest.raises(BadInput, match=message):
        pick_device(device, 0, 2)


def test_alone_is_a_world_of_one():
    with join_world(device="cpu") as world:
        assert (world.rank, world.world_size, world.backend) == (0, 1, "gloo")
        assert sum_over_ranks(torch.tensor([3.0])).tolist() == [3.0]
        assert agree_any(False) is False
        assert gather_json({"é": [None, 1.5]}) == [{"é": [None, 1.5]}]
    assert not dist.is_initialized()


def test_group_of_one_is_closed_after_an_error():
    with pytest.raises(RuntimeError, match="on purpose"), join_world(device="cpu"):
        raise RuntimeError("on purpose")
    assert not dist.is_initialized()


def end(with_error):
    """How often the group was closed at the end of the block."""
    with mock.patch.object(dist, "destroy_process_group") as close:
        with contextlib.suppress(RuntimeError), join_world(device="cpu"):
            if with_error:
                raise RuntimeError("on purpose")
        return close.call_count


def test_ranks_close_the_group_at_a_normal_end_only(three):
    """To close it waits for what is under way, with ranks that may never come."""
    assert three.run(end, with_error=False) == [1, 1, 1]
    assert three.run(end, with_error=True) == [0, 0, 0]


def fail():
    with join_world(device="cpu"):
        raise RuntimeError("on purpose")


def test_ranks_that_failed_leave_nothing_open(three):
    """Warm ranks close it before their next call, without waiting."""
    with pytest.raises(RankFailed, match="on purpose"):
        three.run(fail)
    assert three.run(dist.is_initialized) == [False] * 3


def talk():
    """Everything that ranks say to each other in world.py, in one launch."""
    found = {}
    with join_world(device="cpu") as world:
        rank = world.rank
        own = torch.tensor([[rank, 10 * rank]])
        found["sum"] = sum_over_ranks(own).tolist()
        found["own"] = own.tolist()
        found["gathered"] = gather_over_ranks(own).tolist()
        found["json"] = gather_json({"rank": rank, "text": "x" * rank})
        found["any"] = [agree_any(rank == 2), agree_any(False)]
        check_same({"model": "resnet18", "lr": "0.1"})
        for name, facts in {
            "value": {"model": "resnet18", "lr": "0.1" if rank < 2 else "0.2"},
            "longer": {"a": "1", **({"b": "2"} if rank == 1 else {})},
        }.items():
            try:
                check_same(facts)
            except Exception as error:
                found[name] = f"{type(error).__name__}: {error}"
    return found


@pytest.fixture(scope="module")
def three():
    with Workers(3, num_threads=1) as workers:
        yield workers


def test_three_ranks_talk(three):
    results = three.run(talk)
    for rank, found in enumerate(results):
        assert found["own"] == [[rank, 10 * rank]]  # the argument is not changed
        assert found["sum"] == [[3, 30]]
        assert found["gathered"] == [[[0, 0]], [[1, 10]], [[2, 20]]]
        assert found["json"] == [{"rank": r, "text": "x" * r} for r in range(3)]
        assert found["any"] == [True, False]
        assert found["value"] == (
            "RanksDisagree: the ranks disagree: rank 0 has lr 0.1, rank 2 has lr 0.2; "
            "give all ranks the same code, data and settings"
        )
        assert "rank 0 has nothing more, rank 1 has b 2" in found["longer"]


def arrive_alone():
    import os

    if os.environ["RANK"] == "1":
        return "never came"
    try:
        with join_world(device="cpu", arrive_timeout_s=1.0):
            return "joined"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def test_missing_rank_is_named(three):
    said, other = three.run(in_world_of, 2, arrive_alone, only=[0, 1])
    assert other == "never came"
    assert said.startswith(
        "LabError: 1 of 2 ranks arrived within 1 s, missing: 1. Did it fail"
    )


def test_unreachable_store_is_named(monkeypatch):
    import socket

    with socket.socket() as taken:  # bound but not listening: nobody answers there
        taken.bind(("127.0.0.1", 0))
        port = str(taken.getsockname()[1])
        for name, value in {
            "RANK": "1",
            "LOCAL_RANK": "1",
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }.items():
            monkeypatch.setenv(name, value)
        with (
            pytest.raises(Exception, match=f"no store at 127.0.0.1:{port}") as caught,
            join_world(device="cpu", arrive_timeout_s=1.0),
        ):
            pass
    assert "has rank 0 started" in str(caught.value)


def test_address_is_asked_for(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with (
        pytest.raises(BadInput, match="MASTER_ADDR=''"),
        join_world(device="cpu"),
    ):
        pass
