"""A sweep with every run composed: nothing is begun before all of it is known to be valid; what it will cost, and
where its runs stand.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
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
from ntkexp.records.atomic import SEAL, make_folder, seal
from ntkexp.records.folder import RunFolder
from ntkexp.records.sweep import Sweep, SweepRun
from ntkexp.run.setting import run_seconds, survey
from ntkexp.sweep.definition import MOST, Definition, Point

# --- journal.jsonl: what happened to runs under any sweep, a line an event, appended as it happens.
#
#     {"at": "2026-01-31T12:00:00+00:00", "sweep": "width", "run": "mlp-w32-s0-…", "event": "done", "reason": "",
#      "seal": of all this}
#
# A run whose last event is `failed` is not begun again unasked. A line is written in one piece, so that several
# sweeps may write at once; one that was cut off by a kill, or is not as it was written, is passed over: its run
# is tried again.


NAME = "journal.jsonl"


@dataclass(frozen=True)
class EventLog:
    """The log beside the records of all sweeps of a folder."""

    path: Path
    sweep: str

    def write(self, run: str, event: str, reason: str = "") -> None:
        at = datetime.now(UTC).isoformat(timespec="milliseconds")
        fields = {"at": at, "sweep": self.sweep, "run": run, "event": event, "reason": reason}
        line = json.dumps(fields | {SEAL: seal_of(fields)})
        make_folder(self.path.parent)
        descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            size = os.fstat(descriptor).st_size
            cut_off = (
                size and os.pread(descriptor, 1, size - 1) != b"\n"
            )  # by a full disk, or a kill
            os.write(descriptor, f"{chr(10) if cut_off else ''}{line}\n".encode())
        finally:
            os.close(descriptor)

    def events(self) -> Iterator[dict[str, str]]:
        text = (
            self.path.read_text(encoding="utf-8", errors="replace") if self.path.is_file() else ""
        )
        for line in filter(None, text.split("\n")):
            try:
                event = dict(json.loads(line))
            except (ValueError, TypeError, RecursionError):
                continue
            if event.pop(SEAL, None) == seal_of(event):
                yield event

    def failures(self) -> dict[str, str]:
        """The runs that failed when they were last heard of, with the reasons."""
        last = {str(event["run"]): event for event in self.events()}
        return {
            run: str(event["reason"]) for run, event in last.items() if event["event"] == "failed"
        }


def seal_of(fields: dict[str, str]) -> str:
    return seal(json.dumps(fields).encode()).hex()


# --- A sweep with every run composed: nothing is begun before all of it is known to be valid.


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
        return tuple({run.name: run for run in self.runs}.values())

    @property
    def record(self) -> Path:
        return self.out / "sweeps" / f"{self.sweep.name}.json"

    @property
    def event_log(self) -> EventLog:
        return EventLog(self.record.parent / NAME, self.sweep.name)

    def folder(self, run: PlannedRun) -> RunFolder:
        return RunFolder(self.out / "runs" / run.name)


def plan(sweep: Definition, composer: Composer, out: Path) -> Plan:
    count = prod(map(len, sweep.axes.values())) * len(sweep.seeds)
    if count > MOST:
        raise Mistake(
            f"{sweep.name}: {' × '.join([*sweep.axes, 'seed'])} are {count} runs; {MOST} are the most"
        )
    runs = []
    for point in sweep.points:
        overrides = sweep.overrides(point)
        experiment = composer.resolve(overrides).experiment()
        runs.append(PlannedRun(point, overrides, experiment, folder_name(experiment)))
    return Plan(sweep, out, tuple(runs))


def longest_first(runs: Sequence[PlannedRun], seconds: Sequence[float]) -> list[PlannedRun]:
    """Order runs so that no worker is left alone with a long one at the end."""
    return [runs[k] for k in sorted(range(len(runs)), key=lambda k: -seconds[k])]


# --- Where the runs of a sweep stand, and the record that says so (`ntkexp.records.sweep`).


State: TypeAlias = Literal["done", "failed", "running", "unfinished"]


@dataclass(frozen=True)
class RunStatus:
    """A run of a sweep stands here, for this reason."""

    state: State
    reason: str = ""


def statuses(
    plan: Plan, failures: Mapping[str, str], ended: Mapping[str, Ended]
) -> dict[str, RunStatus]:
    """Find where every run stands: ask its folder, then the log, and last how it ended under this command."""
    found = {}
    for run in plan.distinct:
        match plan.folder(run).state:
            case "done" | "running" as state:
                found[run.name] = RunStatus(state)
            case _ if run.name in failures:
                found[run.name] = RunStatus("failed", failures[run.name])
            case _:
                found[run.name] = RunStatus(
                    "unfinished", ended[run.name].reason if run.name in ended else ""
                )
    return found


def runs_to_do(
    plan: Plan, before: Mapping[str, RunStatus], *, retry_failed: bool
) -> list[PlannedRun]:
    """The runs that are not finished; those that failed if they are to be tried again."""
    states = {"unfinished", "running"} | ({"failed"} if retry_failed else set())
    return [run for run in plan.distinct if before[run.name].state in states]


def record(plan: Plan, statuses: Mapping[str, RunStatus]) -> Sweep:
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


# --- What a run will cost, from shapes alone: seconds and bytes of `ntkexp.path.budget`.


@dataclass(frozen=True)
class RunCost:
    """What a run takes: core seconds and bytes; where they cannot be known, why."""

    seconds: float
    bytes: float
    mistake: str = ""


@dataclass
class Estimator:
    """An estimator remembers what it has looked at: seeds, scales and step sizes cost nothing."""

    known: dict[str, RunCost] = field(default_factory=dict)

    def __call__(self, experiment: Experiment) -> RunCost:
        """The cost of a run, from one look at its data and its network on the processor."""
        parts = (
            experiment.data,
            experiment.model,
            experiment.loss,
            experiment.path,
            experiment.integration.passes,
        )
        shape = (
            experiment.init.antisymmetric,
            experiment.steps,
            experiment.dtype,
            experiment.memory_gb,
        )
        key = repr((*parts, *shape))
        if key not in self.known:
            try:
                here = experiment.model_copy(update={"device": "cpu"})
                budget = survey(here).budget
                tapes = 2 * budget.points * budget.tape_bytes if budget.keep else 0.0
                size = budget.fixed + budget.block * budget.per_point + tapes
                self.known[key] = RunCost(run_seconds(here, budget), size)
            except Mistake as mistake:
                self.known[key] = RunCost(0.0, 0.0, str(mistake))
        return self.known[key]
