"""sweeps/<name>.json: a sweep as it was resolved, and where it stands. What analyses it starts from here.

    {"name": …, "command": …, "axes": {KEY: [VALUE, …]}, "seeds": [SEED, …], "base": [KEY=VALUE, …],
     "fits": [{"quantity": …, "axis": KEY, "exponent": NUMBER or null, "margin": NUMBER, "bound": …}, …],
     "runs": [{"folder": NAME under runs/, "axes": {KEY: VALUE}, "seed": SEED, "state": …, "reason": …}, …],
     "seal": of all this}

A state is `done`, `failed` (it would fail again), `running` (another process is at it), or
`unfinished`: the same command goes on with it. Nothing here depends on how often the sweep was interrupted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from ntkexp.engine.base import Ended
from ntkexp.records.json_file import Json
from ntkexp.sweep.plan import Plan, Planned

State: TypeAlias = Literal["done", "failed", "running", "unfinished"]


@dataclass(frozen=True)
class Standing:
    """Where a run stands, and why it is not further."""

    state: State
    reason: str = ""


def standings(plan: Plan, failures: Mapping[str, str], ended: Mapping[str, Ended]) -> dict[str, Standing]:
    """Where every run stands."""
    return {run.name: standing(plan, run, failures, ended.get(run.name)) for run in plan.distinct}


def standing(plan: Plan, run: Planned, failures: Mapping[str, str], ended: Ended | None) -> Standing:
    """What the folder of a run says, then the journal, and last how it ended under this command."""
    state = plan.folder(run).state
    if state in {"done", "running"}:
        return Standing("done" if state == "done" else "running")
    if run.name in failures:
        return Standing("failed", failures[run.name])
    return Standing("unfinished", ended.reason if ended else "")


def fields(plan: Plan, standings: Mapping[str, Standing]) -> dict[str, Json]:
    """The sweep as plain data."""
    runs: list[Json] = [
        {
            "folder": run.name,
            "axes": dict(run.point.values),
            "seed": run.point.seed,
            "state": standings[run.name].state,
            "reason": standings[run.name].reason,
        }
        for run in plan.runs
    ]
    return {"name": plan.sweep.name, "command": plan.sweep.command, **plan.sweep.fields, "runs": runs}
