"""launch: new processes for one call, what they are given, and nothing left of them.

What comes back from a call is in test_calls.py.
"""

import importlib
import os
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import psutil
import pytest
import torch

import rank_functions as on_ranks
from ddp_lab.errors import BadInput, NotSendable, RankFailed
from ddp_lab.ranks import _rank_set
from ddp_lab.ranks.launch import launch, shared
from kernel import cmd, descendants, wait_gone


def children():
    """Processes of ours, without multiprocessing's own helper."""
    return [p for p in descendants(os.getpid()) if "resource_tracker" not in cmd(p)]


@pytest.fixture(autouse=True)
def nothing_is_left():
    """Also ranks that other modules keep are ours, but they are not new."""
    before = {process.pid for process in children()}
    yield
    assert [p for p in children() if p.pid not in before] == []


def test_values_in_rank_order_and_no_line_is_lost(capsys):
    def fn():
        on_ranks.print_much(num_lines)
        return on_ranks.who_am_i()

    num_lines = 50_000
    assert launch(fn, num_ranks=3) == [(0, 3), (1, 3), (2, 3)]
    lines = capsys.readouterr().out.splitlines()
    expected = [
        ("" if rank == 0 else f"[rank {rank}] ")
        + f"line {line} of rank {rank}, with some text to fill it up"
        for rank in range(3)
        for line in range(num_lines)
    ]
    assert lines == expected


def test_nothing_that_a_rank_has_started_outlives_it(tmp_path):
    """Nor does such a process hide that its rank has gone."""
    with pytest.raises(RankFailed, match="rank 1 of 2 failed: SIGKILL"):
        launch(on_ranks.leave_things_behind, tmp_path)
    pids = [int(p) for rank in "01" for p in (tmp_path / rank).read_text().split()]
    assert len(pids) == 4
    assert wait_gone([p for p in psutil.process_iter() if p.pid in pids]) == []


def test_threads_and_exit_hooks_end_as_they_would(tmp_path, capsys):
    launch(on_ranks.leave_work_to_others, tmp_path)
    left = sorted(path.name for path in tmp_path.iterdir())
    names = ("hook", "returned", "thread")
    assert left == sorted(f"{name}{rank}" for name in names for rank in range(2))
    assert capsys.readouterr().out == "late\n[rank 1] late\n"


def test_a_thread_that_never_ends_is_told(monkeypatch, capsys):
    monkeypatch.setattr(_rank_set, "_LEAVING_S", 0.5)
    launch(on_ranks.leave_a_thread_that_never_ends, num_ranks=1)
    assert capsys.readouterr().err == (
        "rank 0 had returned, but did not end within 0.5 s: threads or exit hooks that "
        "still ran there were cut off; join() what the function starts\n"
    )


def test_several_threads_launch(capfd):
    """Each start borrows what belongs to the whole process."""
    main = sys.modules["__main__"]
    with ThreadPoolExecutor(3) as pool:
        launches = [
            pool.submit(launch, on_ranks.who_am_i, num_ranks=1) for _ in range(3)
        ]
        assert [one.result() for one in launches] == [[(0, 1)]] * 3
    assert sys.modules["__main__"] is main
    os.write(2, b"heard\n")
    assert capfd.readouterr().err == "heard\n"


def test_windows_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(
        BadInput, match="ranks need Linux or macOS: on Windows, work in"
    ):
        launch(on_ranks.who_am_i)


def test_a_failure(capsys):
    """Told with what the ranks have printed, even without echo."""
    with pytest.raises(RankFailed) as caught:
        launch(on_ranks.print_and_die, echo=False)
    assert str(caught.value).startswith("rank 1 of 2 failed: SIGKILL")
    assert capsys.readouterr().out == "[rank 1] last words\n"


def test_environment_of_a_rank(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = dict(os.environ)
    found = launch(on_ranks.environment, num_threads=1)
    assert dict(os.environ) == before
    for rank, seen in enumerate(found):
        expected = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "ROLE_RANK": str(rank),
            "GROUP_RANK": "0",
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        assert expected.items() <= seen["variables"].items()
        assert seen["threads"] == 1
        assert not seen["cuda"]
    assert not torch.cuda.is_initialized()


def test_own_copies_and_one_shared_in_a_group():
    """Two ranks stepping one weight would end at -0.2; the data is one on purpose."""

    def fn(*args):
        return on_ranks.step_one_weight(*args) | {"sum": on_ranks.sum_of_ranks()}

    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    data = torch.zeros(2)
    first, second = launch(fn, model, shared(data), init=True)
    for found in (first, second):
        assert found["sum"] == 1.0
        assert found["weight"].item() == pytest.approx(-0.1)
        assert found["data"].tolist() == [7.0, 7.0]
        assert type(found["model"]) is torch.nn.Linear
    assert model.weight.item() == 0.0
    assert data.tolist() == [7.0, 7.0]


class NoRanks:
    """Takes the place of `RankSet` where no process is needed."""

    made: ClassVar[list[int]] = []

    def __init__(self, num_ranks, *, num_threads):
        self.made.append(num_ranks)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def call(self, packed, **options):
        return []


def test_notice_about_big_copies(capfd, monkeypatch):
    monkeypatch.setattr("ddp_lab.ranks.launch.RankSet", NoRanks)
    launch(len, torch.zeros(3 * 2**20))
    notice = capfd.readouterr().err
    assert notice == (
        "launch: 12 MB of arguments are copied to each of 2 ranks; "
        "shared(tensor) passes one copy for all\n"
    )
    launch(len, shared(torch.zeros(3 * 2**20)))
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("line", "headline"),
    [
        ("raise ImportError('no such library')", "ImportError: no such library"),
        ("os._exit(7)", "exit: the process ended with exit code 7"),
    ],
)
def test_a_rank_that_fails_before_the_function(line, headline, tmp_path, monkeypatch):
    """Its module cannot be imported there: told at once, and not tried for ever."""
    name = f"fails_{headline.partition(':')[0].lower()}"
    code = f"import os\nif 'RANK' in os.environ:\n    {line}\ndef fn():\n    pass\n"
    (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RankFailed) as caught:
        launch(importlib.import_module(name).fn, num_ranks=1)
    assert str(caught.value).startswith(f"rank 0 of 1 failed: {headline}")


async def coroutine():
    """Not something a rank can run."""


def generator():
    yield 1


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"num_ranks": 0}, "num_ranks must be a whole number from 1 on, not 0"),
        ({"num_ranks": -1}, "num_ranks must be"),
        ({"num_ranks": 1.5}, "num_ranks must be"),
        ({"num_ranks": True}, "num_ranks must be"),
        ({"fn": 3}, "launch needs a function, not 'int'"),
        ({"fn": coroutine}, "coroutine is a coroutine function"),
        ({"fn": generator}, "generator is a generator function"),
        ({"num_threads": 0}, "num_threads must be"),
        ({"timeout_s": -1}, "timeout_s must be"),
        ({"stuck_after_s": 0}, "stuck_after_s must be"),
        ({"device": "tpu"}, "device 'tpu' is unknown"),
        (
            {"num_ranks": 2, "device": "cuda"},
            "2 ranks on this machine, but only 1 GPU(s)",
        ),
        ({"fn": lambda: threading.Lock, "args": (threading.Lock(),)}, "is a lock"),
    ],
)
def test_refused_before_a_process_starts(kwargs, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr("ddp_lab.ranks.launch.RankSet", None)  # starting one would fail
    kwargs = {"fn": on_ranks.who_am_i, "args": (), **kwargs}
    with pytest.raises(BadInput, match=re.escape(message)) as caught:
        launch(kwargs.pop("fn"), *kwargs.pop("args"), **kwargs)
    assert "\n" not in str(caught.value)


def test_number_of_ranks_follows_the_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr("ddp_lab.ranks.launch.RankSet", NoRanks)
    monkeypatch.setattr(NoRanks, "made", [])
    launch(on_ranks.who_am_i, num_ranks=None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    launch(on_ranks.who_am_i, num_ranks=None)
    assert NoRanks.made == [2, 3]


def test_unsendable_argument_is_named():
    with pytest.raises(NotSendable, match="`loader` is a generator"):
        launch(lambda loader: loader, (i for i in range(3)))


def test_only_the_loopback_listens_and_files_are_ours(tmp_path):
    """Every listening socket of the launch, and every file it opens for writing."""
    found = {}

    def look():
        until = time.monotonic() + 60
        while not all((tmp_path / f"rank{r}").exists() for r in range(2)):
            assert time.monotonic() < until
            time.sleep(0.02)
        for process in [psutil.Process(), *children()]:
            for connection in process.net_connections("inet"):
                if connection.status == psutil.CONN_LISTEN:
                    found.setdefault("listeners", set()).add(connection.laddr.ip)
        (tmp_path / "go").touch()

    thread = threading.Thread(target=look)
    thread.start()
    launch(on_ranks.lie_in_wait, tmp_path)
    thread.join()
    assert found["listeners"] == {"127.0.0.1"}


def test_from_a_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(launch(on_ranks.who_am_i)))
    thread.start()
    thread.join(60)
    assert found == [[(0, 2), (1, 2)]]


SCRIPT = """
import os
print("top level runs", flush=True)
from ddp_lab.ranks.launch import launch
def hello():
    return os.environ["RANK"]
"""
SPAWNED_LOADER = """
from torch.utils.data import DataLoader, Dataset
class Squares(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return index**2
def as_list(samples):
    return samples
def load():
    loader = DataLoader(
        Squares(), 2, num_workers=1, multiprocessing_context="spawn", collate_fn=as_list
    )
    return list(loader)
print(launch(load, num_ranks=1))
"""
CALL = "print(launch(hello))\n"
GUARDED = "if __name__ == '__main__':\n    " + CALL


def run_script(path, text):
    path.write_text(text)
    return subprocess.run(
        [sys.executable, path], capture_output=True, text=True, timeout=120
    )


def test_from_a_script_with_a_guard(tmp_path):
    done = run_script(tmp_path / "script.py", SCRIPT + GUARDED)
    assert done.stdout == "top level runs\n['0', '1']\n"
    assert done.stderr == ""


def test_from_a_script_without_a_guard_and_its_error(tmp_path):
    """In a terminal: the rank's traceback first, the headline last.

    A loader whose processes are spawned finds what only the script defines.
    """
    text = SCRIPT + CALL + SPAWNED_LOADER + "launch(lambda: 1 / 0)\n"
    done = run_script(tmp_path / "script.py", text)
    assert done.stdout == "top level runs\n['0', '1']\n[[[0, 1], [4, 9]]]\n"
    assert done.returncode == 1
    assert "launch(lambda: 1 / 0)" in done.stderr
    last = done.stderr.rstrip().splitlines()[-1]
    assert last.endswith("rank 0 of 2 failed: ZeroDivisionError: division by zero")


def test_launches_leave_no_descriptor_or_thread():
    def count():
        return psutil.Process().num_fds(), threading.active_count()

    def some_of_all(data):
        on_ranks.send_records()
        print("text")
        return data

    data = shared(torch.zeros(10))
    launch(some_of_all, data, on_record=lambda rank, fields: None)
    before = count()
    launch(some_of_all, data, on_record=lambda rank, fields: None)
    with pytest.raises(RankFailed):
        launch(on_ranks.fail_alike)
    assert count() == before
