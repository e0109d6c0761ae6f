"""A run under way: what happens after each step and each epoch, on all ranks together.

    with open_session(config, data, world, state, folder) as session:
        for _ in range(state.epoch, config.epochs):
            for tally in train_epoch(state, train, config):
                session.after_step(tally)
            session.after_epoch(evaluate(...))

What the ranks have counted they tell each other at *log points* only: every
``log_every`` steps, before each checkpoint and at an epoch's end, by one all-gather. It
also carries whether one of them was asked to stop, so that all stop after the same
step; they ask that once more after each evaluation but the last.
"""

import math
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ddp_lab.config import TrainConfig
from ddp_lab.datasets import ImageSet
from ddp_lab.errors import BadInput, Diverged, Stopped, signal_name
from ddp_lab.runs import checkpoint
from ddp_lab.runs.progress import Progress, ProgressStyle
from ddp_lab.runs.record import Run
from ddp_lab.runs.resume import Found, find_newest, open_run
from ddp_lab.runs.state import TrainState, check_resumable
from ddp_lab.runs.stop import StopRequest
from ddp_lab.step import share_buffers
from ddp_lab.world import World, gather_over_ranks, sum_over_ranks

__all__ = ["OnLine", "Session", "open_session"]

OnLine = Callable[..., None]
"""Called on rank 0 with the fields of each line of the history."""


def open_session(
    config: TrainConfig,
    data: ImageSet,
    world: World,
    state: TrainState,
    folder: Path | None = None,
    *,
    progress: ProgressStyle = "none",
    request: StopRequest | None = None,
    on_line: OnLine | None = None,
) -> "Session":
    """Begin a run, or go on with the one in its folder.

    Args:
        config: the settings; ``resume`` goes on with what is in the folder,
            ``auto_resume`` does if there is something.
        data: the data set.
        world: this rank.
        state: of a new run; it is brought to where the checkpoint stands.
        folder: where the run's files go (None: nowhere).
        progress: how rank 0 reports.
        request: whether to stop early; one rank's is enough.
        on_line: is given each line of the history, on rank 0.

    Raises:
        BadInput: there is nothing to go on with, it is another run, or the folder
            cannot be written to; on all ranks.

    **Collective**: all ranks must call it.
    """
    found = None
    insisted: list[str] = []
    if folder is not None and (config.resume is not None or config.auto_resume):
        found = find_newest(folder, world)
        if found is None and config.resume is not None:
            raise BadInput(f"resume {folder}: there is no checkpoint in it yet")
    if found is not None:
        insisted = check_resumable(config, found.state, data)
        state.load(found.state, config, len(data.train))
    run, writers = open_run(config, world, folder, found, data.classes)
    num_train = len(data.train)
    report = Progress(
        "none" if world.rank else progress,
        config.epochs,
        config.steps_per_epoch(num_train),
        state.steps_in_all(config, num_train),
    )
    report.say(_opening(config, world, num_train))
    for note in data.notes:
        report.say(note)
    if found is not None:
        for text in found.skipped if world.rank == 0 else ():
            if progress == "none":
                warnings.warn(text, stacklevel=2)
            report.say(text)
        report.say(_going_on(state, insisted, found))
    if len(writers) > 1:
        report.say(f"the run's files are on {', '.join(writers)}, each by itself")
    return Session(config, data, world, state, run, report, request, on_line)


class Session:
    """Counts, records, saves and stops; see `open_session`, which makes one.

    Leaving its ``with`` block removes the progress bar.
    """

    def __init__(
        self,
        config: TrainConfig,
        data: ImageSet,
        world: World,
        state: TrainState,
        run: Run | None,
        report: Progress,
        request: StopRequest | None,
        on_line: OnLine | None,
    ) -> None:
        self.config = config
        self.world = world
        self.state = state
        self.run = run  # on the ranks that write, None elsewhere
        self._report = report
        self._request = request
        self._on_line = on_line
        self._data_fingerprint = data.train.fingerprint()
        self._steps_per_epoch = config.steps_per_epoch(len(data.train))
        self._tallies: list[torch.Tensor] = []  # this rank's, since the last log point
        self._lap = time.perf_counter()

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        self._report.close()

    def after_step(self, tally: torch.Tensor) -> None:
        """Note an optimiser step; at a log point, tell, check, save and stop.

        Args:
            tally: what `train_step` returned on this rank.

        Raises:
            Diverged: the loss or a weight became NaN or infinite.
            Stopped: somebody asked for it; there is a checkpoint of this step.

        Both on all ranks together.

        **Collective**: all ranks must call it. **Cost**: at a log point one all-gather
        of 24 bytes for each step since the last one.
        """
        config, state = self.config, self.state
        self._tallies.append(tally)
        done = state.steps_into_epoch(config) + len(self._tallies)
        is_last = done == self._steps_per_epoch
        every = config.checkpoint_every
        save = every is not None and state.step % every == 0
        if done % config.log_every and not save and not is_last:
            return
        rows, asked = self._exchange()
        self._check_finite(rows)
        total = rows.sum((0, 1))
        took_s = time.perf_counter() - self._lap
        state.time_s += took_s
        state.train_s += took_s
        state.samples += int(total[2].item())
        state.tally = (torch.tensor(state.tally).double() + total).tolist()
        line = {
            "kind": "step",
            "epoch": state.epoch + 1,
            "step": state.step,
            **_means(total.tolist()),
            "lr": state.lr,
            "images_per_s": total[2].item() / took_s,
            "time_s": state.time_s,
            "local": [_means(row) for row in rows.sum(1).tolist()],
        }
        self._record(line)
        self._report.step(line)
        if not is_last:  # else the epoch is over, and about to be saved anyway
            if save or asked:
                share_buffers(state.model.module)  # whoever saves, saves the same
                self._check_weights()
                self._save()
            self._stop_if(asked, state.epoch + 1)
        self._lap = time.perf_counter()

    def after_epoch(self, result: dict[str, Any]) -> None:
        """Note an evaluation, and save.

        Args:
            result: what `evaluate` returned.

        Raises:
            Diverged: the model's weights or its loss are no finite numbers.
            Stopped: somebody asked for it.

        Both on all ranks together.

        **Collective**: all ranks must call it.
        """
        state = self.state
        self._check_weights()
        if not math.isfinite(result["loss"]):
            raise self._diverged(
                f"after step {state.step}, the last of epoch {state.epoch + 1}, the "
                f"loss on the test images is {result['loss']}"
            )
        means = _means(state.tally)
        state.epoch, state.tally = state.epoch + 1, [0.0, 0.0, 0.0]
        state.time_s += time.perf_counter() - self._lap
        line = {"kind": "eval", "epoch": state.epoch, "step": state.step, **result}
        self._record(line)
        self._save()
        self._report.epoch(means, line, state.samples / state.train_s)
        if state.epoch < self.config.epochs:
            _, asked = self._exchange()
            self._stop_if(asked, state.epoch)
        else:
            dist.barrier()  # whoever goes on finds the run saved
        self._lap = time.perf_counter()

    def _exchange(self) -> tuple[torch.Tensor, int]:
        """Every rank's tallies (W, steps, 3), and the number of the signal to stop by.

        Collective.
        """
        number = self._request.signal_number if self._request else 0
        asked = torch.full((3,), number, dtype=torch.float64, device=self.world.device)
        rows = gather_over_ranks(torch.stack([*self._tallies, asked])).cpu()
        self._tallies.clear()
        return rows[:, :-1], int(rows[:, -1].max().item())

    def _check_finite(self, rows: torch.Tensor) -> None:
        """Stop all ranks at the first step whose loss is no number; they all see it."""
        losses = rows[..., 0].sum(0)  # (steps,)
        bad = (~losses.isfinite()).nonzero().flatten().tolist()
        if not bad:
            return
        where = self.state.step - len(losses) + 1 + bad[0]
        raise self._diverged(
            f"the loss became {losses[bad[0]].item()} at step {where}, in epoch "
            f"{self.state.epoch + 1}",
            wrecked_after=where - 1,
        )

    def _check_weights(self) -> None:
        """Stop all ranks rather than save what nobody can go on with.

        The loss of a step is that of the weights before it.
        """
        weights = [p.detach() for p in self.state.model.parameters()]
        bad = torch.stack([~w.isfinite().all() for w in weights]).any()
        if sum_over_ranks(bad.float().view(1)).item():
            raise self._diverged(
                f"step {self.state.step} left weights that are no finite numbers"
            )

    def _diverged(self, what: str, wrecked_after: int | None = None) -> Diverged:
        """The error, with what there is to go on with.

        Args:
            what: happened.
            wrecked_after: the step whose weights were no good already, if that is known
                only now: a checkpoint of it is set aside.
        """
        cure = "try a lower --lr"
        if self.run:
            folder = self.run.folder
            if wrecked_after is not None:
                checkpoint.set_aside(folder, wrecked_after)
            if steps := checkpoint.saved_steps(folder):
                cure += (
                    f"; the checkpoint before is of step {steps[0]}, and --resume "
                    f"{folder} --resume-anyway --lr LOWER goes on from it"
                )
        return Diverged(f"{what}: {cure}")

    def _record(self, line: dict[str, Any]) -> None:
        """Add a line to the history, and let whoever looks on see it."""
        if self.run:
            self.run.append(line)
        if self._on_line and self.world.rank == 0:
            self._on_line(**line)

    def _save(self) -> None:
        if self.run:
            self.run.flush_history()  # a checkpoint counts on it
            checkpoint.save(
                self.run.folder,
                self.state.state(self.config, self._data_fingerprint),
                keep=self.config.keep_checkpoints,
            )

    def _stop_if(self, asked: int, epoch: int) -> None:
        """Stop all ranks, which know from each other that one was asked to."""
        if not asked:
            return
        dist.barrier()  # nobody leaves before all have saved
        where = f"; go on with --resume {self.run.folder}" if self.run else ""
        raise Stopped(
            f"stopped by {signal_name(asked)} after step {self.state.step}, in epoch "
            f"{epoch}{where}"
        )


def _means(tally: list[float]) -> dict[str, float]:
    """Loss and accuracy a sample; 0 where a rank had none in a last, small batch."""
    loss_sum, num_correct, num_samples = tally
    num_samples = max(num_samples, 1)
    return {"loss": loss_sum / num_samples, "accuracy": num_correct / num_samples}


def _opening(config: TrainConfig, world: World, num_train: int) -> str:
    micro, num_micro_batches = config.batches(world.world_size)
    accumulated = f" x {num_micro_batches} accumulated" if num_micro_batches > 1 else ""
    return (
        f"{config.model} on {config.dataset}: {world.world_size} "
        f"{'rank' if world.world_size == 1 else 'ranks'} on {world.device.type} "
        f"({world.backend}), {micro} images a rank{accumulated} = global batch "
        f"{config.global_batch_size}, {config.steps_per_epoch(num_train)} steps an "
        "epoch"
    )


def _going_on(state: TrainState, insisted: list[str], found: Found) -> str:
    also = f", with another {', another '.join(insisted)}" if insisted else ""
    source = f", from {found.host}" if found.host else ""
    return f"going on after step {state.step}, in epoch {state.epoch + 1}{source}{also}"
