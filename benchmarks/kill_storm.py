"""Kill training runs at random moments, go on, and compare with the uninterrupted run.

    python benchmarks/kill_storm.py 200

A small run on two ranks is killed with SIGKILL: one rank, the parent, or everything at
once. The same command is given again, and killed again, until the run ends. Then its
weights, its optimiser's state and its history must be, bit for bit, what the same
settings give uninterrupted. Then the next run begins, until that many kills are done.

Starting takes seconds, a step a twentieth of one, so moments spread evenly over time
would nearly all hit the start. One kill in five is drawn from the start (evenly over
its length); the others wait until the history has grown by one to three lines, and
then for a random part of two steps. What was going on is told afterwards by the files.
Writes benchmarks/results/kill_storm.json; exits with 1 if a run was lost or differs.
"""

import argparse
import collections
import contextlib
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from common import describe_machine, write_results

from ddp_lab.runs import checkpoint
from ddp_lab.runs.record import Run

STEPS_PER_EPOCH, EPOCHS, BATCH = 12, 3, 8
COMMON = [
    *("--device", "cpu", "--num-ranks", "2", "--num-threads", "1"),
    *("--global-batch-size", str(BATCH), "--lr", "0.002"),
    *("--limit-train", str(STEPS_PER_EPOCH * BATCH), "--limit-test", "16"),
    *("--epochs", str(EPOCHS), "--crop-padding", "2", "--auto-resume"),
]
SETTINGS = {
    "BatchNorm": ["--model", "shufflenet_v2_x0_5", "--checkpoint-every", "1"],
    "dropout": ["--model", "squeezenet1_1", "--checkpoint-every", "2"],
}
LIMIT_S = 300.0  # nothing here takes so long


class Attempt:
    """One start of a run, new or resumed, and what can be seen of it from outside."""

    def __init__(self, settings: Sequence[str], folder: Path, **options: Any) -> None:
        self.run = Run(folder)
        self.stamp_before = self._stamp()
        saved = [*checkpoint.saved_steps(folder), 0][0]
        lines = self.run.history.lines if saved else []
        self.num_before = sum(line["step"] <= saved for line in lines)
        command = [*COMMON, *settings, "--out", str(folder)]
        self.process = psutil.Popen(
            [sys.executable, "-m", "ddp_lab.train", *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **{"env": {**os.environ, "OMP_NUM_THREADS": "1"}, **options},
        )
        self.started = time.monotonic()
        self.family: set[psutil.Process] = {self.process}

    def _stamp(self) -> int:
        file = self.run.environment_file
        return file.stat().st_mtime_ns if file.exists() else 0

    @property
    def began(self) -> bool:
        """Whether this attempt has taken up the run, its history cut to fit."""
        written = self._stamp() != self.stamp_before
        return written and self.run.history_file.exists()

    @property
    def lines(self) -> list[dict[str, Any]]:
        """Those that this attempt has added to the history."""
        return self.run.history.lines[self.num_before :] if self.began else []

    def ranks(self) -> list[psutil.Process]:
        """The ranks that have been started, in rank order; none if it has ended."""
        try:
            children = self.process.children()
            self.family |= set(self.process.children(recursive=True))
        except psutil.NoSuchProcess:
            return []
        return sorted(
            (p for p in children if "spawn_main" in _command(p)), key=lambda p: p.pid
        )

    def wait_until(self, reached: Callable[[], bool]) -> None:
        """Wait for something, or for the end."""
        while self.process.poll() is None and not reached():
            assert time.monotonic() - self.started < LIMIT_S, "nothing moves"
            time.sleep(0.002)

    def kill(self, victim: str) -> bool:
        """Kill a rank, the parent, or all; False if it had ended before."""
        ranks = self.ranks()
        victims = {"all": [self.process, *self.family], "parent": [self.process]}
        victims |= {f"rank {k}": [rank] for k, rank in enumerate(ranks)}
        if self.process.poll() is not None or victim not in victims:
            return False
        for process in victims[victim]:
            _kill(process)
        return True

    def phase(self) -> str:
        """What rank 0 was doing, from its files."""
        if not self.began:
            return "starting"
        if not (lines := self.lines):
            return "training"  # its first step
        last = lines[-1]
        saved = checkpoint.saved_steps(self.run.folder)
        newest = self.run.folder / f"checkpoint-{saved[0] if saved else 0:08d}.pt"
        if last["kind"] == "step" and last["step"] % STEPS_PER_EPOCH == 0:
            return "evaluating"
        if list(self.run.folder.glob("*.tmp")) or (
            saved and not newest.samefile(self.run.checkpoint_file)
        ):
            return "saving"
        every = int(json.loads(self.run.config_file.read_text())["checkpoint_every"])
        if last["step"] % every == 0 and saved[:1] != [last["step"]]:
            return "saving"
        over = last["kind"] == "eval" and last["epoch"] == EPOCHS
        return "ending" if over else "training"

    def end(self) -> tuple[int, str, str]:
        """Wait for the end: status, stdout, stderr."""
        out, err = self.process.communicate(timeout=LIMIT_S)
        return self.process.returncode, out, err

    def left(self) -> int:
        """How many of its processes are still there, and are ended now."""
        end = time.monotonic() + 30
        while (alive := [p for p in self.family if _alive(p)]) and (
            time.monotonic() < end
        ):
            time.sleep(0.05)
        for process in alive:
            _kill(process)
        return len(alive)


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _alive(process: psutil.Process) -> bool:
    """A zombie has ended; its new parent has not asked yet how."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _kill(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.kill()


def measure(name: str, folder: Path) -> tuple[float, float]:
    """Run without a kill; return seconds to the first line, and between two."""
    attempt, times = Attempt(SETTINGS[name], folder), []

    def look() -> bool:
        while len(times) < len(attempt.lines):
            times.append(time.monotonic())
        return False

    attempt.wait_until(look)
    status, _, err = attempt.end()
    assert status == 0, err
    laps = [b - a for a, b in itertools.pairwise(times)]
    return times[0] - attempt.started, statistics.median(laps)


def draw(random_: random.Random, start_s: float, lap_s: float) -> dict[str, Any]:
    """A moment and a victim; as numbers, so that a seed gives the same ones again."""
    victim = random_.choice(["all", "all", "rank 0", "rank 1", "parent"])
    if random_.random() < 0.2:
        return {"victim": victim, "lines": 0, "wait_s": random_.random() * start_s}
    lines = random_.choice([1, 2, 3])
    return {"victim": victim, "lines": lines, "wait_s": random_.random() * 2 * lap_s}


def wait_for_moment(attempt: Attempt, moment: dict[str, Any]) -> None:
    """Wait for so many lines, and then for some time."""
    attempt.wait_until(lambda: len(attempt.lines) >= moment["lines"])
    until = time.monotonic() + moment["wait_s"]
    attempt.wait_until(lambda: time.monotonic() >= until)


def kill_and_look(attempt: Attempt, victim: str) -> dict[str, Any] | None:
    """Kill now, and say what came of it; None if the run has ended before."""
    if victim.startswith("rank") and len(attempt.ranks()) < 2:
        victim = "parent"  # there is no such rank yet
    if not attempt.kill(victim):
        return None
    phase = attempt.phase()
    status, _, err = attempt.end()
    expected = [1 if victim.startswith("rank") else -9]
    if phase == "ending":
        expected.append(0)  # the results were in already
    return {
        "victim": victim,
        "phase": phase,
        "left": attempt.left(),
        "problem": "" if status in expected else f"status {status}: {err}",
    }


def differences(folder: Path, whole: Path) -> list[str]:
    """What is not, bit for bit, as in the uninterrupted run."""
    found = []
    lines = [_without_times(Run(f).history.lines) for f in (folder, whole)]
    if lines[0] != lines[1]:
        found.append("history")
    states = [checkpoint.load(Run(f).checkpoint_file) for f in (folder, whole)]
    for part in ("model", "optimizer"):
        tensors = [list(_tensors(state[part])) for state in states]
        if len(tensors[0]) != len(tensors[1]) or not all(
            map(torch.equal, tensors[0], tensors[1])
        ):
            found.append(part)
    names = [sorted(p.name for p in f.iterdir()) for f in (folder, whole)]
    if names[0] != names[1]:
        found.append(f"files {sorted(set(names[0]) ^ set(names[1]))}")
    return found


def _without_times(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    times = ("time_s", "images_per_s")
    return [{k: v for k, v in line.items() if k not in times} for line in lines]


def _tensors(value: Any) -> Any:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, torch.Tensor):
        yield value


def storm(num_kills: int, seed: int, folder: Path) -> dict[str, Any]:
    """Kill that many times; return what happened, counted."""
    random_ = random.Random(seed)
    laps = {name: measure(name, folder / name) for name in SETTINGS}
    shared = _segments()
    counts: dict[str, Any] = {
        "kills": 0,
        "runs": 0,
        "runs_lost": 0,
        "runs_that_differ": 0,
        "processes_left": 0,
        "by_victim": collections.Counter(),
        "by_phase": collections.Counter(),
        "kills_of_a_run": [],
        "problems": [],
    }
    while counts["kills"] < num_kills:
        name = list(SETTINGS)[counts["runs"] % len(SETTINGS)]
        counts["runs"] += 1
        run, kills, status = folder / f"run-{counts['runs']}", 0, -1
        while status == -1:
            attempt = Attempt(SETTINGS[name], run)
            killed = None
            if counts["kills"] < num_kills:
                moment = draw(random_, *laps[name])
                wait_for_moment(attempt, moment)
                killed = kill_and_look(attempt, moment["victim"])
            if killed is None:
                status, _, err = attempt.end()
                counts["processes_left"] += attempt.left()
                if status:
                    counts["runs_lost"] += 1
                    counts["problems"].append(f"{run.name}: status {status}: {err}")
                continue
            kills += 1
            counts["kills"] += 1
            counts["by_victim"][killed["victim"]] += 1
            counts["by_phase"][killed["phase"]] += 1
            counts["processes_left"] += killed["left"]
            print(
                f"kill {counts['kills']} of {num_kills}: {killed['victim']}, "
                f"{killed['phase']} {run.name}",
                file=sys.stderr,
            )
            if killed["problem"]:
                counts["problems"].append(f"{run.name}: {killed['problem']}")
        counts["kills_of_a_run"].append(kills)
        if status == 0 and (differing := differences(run, folder / name)):
            counts["runs_that_differ"] += 1
            counts["problems"].append(f"{run.name} differs in {differing}")
    counts["shared_memory_left"] = len(_segments() - shared)
    counts["seconds_to_the_first_line"] = {n: round(s, 2) for n, (s, _) in laps.items()}
    counts["seconds_between_lines"] = {n: round(s, 3) for n, (_, s) in laps.items()}
    return {k: dict(v) if isinstance(v, dict) else v for k, v in counts.items()}


def _segments() -> set[str]:
    folder = Path("/dev/shm")
    return {p.name for p in folder.glob("*torch*")} if folder.exists() else set()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("kills", type=int, nargs="?", default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-results", action="store_true", help="write no file")
    options = parser.parse_args()
    before = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        counts = storm(options.kills, options.seed, Path(folder))
    counts["seconds"] = round(time.monotonic() - before)
    print(json.dumps(counts, indent=2))
    print("moments:", (__doc__ or "").split("\n\n")[3].replace("\n", " "))
    if not options.no_results:
        facts = {"seed": options.seed, "common": COMMON, "settings": SETTINGS}
        write_results(
            "kill_storm", {"machine": describe_machine(), **facts, "result": counts}
        )
    lost = ("runs_lost", "runs_that_differ", "processes_left", "shared_memory_left")
    return int(bool(counts["problems"]) or any(counts[name] for name in lost))


if __name__ == "__main__":
    sys.exit(main())
