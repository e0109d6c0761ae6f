"""What a run leaves behind: its settings, its environment and its history.

    runs/NAME/
        config.json       every setting of the run, recipe and flags resolved
        classes.json      the classes, in the order of the model's outputs
        environment.json  versions, device, backend, world size, git revision; and
                          under "resumed" the same for each time that it went on
        history.jsonl     one JSON object a line: "step" and "eval" records
        loss.png          the loss curve
        checkpoint.pt     the newest checkpoint
        checkpoint-00000120.pt    the last few, by optimiser step

Rank 0 writes, and the first rank of each machine that does not see rank 0's disk;
anybody reads: ``Run.open("runs/NAME").history.steps``.
"""

import contextlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from ddp_lab.config import TrainConfig
from ddp_lab.errors import BadInput

__all__ = [
    "History",
    "Run",
    "atomic_file",
    "describe_environment",
    "write_atomically",
    "writing_to",
]


class History:
    """The lines of ``history.jsonl``, in the order in which they were written."""

    def __init__(self, lines: list[dict[str, Any]]) -> None:
        self.lines = lines

    @property
    def steps(self) -> list[dict[str, Any]]:
        """Training: epoch, step, loss, accuracy, lr, images_per_s, time_s, local."""
        return [line for line in self.lines if line["kind"] == "step"]

    @property
    def evals(self) -> list[dict[str, Any]]:
        """Evaluation after an epoch: epoch, step, loss, accuracy, num_samples."""
        return [line for line in self.lines if line["kind"] == "eval"]


class Run:
    """The folder of one run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config_file = folder / "config.json"
        self.environment_file = folder / "environment.json"
        self.classes_file = folder / "classes.json"
        self.history_file = folder / "history.jsonl"
        self.picture_file = folder / "loss.png"
        self.checkpoint_file = folder / "checkpoint.pt"

    @classmethod
    def open(cls, folder: str | Path) -> "Run":
        """Open the folder of an existing run for reading.

        Raises:
            BadInput: there is no run in it.
        """
        run = cls(Path(folder))
        if not run.config_file.is_file():
            raise BadInput(
                f"no run in {folder}: it has no config.json; the last line of a run's "
                "output names its folder"
            )
        return run

    @staticmethod
    def check_free(folder: Path) -> None:
        """Check that a new run could be written to this folder; create nothing.

        Raises:
            BadInput: it is a file, holds a run already, or cannot be written to.
        """
        if (folder / "config.json").exists():
            raise BadInput(
                f"out {folder} holds a run already: choose another --out, or go on "
                f"with it by --resume {folder}"
            )
        existing = folder
        while not existing.exists() and existing != existing.parent:
            existing = existing.parent
        if not existing.is_dir():
            raise BadInput(f"out {folder}: {existing} is a file; choose a folder")
        if not os.access(existing, os.W_OK):
            raise BadInput(f"out {folder}: cannot write to {existing}; choose another")

    @classmethod
    def create(
        cls,
        folder: Path,
        config: TrainConfig,
        environment: dict[str, Any],
        classes: Sequence[str] = (),
    ) -> "Run":
        """Make the folder of a new run and write down what is run, and where.

        Raises:
            BadInput: see `check_free`, or the file system refuses.
        """
        cls.check_free(folder)
        run = cls(folder)
        with writing_to(folder):
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(run.environment_file, _pretty(environment))
            write_atomically(run.classes_file, json.dumps(list(classes)) + "\n")
            run.write_config(config)
            run.history_file.touch()
        return run

    @property
    def config(self) -> TrainConfig:
        """The settings of the run.

        Raises:
            BadInput: ``config.json`` cannot be read.
        """
        try:
            return TrainConfig.from_json(json.loads(self.config_file.read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise BadInput(f"{self.config_file} cannot be read: {error}") from error

    def write_config(self, config: TrainConfig) -> None:
        """Write down the settings of the run."""
        write_atomically(self.config_file, _pretty(config.to_json()))

    @property
    def environment(self) -> dict[str, Any]:
        """What `describe_environment` said when the run started."""
        environment: dict[str, Any] = json.loads(self.environment_file.read_text())
        return environment

    @property
    def history(self) -> History:
        """What was written so far; a last line that is still incomplete is left out."""
        return History(list(_parse_lines(self.history_file.read_text())))

    def append(self, line: dict[str, Any]) -> None:
        """Add one line to the history. One rank a disk."""
        try:
            with self.history_file.open("a") as file:
                # JSON has no NaN; what could be one is checked before it comes here
                file.write(json.dumps(line, allow_nan=False) + "\n")
        except OSError as error:
            raise BadInput(
                f"cannot write to {self.history_file}: {error.strerror}; make room and "
                f"go on with --resume {self.folder}"
            ) from error

    def flush_history(self) -> None:
        """Have the history on the disk, where it survives the machine's end."""
        with self.history_file.open("rb") as file:
            os.fsync(file.fileno())

    def go_on(self, step: int, history: str, environment: dict[str, Any]) -> None:
        """Take a run up again after this optimiser step. One rank a disk.

        A killed run wrote lines after its last checkpoint; the resumed one will write
        them again, so they are forgotten here.

        Args:
            step: of the checkpoint.
            history: the text of ``history.jsonl``, perhaps of another machine.
            environment: what `describe_environment` says of the machine that goes on.
        """
        lines = [line for line in _parse_lines(history) if line["step"] <= step]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        write_atomically(self.history_file, text)
        first = self.environment
        resumed = [*first.get("resumed", []), {"step": step, **environment}]
        write_atomically(self.environment_file, _pretty({**first, "resumed": resumed}))

    def read_history(self) -> str:
        """The text of ``history.jsonl``, empty if there is none."""
        return self.history_file.read_text() if self.history_file.exists() else ""


def _parse_lines(text: str) -> Iterator[dict[str, Any]]:
    for line in text.splitlines():
        with contextlib.suppress(json.JSONDecodeError):  # torn by a kill
            yield json.loads(line)


def describe_environment(**facts: Any) -> dict[str, Any]:
    """Describe where a run happens: enough to judge its numbers later.

    Args:
        facts: what the caller knows best: device, backend, world size, threads.
    """
    import torch

    import ddp_lab

    return {
        "ddp_lab": ddp_lab.__version__,
        "git_revision": _git_revision(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": importlib.metadata.version("torchvision"),
        "platform": platform.platform(),
        "num_cores": os.cpu_count(),
        "command": sys.argv,
        **facts,
    }


def _git_revision() -> str | None:
    """The revision of this package's checkout, "+" when it was edited, else None."""
    here = Path(__file__).parent
    if not (here.parent / ".git").exists():
        return None
    git = ["git", "-C", str(here)]
    try:
        revision = subprocess.check_output([*git, "rev-parse", "HEAD"], text=True)
        edited = subprocess.run([*git, "diff", "--quiet", "HEAD"], check=False)
    except (OSError, subprocess.CalledProcessError):
        return None
    return revision.strip() + ("+" if edited.returncode else "")


@contextlib.contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """Turn what the file system refuses in the block into a `BadInput`."""
    try:
        yield
    except OSError as error:
        raise BadInput(f"out {folder}: {error.strerror}; choose another") from error


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file for writing so that ``path`` is always whole: the old or the new.

    What is written goes to a neighbour with ``.tmp`` appended, which takes the file's
    place at the end, and is removed if the block fails.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomically(path: Path, text: str) -> None:
    """Write a text file so that at any moment it is whole: the old or the new one."""
    with atomic_file(path) as file:
        file.write(text.encode())


def _pretty(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2) + "\n"
