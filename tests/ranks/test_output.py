"""The ranks' text in order, without any process."""

import types

import pytest

from ddp_lab.ranks import _output
from ddp_lab.ranks._output import Output


def test_rank_0_is_live_and_the_others_follow(capsys):
    output = Output(3)
    output.feed(2, 0, b"two\n")
    output.feed(1, 0, b"one, fi")
    output.feed(0, 0, b"zero")
    assert output.show() is None
    assert capsys.readouterr().out == "zero"
    output.feed(1, 0, b"rst\none, second")
    output.finish()
    assert capsys.readouterr().out == (
        "\n[rank 1] one, first\n[rank 1] one, second\n[rank 2] two\n"
    )


def test_chatty_output_is_shown_in_batches(capsys, monkeypatch):
    """One every 50 ms: a line is live for a reader, and the messages are few."""
    now = 100.0
    clock = types.SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr(_output, "time", clock)
    output = Output(1)
    output.feed(0, 0, b"a")
    assert output.show() is None
    now += 0.02
    output.feed(0, 0, b"b")
    assert output.show() == pytest.approx(0.03)
    assert capsys.readouterr().out == "a"
    now += 0.03
    assert output.show() is None
    assert capsys.readouterr().out == "b"
    output.feed(0, 0, b"c")
    output.finish()
    assert capsys.readouterr().out == "c"


def test_a_letter_torn_between_two_reads(capsys):
    output = Output(2)
    for rank in range(2):
        first, second = "é".encode()[:1], "é".encode()[1:]
        output.feed(rank, 0, first)
        output.feed(rank, 0, second + b"\n")
    output.finish()
    assert capsys.readouterr().out == "é\n[rank 1] é\n"


def test_a_progress_bar_of_another_rank_ends_as_one_line(capsys):
    output = Output(2)
    output.feed(1, 1, b"\r 10%\r 50%\r100%\nwindows line\r\n")
    output.finish()
    assert capsys.readouterr().err == "[rank 1] 100%\n[rank 1] windows line\n"


@pytest.mark.parametrize("failed", [False, True])
def test_without_echo(capsys, failed):
    output = Output(2, echo=False)
    output.feed(0, 0, b"zero\n")
    output.feed(1, 1, b"one\n")
    output.show()
    output.finish(failed=failed)
    out, err = capsys.readouterr()
    assert out == ("[rank 0] zero\n" if failed else "")
    assert err == ("[rank 1] one\n" if failed else "")


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_long_output_is_cut_and_kept(capsys, tmp_path, monkeypatch, num_ranks):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    output = Output(num_ranks, limit_bytes=1000)
    text = "".join(f"line {i}\n" for i in range(1000))
    for rank in range(num_ranks):
        output.feed(rank, 0, text.encode())
    output.show()
    output.finish()
    out = capsys.readouterr().out
    for rank in range(num_ranks):
        mark = f"[rank {rank}] " if rank else ""
        assert f"{mark}line 0\n" in out
        assert f"{mark}line 500\n" not in out
        assert f"{mark}line 999\n" in out
        (path,) = tmp_path.glob(f"*/rank{rank}-stdout.txt")
        assert path.read_text() == text
        assert f"all of it is in {path}" in out
