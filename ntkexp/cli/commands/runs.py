"""`ntkexp runs`: list run folders, and delete those that are no longer wanted."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from ntkexp.cli.options import AsJson, OutputsFolder
from ntkexp.cli.surroundings import OUTPUTS, with_advice
from ntkexp.mistake import Mistake

if TYPE_CHECKING:
    from ntkexp.report.inventory import FoundRun


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
    from ntkexp.report.inventory import found_runs, kept

    place = out.expanduser() / "runs"
    found = kept(found_runs(place), filters or [])
    if as_json:
        from ntkexp.records.atomic import Json, to_text

        rows: list[Json] = [
            {"run": str(one.path), "state": one.state, "said": one.said, "config": one.facts} for one in found
        ]
        sys.stdout.write(to_text(rows))
    elif found:
        sys.stdout.write(table_of(found))
    else:
        sys.stdout.write(f"no run in {place}{' passes' if filters else ''}\n")
    if remove and found:
        delete(found, sure)


def table_of(found: Sequence[FoundRun]) -> str:
    """Tabulate the runs: their states, what sets them apart, and what became of them."""
    from ntkexp.report.inventory import differing
    from ntkexp.text import MISSING, aligned

    keys = differing([one.config for one in found if one.config])  # one that cannot be read differs in none
    rows = [[one.path.name, one.state, *(str(one.config.get(key, MISSING)) for key in keys), one.said] for one in found]
    return aligned(["run", "state", *keys, "outcome"], rows, [False] * (len(keys) + 3)) + "\n"


def delete(found: Sequence[FoundRun], sure: bool) -> None:
    """Remove these folders, once someone said yes."""
    from ntkexp.report.inventory import delete

    count = f"{len(found)} run folder{'s' * (len(found) != 1)}"
    if not sure and not sys.stdin.isatty():
        raise Mistake(f"--delete would remove {count}; --yes confirms it where nobody can be asked")
    if not sure:
        typer.confirm(f"Delete {count}?", abort=True, err=True)
    kept = []
    for one in found:
        try:
            delete(one)
        except Mistake as mistake:
            kept.append(with_advice(mistake))
    sys.stdout.write(f"deleted {len(found) - len(kept)}\n")
    if kept:
        raise Mistake("; ".join(kept))
