"""The exercises of notebook 10: torchrun on several hosts, Slurm's places, the network.

None of them needs ranks. torchrun's options are judged by torchrun's own parser.
"""

import contextlib
import io
from collections.abc import Iterator
from typing import Any

from ddp_lab.exercises.exercise import (
    Exercise,
    Words,
    Wrong,
    call_by_name,
    close,
    given_by_name,
    same,
)

__all__ = ["HOST_EXERCISES"]


# ------------------------------------------------------------------ torchrun


def _judge_options(case: dict[str, Any], seen: list[Any]) -> Iterator[Wrong]:
    (got,) = seen
    hosts, port = case["hosts"], case["port"]
    endpoint = f"{hosts[0]}:{port}"
    if not isinstance(got, list | tuple) or not all(isinstance(x, str) for x in got):
        rule = "it is a list of texts, as a shell would hand them to torchrun"
        texts = ["--nnodes", str(len(hosts)), Words("...")]
        yield Wrong(rule=rule, rank=None, expected=texts, got=got)
        return
    parsed, complaint = _parse(list(got))
    if parsed is None:
        rule = "torchrun understands all of them"
        none = Words("no complaint")
        yield Wrong(rule=rule, rank=None, expected=none, got=Words(complaint))
        return
    from torch.distributed.run import parse_min_max_nnodes

    places = {f"{host}:{port}" for host in hosts}
    fewest, most = parse_min_max_nnodes(parsed.nnodes)
    conf = dict(part.partition("=")[::2] for part in parsed.rdzv_conf.split(","))
    is_host = f"is_host={conf['is_host']}" if "is_host" in conf else ""
    checks = [
        ("there is no --standalone: it is for one host", parsed.standalone, False),
        (
            "--nnodes is the number of hosts: all of them, before the first step",
            parsed.nnodes if fewest < most else str(most),
            str(len(hosts)),
        ),
        (
            "--nproc-per-node is the number of ranks on one host",
            parsed.nproc_per_node,
            str(case["ranks_per_host"]),
        ),
        (
            "--rdzv-backend is c10d, so that the same options do for every host",
            parsed.rdzv_backend,
            "c10d",
        ),
        (
            "--rdzv-endpoint is one of the hosts and the port, the same for all",
            endpoint if parsed.rdzv_endpoint in places else parsed.rdzv_endpoint,
            endpoint,
        ),
        (
            "the same options do for every host, and only one of them is host of the "
            "endpoint: leave is_host to torchrun",
            is_host,
            "",
        ),
        (
            "the same options do for every host, so none gives a host its own address",
            parsed.local_addr or "",
            "",
        ),
        (
            "they meet over the network, not in a file",
            conf.get("store_type", "tcp"),
            "tcp",
        ),
        (
            "the script is a file that python runs: no -m and no --no-python",
            "-m" * parsed.module or "--no-python" * parsed.no_python,
            "",
        ),
    ]
    for rule, found, expected in checks:
        if found != expected:
            nothing = Words("nothing") if expected == "" else expected
            yield Wrong(rule=rule, rank=None, expected=nothing, got=found)
    if parsed.rdzv_id in ("", "none"):  # "none" is torchrun's default
        rule = "--rdzv-id names the job, so that two jobs never mix"
        a_name = Words("any name")
        yield Wrong(rule=rule, rank=None, expected=a_name, got=parsed.rdzv_id)


def _parse(options: list[str]) -> tuple[Any, str]:
    """What torchrun makes of its options, or None and its complaint."""
    from torch.distributed.run import get_args_parser, parse_min_max_nnodes

    said, helped = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(helped):
            parsed = get_args_parser().parse_args([*options, "train.py"])
            parse_min_max_nnodes(parsed.nnodes)
    except (ValueError, RuntimeError) as error:
        return None, f"--nnodes={parsed.nnodes}: {error}"
    except SystemExit:
        complaint = said.getvalue().strip().rpartition("error: ")[2]
        return None, complaint or "it only prints its help"
    if parsed.training_script != "train.py":
        return None, f"it takes {parsed.training_script!r} for the script to run"
    return parsed, ""


_TORCHRUN_OPTIONS = Exercise(
    name="torchrun_options",
    signature="torchrun_options(hosts, ranks_per_host, port)",
    task=(
        "hosts is a list of host names. The same command is to be started on each of "
        "them: torchrun, its options, then the script, a file. Return the options, as "
        "a list of texts, such that ranks_per_host ranks run on every host and all of "
        "them meet by c10d at a port of one of the hosts. Give the job a name. As the "
        "command is the same everywhere, it says nothing that holds for one host only."
    ),
    cases=(
        {"hosts": ["alpha", "beta"], "ranks_per_host": 4, "port": 29500},
        {"hosts": ["10.0.0.7", "10.0.0.8", "10.0.0.9"], "ranks_per_host": 1, "port": 9},
    ),
    call=call_by_name,
    judge=_judge_options,
    given=given_by_name,
    tried="Two hosts with four ranks and three with one, read by torchrun's parser.",
    where="once",
)

# ------------------------------------------------------------------ Slurm


def _counts(tasks_per_node: str) -> list[int]:
    counts = []
    for part in tasks_per_node.split(","):
        number, _, times = part.rstrip(")").partition("(x")
        counts += [int(number)] * int(times or 1)
    return counts


def _judge_places(case: dict[str, Any], seen: list[Any]) -> Iterator[Wrong]:
    (got,) = seen
    counts = _counts(case["tasks_per_node"])
    expected = [(host, k) for host, n in enumerate(counts) for k in range(n)]
    if not isinstance(got, list | tuple) or not all(
        isinstance(p, list | tuple) and len(p) == 2 and all(type(x) is int for x in p)
        for p in got
    ):
        rule = "it is a list of pairs of whole numbers: host, local rank"
        yield Wrong(rule=rule, rank=None, expected=expected, got=got)
        return
    if len(got) != len(expected):
        rule = "there is one place for each task"
        yield Wrong(rule=rule, rank=None, expected=expected, got=got)
        return
    for host, count in enumerate(counts):
        own = [local_rank for h, local_rank in got if h == host]
        if len(own) != count:
            rule = f"host {host} has {count} of the tasks: hosts count from 0"
            yield Wrong(rule=rule, rank=None, expected=expected, got=got)
        elif sorted(own) != list(range(count)):
            rule = "on each host, local ranks start again from 0"
            yield Wrong(rule=rule, rank=None, expected=expected, got=got)
    if not same(got, expected):
        rule = "ranks fill one host after the other"
        yield Wrong(rule=rule, rank=None, expected=expected, got=got)


_PLACES_FROM_SLURM = Exercise(
    name="places_from_slurm",
    signature="places_from_slurm(tasks_per_node)",
    task=(
        "tasks_per_node is what SLURM_STEP_TASKS_PER_NODE holds: how many tasks each "
        "node has, where '2(x3),1' means two on each of three nodes, and one on the "
        "fourth. Return the list of pairs (host, local rank), one for each rank in "
        "order. Ranks fill one host after the other, and both count from 0."
    ),
    cases=tuple(
        {"tasks_per_node": text}
        for text in ("2", "3(x2)", "2(x3),1", "1,3", "1(x2),2(x2)", "1(x12)")
    ),
    call=call_by_name,
    judge=_judge_places,
    given=given_by_name,
    tried="One host, hosts alike, hosts that differ, and twelve of them.",
    where="once",
)

# ------------------------------------------------------------------ the network


def _judge_bandwidth(case: dict[str, Any], seen: list[Any]) -> Iterator[Wrong]:
    (got,) = seen
    num_bytes, num_ranks, seconds = case.values()
    sent = 2 * (num_ranks - 1) / num_ranks * num_bytes
    expected = 8 * sent / seconds
    if num_ranks == 1:
        rule = "a rank that is alone needs no network"
    elif close(got, expected / 8, 1e-9):
        rule = "a byte has 8 bits, and networks are sold by the bit"
    elif close(got, 8 * sent * seconds, 1e-9):
        rule = "who has less time needs more of it"
    else:
        rule = "each of n ranks sends 2 (n - 1) / n times the tensor's bytes"
    if not close(got, expected, 1e-9):
        yield Wrong(rule=rule, rank=None, expected=expected, got=got)


def _case(num_bytes: int, num_ranks: int, seconds: float) -> dict[str, Any]:
    return {"num_bytes": num_bytes, "num_ranks": num_ranks, "seconds": seconds}


_BANDWIDTH_NEEDED = Exercise(
    name="bandwidth_needed",
    signature="bandwidth_needed(num_bytes, num_ranks, seconds)",
    task=(
        "A ring all-reduce of a tensor of num_bytes on num_ranks ranks is to take at "
        "most that many seconds. Return the bandwidth that each rank needs to the next "
        "one, in bits a second. It receives at the same time; what it computes and the "
        "latency count for nothing."
    ),
    cases=(
        _case(1_000_000, 2, 0.5),
        _case(1_000_000, 4, 2.0),
        _case(3_000_000, 1, 0.1),
        _case(44_726_568, 16, 0.01),
    ),
    call=call_by_name,
    judge=_judge_bandwidth,
    given=given_by_name,
    tried="Two, four and sixteen ranks, and one that is alone.",
    where="once",
)

HOST_EXERCISES = (_TORCHRUN_OPTIONS, _PLACES_FROM_SLURM, _BANDWIDTH_NEEDED)
