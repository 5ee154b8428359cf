"""Where the runs of a sweep stand, and the record that says so (`ntkexp.records.sweep`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from ntkexp.engine.base import Ended
from ntkexp.records.sweep import Sweep, SweepRun
from ntkexp.sweep.plan import Plan, PlannedRun

State: TypeAlias = Literal["done", "failed", "running", "unfinished"]


@dataclass(frozen=True)
class RunStatus:
    """A run of a sweep stands here, for this reason."""

    state: State
    reason: str = ""


def statuses(plan: Plan, failures: Mapping[str, str], ended: Mapping[str, Ended]) -> dict[str, RunStatus]:
    """Find where every run stands."""
    return {run.name: status_of(plan, run, failures, ended.get(run.name)) for run in plan.distinct}


def status_of(plan: Plan, run: PlannedRun, failures: Mapping[str, str], ended: Ended | None) -> RunStatus:
    """Ask the folder of a run, then the log, and last how it ended under this command."""
    state = plan.folder(run).state
    if state in {"done", "running"}:
        return RunStatus("done" if state == "done" else "running")
    if run.name in failures:
        return RunStatus("failed", failures[run.name])
    return RunStatus("unfinished", ended.reason if ended else "")


def record(plan: Plan, statuses: Mapping[str, RunStatus]) -> Sweep:
    """Describe the sweep as it is written down."""
    runs = (
        SweepRun(
            folder=plan.folder(run).path,
            axes=run.point.values,
            seed=run.point.seed,
            state=statuses[run.name].state,
            reason=statuses[run.name].reason,
        )
        for run in plan.runs
    )
    sweep = plan.sweep
    return Sweep(
        path=plan.record,
        name=sweep.name,
        command=sweep.command,
        axes=sweep.axes,
        seeds=sweep.seeds,
        base=sweep.base,
        fits=sweep.fits,
        runs=tuple(runs),
    )
