"""Plan a sweep: compose and validate every run before the first begins.

The plan lists the state and the estimated cost of each run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from math import prod
from pathlib import Path
from typing import Literal, TypeAlias

from ntkexp.config.compose import Composer
from ntkexp.engine.base import Ended
from ntkexp.experiment.experiment import Experiment
from ntkexp.experiment.identity import folder_name
from ntkexp.mistake import Mistake
from ntkexp.path.budget import core_seconds
from ntkexp.records.atomic import SEAL, make_folder, seal
from ntkexp.records.folder import DONE, RunFolder
from ntkexp.records.results import total_seconds
from ntkexp.records.sweep import Sweep, SweepRun
from ntkexp.run.setting import survey
from ntkexp.sweep.definition import MAX_RUNS, Definition, Point

# --- journal.jsonl: the event log, with a line for each event of the runs
# of all sweeps.
#
#     {"at": "2026-01-31T12:00:00+00:00", "sweep": "width", "run": "mlp-w32-s0-…",
#      "event": "done", "reason": "", "seal": …}
#
# A run whose last event is `failed` is not started again without --retry-failed. Each
# line is a single write, so that several sweeps can append concurrently. The seal is a
# checksum. Incomplete lines and lines with a wrong checksum are ignored, and their runs
# are started again.


JOURNAL = "journal.jsonl"


@dataclass(frozen=True)
class EventLog:
    """The event log that all sweeps of a folder share."""

    path: Path
    sweep: str

    def write(self, run: str, event: str, reason: str = "") -> None:
        at = datetime.now(UTC).isoformat(timespec="milliseconds")
        fields = {
            "at": at,
            "sweep": self.sweep,
            "run": run,
            "event": event,
            "reason": reason,
        }
        line = json.dumps(fields | {SEAL: seal_of(fields)})
        make_folder(self.path.parent)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
        descriptor = os.open(self.path, flags, 0o644)
        try:
            # the leading newline ends a line that was cut off by a full disk or a
            # killed process
            os.write(descriptor, f"\n{line}".encode())
        finally:
            os.close(descriptor)

    def events(self) -> Iterator[dict[str, str]]:
        if not self.path.is_file():
            return
        text = self.path.read_text(encoding="utf-8", errors="replace")
        for line in filter(None, text.split("\n")):
            try:
                event = dict(json.loads(line))
            except (ValueError, TypeError, RecursionError):
                continue
            if event.pop(SEAL, None) == seal_of(event):
                yield event

    def failures(self) -> dict[str, str]:
        """Return the reason of failure for each run whose last event is `failed`."""
        last = {str(event["run"]): event for event in self.events()}
        return {
            run: str(event["reason"])
            for run, event in last.items()
            if event["event"] == "failed"
        }


def seal_of(fields: dict[str, str]) -> str:
    return seal(json.dumps(fields).encode()).hex()


# --- The plan: every run of a sweep, composed and validated.


@dataclass(frozen=True)
class PlannedRun:
    """One run of a sweep, with its axis values and seed."""

    point: Point
    overrides: tuple[str, ...]
    experiment: Experiment
    name: str


@dataclass(frozen=True)
class Plan:
    """The runs of a sweep in the order of its points.

    Two points may share a run, if their settings lead to the same results.
    """

    sweep: Definition
    out: Path
    runs: tuple[PlannedRun, ...]

    @property
    def distinct(self) -> tuple[PlannedRun, ...]:
        return tuple({run.name: run for run in self.runs}.values())

    @property
    def record(self) -> Path:
        return self.out / "sweeps" / f"{self.sweep.name}.json"

    @property
    def event_log(self) -> EventLog:
        return EventLog(self.record.parent / JOURNAL, self.sweep.name)

    def folder(self, run: PlannedRun) -> RunFolder:
        return RunFolder(self.out / "runs" / run.name)


def plan(sweep: Definition, composer: Composer, out: Path) -> Plan:
    """Compose all runs of a sweep. Raise if a run is invalid,
    or if there are too many runs."""
    count = prod(map(len, sweep.axes.values())) * len(sweep.seeds)
    if count > MAX_RUNS:
        axes = " × ".join([*sweep.axes, "seed"])
        raise Mistake(f"{sweep.name}: {axes} are {count} runs; {MAX_RUNS} are the most")
    runs = []
    for point in sweep.points:
        overrides = sweep.overrides(point)
        experiment = composer.resolve(overrides).experiment()
        runs.append(PlannedRun(point, overrides, experiment, folder_name(experiment)))
    return Plan(sweep, out, tuple(runs))


def by_decreasing_duration(
    runs: Sequence[PlannedRun], seconds: Sequence[float]
) -> list[PlannedRun]:
    """Sort runs by decreasing duration, so that no long run starts last."""
    return [runs[k] for k in sorted(range(len(runs)), key=lambda k: -seconds[k])]


# --- The states of the runs, and the record of a sweep (`ntkexp.records.sweep`).


State: TypeAlias = Literal["done", "failed", "running", "unfinished"]


@dataclass(frozen=True)
class RunStatus:
    state: State
    reason: str = ""


def statuses(
    plan: Plan, failures: Mapping[str, str], ended: Mapping[str, Ended]
) -> dict[str, RunStatus]:
    """Return the state of every run.

    A run is done or running if its folder says so. Otherwise it is failed if the event
    log lists it in `failures`, and unfinished if not. For unfinished runs, take the
    reason from the `ended` event of this command."""
    states = {}
    for run in plan.distinct:
        state = plan.folder(run).state
        if state in ("done", "running"):
            states[run.name] = RunStatus(state)
        elif run.name in failures:
            states[run.name] = RunStatus("failed", failures[run.name])
        else:
            reason = ended[run.name].reason if run.name in ended else ""
            states[run.name] = RunStatus("unfinished", reason)
    return states


def runs_to_do(
    plan: Plan, statuses: Mapping[str, RunStatus], *, retry_failed: bool
) -> list[PlannedRun]:
    """Return the runs that are not done. Omit failed runs unless `retry_failed`."""
    states = {"unfinished", "running"}
    if retry_failed:
        states.add("failed")
    return [run for run in plan.distinct if statuses[run.name].state in states]


def record(plan: Plan, statuses: Mapping[str, RunStatus]) -> Sweep:
    """Return the sweep with the folder and state of each run, as its record stores
    them."""
    sweep = plan.sweep
    return Sweep(
        path=plan.record,
        name=sweep.name,
        command=sweep.command,
        axes=sweep.axes,
        seeds=sweep.seeds,
        base=sweep.base,
        fits=sweep.fits,
        runs=tuple(
            SweepRun(
                folder=plan.folder(run).path,
                axes=run.point.values,
                seed=run.point.seed,
                state=statuses[run.name].state,
                reason=statuses[run.name].reason,
            )
            for run in plan.runs
        ),
    )


# --- The cost of a run, estimated from shapes without training (`ntkexp.path.budget`).


@dataclass(frozen=True)
class RunCost:
    """The core seconds and peak memory of a run, or the reason why they are unknown."""

    seconds: float
    bytes: float
    mistake: str = ""


@dataclass
class Estimator:
    """An estimator of the costs of runs. A survey (a forward pass) finds the shapes in
    a run. Runs that differ only in seed, scale or step size share a survey."""

    known: dict[str, RunCost] = field(default_factory=dict)

    def __call__(self, experiment: Experiment) -> RunCost:
        """Return the estimated cost of a run."""
        settings = (
            experiment.data,
            experiment.model,
            experiment.loss,
            experiment.path,
            experiment.integration.passes,
            experiment.init.antisymmetric,
            experiment.steps,
            experiment.dtype,
            experiment.memory_gb,
        )
        key = repr(settings)
        if key not in self.known:
            self.known[key] = cost_of(experiment)
        return self.known[key]


def cost_of(experiment: Experiment) -> RunCost:
    """Draw the data and network of a run on the CPU,
    and return the run's estimated cost."""
    try:
        on_cpu = experiment.model_copy(update={"device": "cpu"})
        memory = survey(on_cpu).memory
        seconds = core_seconds(memory, on_cpu.integration.passes)
    except Mistake as mistake:
        return RunCost(0.0, 0.0, str(mistake))
    return RunCost(seconds, memory.peak)


MAX_TIMED_RUNS = 20  # the latest finished runs determine the speed


def finished_speed(plan: Plan, estimate: Estimator) -> float | None:
    """Return the estimated cost per measured second of the latest finished runs.

    Return None if no finished run has timings. The speed depends on the machine, and on
    the machine's other work at that time."""
    done = [
        (plan.folder(run).path / DONE, run)
        for run in plan.distinct
        if (plan.folder(run).path / DONE).is_file()
    ]
    latest = sorted(done, key=lambda pair: pair[0].stat().st_mtime)[-MAX_TIMED_RUNS:]
    costs = 0.0
    seconds = 0.0
    for file, run in latest:
        with suppress(Mistake):  # a run without readable timings does not count
            wall = total_seconds(file.parent / "timings.csv").wall
            if wall > 0:
                seconds += wall
                costs += estimate(run.experiment).seconds
    return costs / seconds if costs > 0 and seconds > 0 else None
