"""Bring the runs of a sweep to their end: what is finished stays, what is dead goes on, what is held is waited for."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from ntkexp.engine.base import AbstractEngine, Began, Ended, Event, Stepped, Task
from ntkexp.sweep.listener import AbstractSweepListener, RemainingTime
from ntkexp.sweep.plan import Plan, PlannedRun, RunCost, longest_first
from ntkexp.sweep.run_job import RunJob
from ntkexp.text import counted

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
    ended: dict[str, Ended] = field(default_factory=dict)  # what became of each run that was not finished before

    def conduct(self, runs: list[PlannedRun], costs: dict[str, RunCost]) -> None:
        """Carry out these runs, the longest first."""
        waiting = longest_first(runs, [costs[run.name].seconds for run in runs])
        clock = RemainingTime({run.name: costs[run.name].seconds for run in runs}, self.engine.workers)
        total = len(self.plan.distinct)
        self.listener.begin(self.plan.sweep.name, total, total - len(runs), self.engine.workers, clock.ahead)
        try:
            while waiting and not self.over:
                self.perform(waiting, clock)
                waiting = [run for run in waiting if run.name not in self.ended]
                if waiting and not self.over:
                    self.wait(waiting)
        finally:
            self.listener.end()

    @property
    def over(self) -> bool:
        """Whether no further run should begin."""
        hows = {ended.how for ended in self.ended.values()}
        return "broken" in hows or (self.fail_fast and bool(hows & set(UNFINISHED)))

    def perform(self, runs: list[PlannedRun], clock: RemainingTime) -> None:
        """Perform every run that nobody else is at."""
        with closing(self.engine.perform(self.tasks(runs, clock))) as events:
            for event in events:
                self.hear(event, clock)
                if self.over:
                    return

    def tasks(self, runs: list[PlannedRun], clock: RemainingTime) -> Iterator[Task]:
        """Give tasks to workers, looked at once more when a worker is free for them."""
        for run in runs:
            state = self.plan.folder(run).state
            if state == "done":
                self.hear(Ended(run.name, "found"), clock)
            elif state != "running":
                out, options = str(self.plan.out), self.plan.sweep.options
                job = RunJob(run.experiment.fields(), run.overrides, out, self.trust, options, self.pictures)
                yield Task(run.name, job, str(Path.cwd()), str(self.plan.record.parent))

    def hear(self, event: Event, clock: RemainingTime) -> None:
        """Keep what happened, and pass it on."""
        clock.see(event)
        self.note(event)
        self.listener.see(event, clock.ahead)

    def note(self, event: Event) -> None:
        """Write into the log what happened."""
        match event:
            case Began():
                self.plan.event_log.write(event.name, "began")
            case Ended():
                self.plan.event_log.write(event.name, event.how, event.reason)
                if event.how != "held":
                    self.ended[event.name] = event
            case Stepped():
                pass

    def wait(self, runs: list[PlannedRun]) -> None:
        """Wait until another process lets go of one of these runs."""
        self.listener.say(f"another process is at {counted(len(runs), 'run')}; waiting for it")
        while all(self.plan.folder(run).state == "running" for run in runs):
            time.sleep(PAUSE)
