"""What rank 0 says while a run is under way: a bar on a terminal, lines elsewhere."""

import contextlib
import sys
import time
from typing import Any, Literal

__all__ = ["Progress", "ProgressStyle"]

ProgressStyle = Literal["bar", "lines", "none"]

_LINE_EVERY_S = 15.0  # without a bar, a long epoch still says that it is alive


class Progress:
    """Reports one run, from rank 0.

    Args:
        style: ``bar``: one bar for the run, and a line an epoch above it; ``lines``: a
            line an epoch, and one every 15 seconds in a longer one; ``none``: silence.
        epochs: number of epochs of the run.
        steps_per_epoch: optimiser steps in each.
        done_steps: steps that an earlier part of the run has done.
    """

    def __init__(
        self, style: ProgressStyle, epochs: int, steps_per_epoch: int, done_steps: int
    ) -> None:
        self.style = style
        self._epochs = epochs
        self._steps_per_epoch = steps_per_epoch
        self._said_at = time.monotonic()
        self._bar: Any = None
        if style == "bar":
            from tqdm import tqdm

            self._bar = tqdm(
                total=epochs * steps_per_epoch,
                initial=done_steps,
                unit="step",
                ncols=78,
                leave=False,
                file=sys.stderr,
            )

    def say(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        if self._bar is not None:
            self._bar.clear()
        if self.style != "none":
            with contextlib.suppress(BrokenPipeError):  # the reader has left
                print(text, flush=True)
        if self._bar is not None:
            self._bar.refresh()

    def step(self, line: dict[str, Any]) -> None:
        """Report training steps: a "step" line of the history."""
        short = f"loss {line['loss']:.3f}, accuracy {line['accuracy']:.1%}"
        where = f"epoch {line['epoch']}/{self._epochs}"
        if self._bar is not None:
            self._bar.set_description_str(where, refresh=False)
            self._bar.set_postfix_str(short, refresh=False)
            self._bar.update(line["step"] - self._bar.n)
        elif time.monotonic() - self._said_at > _LINE_EVERY_S:
            step = (line["step"] - 1) % self._steps_per_epoch + 1
            self.say(
                f"{where}  step {step}/{self._steps_per_epoch}  {short}, "
                f"{line['images_per_s']:.0f} images/s"
            )
            self._said_at = time.monotonic()

    def epoch(self, train: dict[str, float], test: dict[str, Any], rate: float) -> None:
        """Report the end of an epoch: sums over all ranks."""
        self.say(
            f"epoch {test['epoch']}/{self._epochs}  "
            f"train loss {train['loss']:.3f}, accuracy {train['accuracy']:.1%}  "
            f"test loss {test['loss']:.3f}, accuracy {test['accuracy']:.1%}  "
            f"{rate:.0f} images/s"
        )
        self._said_at = time.monotonic()

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()
