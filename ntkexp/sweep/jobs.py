"""The runs of a sweep as jobs, brought to their end: what is finished stays, what is dead goes on, and what another
process is at is waited for; what is reported meanwhile, and how long it will still take.

A terminal shows a line for every worker and a bar for all; elsewhere there is a line for every run that has ended.
"""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from ntkexp.config.build import admit, build
from ntkexp.engine.base import (
    AbstractEngine,
    AbstractJob,
    Began,
    Ended,
    Ending,
    Event,
    Stepped,
    Task,
    Tell,
    Warned,
    run_jobs,
)
from ntkexp.experiment.experiment import USUAL
from ntkexp.experiment.identity import folder_name
from ntkexp.mistake import Mistake
from ntkexp.progress import AbstractProgress
from ntkexp.run.execute import execute
from ntkexp.sweep.plan import Estimator, Plan, PlannedRun, longest_first
from ntkexp.text import counted, duration

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


# --- Progress of a sweep: what is reported, independent of how it is shown.


class AbstractSweepListener(ABC):
    """A listener hears `begin`, any number of events and remarks, and `end`."""

    @abstractmethod
    def begin(self, name: str, runs: int, done: int, workers: int, seconds: float | None) -> None:
        """A sweep of `runs` runs continues, `done` of them finished; the estimated duration of the others, if known."""

    @abstractmethod
    def see(self, event: Event, ahead: float | None) -> None:
        """Something happened to a run; about how many seconds remain, if known."""

    @abstractmethod
    def say(self, text: str) -> None:
        """There is a remark of one line."""

    def warn(self, text: str) -> None:
        """A remark of consequence, which quiet commands print as well."""
        self.say(text)

    @abstractmethod
    def end(self) -> None:
        """The sweep is over, or was interrupted."""


class NoListener(AbstractSweepListener):
    """Prints warnings alone."""

    def begin(self, name: str, runs: int, done: int, workers: int, seconds: float | None) -> None:
        pass

    def see(self, event: Event, ahead: float | None) -> None:
        pass

    def say(self, text: str) -> None:
        pass

    def warn(self, text: str) -> None:
        with suppress(BrokenPipeError):
            sys.stderr.write(f"{text}\n")

    def end(self) -> None:
        pass


def about_duration(seconds: float | None, then: str = "") -> str:
    """How long something takes, if that is known.

    >>> about_duration(200.0), about_duration(60.0, " to go"), about_duration(None)
    ('about 3.3 min', 'about 60 s to go', '')
    """
    return "" if seconds is None else f"about {duration(seconds)}{then}"


def sweep_listener(quiet: bool) -> AbstractSweepListener:
    """The listener that suits the output: a terminal, a file, or none."""
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
        done_already = f", {done} of them done" if done else ""
        takes = [about_duration(seconds), f"with {counted(workers, 'worker')}"]
        self.say(f"{name}: {counted(runs, 'run')}{done_already}; {' '.join(filter(None, takes))}")

    def see(self, event: Event, ahead: float | None) -> None:
        if isinstance(event, Ended) and event.how != "held":
            self.ended += 1
            how = {"found": "done", "broken": "stopped"}.get(event.how, event.how)
            words = [
                f"{self.ended}/{self.runs}  {event.name} is {how}",
                about_duration(ahead, " to go"),
            ]
            self.say("; ".join(filter(None, words)))

    def say(self, text: str) -> None:
        with suppress(BrokenPipeError):  # a closed pipe is no reason to stop
            self.stream.write(f"{text}\n")
            self.stream.flush()

    def end(self) -> None:
        pass


class Board(AbstractSweepListener):
    """Bars: of all runs, and of each that is at work."""

    def __init__(self) -> None:
        self.bars: Progress | None = None
        self.whole: TaskID | None = None
        self.running: dict[str, TaskID] = {}

    def begin(self, name: str, runs: int, done: int, workers: int, seconds: float | None) -> None:
        from rich.console import Console  # noqa: PLC0415  slow, and lines need none
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn  # noqa: PLC0415  the same

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[now]}"),
        )
        self.bars = Progress(*columns, console=Console(stderr=True), transient=True)
        self.whole = self.bars.add_task(
            name, total=runs, completed=done, now=about_duration(seconds)
        )
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
        self.bars.update(self.whole, now=about_duration(ahead, " to go"))

    def say(self, text: str) -> None:
        if self.bars is not None:
            self.bars.console.print(text, markup=False, highlight=False)

    def end(self) -> None:
        if self.bars is not None:
            self.bars.stop()


# --- How long it will still take: what is left of the estimated work, at the speed of the work that was seen.
#
# ahead = max(left / workers, longest that is left) / speed       speed = estimated / measured worker seconds
#
# Where costs are in no known unit, as those of jobs that are taken to be alike, nothing is known until one has
# ended.


TRAINING = 0.9  # the share of a run until its last step; then it is written and drawn
PRIOR = 20.0  # worker seconds for which an estimate is believed until runs have been seen


@dataclass
class RemainingTime:
    """An estimate watches runs go by, and says how long the others will take."""

    costs: Mapping[str, float]
    workers: int
    believed: float = (
        PRIOR  # worker seconds for which the estimate stands; 0 if costs are in no known unit
    )
    shares: dict[str, float] = field(
        default_factory=dict
    )  # of the runs at work and those that ended here
    begun: dict[str, float] = field(default_factory=dict)
    spent: float = 0.0  # worker seconds of runs that ended

    def see(self, event: Event) -> None:
        match event:
            case Began():
                self.begun[event.name], self.shares[event.name] = time.monotonic(), 0.0
            case Stepped():
                self.shares[event.name] = TRAINING * event.step / event.steps
            case Ended() if event.how == "held":  # it comes again
                self.begun.pop(event.name, None)
                self.shares.pop(event.name, None)
            case Ended():
                self.spent += time.monotonic() - self.begun.pop(event.name, time.monotonic())
                self.shares[event.name] = 1.0

    @property
    def ahead(self) -> float | None:
        """About how many seconds the sweep will still take, once that can be estimated."""
        left = {name: cost * (1 - self.shares.get(name, 0.0)) for name, cost in self.costs.items()}
        seen = sum(self.costs.values()) - sum(left.values())
        busy = self.spent + sum(time.monotonic() - start for start in self.begun.values())
        if seen + self.believed == 0:
            return None
        speed = (seen + self.believed) / (busy + self.believed)
        return max(sum(left.values()) / self.workers, *left.values(), 0.0) / speed


# --- A run as a job for a worker.


SAYING = 0.2  # seconds between two words on how far a run is


@dataclass(frozen=True)
class RunJob(AbstractJob):
    """A run to be carried out; its task has the name of its folder."""

    loads = ("ntkexp.report.plots.run_plots", "torch.fx.experimental.symbolic_shapes")
    """Pictures, and what torch loads when it first takes a derivative: half of the time that a small run takes."""

    fields: dict[str, Any]
    overrides: tuple[str, ...]
    out: str
    trust: tuple[str, ...]
    options: tuple[str, ...] = ()
    """Those of `ntkexp train` that repeat the run from its home."""

    pictures: bool = True
    """Whether the run draws pictures of itself, which may take longer than a small run."""

    log: str | None = None
    """Where the run's numbers go while it runs, besides its folder."""

    def carry_out(self, name: str, threads: int, tell: Tell) -> Ending:
        relay = Relay(name, tell)
        try:
            experiment = build(self.fields, admit(self.trust))
            if (
                folder_name(experiment) != name
            ):  # it does not mean the same here as where it was composed
                other = f"{name} would be {folder_name(experiment)} here"
                raise Mistake(f"{other}: this worker has other data or another version")
            if not experiment.memory_gb and experiment.device != "cpu":
                experiment = experiment.model_copy(
                    update={"memory_gb": USUAL}
                )  # workers may share a GPU
            out = Path(self.out)
            execute(
                experiment,
                self.overrides,
                out,
                False,
                relay,
                self.options,
                self.pictures,
                threads,
                self.log,
            )
        except Exception as error:  # whatever it is, with a word more
            error.add_note("error.txt in its folder says where")
            raise
        return "done" if relay.begun else "found"


class Relay(AbstractProgress):
    """A relay passes on how far a run is, and remembers whether there was anything to do."""

    def __init__(self, name: str, tell: Tell) -> None:
        self.name, self.tell, self.steps, self.reported = name, tell, 0, 0.0
        self.begun = False

    def start(self, name: str, steps: int, done: int) -> None:
        self.begun, self.steps = True, steps
        self.tell(Stepped(self.name, done, steps))

    def step(self, step: int, loss: float | None, drift: float | None) -> None:
        if time.monotonic() - self.reported >= SAYING:
            self.reported = time.monotonic()
            self.tell(Stepped(self.name, step, self.steps))

    def found(self, path: Path) -> None:
        pass

    def say(self, text: str) -> None:
        pass

    def warn(self, text: str) -> None:
        self.tell(Warned(self.name, text))

    def stop(self) -> None:
        pass


# --- The runs of a sweep, brought to their end on an engine.


PAUSE = 0.5  # seconds between two looks at runs that another process is at
UNFINISHED = ("stopped", "killed", "broken", "failed")


@dataclass
class Conductor:
    """A conductor carries out a sweep."""

    plan: Plan
    engine: AbstractEngine
    listener: AbstractSweepListener
    trust: tuple[str, ...] = ()
    fail_fast: bool = False
    pictures: bool = True
    log: str | None = None
    ended: dict[str, Ended] = field(
        default_factory=dict
    )  # what became of each run that was not finished before

    def conduct(self, runs: list[PlannedRun]) -> None:
        """Carry out these runs, the longest first."""
        estimate = Estimator()
        seconds = {run.name: estimate(run.experiment).seconds for run in runs}
        waiting = longest_first(runs, list(seconds.values()))
        clock = RemainingTime(seconds, self.engine.workers)
        total = len(self.plan.distinct)
        self.listener.begin(
            self.plan.sweep.name, total, total - len(runs), self.engine.workers, clock.ahead
        )
        try:
            while waiting and not self.over:
                with closing(run_jobs(self.engine, self.tasks(waiting, clock))) as events:
                    for event in events:
                        self.hear(event, clock)
                        if self.over:
                            break
                # what is left was held by another process when its turn came: wait until that lets go of one
                waiting = [run for run in waiting if run.name not in self.ended]
                if waiting and not self.over:
                    self.listener.say(
                        f"another process runs {counted(len(waiting), 'run')}; waiting for it"
                    )
                    while all(self.plan.folder(run).state == "running" for run in waiting):
                        time.sleep(PAUSE)
        finally:
            self.listener.end()

    @property
    def over(self) -> bool:
        hows = {ended.how for ended in self.ended.values()}
        return "broken" in hows or (self.fail_fast and bool(hows & set(UNFINISHED)))

    def tasks(self, runs: list[PlannedRun], clock: RemainingTime) -> Iterator[Task]:
        """Give tasks to workers, looked at once more when a worker is free for them."""
        for run in runs:
            state = self.plan.folder(run).state
            if state == "done":
                self.hear(Ended(run.name, "found"), clock)
            elif state != "running":
                out, options = str(self.plan.out), self.plan.sweep.options
                job = RunJob(
                    run.experiment.fields(),
                    run.overrides,
                    out,
                    self.trust,
                    options,
                    self.pictures,
                    self.log,
                )
                yield Task(run.name, job, str(Path.cwd()), str(self.plan.record.parent))

    def hear(self, event: Event, clock: RemainingTime) -> None:
        """Keep what happened, write it into the log, and pass it on."""
        clock.see(event)
        match event:
            case Began():
                self.plan.event_log.write(event.name, "began")
            case Ended():
                self.plan.event_log.write(event.name, event.how, event.reason)
                for text in event.warnings:
                    self.listener.warn(f"{event.name}: {text}")
                if event.how != "held":
                    self.ended[event.name] = event
        self.listener.see(event, clock.ahead)
