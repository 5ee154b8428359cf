"""Progress on a terminal as a bar, elsewhere as a line now and then; both on stderr, stdout is for results."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from ntkexp.progress import AbstractProgress, Silent
from ntkexp.text import counted

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

SECONDS = 10.0
"""The longest silence on plain lines while steps are taken."""

FOUND = "{} is finished; --force computes it again"


def listener(quiet: bool) -> AbstractProgress:
    """Choose the listener that suits the place."""
    if quiet:
        return Quiet()
    return Bar() if sys.stderr.isatty() else Lines(sys.stderr)


def measures_in_words(loss: float | None, drift: float | None) -> str:
    """Spell the numbers of a step that are known.

    >>> measures_in_words(0.25, None), measures_in_words(0.25, 0.125)
    ('loss 0.25', 'loss 0.25  drift 0.125')
    """
    known = {"loss": loss, "drift": drift}
    return "  ".join(f"{name} {value:.3g}" for name, value in known.items() if value is not None)


class Quiet(Silent):
    """What has consequences is said, and nothing else."""

    def warn(self, text: str) -> None:
        with suppress(BrokenPipeError):
            sys.stderr.write(f"{text}\n")


class Lines(AbstractProgress):
    """A line is written for every tenth of the steps, and at least one in `SECONDS`.

    >>> lines = Lines(sys.stdout)
    >>> lines.start("training", steps=2, done=0)
    training: 2 steps
    >>> lines.step(1, 0.25, None)
    training: step 1 of 2  loss 0.25
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.name, self.steps, self.said, self.at = "", 0, 0, time.monotonic()

    def start(self, name: str, steps: int, done: int) -> None:
        self.name, self.steps, self.said, self.at = name, steps, done, time.monotonic()
        self.say(f"{name}: {counted(steps, 'step')}" + (f", {done} of them done" if done else ""))

    def step(self, step: int, loss: float | None, drift: float | None) -> None:
        tenth = 10 * step // self.steps > 10 * self.said // self.steps
        if tenth or time.monotonic() - self.at > SECONDS:
            self.said, self.at = step, time.monotonic()
            self.say(f"{self.name}: step {step} of {self.steps}  {measures_in_words(loss, drift)}".rstrip())

    def found(self, path: Path) -> None:
        self.say(FOUND.format(path))

    def say(self, text: str) -> None:
        with suppress(BrokenPipeError):  # that nobody reads on is no reason to stop training
            self.stream.write(f"{text}\n")
            self.stream.flush()

    def stop(self) -> None:
        pass


class Bar(AbstractProgress):
    """A bar with the step, loss, drift and the time that is left."""

    def __init__(self) -> None:
        self.bar: Progress | None = None
        self.task: TaskID | None = None

    def start(self, name: str, steps: int, done: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self.stop()
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[now]}"),
        )
        self.bar = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True))
        self.task = self.bar.add_task(name, total=steps, completed=done, now="")
        self.bar.start()

    def step(self, step: int, loss: float | None, drift: float | None) -> None:
        if self.bar is not None and self.task is not None:
            self.bar.update(self.task, completed=step, now=measures_in_words(loss, drift))

    def found(self, path: Path) -> None:
        self.say(FOUND.format(path))

    def say(self, text: str) -> None:
        if self.bar is None:
            sys.stderr.write(f"{text}\n")
        else:
            self.bar.console.print(text, markup=False, highlight=False)

    def stop(self) -> None:
        if self.bar is not None:
            self.bar.stop()
        self.bar = self.task = None
