"""A sweep on a terminal: a line for every worker and a bar for all; elsewhere a line for every run that has ended."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING, TextIO

from ntkexp.engine.base import Began, Ended, Event, Stepped
from ntkexp.sweep.listener import AbstractSweepListener, NoListener
from ntkexp.text import counted, duration

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


def listener(quiet: bool) -> AbstractSweepListener:
    """Choose the listener that suits the place."""
    if quiet:
        return NoListener()
    return Board() if sys.stderr.isatty() else Lines(sys.stderr)


class Lines(AbstractSweepListener):
    """A line for every run that has ended.

    >>> lines = Lines(sys.stdout)
    >>> lines.begin("width", 30, 28, 2, 200.0)
    width: 30 runs, 28 of them done; about 3.3 min with 2 workers
    >>> lines.see(Ended("mlp-w32-s0", "done"), 60.0)
    29/30  mlp-w32-s0 is done; about 60 s to go
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream, self.runs, self.ended = stream, 0, 0

    def begin(self, name: str, runs: int, done: int, workers: int, seconds: float | None) -> None:
        self.runs, self.ended = runs, done
        known = f", {done} of them done" if done else ""
        takes = [about(seconds), f"with {counted(workers, 'worker')}"]
        self.say(f"{name}: {counted(runs, 'run')}{known}; {' '.join(filter(None, takes))}")

    def see(self, event: Event, ahead: float | None) -> None:
        if isinstance(event, Ended) and event.how != "held":
            self.ended += 1
            how = {"found": "done", "broken": "stopped"}.get(event.how, event.how)
            told = [f"{self.ended}/{self.runs}  {event.name} is {how}", to_go(ahead)]
            self.say("; ".join(filter(None, told)))

    def say(self, text: str) -> None:
        with suppress(BrokenPipeError):  # that nobody reads on is no reason to stop
            self.stream.write(f"{text}\n")
            self.stream.flush()

    def end(self) -> None:
        pass


def about(seconds: float | None) -> str:
    """Say how long something takes, if that is known.

    >>> about(200.0), about(None)
    ('about 3.3 min', '')
    """
    return "" if seconds is None else f"about {duration(seconds)}"


def to_go(ahead: float | None) -> str:
    """Say how long is still to go, if that is known.

    >>> to_go(60.0), to_go(None)
    ('about 60 s to go', '')
    """
    return "" if ahead is None else f"{about(ahead)} to go"


class Board(AbstractSweepListener):
    """Bars: of all runs, and of each that is at work."""

    def __init__(self) -> None:
        self.bars: Progress | None = None
        self.whole: TaskID | None = None
        self.running: dict[str, TaskID] = {}

    def begin(self, name: str, runs: int, done: int, workers: int, seconds: float | None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[now]}"),
        )
        self.bars = Progress(*columns, console=Console(stderr=True), transient=True)
        self.whole = self.bars.add_task(name, total=runs, completed=done, now=about(seconds))
        self.bars.start()

    def see(self, event: Event, ahead: float | None) -> None:
        if self.bars is None or self.whole is None:
            return
        match event:
            case Began():
                self.running[event.name] = self.bars.add_task(f"  {event.name}", total=None, now="")
            case Stepped():
                self.bars.update(self.running[event.name], completed=event.step, total=event.steps)
            case Ended():
                if event.name in self.running:
                    self.bars.remove_task(self.running.pop(event.name))
                self.bars.advance(self.whole, event.how != "held")
        self.bars.update(self.whole, now=to_go(ahead))

    def say(self, text: str) -> None:
        if self.bars is not None:
            self.bars.console.print(text, markup=False, highlight=False)

    def end(self) -> None:
        if self.bars is not None:
            self.bars.stop()
