"""A call on ranks: values, output and records come back, and so does every failure.

`launch` and `Workers` make their calls alike, so this is told once, on ranks that stay.
"""

import re
import stat
from functools import partial

import pytest

import rank_functions as on_ranks
from ddp_lab.errors import BadInput, RankFailed
from ddp_lab.ranks import _rank_set
from ddp_lab.ranks._watch import Watch


def test_many_kinds_of_functions(warm):
    class Scale:
        def __init__(self, factor):
            self.factor = factor

        def apply(self, x):
            return x * self.factor

    offset = 5
    assert warm.run(lambda: offset) == [5, 5]
    assert warm.run(Scale(2).apply, 4) == [8, 8]
    assert warm.run(partial(pow, 2), 3) == [8, 8]
    assert warm.run(max, [1, 3, 2], key=lambda x: -x) == [1, 1]


def test_output_in_rank_order(warm, capsys):
    for _ in range(2):  # the same text every time
        warm.run(on_ranks.print_all_ways)
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


def test_echo_off(warm, capsys):
    warm.run(on_ranks.print_all_ways, echo=False)
    assert capsys.readouterr() == ("", "")


def test_records_arrive(warm):
    found = []
    warm.run(
        on_ranks.send_records,
        on_record=lambda rank, fields: found.append((rank, fields)),
    )
    for rank in range(2):
        mine = [fields for r, fields in found if r == rank]
        assert mine == [{"step": step, "loss": 0.5} for step in range(3)]
    on_ranks.send_records()  # does nothing outside of a rank


FAILURES = {
    # how: the headline, the exit code, and why the next call needs new ranks
    "raise": ("ValueError: boom", None, "rank 1 failed and others still waited for it"),
    "_exit": (
        "exit: the process ended with exit code 0, fn did not return",
        0,
        "rank 1 ended with exit code 0",
    ),
    "SIGKILL": (
        "SIGKILL: killed from outside, most likely because memory ran out",
        -9,
        "rank 1 was ended by SIGKILL",
    ),
    "SIGSEGV": (
        "SIGSEGV: it crashed in native code",
        -11,
        "rank 1 was ended by SIGSEGV",
    ),
}


@pytest.mark.parametrize("how", FAILURES)
def test_failures(warm, how, capsys):
    """The headline holds nothing that changes: no path, no process id."""
    headline, exit_code, why_new = FAILURES[how]
    pids = warm.pids
    with pytest.raises(RankFailed) as caught:
        warm.run(on_ranks.fail_as, how)
    error = caught.value
    assert str(error).startswith(f"rank 1 of 2 failed: {headline}")
    assert error.failures[0].rank == 1
    assert error.failures[0].exit_code == exit_code
    assert error.others[0].startswith("rank 0: waiting, rank_functions.py, line ")
    assert "_main.py" not in error.report
    if how == "raise":
        assert isinstance(error.__cause__, ValueError)
        assert 'raise ValueError("boom")' in str(error.__cause__.__cause__)
    if how == "SIGSEGV":  # where it crashed
        assert "os.kill(os.getpid()" in error.failures[0].where
    assert capsys.readouterr().out == ""  # told when it matters: at the next call
    assert warm.run(on_ranks.meet_and_sum) == [1.0, 1.0]
    assert capsys.readouterr().out == (
        f"Workers: 2 new ranks, because {why_new}; what the old held is gone\n"
    )
    assert not set(pids) & set(warm.pids)


@pytest.mark.parametrize(
    ("how", "headline", "exit_code"),
    [("exit", "SystemExit: 3", 3), ("interrupt", "KeyboardInterrupt", None)],
)
def test_failures_that_nobody_waits_for(warm, how, headline, exit_code):
    with pytest.raises(RankFailed) as caught:
        warm.run(on_ranks.fail_alone, how)
    assert str(caught.value) == f"rank 1 of 2 failed: {headline}"
    assert caught.value.failures[0].exit_code == exit_code
    assert caught.value.others == ("rank 0: finished, returned",)
    assert "_main.py" not in caught.value.report


def test_the_same_mistake_on_all_ranks(warm):
    with pytest.raises(RankFailed) as caught:
        warm.run(on_ranks.fail_alike)
    assert str(caught.value) == "rank 0 of 2 failed: Unpicklable: 1 and 2"
    assert [failure.rank for failure in caught.value.failures] == [0, 1]
    assert caught.value.failures[0].exception is None
    assert "raise Unpicklable(1, 2)" in caught.value.failures[0].traceback


def test_a_killed_ranks_memory_is_told(warm, tmp_path, monkeypatch):
    num_bytes, asked = 2**30, tmp_path / "asked"

    class Follow(Watch):
        def saw(self, rank, sight):
            super().saw(rank, sight)
            if sight.peak_bytes > num_bytes:
                asked.touch()

    monkeypatch.setattr(_rank_set, "Watch", Follow)
    with pytest.raises(RankFailed) as caught:
        warm.run(on_ranks.fill_memory_and_die, num_bytes, asked)
    report = caught.value.report
    found = re.search(r"It had ([\d.]+) GiB .*; all ranks share ([\d.]+) GiB", report)
    assert found, report
    had, there_is = map(float, found.groups())
    assert 1.0 <= had <= there_is  # an idle rank has about half of it


def test_rank_0_may_leave_first(warm, tmp_path):
    fn = on_ranks.rank_0_leaves_first
    assert warm.run(fn, tmp_path / "gone") == ["gone", "value"]


def test_a_refused_download_is_the_cause(warm):
    """Its text looks like a broken collective's, but it is not torch's."""
    with pytest.raises(RankFailed, match="rank 1 of 2 failed: ConnectionRefusedError"):
        warm.run(on_ranks.fail_alone, "download")


def test_a_labs_error_keeps_its_class(warm):
    def refuse():
        raise BadInput("nothing to train on")

    with pytest.raises(RankFailed) as caught:
        warm.run(refuse)
    assert isinstance(caught.value.__cause__, BadInput)
    assert str(caught.value.failures[0].exception) == "nothing to train on"


def test_a_value_that_cannot_be_rebuilt(warm):
    with pytest.raises(RankFailed, match="rank 0 of 2 failed: KeyError: it returned"):
        warm.run(on_ranks.OnlyHere)


def test_a_value_that_cannot_return(warm):
    with pytest.raises(RankFailed, match="`the return value` is a generator"):
        warm.run(lambda: (i for i in range(3)))


def test_overflow_file_is_ours_alone(warm, tmp_path, monkeypatch, capsys):
    """What is too much for a notebook goes to a file with mode 0600."""
    monkeypatch.setattr("ddp_lab.ranks._output._in_notebook", lambda: True)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    warm.run(on_ranks.print_much, 30_000)
    out = capsys.readouterr().out
    assert len(out) < 3 * 2**20
    for rank in range(2):
        (path,) = tmp_path.glob(f"*/rank{rank}-stdout.txt")
        assert str(path) in out
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert len(path.read_text().splitlines()) == 30_000
        assert out.count(f"line 29999 of rank {rank}") == 1
