"""`ntkexp sweep`: many experiments, those that are not finished yet; with `--dry-run` what would run."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ntkexp.cli.surroundings import interruptible, options, polite_kill, trusted
from ntkexp.cli.train import ensure_writable, keep_events
from ntkexp.records.folder import command
from ntkexp.text import counted

if TYPE_CHECKING:
    from ntkexp.engine.base import AbstractEngine, Ended
    from ntkexp.sweep.plan import Plan, PlannedRun, RunStatus


# --- `ntkexp sweep`: many experiments, those that are not finished yet.


@dataclass(frozen=True, kw_only=True)
class SweepRequest:
    """What the command line asks for, by the names of its options."""

    words: Sequence[str]
    out: Path
    engine: str
    workers: int | None
    dry_run: bool
    fail_fast: bool
    retry_failed: bool
    tensorboard: bool
    quiet: bool
    as_json: bool
    trust: Sequence[str]
    config_dir: Path | None

    @property
    def repeated(self) -> list[str]:
        """The options that a run of this sweep needs by itself."""
        return options(self.out, self.trust, self.config_dir)


def sweep(asked: SweepRequest) -> int:
    """Carry a sweep out, as far as it is not; the exit status is given back."""
    from ntkexp.engine.base import choose

    engine = choose(asked.engine, asked.workers)
    engine.limit_threads()  # before torch is imported, which composing does
    from ntkexp.sweep.plan import statuses

    plan = compose_plan(asked)
    before = statuses(plan, plan.event_log.failures(), {})
    begun = [run for run in plan.distinct if before[run.name].state in states_to_begin(asked)]
    if asked.dry_run:
        return show_plan(plan, before, begun, engine)
    ensure_writable(plan.out)
    ended = carry_out(asked, plan, before, begun, engine)
    for run in plan.distinct:
        keep_events(plan.folder(run).path, asked.tensorboard and plan.folder(run).done)
    found = statuses(plan, plan.event_log.failures(), ended) if begun else before
    return tell(asked, plan, found, ended)


def compose_plan(asked: SweepRequest) -> Plan:
    """Compose the runs of the sweep, all of them valid."""
    from ntkexp.config.choices import Choices, folders
    from ntkexp.config.compose import composer
    from ntkexp.sweep.definition import define
    from ntkexp.sweep.plan import plan

    definition = replace(define(asked.words, Choices(folders(asked.config_dir))), options=tuple(asked.repeated))
    return plan(definition, composer(asked.config_dir, asked.trust), asked.out.expanduser().absolute())


def states_to_begin(asked: SweepRequest) -> set[str]:
    """Name the states of runs that this command begins."""
    return {"unfinished", "running"} | ({"failed"} if asked.retry_failed else set())


def carry_out(
    asked: SweepRequest, plan: Plan, before: Mapping[str, RunStatus], begun: list[PlannedRun], engine: AbstractEngine
) -> dict[str, Ended]:
    """Carry the runs out, and write down what became of them."""
    write_down(plan, before, changed=False)
    if not begun:
        return {}  # and nothing is loaded that carries runs out
    from ntkexp.cli.progress import listener
    from ntkexp.sweep.jobs import Conductor
    from ntkexp.sweep.plan import Estimator, statuses

    conductor = Conductor(plan, engine, listener(asked.quiet), trusted(asked.trust), asked.fail_fast)
    estimate = Estimator()
    costs = {run.name: estimate(run.experiment) for run in begun}
    with polite_kill(), interruptible(lambda: "; the same command goes on from the last checkpoints"):
        try:
            conductor.conduct(begun, costs)
        finally:
            write_down(plan, statuses(plan, plan.event_log.failures(), conductor.ended), changed=True)
    return conductor.ended


def write_down(plan: Plan, statuses: Mapping[str, RunStatus], *, changed: bool) -> None:
    """Write the record of the sweep, and its tables as soon as there is a run to put into them."""
    from ntkexp.records.atomic import waited_for
    from ntkexp.records.sweep import write_sweep
    from ntkexp.sweep.plan import record

    with waited_for(plan.record.parent / ".lock"):  # another sweep may write the same
        write_sweep(record(plan, statuses))
        tables = plan.record.with_suffix(".runs.csv")
        if any(status.state == "done" for status in statuses.values()) and (changed or not tables.is_file()):
            from ntkexp.report.analysis.tables import write_tables

            write_tables(plan.record)


def tell(asked: SweepRequest, plan: Plan, found: Mapping[str, RunStatus], ended: Mapping[str, Ended]) -> int:
    """Say what came of the sweep; each failure with its reason and the command that repeats it."""
    for run in plan.distinct:
        if reason := found[run.name].reason:
            sys.stderr.write(f"{run.name}: {reason}\n    {command('train', run.overrides, asked.repeated)}\n")
    if asked.as_json:
        show_json(plan, found)
    elif not asked.quiet:
        sys.stdout.write(f"{sentence(plan, found, ended)}\n{plan.record}\n")
    return 1 if any(status.state != "done" for status in found.values()) else 0


def show_json(plan: Plan, statuses: Mapping[str, RunStatus]) -> None:
    """Show the record on stdout."""
    from ntkexp.records.atomic import to_text
    from ntkexp.sweep.plan import record

    sys.stdout.write(to_text({**record(plan, statuses).fields, "record": str(plan.record)}))


def sentence(plan: Plan, statuses: Mapping[str, RunStatus], ended: Mapping[str, Ended]) -> str:
    """Say how many runs there are, and what became of them."""
    counts = {
        "done": sum(status.state == "done" for status in statuses.values()),
        "done just now": sum(end.how == "done" for end in ended.values()),
        "failed": sum(status.state == "failed" for status in statuses.values()),
        "running elsewhere": sum(status.state == "running" for status in statuses.values()),
        "unfinished": sum(status.state == "unfinished" for status in statuses.values()),
    }
    told = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    advice = "; `--retry-failed` runs them again" if counts["failed"] else ""
    advice += "; the same command goes on" if counts["unfinished"] else ""
    return f"{plan.sweep.name}: {counted(len(statuses), 'run')}, {told}{advice}"


# --- `ntkexp sweep --dry-run`: what would run, for how long, and how much memory it takes.


def show_plan(plan: Plan, before: Mapping[str, RunStatus], begun: Sequence[PlannedRun], engine: AbstractEngine) -> int:
    """Show what would run, for how long, and how much memory it takes."""
    from ntkexp.config.choices import spelled
    from ntkexp.sweep.plan import Estimator
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
