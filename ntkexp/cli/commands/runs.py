"""The arguments of `ntkexp runs`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ntkexp.cli.arguments import AsJson


def runs(
    filters: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="Show only the runs of which this holds, such as model.width=64 or state=dead.",
        ),
    ] = None,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="The folder of outputs.")] = Path("outputs"),
    delete: Annotated[bool, typer.Option("--delete", help="Delete the runs that are listed.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before deleting.")] = False,
    as_json: AsJson = False,
) -> None:
    """List runs with their states, and delete those no longer wanted."""
    from ntkexp.cli.runs import runs

    runs(filters or [], out, remove=delete, sure=yes, as_json=as_json)
