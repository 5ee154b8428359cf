"""What a worker does with a task, in a process of its own."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from ntkexp.config.build import build
from ntkexp.config.target import admit
from ntkexp.engine.base import Ended, Ending, Event, Stepped, Task
from ntkexp.engine.fault import FAULTS, in_words
from ntkexp.experiment.experiment import Experiment
from ntkexp.experiment.identity import folder_name
from ntkexp.mistake import Mistake, first_line
from ntkexp.progress import AbstractProgress
from ntkexp.records.folder import Held
from ntkexp.run.execute import execute

PAUSE = 0.2  # seconds between two words on how far a run is


class Relay(AbstractProgress):
    """A relay passes on how far a run is, and remembers whether there was anything to do."""

    def __init__(self, name: str, tell: Callable[[Event], None]) -> None:
        self.name, self.tell, self.steps, self.told = name, tell, 0, 0.0
        self.begun = False

    def start(self, name: str, steps: int, done: int) -> None:
        self.begun, self.steps = True, steps
        self.tell(Stepped(self.name, done, steps))

    def step(self, step: int, loss: float | None, drift: float | None) -> None:
        if time.monotonic() - self.told >= PAUSE:
            self.told = time.monotonic()
            self.tell(Stepped(self.name, step, self.steps))

    def found(self, path: Path) -> None:
        pass

    def say(self, text: str) -> None:
        pass

    def stop(self) -> None:
        pass


def work(task: Task, tell: Callable[[Event], None]) -> Ended:
    """Carry a task out; however that ends, it is said, and nothing is raised."""
    relay = Relay(task.name, tell)
    try:
        os.chdir(task.home)
        execute(experiment(task), task.overrides, Path(task.out), False, relay, task.options)
    except (Exception, KeyboardInterrupt) as error:
        return Ended(task.name, *ending(error))
    return Ended(task.name, "done" if relay.begun else "found")


def experiment(task: Task) -> Experiment:
    """Build the experiment of a task, if it means the same here as where it was composed."""
    made = build(task.fields, admit(task.trust))
    if folder_name(made) != task.name:
        raise Mistake(f"{task.name} would be {folder_name(made)} here: this worker has other data or another version")
    return made if made.threads or not task.threads else made.model_copy(update={"threads": task.threads})


def ending(error: BaseException) -> tuple[Ending, str]:
    """Say what an exception means for a run."""
    match error:
        case Held():
            return "held", ""
        case KeyboardInterrupt():
            return "stopped", ""
        case Mistake():
            return "failed", str(error)
        case OSError() if error.errno in FAULTS:
            return "broken", in_words(error)
        case _:
            return "failed", f"{type(error).__name__}: {first_line(error)}; error.txt in its folder says where"
