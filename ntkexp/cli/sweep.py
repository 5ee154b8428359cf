"""`ntkexp sweep`: run the unfinished experiments of a sweep,
or list them with `--dry-run`."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ntkexp.cli.options import (
    OUTPUTS,
    CommonOptions,
    Engine,
    Events,
    Log,
    RetryFailed,
    RunsFolder,
    SweepWords,
    Workers,
    ensure_writable,
    interruptible,
    options,
    sigterm_as_interrupt,
    trusted,
    write_events,
    write_json,
)
from ntkexp.engine.base import Ended
from ntkexp.records.folder import command
from ntkexp.text import counted

if TYPE_CHECKING:
    from ntkexp.engine.base import AbstractEngine
    from ntkexp.sweep.plan import Plan, PlannedRun, RunCost, RunStatus


def sweep(
    arguments: SweepWords = None,
    out: RunsFolder = OUTPUTS,
    workers: Workers = None,
    engine: Engine = "local",
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Show the runs and estimates of their time and memory; start none.",
        ),
    ] = False,
    fail_fast: Annotated[
        bool, typer.Option("--fail-fast", help="Stop all runs at the first failure.")
    ] = False,
    retry_failed: RetryFailed = False,
    tensorboard: Events = False,
    log: Log = None,
    *,
    common: CommonOptions,
) -> None:
    """Run many experiments.

    Name a sweep of configs/sweep, such as width, or give several values to a key.
    """
    from ntkexp.engine.base import choose

    chosen = choose(engine, workers)
    chosen.limit_threads()  # must precede the import of torch
    from ntkexp.sweep.plan import runs_to_do, statuses

    plan = compose_plan(arguments or [], out, common.trusted, common.config_dir)
    statuses_before = statuses(plan, plan.event_log.failures(), {})
    selected = runs_to_do(plan, statuses_before, retry_failed=retry_failed)
    if dry_run:
        show_plan(plan, statuses_before, selected, chosen)
        return
    ensure_writable(plan.out)
    write_record(plan, statuses_before, changed=False)
    statuses_after = statuses_before
    ended = dict[str, Ended]()
    if selected:  # avoid slow imports if there is nothing to run
        from ntkexp.report.progress import progress_listener
        from ntkexp.sweep.jobs import Conductor

        conductor = Conductor(
            plan,
            chosen,
            progress_listener(common.quiet),
            trusted(common.trusted),
            fail_fast,
            log=log,
        )
        ended = conductor.ended
        with (
            sigterm_as_interrupt(),
            interruptible(
                lambda: "; the same command continues from the last checkpoints"
            ),
        ):
            try:
                conductor.conduct(selected)
            finally:
                statuses_after = statuses(plan, plan.event_log.failures(), ended)
                write_record(plan, statuses_after, changed=True)
    for run in plan.distinct:
        write_events(plan.folder(run).path, tensorboard and plan.folder(run).done)
    print_sweep(plan, statuses_after, ended, quiet=common.quiet, as_json=common.as_json)
    all_done = all(status.state == "done" for status in statuses_after.values())
    raise typer.Exit(0 if all_done else 1)


def print_sweep(
    plan: Plan,
    statuses: Mapping[str, RunStatus],
    ended: Mapping[str, Ended],
    *,
    quiet: bool,
    as_json: bool,
) -> None:
    """Print the failures and the summary of a sweep."""
    divergences = {run.name: divergence(plan, run) for run in plan.distinct}
    list_failures(plan, statuses, divergences)
    if as_json:
        from ntkexp.sweep.plan import record

        write_json({**record(plan, statuses).fields, "record": str(plan.record)})
    elif not quiet:
        line = summary_line(plan, statuses, divergences, ended)
        sys.stdout.write(f"{line}\n{plan.record}\n")


def list_failures(
    plan: Plan, statuses: Mapping[str, RunStatus], divergences: Mapping[str, str]
) -> None:
    """Print each run that failed, was stopped or diverged, with the reason and the
    command that repeats it."""
    for run in plan.distinct:
        reason = statuses[run.name].reason or divergences[run.name]
        if reason:
            repeat = command("train", run.overrides, plan.sweep.options)
            sys.stderr.write(f"{run.name}: {reason}\n    {repeat}\n")


def divergence(plan: Plan, run: PlannedRun) -> str:
    """Return the outcome of a finished run that diverged, else an empty text."""
    folder = plan.folder(run)
    if not folder.done:
        return ""
    facts = folder.sealed_facts
    return str(facts.get("outcome", "")) if facts.get("diverged") else ""


def compose_plan(
    arguments: Sequence[str], out: Path, trust: Sequence[str], config_dir: Path | None
) -> Plan:
    """Compose and validate all runs of the sweep."""
    from ntkexp.config.choices import Choices, config_folders
    from ntkexp.config.compose import composer
    from ntkexp.sweep.definition import define
    from ntkexp.sweep.plan import plan

    definition = define(arguments, Choices(config_folders(config_dir)))
    repeated = replace(definition, options=tuple(options(out, trust, config_dir)))
    return plan(repeated, composer(config_dir, trust), out.expanduser().absolute())


def write_record(
    plan: Plan, statuses: Mapping[str, RunStatus], *, changed: bool
) -> None:
    """Write the sweep file, and its tables if at least one run is done."""
    from ntkexp.records.atomic import waited_for
    from ntkexp.records.sweep import write_sweep
    from ntkexp.sweep.plan import record

    # another process may write the same files
    with waited_for(plan.record.parent / ".lock"):
        write_sweep(record(plan, statuses))
        tables = plan.record.with_suffix(".runs.csv")
        if any(status.state == "done" for status in statuses.values()) and (
            changed or not tables.is_file()
        ):
            from ntkexp.report.analysis.tables import write_tables

            write_tables(plan.record)


def summary_line(
    plan: Plan,
    statuses: Mapping[str, RunStatus],
    divergences: Mapping[str, str],
    ended: Mapping[str, Ended],
) -> str:
    """Summarise the numbers of runs in each state in one line."""
    done = [run for run in plan.distinct if statuses[run.name].state == "done"]
    states = Counter(status.state for status in statuses.values())
    counts = {
        "done": len(done),
        "diverged": sum(bool(divergences[run.name]) for run in done),
        "done just now": sum(end.how == "done" for end in ended.values()),
        "failed": states["failed"],
        "running elsewhere": states["running"],
        "unfinished": states["unfinished"],
    }
    parts = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    advice = "; `--retry-failed` runs them again" if counts["failed"] else ""
    advice += "; the same command continues" if counts["unfinished"] else ""
    return f"{plan.sweep.name}: {counted(len(statuses), 'run')}, {parts}{advice}"


# --- `ntkexp sweep --dry-run`: the runs with estimated time and memory.


def show_plan(
    plan: Plan,
    statuses: Mapping[str, RunStatus],
    selected: Sequence[PlannedRun],
    engine: AbstractEngine,
) -> None:
    """Print the runs of a sweep, with estimates of their time and memory."""
    from ntkexp.sweep.jobs import IDLE
    from ntkexp.sweep.plan import Estimator, finished_speed
    from ntkexp.text import duration

    estimate = Estimator()
    costs = {run.name: estimate(run.experiment) for run in plan.distinct}
    sys.stdout.write(f"{format_plan(plan, statuses, costs)}\n\n")
    # the wall times of finished runs measure the speed of this machine and its other work
    speed = finished_speed(plan, estimate)
    seconds = [costs[run.name].seconds / (speed or 1.0) for run in selected]
    basis = IDLE if speed is None else "as fast as the finished runs"
    total = max([sum(seconds) / engine.workers, *seconds])
    largest = max([costs[run.name].bytes for run in selected], default=0.0)
    memory = f"{largest * engine.workers / 1e9:.1f} GB"
    remark = ""
    if any(run.experiment.stop_at_loss is not None for run in selected):
        remark = ", or less: stop_at_loss may end runs sooner than all their steps"
    sys.stdout.write(
        f"{plan.sweep.name}: {len(selected)} of {counted(len(plan.distinct), 'run')} to do, about {duration(total)} "
        f"and up to {memory} with {counted(engine.workers, 'worker')}, {basis}{remark}\n"
    )
    mistakes = [cost.mistake for cost in costs.values() if cost.mistake]
    for mistake in dict.fromkeys(mistakes):
        sys.stderr.write(f"ntkexp: would fail: {mistake}\n")


def format_plan(
    plan: Plan, statuses: Mapping[str, RunStatus], costs: Mapping[str, RunCost]
) -> str:
    """Format a table with a row for each run: its settings, state and cost."""
    from ntkexp.config.plain_yaml import spell_value
    from ntkexp.text import aligned, duration

    rows = []
    for run in plan.runs:
        cost = costs[run.name]
        values = [spell_value(value) for value in run.point.values.values()]
        settings = [run.name, *values, str(run.point.seed), statuses[run.name].state]
        rows.append([*settings, duration(cost.seconds), f"{cost.bytes / 1e9:.1f} GB"])
    header = ["run", *plan.sweep.axes, "seed", "state", "core time", "memory"]
    return aligned(header, rows, [False, *[True] * (len(header) - 1)]).rstrip()
