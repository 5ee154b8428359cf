"""The arguments of `ntkexp report`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Format(StrEnum):
    """How a report is written."""

    html = "html"
    md = "md"
    text = "text"
    csv = "csv"
    json = "json"


def report(
    named: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN|SWEEP]...", help="Run folders, sweeps, or folders of them; everything if none is given."
        ),
    ] = None,
    form: Annotated[
        Format,
        typer.Option("--format", metavar="|".join(Format), help="A page (html), or tables for a paper or a program."),
    ] = Format.html,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="DIR|FILE", help="The folder of outputs; with a format other than html, the file to write."
        ),
    ] = None,
) -> None:
    """Put finished runs and sweeps onto one page, outputs/report/index.html."""
    from ntkexp.cli.report import report

    report(named or [], form.value, out)
