"""Progress on a terminal as a bar, elsewhere as a line now and then; both on stderr, stdout is for results."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from ntkexp.progress import AbstractProgress, Silent
from ntkexp.text import counted, duration, printable_lines

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

SECONDS = 10.0
"""The longest silence on plain lines while steps are taken."""
KNOWN, LONG = 0.5, 10.0
"""Seconds after which a task's duration is estimated; and seconds from which a task counts as long."""


def progress_listener(quiet: bool, again: str = "") -> AbstractProgress:
    """Choose the listener that suits the place; `again` says how what is finished is computed again."""
    if quiet:
        return Quiet()
    return Bar(again) if sys.stderr.isatty() else ProgressLines(sys.stderr, again=again)


class Announced:
    """A task of `steps` steps that says how long it takes, once that is known and is long, and goes on with a bar, in
    a terminal and a notebook, or with lines. One that takes less than `LONG` says nothing.

    >>> times = (60.0 * minute for minute in range(9))
    >>> announced = Announced("attribution", 3, ProgressLines(sys.stdout, times.__next__), times.__next__)
    >>> for _ in range(3):
    ...     announced.step()
    attribution takes about 3.0 min
    attribution: 3 steps, 1 of them done
    attribution: step 2 of 3  60 s left
    attribution: step 3 of 3

    The first step does what is done once, so shorter ones tell how long the others take.

    >>> times = iter([0.0, 6.0, 7.0, 7.0, 8.0])
    >>> announced = Announced("attribution", 12, ProgressLines(sys.stdout, times.__next__), times.__next__)
    >>> announced.step(), announced.step()
    attribution takes about 17 s
    attribution: 12 steps, 2 of them done
    (None, None)
    """

    def __init__(
        self,
        name: str,
        steps: int,
        progress: AbstractProgress,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name, self.steps, self.progress, self.clock = name, steps, progress, clock
        self.begun, self.done, self.announced = clock(), 0, False
        self.first = 0.0  # seconds that the first step took

    def step(self) -> None:
        self.done += 1
        if self.announced:
            self.progress.step(self.done, None, None)
            return
        spent = self.clock() - self.begun
        if self.done == 1:
            self.first, whole, known = spent, spent * self.steps, spent > LONG
        else:
            whole = self.first + (spent - self.first) * (self.steps - 1) / (self.done - 1)
            known = spent >= KNOWN
        if known and whole > LONG and self.done < self.steps:
            self.announced = True
            self.progress.say(f"{self.name} takes about {duration(whole)}")
            self.progress.start(self.name, self.steps, self.done)

    def stop(self) -> None:
        if self.announced:
            self.progress.stop()


def in_place(quiet: bool) -> AbstractProgress:
    """Choose the listener for who calls a function: a bar also in a notebook, and lines that say what is left."""
    if quiet:
        return Quiet()
    return (
        Bar()
        if sys.stderr.isatty() or "ipykernel" in sys.modules
        else ProgressLines(sys.stderr, clock=time.monotonic)
    )


LOGGERS = ("ntkexp", "ntkexp.follow")


@contextmanager
def quiet_log(quiet: bool) -> Iterator[None]:
    """Drop what this package logs below errors, if it is to be quiet.

    >>> with quiet_log(True):
    ...     logging.getLogger("ntkexp.follow").warning("takes 3 GB")
    """

    def is_error(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR

    loggers = [logging.getLogger(name) for name in LOGGERS if quiet]
    for logger in loggers:
        logger.addFilter(is_error)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(is_error)


def measures_in_words(loss: float | None, drift: float | None) -> str:
    """Spell the numbers of a step that are known.

    >>> measures_in_words(0.25, None), measures_in_words(0.25, 0.125)
    ('loss 0.25', 'loss 0.25  drift 0.125')
    """
    measures = {"loss": loss, "drift": drift}
    return "  ".join(f"{name} {value:.3g}" for name, value in measures.items() if value is not None)


class Quiet(Silent):
    """What has consequences is said, and nothing else."""

    def warn(self, text: str) -> None:
        with suppress(BrokenPipeError):
            sys.stderr.write(f"{printable_lines(text)}\n")


class ProgressLines(AbstractProgress):
    """A line is written for every tenth of the steps, and at least one in `SECONDS`; with a clock, also what is left.

    >>> lines = ProgressLines(sys.stdout)
    >>> lines.start("training", steps=2, done=0)
    training: 2 steps
    >>> lines.step(1, 0.25, None)
    training: step 1 of 2  loss 0.25
    """

    def __init__(
        self, stream: TextIO, clock: Callable[[], float] | None = None, again: str = ""
    ) -> None:
        self.stream, self.clock, self.again = stream, clock, again
        self.name, self.steps, self.written, self.at = "", 0, 0, time.monotonic()
        self.first, self.begun = 0, 0.0

    def start(self, name: str, steps: int, done: int) -> None:
        self.name, self.steps, self.written, self.at = name, steps, done, time.monotonic()
        self.first, self.begun = done, 0.0 if self.clock is None else self.clock()
        self.say(f"{name}: {counted(steps, 'step')}" + (f", {done} of them done" if done else ""))

    def step(self, step: int, loss: float | None, drift: float | None) -> None:
        tenth = 10 * step // self.steps > 10 * self.written // self.steps
        if tenth or time.monotonic() - self.at > SECONDS:
            self.written, self.at = step, time.monotonic()
            words = f"{measures_in_words(loss, drift)}{self.left(step)}"
            self.say(f"{self.name}: step {step} of {self.steps}  {words}".rstrip())

    def left(self, step: int) -> str:
        """Spell the time that is left, where there is a clock."""
        if self.clock is None or not self.first < step < self.steps:
            return ""
        each = (self.clock() - self.begun) / (step - self.first)
        return f"{duration(each * (self.steps - step))} left"

    def found(self, path: Path) -> None:
        self.say(f"{path} is finished{self.again}")

    def say(self, text: str) -> None:
        with suppress(BrokenPipeError):  # a closed pipe is no reason to stop training
            self.stream.write(f"{printable_lines(text)}\n")
            self.stream.flush()

    def stop(self) -> None:
        pass


class Bar(AbstractProgress):
    """A bar with the step, loss, drift and the time that is left."""

    def __init__(self, again: str = "") -> None:
        self.again = again
        self.bar: Progress | None = None
        self.task: TaskID | None = None

    def start(self, name: str, steps: int, done: int) -> None:
        from rich.console import Console  # noqa: PLC0415  slow
        from rich.progress import (  # noqa: PLC0415
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

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
        self.say(f"{path} is finished{self.again}")

    def say(self, text: str) -> None:
        if self.bar is None:
            sys.stderr.write(f"{printable_lines(text)}\n")
        else:
            self.bar.console.print(printable_lines(text), markup=False, highlight=False)

    def stop(self) -> None:
        if self.bar is not None:
            self.bar.stop()
        self.bar = self.task = None
