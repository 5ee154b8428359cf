"""`ntkexp report`: finished runs and sweeps as a page or a table, without torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ntkexp.cli.surroundings import options
from ntkexp.mistake import Mistake
from ntkexp.records.folder import command

if TYPE_CHECKING:
    from ntkexp.report.material import Material


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
    from ntkexp.report.painter import uncollected

    with uncollected():
        write(named or [], form.value, out)


def write(named: Sequence[str], form: str, out: Path | None) -> None:
    """Write what was asked for; what cannot be read is named in one line."""
    from ntkexp.report.material import gather

    outputs = out.expanduser() if out is not None and form == "html" else Path("outputs")
    material = gather(named, outputs)
    if material.left_out_line:
        sys.stderr.write(f"ntkexp: {material.left_out_line}\n")
    if form == "html":
        page(material, named, outputs)
    elif out is None:
        sys.stdout.write(WRITTEN[form](material))
    else:
        save(WRITTEN[form](material), out.expanduser())


def page(material: Material, named: Sequence[str], outputs: Path) -> None:
    """Write the page, and say what it says first."""
    from ntkexp.report.material import what_came_out, what_was_run
    from ntkexp.report.page.build import write as write_page

    repeat = command("report", named, options(outputs))
    try:
        written = write_page(material, outputs / "report", repeat)
    except (FileExistsError, NotADirectoryError, PermissionError) as error:
        raise Mistake(f"--out={outputs}: {error.strerror}; it takes a folder that can be written to") from None
    sys.stdout.write(f"{what_was_run(material)}\n{what_came_out(material.runs)}\n{written}\n")


def save(text: str, out: Path) -> None:
    """Write a file of the user's choice."""
    try:
        out.write_text(text, encoding="utf-8")
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError) as error:
        raise Mistake(f"--out={out}: {error.strerror}; it takes the name of a file in a folder that exists") from None


def as_text(material: Material) -> str:
    """Align the table in columns for a reader."""
    from ntkexp.report.analysis.laws import summary
    from ntkexp.report.material import tabulate_fits
    from ntkexp.report.run import combined
    from ntkexp.report.tables import format_text, of_frame

    swept = [analysis for analysis in material.analyses if analysis.laws]
    laws = [
        f"{summary(one.laws, one.draws)}\n{format_text(of_frame(tabulate_fits(one))).rstrip()}\n\n" for one in swept
    ]
    return "".join(laws) + format_text(of_frame(combined(material.runs))).rstrip("\n") + "\n"


def as_markdown(material: Material) -> str:
    """Write sentences and tables."""
    from ntkexp.report.page.build import markdown

    return markdown(material)


def as_csv(material: Material) -> str:
    """Write every digit, comma-separated."""
    from ntkexp.report.run import combined
    from ntkexp.report.tables import format_csv

    return format_csv(combined(material.runs))


def as_json(material: Material) -> str:
    """Write a list with an object for each run."""
    from ntkexp.records.atomic import to_text
    from ntkexp.report.run import combined
    from ntkexp.report.tables import json_rows, of_frame

    return to_text(json_rows(of_frame(combined(material.runs))))


WRITTEN = {"text": as_text, "md": as_markdown, "csv": as_csv, "json": as_json}
