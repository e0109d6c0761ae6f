"""Train a classifier with DistributedDataParallel, from the command line.

    python -m ddp_lab.train                      spawns its own ranks
    python -m ddp_lab train                      the same
    torchrun --standalone --nproc-per-node 2 -m ddp_lab.train      joins torchrun's
    srun python -m ddp_lab.train                 joins Slurm's

This module defines no class: `python -m` runs it as ``__main__``, and spawned ranks
would not recognise its classes.
"""

import contextlib
import io
import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing.errors import record

from ddp_lab.config import RECIPES, TrainConfig
from ddp_lab.datasets import load_dataset
from ddp_lab.errors import BadInput, LabError, Stopped, lab_error_inside
from ddp_lab.loop import fit_on_rank
from ddp_lab.ranks.launch import OnRecord, launch, leave_process, send_record, shared
from ddp_lab.runs import checkpoint
from ddp_lab.runs.progress import ProgressStyle
from ddp_lab.runs.record import Run
from ddp_lab.runs.state import check_batches, check_fits, check_resumable
from ddp_lab.runs.stop import StopRequest
from ddp_lab.world import (
    check_joined,
    count_gpus,
    pick_device,
    read_ranks,
    speaks_for_all,
)

__all__ = ["drop_local_rank", "main", "parse_arguments", "train"]

_DESCRIPTION = """Train an image classifier with PyTorch DistributedDataParallel.

Without arguments: ResNet-18 on handwritten digits, on all GPUs or on two CPU ranks.
Under torchrun or srun it joins their processes instead of starting its own.
The run's settings, history, loss curve and checkpoint go to runs/NAME/."""


def parse_arguments(arguments: Sequence[str]) -> TrainConfig:
    """Turn command line arguments into settings.

    A recipe, or the run to resume, gives the values that no argument names.

    Raises:
        BadInput: an argument is unknown or its value is not legal.
        SystemExit: ``--help`` was asked for.
    """
    import tyro

    arguments, dropped = drop_local_rank(arguments)
    if dropped and ((ranks := read_ranks()) is None or ranks["rank"] == 0):
        note = "--local-rank is ignored: LOCAL_RANK of the environment counts"
        print(f"ddp_lab.train: {note}", file=sys.stderr, flush=True)
    resume = _value_of("--resume", arguments)
    recipe = _value_of("--recipe", arguments)
    if resume:
        run = Run.open(resume)
        defaults = replace(run.config, out=run.folder)
    elif recipe and recipe not in RECIPES:
        names = ", ".join(RECIPES)
        raise BadInput(f"recipe {recipe!r} is unknown: choose one of {names}")
    else:
        defaults = RECIPES[recipe or "default"]

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            config = tyro.cli(
                TrainConfig,
                args=arguments,
                default=defaults,
                prog="python -m ddp_lab.train",
                description=_DESCRIPTION,
            )
    except SystemExit as end:
        if not end.code:  # --help
            raise
        raise BadInput(_unboxed(said.getvalue())) from None
    if resume and config.out != defaults.out:
        raise BadInput(f"out: a resumed run stays in its folder, {resume}; drop --out")
    return config


def drop_local_rank(arguments: Sequence[str]) -> tuple[list[str], bool]:
    """Leave out ``--local-rank``, and say whether it was there.

    ``torch.distributed.launch``, torchrun's forerunner, adds it (``--local_rank``
    before PyTorch 2.0); the environment says the same.
    """
    kept, rest = [], list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument in ("--local-rank", "--local_rank") and rest and rest[0].isdigit():
            rest.pop(0)
        elif not re.fullmatch(r"--local[-_]rank=\d+", argument):
            kept.append(argument)
    return kept, kept != list(arguments)


def _value_of(option: str, arguments: Sequence[str]) -> str | None:
    """The last value given to an option, which is needed before all others."""
    value = None
    for k, argument in enumerate(arguments):
        if argument.startswith(option + "="):
            value = argument.partition("=")[2]
        elif argument == option and k + 1 < len(arguments):
            value = arguments[k + 1]
    return value


def _unboxed(message: str) -> str:
    """tyro's boxed error message as one line, without its pointer to the help text."""
    body, _, _ = message.partition("Argument helptext")
    body, _, _ = body.partition("For full helptext")
    body = re.sub(r"(?m)^╭.*$|\[/?bold\]", " ", body)  # the box's title, its markup
    words = re.sub(r"[\u2500-\u257f]", " ", body).split()  # its lines
    text = " ".join(words).removeprefix("Error parsing TrainConfig: ")
    return text.rstrip(".") + "; see --help"


def train(
    config: TrainConfig,
    progress: ProgressStyle = "lines",
    *,
    on_record: OnRecord | None = None,
    stop_flag: torch.Tensor | None = None,
) -> dict[str, Any]:
    """Train on ranks of our own, or as one of torchrun's or Slurm's.

    Everything that can be checked without ranks is checked before any is started.

    Args:
        config: the settings of the run.
        progress: how rank 0 reports.
        on_record: gets the lines of the history as they are written, like
            `ddp_lab.figures.LiveCurve`; only of ranks that are started here.
        stop_flag: of a `StopRequest`; ranks that are started here look at it.

    Returns:
        What `fit` returns on rank 0, and ``folder``, the run's.

    Raises:
        LabError: bad input, or ranks that failed or disagree.
    """
    ranks = read_ranks()
    speaks = speaks_for_all()
    folder = config.resume or config.out or _new_folder(config)
    if config.auto_resume and folder != config.out and ranks is None:
        raise BadInput("auto_resume: name the folder of the run with --out")
    if config.resume is None and (config.auto_resume or _may_restart()):
        config = replace(config, auto_resume=True)
    elif config.resume is None:
        Run.check_free(folder)
    request = StopRequest(stop_flag)
    history_before = Run(folder).read_history()
    try:
        if ranks is None:
            result = _spawn(config, folder, progress, on_record, request)
        else:
            _check_no_notebook(ranks["rank"], ranks["world_size"])
            check_joined(config.num_ranks, ranks["world_size"])
            result = fit_on_rank(config, folder, progress=progress)
    except BaseException:
        # also when the run was stopped or diverged: the picture shows where
        if speaks and Run(folder).read_history() != history_before:
            _draw(Run(folder))
        raise
    if speaks:
        _draw(Run(folder))
    return {**result, "folder": folder}


def _spawn(
    config: TrainConfig,
    folder: Path,
    progress: ProgressStyle,
    on_record: OnRecord | None,
    request: StopRequest,
) -> dict[str, Any]:
    """Load the data once, start the ranks, and share one copy with all of them."""
    num_ranks = config.num_ranks or _choose_num_ranks(config)
    pick_device(config.device, local_world_size=num_ranks)
    config.batches(num_ranks)  # may refuse, before anything is loaded
    state = None
    if config.resume is not None or config.auto_resume:
        state = checkpoint.load_latest(folder, warn=lambda _: None)  # ranks will say it
        if state is not None:
            check_resumable(config, state)
        elif config.resume is not None:
            raise BadInput(
                f"no checkpoint in {folder}: name the folder of a run that has one"
            )
    data = load_dataset(config)
    check_fits(config, data, num_ranks)
    check_batches(config, data, num_ranks)
    if state is not None:
        check_resumable(config, state, data)
    del state  # the ranks read their own
    results: list[dict[str, Any]] = launch(
        fit_on_rank,
        config,
        folder,
        shared(data),
        shared(request.flag),
        progress=progress,
        on_line=send_record,
        num_ranks=num_ranks,
        num_threads=config.num_threads,
        # torch's own limit ends a wait before: ranks may wait for a slow disk
        stuck_after_s=config.timeout_s,
        on_record=on_record,
    )
    return results[0]


def _choose_num_ranks(config: TrainConfig) -> int:
    """One rank a GPU, or two; fewer if the global batch does not divide by so many."""
    wanted = count_gpus(config.device)
    if not wanted:
        return 2
    total = config.global_batch_size // (config.micro_batch_size or 1)
    fits = [num for num in range(wanted, 0, -1) if total % num == 0]
    if not fits or fits[0] == wanted:
        return wanted
    try:
        config.batches(wanted)
    except BadInput as error:
        print(
            f"ddp_lab.train: {fits[0]} of {wanted} ranks: {error}",
            file=sys.stderr,
            flush=True,
        )
    return fits[0]


def _check_no_notebook(rank: int, world_size: int) -> None:
    """Refuse to be one rank of several in a Jupyter kernel: no other would come.

    People set RANK and WORLD_SIZE by hand when they copy a script into a notebook.
    """
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if world_size > 1 and hasattr(shell, "kernel"):
        raise BadInput(
            f"this notebook's environment makes it rank {rank} of {world_size}, and no "
            "other rank would come: delete RANK and WORLD_SIZE from os.environ, or use "
            f"launch(), or !torchrun --nproc-per-node {world_size} -m ddp_lab.train"
        )


def _new_folder(config: TrainConfig) -> Path:
    """runs/DATASET-MODEL-TIME, or the launcher's own name for this job behind it."""
    start = f"{config.dataset}-{config.model}"
    if name := _name_of_job():
        return Path("runs", f"{start}-{name}")
    name = f"{start}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder, count = Path("runs", name), 1
    while folder.exists():
        count += 1
        folder = Path("runs", f"{name}-{count}")
    return folder


def _name_of_job() -> str:
    """A name that stays the same when torchrun or Slurm restart this process."""
    if "SLURM_STEP_NUM_TASKS" in os.environ:
        names = "SLURM_JOB_ID", "SLURM_STEP_ID"
        return "-".join(["slurm", *(os.environ.get(name, "0") for name in names)])
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "")
    if run_id not in ("", "none"):
        return re.sub(r"[^\w.-]+", "-", run_id)
    if run_id:  # torchrun without --rdzv-id: our parent is its agent, which stays
        import psutil

        agent = psutil.Process(os.getppid())
        started = time.localtime(agent.create_time())
        return f"{time.strftime('%Y%m%d-%H%M%S', started)}-{agent.pid}"
    return ""


def _may_restart() -> bool:
    """Whether a launcher starts this command again if it fails, or has done so."""
    names = "TORCHELASTIC_MAX_RESTARTS", "SLURM_RESTART_COUNT"
    return any(os.environ.get(name, "0") not in ("", "0") for name in names)


def _draw(run: Run) -> None:
    """Draw the loss curve of what has been written so far, if anything has.

    A run is what it is without its picture: what goes wrong here is told, no more.
    """
    if not (run.history_file.exists() and run.history.steps):
        return
    try:
        from ddp_lab.figures import plot_loss, save_picture

        save_picture(plot_loss(run.history), run.picture_file)
    except Exception as error:
        print(
            f"ddp_lab.train: no {run.picture_file}: {type(error).__name__}: {error}",
            file=sys.stderr,
            flush=True,
        )


def _summary(result: dict[str, Any]) -> str:
    return (
        f"test accuracy {result['accuracy']:.1%} ({result['num_correct']} of "
        f"{result['num_samples']}) after {result['epochs']} epochs, "
        f"{result['time_s']:.1f} s, {result['images_per_s']:.0f} images/s; "
        f"loss curve: {Run(result['folder']).picture_file}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit status.

    0: trained; 1: a rank failed or the loss diverged; 2: bad input, nothing was
    started; 75: stopped by SIGTERM or SIGUSR1, and saved; 130: interrupted.
    """
    try:
        config = parse_arguments(_own_arguments() if arguments is None else arguments)
        _stand_in_for_closed_streams()
        bar = sys.stderr.isatty() and read_ranks() is None
        with StopRequest().on_signals() as request:
            style: ProgressStyle = "bar" if bar else "lines"
            result = train(config, style, stop_flag=request.flag)
    except LabError as error:
        cause = lab_error_inside(error)
        if not isinstance(cause, Stopped) or speaks_for_all():
            print(f"ddp_lab.train: {cause}", file=sys.stderr, flush=True)
        return cause.exit_status
    except KeyboardInterrupt:
        print("ddp_lab.train: interrupted, all ranks are stopped", file=sys.stderr)
        return 130
    if speaks_for_all():
        with contextlib.suppress(BrokenPipeError):  # the reader, like head, has left
            print(_summary(result), flush=True)
    return 0


def _stand_in_for_closed_streams() -> None:
    """A service may start us without stdout: no other file may get its number."""
    for number, name in ((0, "stdin"), (1, "stdout"), (2, "stderr")):
        try:
            os.fstat(number)
        except OSError:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
        if getattr(sys, name) is None:
            stream = os.fdopen(number, "r" if number == 0 else "w")
            setattr(sys, name, stream)


def _own_arguments() -> list[str]:
    """The command line's, and in a notebook none: its kernel was given others."""
    return [] if "ipykernel" in sys.modules else sys.argv[1:]


if __name__ == "__main__":
    # under torchrun, record() hands an unexpected error's traceback to its summary
    leave_process(record(main)() or 0)
