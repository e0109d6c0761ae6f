"""Plant faults in the package, one by one, and see whether the tests notice them.

    python benchmarks/planted_faults.py
    python benchmarks/planted_faults.py --only agree-any-needs-all --root ../other
    python benchmarks/planted_faults.py --list

A test suite can be made faster by leaving out what finds faults. This is the check that
it has not become blind: each fault below is a slip that a programmer could make. It is
planted alone in a temporary copy of the repository, and the tests that ought to notice
are run there. Found means that a test failed; tests that cannot be collected, or that
end before they begin, have found nothing. As a control, the same tests have to pass
without the fault.

A fault is a text of one module and what stands there instead. If the text is not there
exactly once, the fault is out of date, and nothing is run. Exits with 1 if a fault was
missed or could not be tried.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "ddp_lab"
MARK = "PLANTED_FAULTS_RUN"  # in the environment of all that a run starts
LIMIT_S = 300.0  # no selection below takes a third of it


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A slip, where it is planted, and who ought to notice it."""

    name: str
    wrong: str
    """What is wrong, in one sentence."""
    where: tuple[str, ...]
    """Names that the module has or had; the first one that exists counts."""
    swaps: tuple[tuple[str, str], ...]
    """Pairs of a text and what replaces it; one of them must fit."""
    tests: tuple[str, ...]
    """Names of test files, in whatever folder below ``tests``."""
    only: str = ""
    """An expression of ``pytest -k`` that keeps it short."""


@dataclass(frozen=True)
class Planted:
    """A fault, made to fit one copy of the repository."""

    fault: Fault
    module: str
    before: str
    after: str
    tests: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """What became of a fault, or of a control."""

    name: str
    verdict: str
    """``found``, ``MISSED``, or what kept the tests from being run."""
    seconds: float
    by: str = ""
    """The first test that failed."""


RESUME_ON_TWO = "uninterrupted_one or newest_of_several or one_rank_asks"
LOOP_ON_TWO = "gradients_travel or nan_stops or dropout_draws"

FAULTS = (
    # ---------------------------------------------------------------- step by step
    Fault(
        name="tasks-of-the-first-node-everywhere",
        wrong="Every node is taken to have as many tasks as Slurm's first one.",
        where=("world.py",),
        swaps=(
            (
                "counts[int(node) if node.isdigit() else 0]",
                "counts[0]",
            ),
        ),
        tests=("test_world.py",),
        only="read_ranks",
    ),
    Fault(
        name="agree-any-needs-all",
        wrong="agree_any is True only if all ranks say so.",
        where=("world.py",),
        swaps=(("op=dist.ReduceOp.MAX", "op=dist.ReduceOp.MIN"),),
        tests=("test_world.py",),
        only="three_ranks_talk",
    ),
    Fault(
        name="one-norm-over-all-channels",
        wrong="GroupNorm gets one group of all channels instead of up to 32.",
        where=("model.py",),
        swaps=(("math.gcd(32, child.num_features)", "math.gcd(1, 32)"),),
        tests=("test_model.py",),
        only="group_norm",
    ),
    Fault(
        name="evaluation-drops-the-tail",
        wrong="Samples that do not divide by the ranks are not evaluated.",
        where=("data.py",),
        swaps=(
            (
                "return range(rank, num_samples, world_size)",
                "return range(rank, num_samples // world_size * world_size, "
                "world_size)",
            ),
        ),
        tests=("test_data.py",),
    ),
    Fault(
        name="same-order-in-every-epoch",
        wrong="The sampler is never told which epoch it is.",
        where=("data.py",),
        swaps=(("self.indices.set_epoch(epoch)", "self.indices.set_epoch(0)"),),
        tests=("test_data.py",),
    ),
    Fault(
        name="crops-by-place-in-the-batch",
        wrong="A sample is cropped by its place in the batch, not by its number.",
        where=("data.py",),
        swaps=(("draws_of(epoch)[samples]", "draws_of(epoch)[: len(samples)]"),),
        tests=("test_data.py",),
    ),
    Fault(
        name="test-digits-among-the-training-ones",
        wrong="The digits to test on are also among those to learn from.",
        where=("datasets.py",),
        swaps=(
            (
                "test=whole.subset(order[:360].tolist())",
                "test=whole.subset(order[-360:].tolist())",
            ),
        ),
        tests=("test_datasets.py",),
        only="digits",
    ),
    Fault(
        name="every-rank-downloads",
        wrong="All ranks of a machine fetch the data set, not the first one only.",
        where=("datasets.py",),
        swaps=(
            (
                "own = config if now < 2 else replace(config, download=False)",
                "own = config",
            ),
        ),
        tests=("test_datasets.py",),
        only="one_rank_downloads",
    ),
    Fault(
        name="mean-of-sums-is-too-small",
        wrong="The loss is divided by all samples, and once more by the ranks.",
        where=("step.py",),
        swaps=(("dist.get_world_size() / num_samples", "1.0 / num_samples"),),
        tests=("test_loop.py",),
        only="one_curve",
    ),
    Fault(
        name="gradients-travel-with-every-micro-batch",
        wrong="Accumulating does not save messages.",
        where=("step.py",),
        swaps=(("last = k == num_micro_batches", "last = True"),),
        tests=("test_loop.py",),
        only=LOOP_ON_TWO,
    ),
    Fault(
        name="clipped-after-the-step",
        wrong="The gradient is clipped when it has been used already.",
        where=("step.py",),
        swaps=(
            (
                "        nn.utils.clip_grad_norm_(model.parameters(), clip_grad_norm)\n"
                "    optimizer.step()\n",
                "        optimizer.step()\n"
                "        nn.utils.clip_grad_norm_(model.parameters(), clip_grad_norm)\n"
                "    else:\n"
                "        optimizer.step()\n",
            ),
        ),
        tests=("test_equivalence.py",),
        only="clipped",
    ),
    Fault(
        name="accumulation-forgets-the-ranks",
        wrong="Micro-batches are counted as if one rank had the whole batch.",
        where=("config.py",),
        swaps=(("total // (world_size * micro)", "total // micro"),),
        tests=("test_config.py",),
    ),
    Fault(
        name="seeds-run-together",
        wrong="mix_seed makes the same seed of (1, 11) and (11, 1).",
        where=("config.py",),
        swaps=(
            (
                '" ".join(map(str, numbers)).encode()',
                '"".join(map(str, numbers)).encode()',
            ),
        ),
        tests=("test_config.py", "test_data.py"),
    ),
    # ---------------------------------------------------------------- whole runs
    Fault(
        name="same-dropout-on-all-ranks",
        wrong="All ranks drop the same units.",
        where=("loop.py",),
        swaps=(
            (
                "mix_seed(config.seed, training.step, dist.get_rank())",
                "mix_seed(config.seed, training.step)",
            ),
            (
                "mix_seed(config.seed, state.step, dist.get_rank())",
                "mix_seed(config.seed, state.step)",
            ),
        ),
        tests=("test_loop.py",),
        only=LOOP_ON_TWO,
    ),
    Fault(
        name="nan-of-rank-0-only",
        wrong="A loss that is not a number is seen on rank 0 only.",
        where=("runs/session.py", "loop.py"),
        swaps=(("losses = rows[..., 0].sum(0)", "losses = rows[0, :, 0]"),),
        tests=("test_loop.py",),
        only=LOOP_ON_TWO,
    ),
    Fault(
        name="stop-of-rank-0-only",
        wrong="The request to stop counts only where rank 0 got it.",
        where=("runs/session.py", "loop.py"),
        swaps=(("int(rows[:, -1].max().item())", "int(rows[0, -1].max().item())"),),
        tests=("test_resume.py",),
        only=RESUME_ON_TWO,
    ),
    Fault(
        name="resumed-run-skips-too-little",
        wrong="Steps are skipped as if each had one micro-batch.",
        where=("loop.py",),
        swaps=(("skip=first * num_micro_batches", "skip=first"),),
        tests=("test_resume.py",),
        only=RESUME_ON_TWO,
    ),
    Fault(
        name="saves-are-counted-in-the-epoch",
        wrong="checkpoint_every counts anew in each epoch.",
        where=("runs/session.py", "loop.py"),
        swaps=(
            (
                "training.step % (config.checkpoint_every or 1)",
                "k % (config.checkpoint_every or 1)",
            ),
            ("state.step % every == 0", "done % every == 0"),
        ),
        tests=("test_resume.py",),
        only=RESUME_ON_TWO,
    ),
    Fault(
        name="resumed-run-forgets-momentum",
        wrong="The optimiser's state is saved, and not loaded.",
        where=("runs/state.py", "training.py"),
        swaps=(('self.optimizer.load_state_dict(state["optimizer"])', "pass"),),
        tests=("test_resume.py",),
        only="damaged_newest",
    ),
    Fault(
        name="another-momentum-may-go-on",
        wrong="A run goes on with another momentum, and nobody is asked.",
        where=("training.py", "config.py"),
        swaps=(
            ('    "momentum",\n', ""),
            ("momentum: float = 0.9", "momentum: Free[float] = 0.9"),
        ),
        tests=("test_resume.py", "test_config.py"),
        only="other_settings or marks_are_those",
    ),
    Fault(
        name="checkpoint-written-in-place",
        wrong="A kill while it is written leaves a torn checkpoint.",
        where=("runs/checkpoint.py", "checkpoint.py"),
        swaps=(("with atomic_file(path) as file:", 'with path.open("wb") as file:'),),
        tests=("test_checkpoint.py",),
    ),
    Fault(
        name="history-keeps-what-comes-again",
        wrong="Lines after the checkpoint stay, and are then written again.",
        where=("runs/record.py", "record.py"),
        swaps=((' if line["step"] <= step]', "]"),),
        tests=("test_record.py",),
    ),
    Fault(
        name="newest-of-rank-0-only",
        wrong="Another host's checkpoint is not taken even if it is newer.",
        where=("runs/resume.py", "resume.py"),
        swaps=(("newest = max(steps)", "newest = steps[0]"),),
        tests=("test_resume.py",),
        only=RESUME_ON_TWO,
    ),
    # ---------------------------------------------------------------- rendezvous
    Fault(
        name="the-dead-have-arrived",
        wrong="Ranks of an earlier attempt, long gone, count as arrived.",
        where=("rendezvous/meeting.py", "meeting.py"),
        swaps=(
            (
                "{r: text for r, text in after if text != before.get(r)}",
                "dict(after)",
            ),
        ),
        tests=("test_meeting.py",),
        only="meet_again or died",
    ),
    Fault(
        name="attempts-share-one-group",
        wrong="A second attempt finds what the first one left in the store.",
        where=("rendezvous/meeting.py", "meeting.py"),
        swaps=(
            (
                "dist.PrefixStore(f\"group/{everybody[0]['nonce']}\", store)",
                'dist.PrefixStore("group", store)',
            ),
        ),
        tests=("test_meeting.py",),
        only="meet_again or died",
    ),
    # ---------------------------------------------------------------- DDP by hand
    Fault(
        name="ring-passes-on-the-wrong-chunk",
        wrong="The second half of the ring starts with a chunk that is not finished.",
        where=("by_hand/all_reduce.py", "by_hand.py"),
        swaps=(
            (
                "outgoing = chunks[(rank - step + 1) % world_size]",
                "outgoing = chunks[(rank - step) % world_size]",
            ),
        ),
        tests=("test_by_hand.py", "test_ddp.py", "test_all_reduce.py"),
        only="3 and ranks",
    ),
    Fault(
        name="buckets-in-forward-order",
        wrong="The first layers' gradients, which come last, leave first.",
        where=("by_hand/ddp.py", "by_hand.py"),
        swaps=(
            (
                "in reversed(list(enumerate(parameters))):",
                "in list(enumerate(parameters)):",
            ),
        ),
        tests=("test_by_hand.py", "test_ddp.py", "test_all_reduce.py"),
        only="assign_buckets",
    ),
    Fault(
        name="used-on-this-rank-only",
        wrong="A parameter that other ranks used is left alone where it was not used.",
        where=("by_hand/ddp.py", "by_hand.py"),
        swaps=(("used = _used_on_some_rank(used, parameters)", "pass"),),
        tests=("test_by_hand.py", "test_ddp.py", "test_all_reduce.py"),
        only="3 and ranks",
    ),
    Fault(
        name="gradient-stops-at-the-sum",
        wrong="The sum over ranks passes back this rank's gradient only.",
        where=("by_hand/sync_batch_norm.py", "sync_batch_norm.py"),
        swaps=(
            (
                "return all_reduce_sum(gradient, ctx.group), None",
                "return gradient, None",
            ),
        ),
        tests=("test_sync_batch_norm.py",),
        only="on_the_whole_batch",
    ),
    # ---------------------------------------------------------------- ranks
    Fault(
        name="shared-memory-by-accident-is-shared",
        wrong="A batch of a loader's worker becomes one tensor for all ranks.",
        where=("ranks/_pickling.py", "payload.py"),
        swaps=(
            (
                "if storage.data_ptr() in self.addresses and",
                "if storage.is_shared() and",
            ),
        ),
        tests=("test_payload.py", "test_pickling.py"),
    ),
    Fault(
        name="last-rank-speaks-first",
        wrong="The other ranks' output comes in reverse order.",
        where=("ranks/_output.py", "output.py"),
        swaps=(
            (
                "for rank in range(first, self._num_ranks):",
                "for rank in reversed(range(first, self._num_ranks)):",
            ),
        ),
        tests=("test_output.py",),
    ),
    Fault(
        name="one-still-rank-is-a-deadlock",
        wrong="A rank that waits for one that computes is called stuck.",
        where=("ranks/_watch.py", "stuck.py"),
        swaps=(
            (
                "all(self.still(rank, ranks) for rank in ranks)",
                "any(self.still(rank, ranks) for rank in ranks)",
            ),
            ("all(map(self.still, ranks))", "any(map(self.still, ranks))"),
        ),
        tests=("test_stuck.py", "test_watch.py"),
        only="counts_as_progress or not_before or sleeping_alone or may_be_work",
    ),
    Fault(
        name="a-pause-is-rest",
        wrong="After a pause of the machine, waiting ranks are called stuck.",
        where=("ranks/_watch.py",),
        swaps=(("min(gap_s, self.stuck_after_s / 4)", "gap_s"),),
        tests=("test_watch.py",),
        only="pause",
    ),
    Fault(
        name="an-exception-hides-behind-its-finally",
        wrong="What a rank has raised is not told while its finally waits.",
        where=("ranks/_rank_set.py",),
        swaps=(
            ("if sight and sight.handled and not", "if sight and not sight and not"),
        ),
        tests=("test_watch.py",),
        only="though_its_finally_waits",
    ),
    Fault(
        name="wrecked-weights-are-saved",
        wrong="A checkpoint may hold infinite weights.",
        where=("runs/session.py",),
        swaps=(("bad = torch.stack([~w.isfinite()", "bad = torch.stack([w.isnan()"),),
        tests=("test_loop.py",),
        only="wrecked",
    ),
    Fault(
        name="a-tasks-only-gpu-stays-idle",
        wrong="With one visible GPU a task, Slurm's ranks train on the CPU.",
        where=("world.py",),
        swaps=(("if joined and num_gpus == 1:", "if joined and num_gpus == -1:"),),
        tests=("test_world.py",),
        only="under_a_launcher",
    ),
    Fault(
        name="a-consequence-is-the-cause",
        wrong="Whoever lost the connection first is blamed, not the rank that died.",
        where=("ranks/_report.py", "verdict.py"),
        swaps=(
            ("key=lambda f: (f.consequence, f.at_s)", "key=lambda f: f.at_s"),
            (
                "return _failure(outcome).consequence, outcome.at_s",
                "return False, outcome.at_s",
            ),
        ),
        tests=("test_calls.py", "test_report.py", "test_launch.py"),
        only="test_failures or who_was_first",
    ),
    Fault(
        name="loader-workers-outlive-their-rank",
        wrong="Only the rank is killed, not what it has started.",
        where=("ranks/_main.py", "process.py"),
        swaps=(
            ("                process.kill()", "                pass"),
            ("kill_group(self.process.pid)", "pass"),
        ),
        tests=("test_launch_stop.py", "test_launch.py"),
        only="stop_button or outlives_it",
    ),
    Fault(
        name="stop-skips-the-users-clean-up",
        wrong="The stop button kills ranks before their finally blocks.",
        where=("ranks/_rank_set.py", "ranks.py"),
        swaps=(("rank.signal(signal.SIGINT)", "pass"),),
        tests=("test_launch_stop.py",),
        only="stop_button",
    ),
    Fault(
        name="store-listens-to-the-world",
        wrong="The store can be reached from other machines.",
        where=("rendezvous/store.py", "ranks/_environment.py", "start.py"),
        swaps=(('listener.bind(("127.0.0.1", 0))', 'listener.bind(("", 0))'),),
        tests=("test_launch.py",),
        only="only_the_loopback",
    ),
    Fault(
        name="main-script-runs-again",
        wrong="Each rank runs the script that started it.",
        where=("ranks/_environment.py", "start.py"),
        swaps=(('sys.modules["__main__"] = types.ModuleType("__main__")', "pass"),),
        tests=("test_launch.py",),
        only="from_a_script",
    ),
    Fault(
        name="set-up-on-the-first-ranks-only",
        wrong="Ranks that replace others are not set up.",
        where=("ranks/workers.py", "workers.py"),
        swaps=(("self._set_up = False", 'self._set_up = hasattr(self, "_set_up")'),),
        tests=("test_workers.py",),
        only="setup_runs",
    ),
    Fault(
        name="names-are-gone-after-the-cell",
        wrong="What a %%ranks cell defines is not there in the next one.",
        where=("ranks/_cells.py", "cells.py"),
        swaps=(
            (
                'return vars(sys.modules["__main__"])',
                'return dict(vars(sys.modules["__main__"]))',
            ),
        ),
        tests=("test_magics.py",),
        only="names_persist",
    ),
    # ---------------------------------------------------------------- exercises
    Fault(
        name="judge-takes-any-flush",
        wrong="A file that was flushed before it was whole passes.",
        where=("exercises/about_failures.py", "exercises_failures.py"),
        swaps=(
            (
                "elif self.flushed.get(facts.st_ino) != facts.st_size:",
                "elif facts.st_ino not in self.flushed:",
            ),
            (
                "self.flushed.get(facts.st_ino) != facts.st_size\n",
                "facts.st_ino not in self.flushed\n",
            ),
        ),
        tests=("test_checks.py", "test_check.py"),
        only="wrong_answers and (save_atomically or broadcast_model)",
    ),
    Fault(
        name="judge-looks-at-no-buffer",
        wrong="A model that is copied without its buffers passes.",
        where=("exercises/about_model.py", "exercises_model.py"),
        swaps=(
            (
                "in original.state_dict().items():",
                "in original.named_parameters():",
            ),
        ),
        tests=("test_checks.py", "test_check.py"),
        only="wrong_answers and (save_atomically or broadcast_model)",
    ),
    # ---------------------------------------------------------------- proofs, pictures
    Fault(
        name="weights-compared-with-themselves",
        wrong="Every number of ranks is as far from itself as can be: 0.",
        where=("proofs/world_sizes.py", "compare.py"),
        swaps=(
            (
                "theirs = np.fromfile(kept, weights.dtype, len(weights))",
                "theirs = weights",
            ),
        ),
        tests=("test_compare.py", "test_world_sizes.py"),
        only="agree_to_rounding",
    ),
    Fault(
        name="loss-of-rank-0-for-the-runs",
        wrong="The black curve is rank 0's loss, not the mean over ranks.",
        where=("figures/loss.py", "curves.py"),
        swaps=(
            (
                'top.plot(at, [line["loss"] for line in steps]',
                'top.plot(at, [line["local"][0]["loss"] for line in steps]',
            ),
        ),
        tests=("test_plots.py", "test_figures.py"),
        only="curves_hold",
    ),
    Fault(
        name="seen-twice-is-not-often",
        wrong="The title of the shards counts samples that were seen three times.",
        where=("figures/diagrams.py", "diagrams.py"),
        swaps=(("sum(n > 1 for n in visits)", "sum(n > 2 for n in visits)"),),
        tests=("test_plots.py", "test_figures.py"),
        only="shards_count",
    ),
    # ---------------------------------------------------------------- tools, commands
    Fault(
        name="innermost-import-is-blamed",
        wrong="CUDA's first use is put down to a library's own import.",
        where=("tools/cuda_finder.py", "cuda_finder.py"),
        swaps=(("imported = module", "imported = imported or module"),),
        tests=("test_cuda_finder.py",),
    ),
    Fault(
        name="local-rank-in-one-spelling-only",
        wrong="--local_rank, as older launchers write it, is taken for an option.",
        where=("train.py",),
        swaps=(
            (
                'argument in ("--local-rank", "--local_rank") and rest',
                'argument == "--local-rank" and rest',
            ),
        ),
        tests=("test_train.py",),
        only="local_rank_is_dropped",
    ),
)


# ------------------------------------------------------------------ fitting a fault


def fit(fault: Fault, root: Path) -> Planted | str:
    """Find where a fault goes in this repository; a text says why it is out of date."""
    found = [name for name in fault.where if (root / PACKAGE / name).is_file()]
    if not found:
        return f"there is no {' or '.join(fault.where)}"
    before = (root / PACKAGE / found[0]).read_text()
    counts = [before.count(old) for old, _ in fault.swaps]
    if sorted(counts)[-2:] not in ([1], [0, 1]):
        times = " and ".join(map(str, counts))
        return f"its text is {times} times in {found[0]}, and not once"
    old, new = fault.swaps[counts.index(1)]
    files = [
        str(path.relative_to(root))
        for name in fault.tests
        for path in sorted((root / "tests").rglob(name))
    ]
    if not files:
        return f"there is no {' or '.join(fault.tests)}"
    after = before.replace(old, new)
    return Planted(fault, f"{PACKAGE}/{found[0]}", before, after, tuple(files))


def fit_all(faults: Sequence[Fault], root: Path) -> list[Planted]:
    """Fit all of them, or stop and say which are out of date."""
    fitted = [fit(fault, root) for fault in faults]
    old = [
        f"{fault.name} is out of date: {what}"
        for fault, what in zip(faults, fitted, strict=True)
        if isinstance(what, str)
    ]
    if old:
        sys.exit("\n".join(old))
    return [what for what in fitted if isinstance(what, Planted)]


# ------------------------------------------------------------------ running tests


@contextlib.contextmanager
def copy_of(root: Path) -> Iterator[Path]:
    """A copy of what git knows or would add, in a folder that is gone afterwards."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.check_output(command, cwd=root, text=True).split("\0")
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        copy = Path(folder, "copy")
        Path(folder, "tmp").mkdir()  # for the tests' own temporary files
        for name in filter(None, names):
            if (root / name).is_file():  # else it is deleted, and not yet committed
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, copy / name)
        yield copy


def run_tests(copy: Path, files: Sequence[str], only: str) -> tuple[int | None, str]:
    """Run pytest on the copy: its exit status, None if its time was over; its output.

    Whatever it started is ended afterwards, also what has left its process group.
    """
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    command += [*files, *(["-k", only] if only else [])]
    mark = uuid.uuid4().hex
    environment = {
        **os.environ,
        "PYTHONPATH": str(copy),
        # a module may change twice within a second, which a .pyc would not notice
        "PYTHONDONTWRITEBYTECODE": "1",
        "TMPDIR": str(copy.parent / "tmp"),
        MARK: mark,
    }
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            command,
            cwd=copy,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        status = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(LIMIT_S)
        finally:
            end_all(process, mark)
        said.seek(0)
        return status, said.read()


def end_all(process: subprocess.Popen[bytes], mark: str) -> None:
    """Kill a process, its group, and all that bear its mark."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for _ in range(10):  # one of them may be starting another just now
        left = marked(f"{MARK}={mark}".encode())
        if not left:
            return
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


def marked(mark: bytes) -> list[int]:
    """Processes with this in their environment, where /proc tells."""
    found = []
    for file in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in file.read_bytes():  # a zombie has none
                found.append(int(file.parent.name))
    return found


def failed_test(said: str) -> str:
    """The test that failed, by pytest's summary; empty if it names none.

    A file that cannot be collected stands there too, but without a test's name.
    """
    found = re.search(r"^(?:FAILED|ERROR) \S*?([\w.]+::.*?)(?: - .*)?$", said, re.M)
    return found[1] if found else ""


def imported_from(copy: Path) -> Path:
    """The folder whose package the tests of the copy import."""
    code = f"import {PACKAGE}; print({PACKAGE}.__file__)"
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    file = subprocess.check_output(
        [sys.executable, "-c", code], cwd=copy, env=environment, text=True
    )
    return Path(file.strip()).parent.parent


# ------------------------------------------------------------------ one after another


def control(copy: Path, planted: Planted) -> Outcome:
    """The tests of a fault without it."""
    started = time.monotonic()
    status, said = run_tests(copy, planted.tests, planted.fault.only)
    verdict = "passed" if status == 0 else f"control: {_ending(status)}"
    name = " ".join(filter(None, [*planted.tests, planted.fault.only]))
    return Outcome(name, verdict, time.monotonic() - started, failed_test(said))


def try_fault(copy: Path, planted: Planted) -> Outcome:
    """Plant a fault, run its tests, and take it out again."""
    started = time.monotonic()
    module = copy / planted.module
    module.write_text(planted.after)
    try:
        status, said = run_tests(copy, planted.tests, planted.fault.only)
    finally:
        module.write_text(planted.before)
    by = failed_test(said)
    if status == 0:
        verdict = "MISSED"
    elif status == 1 and by:
        verdict = "found"
    else:
        verdict = f"not tried: {_ending(status)}"
    return Outcome(planted.fault.name, verdict, time.monotonic() - started, by)


def _ending(status: int | None) -> str:
    known = {
        None: f"nothing after {LIMIT_S:g} s",
        1: "tests failed or could not be collected",
        2: "the tests could not be collected",
        5: "no test was selected",
    }
    return known.get(status, f"pytest ended with {status}")


def try_all(copy: Path, faults: Sequence[Planted]) -> list[Outcome]:
    """Try each fault, the control of its tests before; tell of each as it comes."""
    controls: dict[tuple[tuple[str, ...], str], Outcome] = {}
    outcomes = []
    for planted in faults:
        selection = planted.tests, planted.fault.only
        if selection not in controls:
            controls[selection] = control(copy, planted)
            tell("control", controls[selection])
        if controls[selection].verdict == "passed":
            outcome = try_fault(copy, planted)
        else:
            verdict = f"not tried: {controls[selection].verdict}"
            outcome = Outcome(planted.fault.name, verdict, 0.0)
        tell(f"fault {len(outcomes) + 1} of {len(faults)}", outcome)
        outcomes.append(outcome)
    return outcomes


def tell(what: str, outcome: Outcome) -> None:
    """One line on what has just been tried."""
    by = f", by {outcome.by}" if outcome.by else ""
    line = f"{what}: {outcome.name}: {outcome.verdict}{by}, {outcome.seconds:.1f} s"
    print(line, flush=True)


def table(faults: Sequence[Planted], outcomes: Sequence[Outcome]) -> str:
    """All faults, where they were planted, and who noticed."""
    rows = [("fault", "planted in", "verdict", "seconds", "by")]
    for planted, outcome in zip(faults, outcomes, strict=True):
        took = f"{outcome.seconds:.1f}"
        by = outcome.by.partition("[")[0]
        rows.append((outcome.name, planted.module, outcome.verdict, took, by))
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    return "\n".join(
        "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def chosen(names: Sequence[str]) -> list[Fault]:
    """The faults of these names; all if there are none."""
    known = {fault.name: fault for fault in FAULTS}
    if unknown := [name for name in names if name not in known]:
        sys.exit(f"no such fault: {', '.join(unknown)}; --list names them")
    return [known[name] for name in names] if names else list(FAULTS)


def write_json(file: Path, faults: Sequence[Planted], outcomes: list[Outcome]) -> None:
    """Keep what was found, for comparing it later."""
    rows = [
        {
            "name": outcome.name,
            "wrong": planted.fault.wrong,
            "module": planted.module,
            "tests": planted.tests,
            "only": planted.fault.only,
            "verdict": outcome.verdict,
            "by": outcome.by,
            "seconds": round(outcome.seconds, 1),
        }
        for planted, outcome in zip(faults, outcomes, strict=True)
    ]
    file.write_text(json.dumps(rows, indent=2) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser()
    here = Path(__file__).resolve().parent.parent
    parser.add_argument("--root", type=Path, default=here, help="of the repository")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write it there too")
    parser.add_argument("--list", action="store_true", help="plant nothing")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    faults = fit_all(chosen(options.only), options.root.resolve())
    if options.list:
        for planted in faults:
            print(f"{planted.fault.name} ({planted.module}): {planted.fault.wrong}")
        return 0
    started = time.monotonic()
    with copy_of(options.root.resolve()) as copy:
        if (place := imported_from(copy)) != copy.resolve():
            sys.exit(f"the copy in {copy} would be tested with the package in {place}")
        outcomes = try_all(copy, faults)
    print(f"\n{table(faults, outcomes)}")
    num_found = sum(outcome.verdict == "found" for outcome in outcomes)
    took_s = time.monotonic() - started
    print(f"\n{num_found} of {len(faults)} faults were found, in {took_s:.0f} s")
    if options.json:
        write_json(options.json, faults, outcomes)
    return int(num_found < len(faults))


if __name__ == "__main__":
    sys.exit(main())
