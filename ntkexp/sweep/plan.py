"""A sweep with every run composed: nothing is begun before all of it is known to be valid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from ntkexp.config.compose import Composer
from ntkexp.experiment.experiment import Experiment
from ntkexp.experiment.identity import folder_name
from ntkexp.mistake import Mistake
from ntkexp.records.folder import RunFolder
from ntkexp.sweep.axis_values import MOST
from ntkexp.sweep.definition import Definition, Point
from ntkexp.sweep.event_log import NAME, EventLog


@dataclass(frozen=True)
class PlannedRun:
    """One run of a sweep: where it lies among the axes, and what it computes."""

    point: Point
    overrides: tuple[str, ...]
    experiment: Experiment
    name: str


@dataclass(frozen=True)
class Plan:
    """The runs of a sweep in the order of its points. Two points may ask for the same run."""

    sweep: Definition
    out: Path
    runs: tuple[PlannedRun, ...]

    @property
    def distinct(self) -> tuple[PlannedRun, ...]:
        """Each run once."""
        return tuple({run.name: run for run in self.runs}.values())

    @property
    def record(self) -> Path:
        """Where the sweep is written down."""
        return self.out / "sweeps" / f"{self.sweep.name}.json"

    @property
    def event_log(self) -> EventLog:
        """Where it is noted what happens."""
        return EventLog(self.record.parent / NAME, self.sweep.name)

    def folder(self, run: PlannedRun) -> RunFolder:
        """The place of a run."""
        return RunFolder(self.out / "runs" / run.name)


def plan(sweep: Definition, composer: Composer, out: Path) -> Plan:
    """Compose every run."""
    count = prod(map(len, sweep.axes.values())) * len(sweep.seeds)
    if count > MOST:
        raise Mistake(f"{sweep.name}: {' × '.join([*sweep.axes, 'seed'])} are {count} runs; {MOST} are the most")
    runs = []
    for point in sweep.points:
        overrides = sweep.overrides(point)
        experiment = composer.resolve(overrides).experiment()
        runs.append(PlannedRun(point, overrides, experiment, folder_name(experiment)))
    return Plan(sweep, out, tuple(runs))


def longest_first(runs: Sequence[PlannedRun], seconds: Sequence[float]) -> list[PlannedRun]:
    """Order runs so that no worker is left alone with a long one at the end."""
    order = sorted(range(len(runs)), key=lambda k: -seconds[k])
    return [runs[k] for k in order]
