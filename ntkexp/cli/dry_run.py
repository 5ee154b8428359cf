"""`ntkexp sweep --dry-run`: what would run, for how long, and how much memory it takes."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ntkexp.engine.base import AbstractEngine
    from ntkexp.sweep.plan import Plan, PlannedRun
    from ntkexp.sweep.status import RunStatus


def show_plan(plan: Plan, before: Mapping[str, RunStatus], begun: Sequence[PlannedRun], engine: AbstractEngine) -> int:
    """Show what would run, for how long, and how much memory it takes."""
    from ntkexp.config.as_text import spelled
    from ntkexp.sweep.cost import Estimator
    from ntkexp.text import aligned, counted, duration

    estimate = Estimator()
    costs = {run.name: estimate(run.experiment) for run in plan.distinct}
    rows = [
        [
            run.name,
            *(spelled(value) for value in run.point.values.values()),
            str(run.point.seed),
            before[run.name].state,
            duration(costs[run.name].seconds),
            f"{costs[run.name].bytes / 1e9:.1f} GB",
        ]
        for run in plan.runs
    ]
    header = ["run", *plan.sweep.axes, "seed", "state", "core time", "memory"]
    sys.stdout.write(aligned(header, rows, [False, *[True] * (len(header) - 1)]).rstrip() + "\n\n")
    seconds = [costs[run.name].seconds for run in begun]
    total = max([sum(seconds) / engine.workers, *seconds])
    most = max([costs[run.name].bytes for run in begun], default=0.0) * engine.workers
    sys.stdout.write(
        f"{plan.sweep.name}: {len(begun)} of {counted(len(plan.distinct), 'run')} to do, about {duration(total)} "
        f"and up to {most / 1e9:.1f} GB with {counted(engine.workers, 'worker')}{early_end(begun)}\n"
    )
    for mistake in dict.fromkeys(cost.mistake for cost in costs.values() if cost.mistake):
        sys.stderr.write(f"ntkexp: would fail: {mistake}\n")
    return 0


def early_end(begun: Sequence[PlannedRun]) -> str:
    """Say that runs may end sooner: shapes do not tell when a loss will be reached."""
    sooner = any(run.experiment.stop_at_loss is not None for run in begun)
    return ", or less: stop_at_loss may end runs sooner than all their steps" if sooner else ""
