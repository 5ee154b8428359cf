"""A run as a job for a worker."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ntkexp.config.build import admit, build
from ntkexp.engine.base import AbstractJob, Ending, Stepped, Tell
from ntkexp.experiment.experiment import USUAL, Experiment
from ntkexp.experiment.identity import folder_name
from ntkexp.mistake import Mistake
from ntkexp.progress import AbstractProgress
from ntkexp.run.execute import execute

PAUSE = 0.2  # seconds between two words on how far a run is


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
        with pointing_at_folder():
            experiment, out = self.experiment(name), Path(self.out)
            execute(experiment, self.overrides, out, False, relay, self.options, self.pictures, threads)
        return "done" if relay.begun else "found"

    def experiment(self, name: str) -> Experiment:
        """Build the experiment, if it means the same here as where it was composed."""
        made = build(self.fields, admit(self.trust))
        if folder_name(made) != name:
            raise Mistake(f"{name} would be {folder_name(made)} here: this worker has other data or another version")
        if made.memory_gb or made.device == "cpu":
            return made
        return made.model_copy(update={"memory_gb": USUAL})  # workers may share a GPU


@contextmanager
def pointing_at_folder() -> Iterator[None]:
    """Let whatever is raised say where more stands on it."""
    try:
        yield
    except Exception as error:
        error.add_note("error.txt in its folder says where")
        raise


class Relay(AbstractProgress):
    """A relay passes on how far a run is, and remembers whether there was anything to do."""

    def __init__(self, name: str, tell: Tell) -> None:
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
