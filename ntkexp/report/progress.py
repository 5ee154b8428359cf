"""Progress on stderr: a bar on a terminal, occasional lines elsewhere. Results go to stdout."""

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

MAX_SILENT_SECONDS = 10.0  # between two plain lines
MIN_ESTIMATE_SECONDS = 0.5  # after which the duration of a task is estimated
LONG_TASK_SECONDS = 10.0  # shorter tasks are not announced


def progress_listener(quiet: bool, again: str = "") -> AbstractProgress:
    """Return the listener for a command. `again` says how to compute a finished result again."""
    if quiet:
        return Quiet()
    return Bar(again) if sys.stderr.isatty() else ProgressLines(sys.stderr, again=again)


class Announced:
    """A task that announces its duration if it is long, and then shows its progress.

    A task shorter than `LONG_TASK_SECONDS` shows nothing.

    >>> times = (60.0 * minute for minute in range(9))
    >>> announced = Announced("attribution", 3, ProgressLines(sys.stdout, times.__next__), times.__next__)
    >>> for _ in range(3):
    ...     announced.step()
    attribution takes about 3.0 min
    attribution: 3 steps, 1 of them done
    attribution: step 2 of 3  60 s left
    attribution: step 3 of 3

    The first step includes the preparation, so the duration is estimated from the later steps.

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
        self.name = name
        self.steps = steps
        self.progress = progress
        self.clock = clock
        self.begun = clock()
        self.done = 0
        self.announced = False
        self.first_seconds = 0.0  # of the first step

    def step(self) -> None:
        """Count one step."""
        self.done += 1
        if self.announced:
            self.progress.step(self.done, None, None)
            return
        spent = self.clock() - self.begun
        if self.done == 1:
            self.first_seconds = spent
            total = spent * self.steps
            is_known = spent > LONG_TASK_SECONDS
        else:
            per_step = (spent - self.first_seconds) / (self.done - 1)
            total = self.first_seconds + per_step * (self.steps - 1)
            is_known = spent >= MIN_ESTIMATE_SECONDS
        if is_known and total > LONG_TASK_SECONDS and self.done < self.steps:
            self.announced = True
            self.progress.say(f"{self.name} takes about {duration(total)}")
            self.progress.start(self.name, self.steps, self.done)

    def stop(self) -> None:
        if self.announced:
            self.progress.stop()


def in_place(quiet: bool) -> AbstractProgress:
    """Return the listener for a function call: a bar in a terminal or notebook, else lines with the remaining time."""
    if quiet:
        return Quiet()
    if sys.stderr.isatty() or "ipykernel" in sys.modules:
        return Bar()
    return ProgressLines(sys.stderr, clock=time.monotonic)


LOGGERS = ("ntkexp", "ntkexp.follow")


@contextmanager
def quiet_log(quiet: bool) -> Iterator[None]:
    """Suppress the package's log messages below errors, if `quiet`.

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
    """Spell the known numbers of a step.

    >>> measures_in_words(0.25, None), measures_in_words(0.25, 0.125)
    ('loss 0.25', 'loss 0.25  drift 0.125')
    """
    measures = {"loss": loss, "drift": drift}
    return "  ".join(f"{name} {value:.3g}" for name, value in measures.items() if value is not None)


class Quiet(Silent):
    """A listener that prints warnings only."""

    def warn(self, text: str) -> None:
        with suppress(BrokenPipeError):
            sys.stderr.write(f"{printable_lines(text)}\n")


class ProgressLines(AbstractProgress):
    """A listener that prints a line for every tenth of the steps, or after `MAX_SILENT_SECONDS`.

    With a clock, lines show the remaining time.

    >>> lines = ProgressLines(sys.stdout)
    >>> lines.start("training", steps=2, done=0)
    training: 2 steps
    >>> lines.step(1, 0.25, None)
    training: step 1 of 2  loss 0.25
    """

    def __init__(
        self, stream: TextIO, clock: Callable[[], float] | None = None, again: str = ""
    ) -> None:
        self.stream = stream
        self.clock = clock
        self.again = again
        self.name = ""
        self.steps = 0
        self.first_step = 0
        self.begun = 0.0  # when the clock is given
        self.last_line_step = 0
        self.last_line_time = time.monotonic()

    def start(self, name: str, steps: int, done: int) -> None:
        self.name = name
        self.steps = steps
        self.first_step = done
        self.begun = 0.0 if self.clock is None else self.clock()
        self.last_line_step = done
        self.last_line_time = time.monotonic()
        self.say(f"{name}: {counted(steps, 'step')}" + (f", {done} of them done" if done else ""))

    def step(self, step: int, loss: float | None, drift: float | None) -> None:
        is_tenth = 10 * step // self.steps > 10 * self.last_line_step // self.steps
        if is_tenth or time.monotonic() - self.last_line_time > MAX_SILENT_SECONDS:
            self.last_line_step = step
            self.last_line_time = time.monotonic()
            words = f"{measures_in_words(loss, drift)}{self.left(step)}"
            self.say(f"{self.name}: step {step} of {self.steps}  {words}".rstrip())

    def left(self, step: int) -> str:
        """Spell the remaining time; empty without a clock."""
        if self.clock is None or not self.first_step < step < self.steps:
            return ""
        per_step = (self.clock() - self.begun) / (step - self.first_step)
        return f"{duration(per_step * (self.steps - step))} left"

    def found(self, path: Path) -> None:
        self.say(f"{path} is finished{self.again}")

    def say(self, text: str) -> None:
        with suppress(BrokenPipeError):  # a closed pipe is no reason to stop training
            self.stream.write(f"{printable_lines(text)}\n")
            self.stream.flush()

    def stop(self) -> None:
        pass


class Bar(AbstractProgress):
    """A listener that shows a bar with the step, loss, drift and remaining time."""

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
