"""Bring the runs and trials of a claim to their end: what is finished stays, what was killed goes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ntkexp.claim.planned import PlannedClaim
from ntkexp.engine.base import AbstractEngine, Ended, Task
from ntkexp.mistake import Mistake
from ntkexp.sweep.conductor import Conductor
from ntkexp.sweep.cost import Estimator
from ntkexp.sweep.listener import AbstractSweepListener
from ntkexp.sweep.remaining_time import RemainingTime
from ntkexp.sweep.status import RunStatus, statuses


@dataclass(frozen=True)
class Workshop:
    """Who carries claims out, who hears of it, and what is trusted."""

    engine: AbstractEngine
    listener: AbstractSweepListener
    trust: tuple[str, ...] = ()
    retry_failed: bool = False


def carry_out(planned: PlannedClaim, workshop: Workshop) -> Mapping[str, RunStatus]:
    """Carry out what is missing of a claim, and find where each of its runs stands then."""
    ended = carry_out_runs(planned, workshop)
    carry_out_trials(planned, workshop)
    return statuses(planned.whole, planned.whole.event_log.failures(), ended)


def carry_out_runs(planned: PlannedClaim, workshop: Workshop) -> Mapping[str, Ended]:
    """Carry out the runs; pictures of each are left to whoever looks at it by itself."""
    whole = planned.whole
    before = statuses(whole, whole.event_log.failures(), {})
    wanted = {"unfinished", "running"} | ({"failed"} if workshop.retry_failed else set())
    begun = [run for run in whole.distinct if before[run.name].state in wanted]
    if not begun:
        return {}
    conductor = Conductor(whole, workshop.engine, workshop.listener, workshop.trust, pictures=False)
    estimate = Estimator()
    conductor.conduct(begun, {run.name: estimate(run.experiment) for run in begun})
    return conductor.ended


def carry_out_trials(planned: PlannedClaim, workshop: Workshop) -> None:
    """Carry out the trials; one that fails is a mistake with its reason."""
    left = [job for job in planned.trials if job.rows is None]
    home, logs = str(Path.cwd()), str(planned.out / "sweeps")
    if not left:
        return
    done, workers = len(planned.trials) - len(left), workshop.engine.workers
    clock = RemainingTime({job.name: 1.0 for job in left}, workers, believed=0.0)
    workshop.listener.begin(planned.claim.name, len(planned.trials), done, workers, clock.ahead)
    try:
        for event in workshop.engine.perform(Task(job.name, job, home, logs) for job in left):
            clock.see(event)
            workshop.listener.see(event, clock.ahead)
            if isinstance(event, Ended) and event.how not in {"done", "found"}:
                raise Mistake(f"{planned.claim.name}: {event.name} {event.how}: {event.reason or 'no reason given'}")
    finally:
        workshop.listener.end()
