"""launch: functions run on real processes, and whatever happens there is told."""

import importlib
import os
import re
import stat
import subprocess
import sys
import threading
import time
from functools import partial

import psutil
import pytest
import torch

import rank_functions as on_ranks
from ddp_lab.errors import BadInput, NotSendable, RankFailed
from ddp_lab.launch import launch, shared

# forkserver imports torch once for all tests; spawn, the default, is used where the
# start itself matters
quick = partial(launch, start_method="forkserver")


def children():
    """Processes of ours, without multiprocessing's own helpers."""
    helpers = ("resource_tracker", "forkserver import main")
    found = psutil.Process().children(recursive=True)
    return [p for p in found if not any(h in " ".join(p.cmdline()) for h in helpers)]


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    assert children() == []


def test_values_come_back_in_rank_order():
    assert launch(on_ranks.who_am_i, num_ranks=3) == [(0, 3), (1, 3), (2, 3)]


def test_init_joins_the_group():
    assert quick(on_ranks.sum_of_ranks, init=True) == [1.0, 1.0]


def test_many_kinds_of_functions():
    class Scale:
        def __init__(self, factor):
            self.factor = factor

        def apply(self, x):
            return x * self.factor

    offset = 5
    assert quick(lambda: offset) == [5, 5]
    assert quick(Scale(2).apply, 4) == [8, 8]
    assert quick(partial(pow, 2), 3) == [8, 8]
    assert quick(max, [1, 3, 2], key=lambda x: -x, num_ranks=1) == [1]


@pytest.mark.parametrize("start_method", ["spawn", "forkserver"])
def test_environment_of_a_rank(start_method, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = dict(os.environ)
    found = launch(on_ranks.environment, num_threads=1, start_method=start_method)
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


def test_own_copies_and_one_shared():
    """Two ranks stepping one weight would end at -0.2; the data is one on purpose."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    data = torch.zeros(2)
    first, second = quick(on_ranks.step_one_weight, model, shared(data), init=True)
    for found in (first, second):
        assert found["weight"].item() == pytest.approx(-0.1)
        assert found["data"].tolist() == [7.0, 7.0]
        assert type(found["model"]) is torch.nn.Linear
    assert model.weight.item() == 0.0
    assert data.tolist() == [7.0, 7.0]
    assert quick(on_ranks.step_one_weight, model, data, init=True)[0]["data"][1] == 7.0


def test_notice_about_big_copies(capfd):
    quick(len, torch.zeros(3 * 2**20))
    notice = capfd.readouterr().err
    assert notice == (
        "launch: 12 MB of arguments are copied to each of 2 ranks; "
        "shared(tensor) passes one copy for all\n"
    )
    quick(len, shared(torch.zeros(3 * 2**20)))
    assert capfd.readouterr().err == ""


def test_output_in_rank_order(capsys):
    for _ in range(2):  # the same text every time
        quick(on_ranks.print_all_ways)
        out, err = capsys.readouterr()
        assert out == (
            "first from 0\nraw from 0\nünïcode from 0, no end\n"
            "[rank 1] first from 1\n[rank 1] raw from 1\n"
            "[rank 1] ünïcode from 1, no end\n"
        )
        assert err == (
            "warning from 0\n\r0 %\r50 %\r100 %\n[rank 1] warning from 1\n"
            "[rank 1] 100 %\n"
        )


def test_echo_off(capsys):
    quick(on_ranks.print_all_ways, echo=False)
    assert capsys.readouterr() == ("", "")
    with pytest.raises(RankFailed):
        quick(on_ranks.print_and_die, echo=False)
    assert capsys.readouterr().out == "[rank 1] last words\n"


def test_no_line_is_lost(capsys):
    num_lines = 50_000
    quick(on_ranks.print_much, num_lines, num_ranks=4)
    lines = capsys.readouterr().out.splitlines()
    expected = [
        ("" if rank == 0 else f"[rank {rank}] ")
        + f"line {line} of rank {rank}, with some text to fill it up"
        for rank in range(4)
        for line in range(num_lines)
    ]
    assert lines == expected


def test_records_arrive():
    found = []
    quick(
        on_ranks.send_records,
        on_record=lambda rank, fields: found.append((rank, fields)),
    )
    for rank in range(2):
        mine = [fields for r, fields in found if r == rank]
        assert mine == [{"step": step, "loss": 0.5} for step in range(3)]
    on_ranks.send_records()  # does nothing outside of a rank


FAILURES = {
    "raise": ("ValueError: boom", None),
    "exit": ("SystemExit: 3", 3),
    "_exit": ("exit: the process ended with exit code 0, fn did not return", 0),
    "interrupt": ("KeyboardInterrupt", None),
    "SIGKILL": ("SIGKILL: killed from outside, most likely because memory ran out", -9),
    "SIGSEGV": ("SIGSEGV: it crashed in native code", -11),
    "SIGBUS": ("SIGBUS: most likely /dev/shm is full", -7),
}


@pytest.mark.parametrize("how", FAILURES)
def test_failures(how):
    """The headline holds nothing that changes: no path, no process id."""
    headline, exit_code = FAILURES[how]
    with pytest.raises(RankFailed) as caught:
        quick(on_ranks.fail_as, how)
    error = caught.value
    assert str(error).startswith(f"rank 1 of 2 failed: {headline}")
    assert error.failures[0].rank == 1
    assert error.failures[0].exit_code == exit_code
    assert error.others[0].startswith("rank 0: waiting, rank_functions.py, line ")
    assert "inside.py" not in error.report
    if how == "raise":
        assert isinstance(error.__cause__, ValueError)
        assert 'raise ValueError("boom")' in str(error.__cause__.__cause__)
    if how == "SIGSEGV":  # where it crashed
        assert "os.kill(os.getpid()" in error.failures[0].where


def test_the_same_mistake_on_all_ranks():
    with pytest.raises(RankFailed) as caught:
        quick(on_ranks.fail_alike)
    assert str(caught.value) == "rank 0 of 2 failed: Unpicklable: 1 and 2"
    assert [failure.rank for failure in caught.value.failures] == [0, 1]
    assert caught.value.failures[0].exception is None
    assert "raise Unpicklable(1, 2)" in caught.value.failures[0].traceback


def test_a_killed_ranks_memory_is_told():
    with pytest.raises(RankFailed) as caught:
        quick(on_ranks.fill_memory_and_die, 2**29)
    report = caught.value.report
    found = re.search(r"It had ([\d.]+) GiB .*; all ranks share ([\d.]+) GiB", report)
    assert found, report
    had, there_is = map(float, found.groups())
    assert 0.5 <= had <= there_is  # an idle rank has about 0.3


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
        quick(importlib.import_module(name).fn)
    assert str(caught.value).startswith(f"rank 0 of 2 failed: {headline}")


def test_rank_0_may_leave_first():
    assert quick(on_ranks.rank_0_leaves_first) == ["gone", "value"]


def test_a_refused_download_is_the_cause():
    """Its text looks like a broken collective's, but it is not torch's."""
    with pytest.raises(RankFailed, match="rank 1 of 2 failed: ConnectionRefusedError"):
        quick(on_ranks.fail_to_download)


def test_a_labs_error_keeps_its_class():
    def refuse():
        raise BadInput("nothing to train on")

    with pytest.raises(RankFailed) as caught:
        quick(refuse)
    assert isinstance(caught.value.__cause__, BadInput)
    assert str(caught.value.failures[0].exception) == "nothing to train on"


def test_a_value_that_cannot_return():
    with pytest.raises(RankFailed, match="`the return value` is a generator"):
        quick(lambda: (i for i in range(3)))


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
        ({"start_method": "fork"}, "start_method 'fork' is unknown"),
        ({"num_threads": 0}, "num_threads must be"),
        ({"timeout_s": -1}, "timeout_s must be"),
        ({"stuck_after_s": 0}, "stuck_after_s must be"),
        ({"device": "tpu"}, "device 'tpu' is unknown"),
        ({"num_ranks": 2, "device": "cuda"}, "this machine has"),
        ({"fn": lambda: threading.Lock, "args": (threading.Lock(),)}, "is a lock"),
    ],
)
def test_refused_before_a_process_starts(kwargs, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr("ddp_lab.launch.Ranks", None)  # starting one would fail
    kwargs = {"fn": on_ranks.who_am_i, "args": (), **kwargs}
    with pytest.raises(BadInput, match=re.escape(message)) as caught:
        launch(kwargs.pop("fn"), *kwargs.pop("args"), **kwargs)
    assert "\n" not in str(caught.value)


def test_number_of_ranks_follows_the_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert len(quick(on_ranks.who_am_i, num_ranks=None)) == 2


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
    launch(on_ranks.lie_in_wait, str(tmp_path))
    thread.join()
    assert found["listeners"] == {"127.0.0.1"}


def test_from_a_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(quick(on_ranks.who_am_i)))
    thread.start()
    thread.join(60)
    assert found == [[(0, 2), (1, 2)]]


SCRIPT = """
import os
print("top level runs", flush=True)
from ddp_lab.launch import launch
def hello():
    return os.environ["RANK"]
"""
CALL = "print(launch(hello))\n"
GUARDED = "if __name__ == '__main__':\n    " + CALL


@pytest.mark.parametrize("call", [CALL, GUARDED], ids=["no guard", "guard"])
def test_from_a_script(tmp_path, call):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT + call)
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "top level runs\n['0', '1']\n"
    assert done.stderr == ""


def test_error_of_a_script(tmp_path):
    """In a terminal: the rank's traceback first, the headline last."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT + "launch(lambda: 1 / 0)\n")
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "launch(lambda: 1 / 0)" in done.stderr
    last = done.stderr.rstrip().splitlines()[-1]
    assert last.endswith("rank 0 of 2 failed: ZeroDivisionError: division by zero")


def test_overflow_file_is_ours_alone(tmp_path, monkeypatch, capsys):
    """What is too much for a notebook goes to a file with mode 0600."""
    monkeypatch.setattr("ddp_lab.output._in_notebook", lambda: True)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    quick(on_ranks.print_much, 30_000)
    out = capsys.readouterr().out
    assert len(out) < 3 * 2**20
    for rank in range(2):
        (path,) = tmp_path.glob(f"*/rank{rank}-stdout.txt")
        assert str(path) in out
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert len(path.read_text().splitlines()) == 30_000
        assert out.count(f"line 29999 of rank {rank}") == 1


def test_many_launches_leave_no_descriptor_or_thread():
    def count():
        return psutil.Process().num_fds(), threading.active_count()

    def some_of_all(data):
        on_ranks.send_records()
        print("text")
        return data

    data = shared(torch.zeros(10))
    quick(some_of_all, data, on_record=lambda rank, fields: None)
    before = count()
    for _ in range(3):
        quick(some_of_all, data, on_record=lambda rank, fields: None)
        with pytest.raises(RankFailed):
            quick(on_ranks.fail_alike)
    assert count() == before
