"""The runs of a sweep as jobs, brought to their end: what is finished stays, what is dead goes on, and what another
process is at is waited for.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ntkexp.config.build import admit, build
from ntkexp.engine.base import AbstractEngine, AbstractJob, Began, Ended, Ending, Event, Stepped, Task, Tell, run_jobs
from ntkexp.experiment.experiment import USUAL
from ntkexp.experiment.identity import folder_name
from ntkexp.mistake import Mistake
from ntkexp.progress import AbstractProgress
from ntkexp.run.execute import execute
from ntkexp.sweep.listener import AbstractSweepListener, RemainingTime
from ntkexp.sweep.plan import Estimator, Plan, PlannedRun, longest_first
from ntkexp.text import counted

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

    def carry_out(self, name: str, threads: int, tell: Tell) -> Ending:
        relay = Relay(name, tell)
        try:
            experiment = build(self.fields, admit(self.trust))
            if folder_name(experiment) != name:  # it does not mean the same here as where it was composed
                other = f"{name} would be {folder_name(experiment)} here"
                raise Mistake(f"{other}: this worker has other data or another version")
            if not experiment.memory_gb and experiment.device != "cpu":
                experiment = experiment.model_copy(update={"memory_gb": USUAL})  # workers may share a GPU
            out = Path(self.out)
            execute(experiment, self.overrides, out, False, relay, self.options, self.pictures, threads)
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
    ended: dict[str, Ended] = field(default_factory=dict)  # what became of each run that was not finished before

    def conduct(self, runs: list[PlannedRun]) -> None:
        """Carry out these runs, the longest first."""
        estimate = Estimator()
        seconds = {run.name: estimate(run.experiment).seconds for run in runs}
        waiting = longest_first(runs, list(seconds.values()))
        clock = RemainingTime(seconds, self.engine.workers)
        total = len(self.plan.distinct)
        self.listener.begin(self.plan.sweep.name, total, total - len(runs), self.engine.workers, clock.ahead)
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
                    self.listener.say(f"another process is at {counted(len(waiting), 'run')}; waiting for it")
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
                job = RunJob(run.experiment.fields(), run.overrides, out, self.trust, options, self.pictures)
                yield Task(run.name, job, str(Path.cwd()), str(self.plan.record.parent))

    def hear(self, event: Event, clock: RemainingTime) -> None:
        """Keep what happened, write it into the log, and pass it on."""
        clock.see(event)
        match event:
            case Began():
                self.plan.event_log.write(event.name, "began")
            case Ended():
                self.plan.event_log.write(event.name, event.how, event.reason)
                if event.how != "held":
                    self.ended[event.name] = event
        self.listener.see(event, clock.ahead)
