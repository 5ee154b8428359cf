"""`ntkexp runs`: list run folders, and delete those that are no longer wanted."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from ntkexp.cli.options import OUTPUTS, AsJson, OutputsFolder, with_advice
from ntkexp.mistake import Mistake

if TYPE_CHECKING:
    from ntkexp.report.inventory import ListedRun


def runs(
    filters: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="Show only the runs of which this holds, such as model.width=64 or state=dead.",
        ),
    ] = None,
    out: OutputsFolder = OUTPUTS,
    remove: Annotated[bool, typer.Option("--delete", help="Delete the runs that are listed.")] = False,
    sure: Annotated[bool, typer.Option("--yes", help="Do not ask before deleting.")] = False,
    as_json: AsJson = False,
) -> None:
    """List runs with their states, and delete those no longer wanted."""
    from ntkexp.report.inventory import filter_runs, list_runs, tabulate_runs
    from ntkexp.report.tables import format_text

    place = out.expanduser() / "runs"
    found = filter_runs(list_runs(place), filters or [])
    if as_json:
        from ntkexp.records.atomic import Json, to_text

        rows: list[Json] = [
            {"run": str(one.path), "state": one.state, "said": one.outcome, "config": one.facts} for one in found
        ]
        sys.stdout.write(to_text(rows))
    elif found:
        sys.stdout.write(f"{format_text(tabulate_runs(found))}\n")
    else:
        sys.stdout.write(f"no run in {place}{' passes' if filters else ''}\n")
    if remove and found:
        delete(found, sure)


def delete(runs: Sequence[ListedRun], sure: bool) -> None:
    """Remove these folders, once someone said yes."""
    from ntkexp.report.inventory import delete

    count = f"{len(runs)} run folder{'s' * (len(runs) != 1)}"
    if not sure and not sys.stdin.isatty():
        raise Mistake(f"--delete would remove {count}; --yes confirms it where nobody can be asked")
    if not sure:
        typer.confirm(f"Delete {count}?", abort=True, err=True)
    refused = []
    for one in runs:
        try:
            delete(one)
        except Mistake as mistake:
            refused.append(with_advice(mistake))
    sys.stdout.write(f"deleted {len(runs) - len(refused)}\n")
    if refused:
        raise Mistake("; ".join(refused))
