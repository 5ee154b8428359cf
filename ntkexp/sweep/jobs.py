"""The runs of a sweep as jobs, brought to their end: what is finished stays, what is dead goes on, and what another
process is at is waited for; what is reported meanwhile, and how long it will still take.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
from ntkexp.progress import AbstractProgress, Unit
from ntkexp.run.execute import execute
from ntkexp.sweep.plan import Estimator, Plan, PlannedRun, longest_first
from ntkexp.text import counted, duration

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
        """Take in what happened to a job."""
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


@dataclass
class JobProgress:
    """The display of jobs on an engine: one task, whose runs at work are its parts.

    >>> import sys
    >>> from ntkexp.report.progress import ProgressLines
    >>> lines = ProgressLines(sys.stdout)
    >>> jobs = JobProgress(lines, RemainingTime({"a": 100.0, "b": 100.0}, workers=2), 30, 28)
    >>> jobs.start("width")
    width: 30 runs, 28 of them done; about 1.7 min with 2 workers
    >>> jobs.see(Ended("a", "failed"))
    width: run 29 of 30  a failed; about 17 s to go
    """

    progress: AbstractProgress
    clock: RemainingTime
    runs: int
    done: int

    def start(self, name: str) -> None:
        """Begin the task."""
        workers = f"with {counted(self.clock.workers, 'worker')}"
        note = f"{self.time_ahead()} {workers}".strip()
        self.progress.start(name, self.runs, self.done, "run", note)

    def see(self, event: Event) -> None:
        """Show what happened to a job, and about how long the others take."""
        self.clock.see(event)
        match event:
            case Began():
                self.progress.show_part(event.name, None, None)
            case Stepped():
                self.progress.show_part(event.name, event.step, event.steps)
            case Ended():
                self.progress.drop_part(event.name)
                if event.how != "held":
                    self.done += 1
                    ending = ENDINGS.get(event.how, f"is {event.how}")
                    ahead = self.time_ahead(" to go")
                    note = f"{event.name} {ending}"
                    self.progress.step(self.done, f"{note}; {ahead}" if ahead else note)

    def time_ahead(self, ending: str = "") -> str:
        """Spell the estimated time of the jobs that are left, if it is known."""
        seconds = self.clock.ahead
        return "" if seconds is None else f"about {duration(seconds)}{ending}"


ENDINGS = {"found": "is done", "broken": "is stopped", "failed": "failed"}


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

    def start(self, name: str, steps: int, done: int, unit: Unit = "step", note: str = "") -> None:
        self.begun, self.steps = True, steps
        self.tell(Stepped(self.name, done, steps))

    def step(self, done: int, note: str = "") -> None:
        if time.monotonic() - self.reported >= SAYING:
            self.reported = time.monotonic()
            self.tell(Stepped(self.name, done, self.steps))

    def say(self, text: str) -> None:
        pass

    def warn(self, text: str) -> None:
        self.tell(Warned(self.name, text))


# --- The runs of a sweep, brought to their end on an engine.


PAUSE = 0.5  # seconds between two looks at runs that another process is at
UNFINISHED = ("stopped", "killed", "broken", "failed")


@dataclass
class Conductor:
    """A conductor carries out a sweep."""

    plan: Plan
    engine: AbstractEngine
    progress: AbstractProgress
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
        jobs = JobProgress(self.progress, clock, total, total - len(runs))
        jobs.start(self.plan.sweep.name)
        try:
            while waiting and not self.over:
                with closing(run_jobs(self.engine, self.tasks(waiting, jobs))) as events:
                    for event in events:
                        self.hear(event, jobs)
                        if self.over:
                            break
                # what is left was held by another process when its turn came: wait until that lets go of one
                waiting = [run for run in waiting if run.name not in self.ended]
                if waiting and not self.over:
                    self.progress.say(
                        f"another process runs {counted(len(waiting), 'run')}; waiting for it"
                    )
                    while all(self.plan.folder(run).state == "running" for run in waiting):
                        time.sleep(PAUSE)
        finally:
            self.progress.stop()

    @property
    def over(self) -> bool:
        hows = {ended.how for ended in self.ended.values()}
        return "broken" in hows or (self.fail_fast and bool(hows & set(UNFINISHED)))

    def tasks(self, runs: list[PlannedRun], jobs: JobProgress) -> Iterator[Task]:
        """Give tasks to workers, looked at once more when a worker is free for them."""
        for run in runs:
            state = self.plan.folder(run).state
            if state == "done":
                self.hear(Ended(run.name, "found"), jobs)
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

    def hear(self, event: Event, jobs: JobProgress) -> None:
        """Keep what happened, write it into the log, and display it."""
        match event:
            case Began():
                self.plan.event_log.write(event.name, "began")
            case Ended():
                self.plan.event_log.write(event.name, event.how, event.reason)
                for text in event.warnings:
                    self.progress.warn(f"{event.name}: {text}")
                if event.how != "held":
                    self.ended[event.name] = event
        jobs.see(event)
