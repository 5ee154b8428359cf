"""Displays of progress: a bar on a terminal, text lines elsewhere.

Bars and text lines are written to stderr, because stdout is for results.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TextIO

from ntkexp.progress import AbstractProgress, Unit
from ntkexp.text import counted, duration, printable_lines

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn, TaskID

MAX_SILENT_SECONDS = 10.0
"""The maximum time between two text lines while training runs."""

MIN_ESTIMATE_SECONDS = 0.5
"""The duration of a task is estimated only after this time."""

STEP_COLUMNS = 4
"""The number of columns of a bar before the column with the time left."""

LONG_TASK_SECONDS = 10.0
"""The progress of shorter tasks is not displayed."""


def progress_listener(quiet: bool, hint: str = "") -> AbstractProgress:
    """Return the display for a command: only warnings (`quiet`), a bar on a terminal,
    or text lines.

    The display appends `hint` to the remark that a result exists already.
    """
    if quiet:
        return Quiet()
    if sys.stderr.isatty():
        return Bar(hint)
    return ProgressLines(sys.stderr, hint=hint)


class Announced:
    """A task whose progress is displayed if its estimated duration exceeds
    `LONG_TASK_SECONDS`.

    >>> times = (60.0 * minute for minute in range(9))
    >>> lines = ProgressLines(sys.stdout, times.__next__)
    >>> announced = Announced("attribution", 3, lines, times.__next__)
    >>> for _ in range(3):
    ...     announced.step()
    attribution: 3 steps, 1 of them done; 2.0 min left
    attribution: step 2 of 3  60 s left
    attribution: step 3 of 3

    The first step includes work that is done only once. From the second step on, the
    estimate ignores the duration of the first step.

    >>> times = iter([0.0, 6.0, 7.0, 7.0, 8.0])
    >>> lines = ProgressLines(sys.stdout, times.__next__)
    >>> announced = Announced("attribution", 12, lines, times.__next__)
    >>> announced.step(), announced.step()
    attribution: 12 steps, 2 of them done; 10 s left
    (None, None)
    >>> times = iter([0.0, 6.0, 7.0, 7.0, 8.0])
    >>> announced = Announced("validation", 12, lines, times.__next__, unit="training")
    >>> announced.step(), announced.step()
    validation: 12 trainings, 2 of them done; 10 s left
    (None, None)
    """

    def __init__(
        self,
        name: str,
        steps: int,
        progress: AbstractProgress,
        clock: Callable[[], float] | None = None,
        unit: Unit = "step",
    ) -> None:
        self.name = name
        self.steps = steps
        self.progress = progress
        self.clock = clock or time.monotonic
        self.unit = unit
        self.begun = self.clock()
        self.done = 0
        self.displayed = False
        self.first_seconds = 0.0  # duration of the first step

    def step(self) -> None:
        self.done += 1
        if self.displayed:
            self.progress.step(self.done)
            return
        elapsed = self.clock() - self.begun
        if self.done == 1:
            self.first_seconds = elapsed
            seconds_per_step = elapsed
            is_known = elapsed > LONG_TASK_SECONDS
        else:
            seconds_per_step = (elapsed - self.first_seconds) / (self.done - 1)
            is_known = elapsed >= MIN_ESTIMATE_SECONDS
        left = seconds_per_step * (self.steps - self.done)
        if is_known and elapsed + left > LONG_TASK_SECONDS and self.done < self.steps:
            self.displayed = True
            note = f"{duration(left)} left"
            self.progress.start(self.name, self.steps, self.done, self.unit, note)

    def stop(self) -> None:
        if self.displayed:
            self.progress.stop()


def in_place(quiet: bool) -> AbstractProgress:
    """Return the display for a Python function: only warnings
    (`quiet`), a bar, or text lines."""
    if quiet:
        return Quiet()
    if sys.stderr.isatty() or "ipykernel" in sys.modules:
        return Bar()
    return ProgressLines(sys.stderr, clock=time.monotonic)


LOGGERS = ("ntkexp", "ntkexp.follow")


@contextmanager
def quiet_log(quiet: bool) -> Iterator[None]:
    """If `quiet`, drop log records of this package below the level ERROR inside the
    block.

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


class Quiet(AbstractProgress):
    """A display that shows warnings only."""

    def say(self, text: str) -> None:
        pass

    def warn(self, text: str) -> None:
        with suppress(BrokenPipeError):
            sys.stderr.write(f"{printable_lines(text)}\n")


class ProgressLines(AbstractProgress):
    """A display of text lines: after every tenth of the steps, after every run, and
    after a step that ends `MAX_SILENT_SECONDS` after the previous line.

    If there is a `clock`, the lines include the time left.

    >>> lines = ProgressLines(sys.stdout)
    >>> lines.start("training", steps=2, done=0)
    training: 2 steps
    >>> lines.step(1, "loss 0.25")
    training: step 1 of 2  loss 0.25
    >>> lines.start("width", steps=30, done=28, unit="run", note="about 3 min")
    width: 30 runs, 28 of them done; about 3 min
    >>> lines.step(29, "mlp-w32-s0 is done")
    width: run 29 of 30  mlp-w32-s0 is done
    """

    def __init__(
        self, stream: TextIO, clock: Callable[[], float] | None = None, hint: str = ""
    ) -> None:
        self.stream = stream
        self.clock = clock
        self.hint = hint

    def start(
        self, name: str, steps: int, done: int, unit: Unit = "step", note: str = ""
    ) -> None:
        self.name = name
        self.steps = steps
        self.unit = unit
        self.first_step = done
        self.begun = 0.0 if self.clock is None else self.clock()
        self.written_step = done
        self.written_at = time.monotonic()
        done_already = f", {done} of them done" if done else ""
        ending = f"; {note}" if note else ""
        self.say(f"{name}: {counted(steps, unit)}{done_already}{ending}")

    def step(self, done: int, note: str = "") -> None:
        tenth = 10 * done // self.steps > 10 * self.written_step // self.steps
        late = time.monotonic() - self.written_at > MAX_SILENT_SECONDS
        if tenth or late or self.unit == "run":
            self.written_step = done
            self.written_at = time.monotonic()
            text = f"{self.name}: {self.unit} {done} of {self.steps}  {note}{self.time_left(done)}"
            self.say(text.rstrip())

    def time_left(self, done: int) -> str:
        if self.clock is None or not self.first_step < done < self.steps:
            return ""
        seconds_per_step = (self.clock() - self.begun) / (done - self.first_step)
        return f"{duration(seconds_per_step * (self.steps - done))} left"

    def say(self, text: str) -> None:
        with suppress(BrokenPipeError):  # a closed pipe must not stop training
            self.stream.write(f"{printable_lines(text)}\n")
            self.stream.flush()


class Bar(AbstractProgress):
    """A display of bars: a bar with the number of steps, a note and the time left, and
    a bar for each active run."""

    def __init__(self, hint: str = "") -> None:
        self.hint = hint
        self.bars: Progress | None = None
        self.task: TaskID | None = None
        self.parts: dict[str, TaskID] = {}

    def start(
        self, name: str, steps: int, done: int, unit: Unit = "step", note: str = ""
    ) -> None:
        # import here: rich is slow to import, and text lines do not need it
        from rich.console import Console  # noqa: PLC0415
        from rich.progress import (  # noqa: PLC0415
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        self.stop()
        columns: list[ProgressColumn] = [
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
        ]
        # omit the time left for runs: runs take unequal times, so their notes state it
        if unit != "run":
            columns.append(TimeRemainingColumn())
        console = Console(stderr=True)
        self.bars = Progress(*columns, console=console, transient=unit == "run")
        self.task = self.bars.add_task(name, total=steps, completed=done, note=note)
        self.bars.start()

    def step(self, done: int, note: str = "") -> None:
        if self.bars is not None and self.task is not None:
            self.bars.update(self.task, completed=done, note=note)

    def after_steps(self, note: str) -> None:
        if self.bars is not None and self.task is not None:
            # remove the column with the time left, which is not known now
            self.bars.columns = self.bars.columns[:STEP_COLUMNS]
            self.bars.update(self.task, note=note)

    def show_part(self, name: str, done: int | None, steps: int | None) -> None:
        if self.bars is None:
            return
        if name not in self.parts:
            self.parts[name] = self.bars.add_task(f"  {name}", total=steps, note="")
        self.bars.update(self.parts[name], completed=done, total=steps)

    def drop_part(self, name: str) -> None:
        if self.bars is not None and name in self.parts:
            self.bars.remove_task(self.parts.pop(name))

    def say(self, text: str) -> None:
        if self.bars is None:
            sys.stderr.write(f"{printable_lines(text)}\n")
        else:
            self.bars.console.print(
                printable_lines(text), markup=False, highlight=False
            )

    def stop(self) -> None:
        if self.bars is not None:
            self.bars.stop()
        self.bars = None
        self.task = None
        self.parts = {}
