"""`ntkexp report`: finished runs and sweeps as a page or a table, without torch."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ntkexp.cli.options import OUTPUTS, options
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
    from ntkexp.report.material import gather, what_came_out, what_was_run
    from ntkexp.report.painter import uncollected

    with uncollected():
        outputs = out.expanduser() if out is not None and form is Format.html else OUTPUTS
        material = gather(named or [], outputs)
        if material.left_out_line:
            sys.stderr.write(f"ntkexp: {material.left_out_line}\n")
        if form is not Format.html:
            write_table(format_runs(material, form), out)
            return
        from ntkexp.report.page.build import write as write_page

        repeat = command("report", named or [], options(outputs))
        try:
            written = write_page(material, outputs / "report", repeat)
        except (FileExistsError, NotADirectoryError, PermissionError) as error:
            raise Mistake(f"--out={outputs}: {error.strerror}; it takes a folder that can be written to") from None
        sys.stdout.write(f"{what_was_run(material)}\n{what_came_out(material.runs)}\n{written}\n")


def write_table(text: str, out: Path | None) -> None:
    """Print a table, or write it into a file of the user's choice."""
    if out is None:
        sys.stdout.write(text)
        return
    out = out.expanduser()
    try:
        out.write_text(text, encoding="utf-8")
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError) as error:
        raise Mistake(f"--out={out}: {error.strerror}; it takes the name of a file in a folder that exists") from None


def format_runs(material: Material, form: Format) -> str:
    """The runs as a table; as plain text and in Markdown with what their sweeps say."""
    from ntkexp.records.atomic import to_text
    from ntkexp.report.analysis.laws import summary
    from ntkexp.report.material import tabulate_fits
    from ntkexp.report.page.build import markdown
    from ntkexp.report.run import combined
    from ntkexp.report.tables import format_csv, format_text, json_rows, of_frame

    match form:
        case Format.md:
            return markdown(material)
        case Format.csv:
            return format_csv(combined(material.runs))
        case Format.json:
            return to_text(json_rows(of_frame(combined(material.runs))))
    laws = [
        f"{summary(one.laws, one.draws)}\n{format_text(of_frame(tabulate_fits(one))).rstrip()}\n\n"
        for one in material.analyses
        if one.laws
    ]
    return "".join(laws) + format_text(of_frame(combined(material.runs))).rstrip("\n") + "\n"
