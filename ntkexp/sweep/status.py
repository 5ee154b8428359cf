"""Where the runs of a sweep stand, and the record that says so (`ntkexp.records.sweep`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from ntkexp.engine.base import Ended
from ntkexp.records.sweep import Sweep, SweepRun
from ntkexp.sweep.plan import Plan, Planned

State: TypeAlias = Literal["done", "failed", "running", "unfinished"]


@dataclass(frozen=True)
class Standing:
    """Where a run stands, and why it is not further."""

    state: State
    reason: str = ""


def standings(plan: Plan, failures: Mapping[str, str], ended: Mapping[str, Ended]) -> dict[str, Standing]:
    """Find where every run stands."""
    return {run.name: standing(plan, run, failures, ended.get(run.name)) for run in plan.distinct}


def standing(plan: Plan, run: Planned, failures: Mapping[str, str], ended: Ended | None) -> Standing:
    """Ask the folder of a run, then the log, and last how it ended under this command."""
    state = plan.folder(run).state
    if state in {"done", "running"}:
        return Standing("done" if state == "done" else "running")
    if run.name in failures:
        return Standing("failed", failures[run.name])
    return Standing("unfinished", ended.reason if ended else "")


def record(plan: Plan, standings: Mapping[str, Standing]) -> Sweep:
    """Describe the sweep as it is written down."""
    runs = (
        SweepRun(
            folder=plan.folder(run).path,
            axes=run.point.values,
            seed=run.point.seed,
            state=standings[run.name].state,
            reason=standings[run.name].reason,
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
