"""The network benchmark: its numbers by their definitions, and as people start it."""

import re
import sys

import pytest
import torch.distributed as dist

from ddp_lab.errors import BadInput, RankFailed
from ddp_lab.figures.network import bus_factor
from ddp_lab.ranks.launch import launch
from ddp_lab.ranks.workers import Workers
from ddp_lab.tools.bandwidth import fit_line, main, measure_all_reduce
from small_commands import run

COMMAND = [sys.executable, "-m", "ddp_lab.tools.bandwidth"]
FEW = ["--sizes", "4K", "64K", "--repeats", "3", "--device", "cpu"]
NAME = "ddp_lab.tools.bandwidth"


# ---- numbers ---------------------------------------------------------------------


@pytest.mark.parametrize(("num_ranks", "factor"), [(2, 1), (4, 1.5), (8, 1.75)])
def test_bus_bandwidth_counts_what_a_ring_sends(num_ranks, factor):
    """In each of 2 (n - 1) hops a rank sends an n-th of the tensor."""
    sent = sum(1 / num_ranks for _ in range(2 * (num_ranks - 1)))
    assert bus_factor(num_ranks) == pytest.approx(sent) == pytest.approx(factor)


SIZES = [4 * 2**10, 2**16, 2**20, 2**26]


@pytest.mark.parametrize(("latency_s", "bytes_per_s"), [(1e-4, 1e9), (2e-6, 5e10)])
def test_the_fit_finds_the_line_that_the_times_lie_on(latency_s, bytes_per_s):
    seconds = [latency_s + size / bytes_per_s for size in SIZES]
    fit = fit_line(SIZES, seconds)
    assert fit == pytest.approx((latency_s, bytes_per_s))


def test_no_other_line_is_nearer_in_per_cent():
    seconds = [1.3e-4, 1.5e-4, 1.0e-3, 7.5e-2]

    def error(latency_s, bytes_per_s):
        times = [latency_s + size / bytes_per_s for size in SIZES]
        return sum((t / s - 1) ** 2 for t, s in zip(times, seconds, strict=True))

    latency_s, bytes_per_s = fit_line(SIZES, seconds)
    least = error(latency_s, bytes_per_s)
    for k in (0.99, 1.01):
        assert error(k * latency_s, bytes_per_s) > least
        assert error(latency_s, k * bytes_per_s) > least


def test_a_latency_is_never_negative_and_a_bandwidth_may_be_infinite():
    assert fit_line([10, 20], [1, 3])[0] == 0  # through 10 and 20 it would be -1
    latency_s, bytes_per_s = fit_line([10, 20], [3, 3])
    assert (latency_s, bytes_per_s) == (pytest.approx(3), float("inf"))


# ---- on ranks --------------------------------------------------------------------


def measure_and_look(sizes, num_repeats):
    """Also: how many elements each all-reduce had, and what is left open."""
    real, elements = dist.all_reduce, []

    def noting(tensor, *args, **kwargs):
        elements.append(tensor.numel())
        return real(tensor, *args, **kwargs)

    dist.all_reduce = noting
    try:
        found = measure_all_reduce(sizes, num_repeats, "cpu")
    finally:
        dist.all_reduce = real
    return found, elements, dist.is_initialized()


def test_all_ranks_find_the_same_and_each_size_is_called_as_often():
    with Workers(3) as workers:
        (found, elements, is_open), *others = workers.run(
            measure_and_look, [4, 4096], 5
        )
    assert all(other == (found, elements, is_open) for other in others)
    assert not is_open
    assert elements == [1] * 10 + [1024] * 10  # float32; five of ten are not timed
    assert {name: found[name] for name in ("num_ranks", "num_hosts", "backend")} == {
        "num_ranks": 3,
        "num_hosts": 1,
        "backend": "gloo",
    }
    assert [*found["seconds"]] == [4, 4096]
    for seconds in found["seconds"].values():
        assert len(seconds) == 5
        assert min(seconds) > 0


def test_one_rank_has_nobody_to_send_to():
    with pytest.raises(BadInput, match="start 2 or more"):
        measure_all_reduce([4])
    with pytest.raises(RankFailed, match="start 2 or more"):
        launch(measure_all_reduce, [4], num_ranks=1)


# ---- the command -----------------------------------------------------------------


def numbers(line):
    return [float(text) for text in re.findall(r"\d+(?:\.\d+)?", line)]


def check_table(said, num_ranks):
    """Each number by its definition, from the two that were measured."""
    head, _, *rows, fit, ring = said
    assert head == f"all-reduce on {num_ranks} ranks, gloo, hosts: 1"
    assert [numbers(row)[0] for row in rows] == [4, 64]
    for row in rows:
        size_kb, median_ms, low_ms, high_ms, algbw, busbw = numbers(row)
        assert low_ms <= median_ms <= high_ms
        # as printed, to three places
        exact = size_kb * 1024 / (median_ms / 1000) / 1e9
        assert algbw == pytest.approx(exact, abs=1e-3, rel=0.02)
        factor = 2 * (num_ranks - 1) / num_ranks
        assert busbw == pytest.approx(factor * algbw, abs=2e-3)
    assert fit.startswith("fit: ")
    assert f"a hop, of {2 * (num_ranks - 1)};" in ring


def test_by_itself_it_starts_ranks_and_draws(tmp_path):
    command = [*COMMAND, "--num-ranks", "3", *FEW, "--out", "network.png"]
    status, said, complaints = run(command, tmp_path)
    assert (status, complaints) == (0, [])
    check_table(said, 3)
    picture = (tmp_path / "network.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert b"Software" not in picture


def test_under_torchrun_it_joins_and_rank_0_speaks(tmp_path):
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", "2", "-m", NAME, *FEW, "--out", "network.png"),
    ]
    status, said, complaints = run(command, tmp_path, OMP_NUM_THREADS="1")
    assert status == 0, complaints
    check_table(said, 2)
    assert (tmp_path / "network.png").exists()


def test_it_is_a_command_of_the_lab(tmp_path):
    status, said, _ = run(
        [sys.executable, "-m", "ddp_lab", "bandwidth", "-h"], tmp_path
    )
    assert status == 0
    assert f"python -m {NAME}" in said[0]
    assert any("How fast is my network?" in line for line in said)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--sizes", "ten"], "'ten' is not a size like 512, 4K or 16M"),
        (["--sizes", "5"], "'5' is not a size"),
        (["--sizes", "0"], "'0' is not a size"),
        (["--repeats", "1"], "'1' is not a number from 2 on"),
        (["--num-ranks", "1"], "'1' is not a number from 2 on"),
        (["--device", "tpu"], "invalid choice: 'tpu'"),
        (["--seizes", "4K"], "unrecognized arguments: --seizes 4K"),
        (["--out", "nowhere/a.png"], "name a .png in a folder that is there"),
        (["--out", "a.txt"], "name a .png in a folder that is there"),
    ],
)
def test_what_cannot_work_is_told_in_one_line(capsys, arguments, told):
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"{NAME}: ")
    assert told in said.err
    assert said.err.count("\n") == 1


def test_gpus_that_are_not_there(capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert main(["--device", "cuda"]) == 2
    assert "this machine shows no GPU" in capsys.readouterr().err


def test_a_launcher_has_chosen_the_number_of_ranks(capsys, monkeypatch):
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    assert main(["--num-ranks", "3"]) == 2
    assert "the launcher started 2 ranks already" in capsys.readouterr().err


def test_why_a_rank_failed_is_told_in_one_line(capsys, monkeypatch):
    def refuse(*args, **kwargs):
        raise BadInput("what it was")

    monkeypatch.setattr("ddp_lab.tools.bandwidth.measure_all_reduce", refuse)
    assert main([*FEW, "--num-ranks", "2"]) == 2
    assert capsys.readouterr().err == f"{NAME}: what it was\n"
