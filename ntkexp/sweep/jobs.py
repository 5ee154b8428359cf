"""Carry out the runs of a sweep as jobs on an engine,
and show progress and remaining time.

Finished runs are kept, and interrupted runs are resumed. If another process works on a
run, the sweep waits for it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ntkexp.capacity import DEFAULT_MEMORY_GB
from ntkexp.config.build import admit, build
from ntkexp.engine.base import (
    AbstractEngine,
    AbstractJob,
    Began,
    Ended,
    Ending,
    Event,
    ReportEvent,
    Stepped,
    Task,
    Warned,
    run_jobs,
)
from ntkexp.experiment.experiment import Experiment
from ntkexp.experiment.identity import folder_name
from ntkexp.mistake import Mistake
from ntkexp.progress import AbstractProgress, Unit
from ntkexp.records.folder import RunFolder, command
from ntkexp.run.execute import execute
from ntkexp.run.folder_listener import RunRequest
from ntkexp.sweep.plan import (
    Estimator,
    Plan,
    PlannedRun,
    by_decreasing_duration,
    finished_speed,
)
from ntkexp.text import counted, duration

# --- The remaining time: the estimated remaining work divided by the measured speed.
#
# seconds left = max(remaining work / workers, longest remaining job) / speed
# speed        = estimated cost of the completed work / measured worker seconds
#
# The cost of a job is its estimated time in seconds on a machine without other work.
# Until a job of this command is complete, the speed includes the jobs of earlier
# commands, or the speed 1 if there are none. Costs may also have an unknown unit
# (`prior_seconds` = 0). Then there is no estimate before the first progress.


# training takes this share of a run's time; the rest is for files and pictures
TRAINING_SHARE = 0.9
# Until a job of this command is complete, the speed of earlier jobs counts like a
# measurement over this many worker seconds.
PRIOR_SECONDS = 20.0


@dataclass
class RemainingTime:
    """An estimate of the remaining time, from the estimated costs of jobs and
    from their events."""

    costs: Mapping[str, float]
    workers: int
    # the weight of `earlier_speed`, in worker seconds; 0 if costs have no known unit
    prior_seconds: float = PRIOR_SECONDS
    # speed of the jobs that earlier commands completed
    earlier_speed: float | None = None
    # the completed share of each begun job
    shares: dict[str, float] = field(default_factory=dict)
    # start times of the running jobs, and the duration of the completed jobs
    start_times: dict[str, float] = field(default_factory=dict)
    durations: dict[str, float] = field(default_factory=dict)
    # jobs that ended without being done by this command, so that no duration is known
    dropped: set[str] = field(default_factory=set)

    def update(self, event: Event) -> None:
        """Update the estimate with an event."""
        match event:
            case Began():
                self.start_times[event.name] = time.monotonic()
                self.shares[event.name] = 0.0
            case Stepped():
                self.shares[event.name] = TRAINING_SHARE * event.step / event.steps
            case Ended():
                self.end(event)

    def end(self, event: Ended) -> None:
        """Update the estimate with the end of a job."""
        start = self.start_times.pop(event.name, None)
        if event.how == "done" and start is not None:
            self.durations[event.name] = time.monotonic() - start
            self.shares[event.name] = 1.0
            return
        self.shares.pop(event.name, None)
        # a held job will begin again
        if event.how != "held":
            self.dropped.add(event.name)

    @property
    def is_measured(self) -> bool:
        """True if the speed was measured at complete jobs."""
        return bool(self.durations) or self.earlier_speed is not None

    @property
    def speed(self) -> float | None:
        """The completed cost per worker second, or None if it is unknown."""
        done = sum(self.costs[name] * share for name, share in self.shares.items())
        now = time.monotonic()
        busy = sum(self.durations.values())
        busy += sum(now - start for start in self.start_times.values())
        prior = 0.0 if self.durations else self.prior_seconds
        earlier = 1.0 if self.earlier_speed is None else self.earlier_speed
        if done + prior == 0:
            return None
        return (done + prior * earlier) / max(busy + prior, 1e-9)

    @property
    def seconds_left(self) -> float | None:
        """The remaining seconds, or None if they cannot be estimated yet."""
        speed = self.speed
        if speed is None:
            return None
        costs_left = [
            cost * (1 - self.shares.get(name, 0.0))
            for name, cost in self.costs.items()
            if name not in self.dropped
        ]
        return max(sum(costs_left) / self.workers, *costs_left, 0.0) / speed


@dataclass
class JobProgress:
    """The progress display of jobs on an engine: one bar,
    with a part for every running job.

    >>> import sys
    >>> from ntkexp.report.progress import ProgressLines
    >>> lines = ProgressLines(sys.stdout)
    >>> jobs = JobProgress(lines, RemainingTime({"a": 100.0, "b": 100.0}, workers=2), 30, 28)
    >>> jobs.start("width")
    width: 30 runs, 28 of them done; about 1.7 min with 2 workers, without other work on the machine
    >>> jobs.update(Ended("a", "failed"))
    width: run 29 of 30  a failed; about 1.7 min to go
    """

    progress: AbstractProgress
    clock: RemainingTime
    runs: int
    done: int

    def start(self, name: str) -> None:
        time_left = self.time_left()
        note = f"{time_left} with {counted(self.clock.workers, 'worker')}".strip()
        if time_left and not self.clock.is_measured:
            note += f", {IDLE}"
        self.progress.start(name, self.runs, self.done, "run", note)

    def update(self, event: Event) -> None:
        """Display an event and the remaining time."""
        self.clock.update(event)
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
                    note = f"{event.name} {ending}"
                    time_left = self.time_left(" to go")
                    if time_left:
                        note += f"; {time_left}"
                    self.progress.step(self.done, note)

    def time_left(self, suffix: str = "") -> str:
        """Return the remaining time in words, or "" if it is unknown."""
        seconds = self.clock.seconds_left
        return "" if seconds is None else f"about {duration(seconds)}{suffix}"


IDLE = "without other work on the machine"
"""The condition for estimates that are not measured on this machine."""

ENDINGS = {"found": "is done", "broken": "is stopped", "failed": "failed"}


# --- A run as a job for a worker.


REPORT_SECONDS = 0.2  # minimal interval between reports of a run's progress


@dataclass(frozen=True)
class RunJob(AbstractJob):
    """A run as a job. The name of its task is the name of the run's folder."""

    loads = ("ntkexp.report.plots.run_plots", "torch.fx.experimental.symbolic_shapes")
    """Modules that workers import in advance: the module of pictures, and a module that
    torch imports at the first derivative. The imports take half the time of a small
    run."""
    advice = "error.txt in its folder holds the traceback"

    fields: dict[str, Any]
    overrides: tuple[str, ...]
    out: str
    trust: tuple[str, ...]
    # options of the `ntkexp train` command that repeats the run
    options: tuple[str, ...] = ()
    pictures: bool = True  # draw pictures, which may take longer than a small run
    log: str | None = None  # the service that receives metrics during the run

    def carry_out(self, name: str, threads: int, report_event: ReportEvent) -> Ending:
        relay = Relay(name, report_event)
        request = RunRequest(
            experiment=self.experiment(name),
            folder=RunFolder(Path(self.out) / "runs" / name),
            overrides=self.overrides,
            repeat=command("train", self.overrides, self.options),
            progress=relay,
            pictures=self.pictures,
            most_threads=threads,
            log=self.log,
        )
        execute(request)
        return "done" if relay.has_started else "found"

    def experiment(self, name: str) -> Experiment:
        """Build the experiment on the worker.

        Raise if the name of its run folder is not `name`. Then the worker has different
        data or a different version of the package."""
        experiment = build(self.fields, admit(self.trust))
        if folder_name(experiment) != name:
            raise Mistake(
                f"{name} would be named {folder_name(experiment)} on this worker, which has other "
                "data or another version"
            )
        if not experiment.memory_gb and experiment.device != "cpu":
            # several workers may share a GPU, so do not use the default limit of the
            # device
            experiment = experiment.model_copy(update={"memory_gb": DEFAULT_MEMORY_GB})
        return experiment


class Relay(AbstractProgress):
    """A display that sends the progress of a run as events to the command."""

    def __init__(self, name: str, report_event: ReportEvent) -> None:
        self.name = name
        self.report_event = report_event
        self.steps = 0
        self.reported = 0.0
        self.has_started = False

    def start(
        self, name: str, steps: int, done: int, unit: Unit = "step", note: str = ""
    ) -> None:
        self.has_started = True
        self.steps = steps
        self.report_event(Stepped(self.name, done, steps))

    def step(self, done: int, note: str = "") -> None:
        if time.monotonic() - self.reported >= REPORT_SECONDS:
            self.reported = time.monotonic()
            self.report_event(Stepped(self.name, done, self.steps))

    def say(self, text: str) -> None:
        pass

    def warn(self, text: str) -> None:
        self.report_event(Warned(self.name, text))


# --- The runs of a sweep on an engine.


RUN_POLL_SECONDS = 0.5  # interval between checks of the runs of another process
UNFINISHED = {"stopped", "killed", "broken", "failed"}


@dataclass
class Conductor:
    """The execution of a sweep on an engine."""

    plan: Plan
    engine: AbstractEngine
    progress: AbstractProgress
    trust: tuple[str, ...] = ()
    fail_fast: bool = False
    pictures: bool = True
    log: str | None = None
    # the runs that ended under this command
    ended: dict[str, Ended] = field(default_factory=dict)

    def conduct(self, runs: list[PlannedRun]) -> None:
        """Carry out these runs, longest first."""
        estimate = Estimator()
        seconds = {run.name: estimate(run.experiment).seconds for run in runs}
        waiting = by_decreasing_duration(runs, list(seconds.values()))
        earlier = finished_speed(self.plan, estimate)
        clock = RemainingTime(seconds, self.engine.workers, earlier_speed=earlier)
        total = len(self.plan.distinct)
        jobs = JobProgress(self.progress, clock, total, total - len(runs))
        jobs.start(self.plan.sweep.name)
        try:
            while waiting and not self.must_stop:
                with closing(
                    run_jobs(self.engine, self.tasks(waiting, jobs))
                ) as events:
                    for event in events:
                        self.handle(event, jobs)
                        if self.must_stop:
                            break
                # another process works on the remaining runs
                waiting = [run for run in waiting if run.name not in self.ended]
                if waiting and not self.must_stop:
                    self.wait_for(waiting)
        finally:
            self.progress.stop()

    def wait_for(self, runs: list[PlannedRun]) -> None:
        """Wait while other processes work on all of these runs."""
        self.progress.say(
            f"another process runs {counted(len(runs), 'run')}; waiting for it"
        )
        while all(self.plan.folder(run).state == "running" for run in runs):
            time.sleep(RUN_POLL_SECONDS)

    @property
    def must_stop(self) -> bool:
        """True if the sweep must stop early: the machine failed,
        or a run failed and `fail_fast` is set."""
        endings = {ended.how for ended in self.ended.values()}
        return "broken" in endings or (self.fail_fast and bool(endings & UNFINISHED))

    def tasks(self, runs: list[PlannedRun], jobs: JobProgress) -> Iterator[Task]:
        """Yield a task for each run. The engine takes the next one if a worker is free.

        Skip runs that another process has finished or begun in the meantime.
        """
        for run in runs:
            state = self.plan.folder(run).state
            if state == "done":
                self.handle(Ended(run.name, "found"), jobs)
            elif state != "running":
                job = RunJob(
                    fields=run.experiment.fields(),
                    overrides=run.overrides,
                    out=str(self.plan.out),
                    trust=self.trust,
                    options=self.plan.sweep.options,
                    pictures=self.pictures,
                    log=self.log,
                )
                yield Task(run.name, job, str(self.plan.record.parent))

    def handle(self, event: Event, jobs: JobProgress) -> None:
        """Write an event to the event log, and display it."""
        match event:
            case Began():
                self.plan.event_log.write(event.name, "began")
            case Ended():
                self.plan.event_log.write(event.name, event.how, event.reason)
                for text in event.warnings:
                    self.progress.warn(f"{event.name}: {text}")
                if event.how != "held":
                    self.ended[event.name] = event
        jobs.update(event)
