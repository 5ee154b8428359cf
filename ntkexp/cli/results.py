"""`ntkexp report`, `runs` and `compare`: show runs and sweeps on a page,
in a list, or in pairs."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ntkexp.cli.options import (
    OUTPUTS,
    AsJson,
    OutputsFolder,
    options,
    with_advice,
    wrap,
    write_json,
    write_out,
)
from ntkexp.mistake import Mistake
from ntkexp.records.folder import command
from ntkexp.report.tables import (
    format_csv,
    format_json,
    format_markdown,
    format_text,
    json_rows,
    table_of_frame,
)
from ntkexp.text import printable_lines

if TYPE_CHECKING:
    from ntkexp.report.inventory import ListedRun
    from ntkexp.report.material import Material
    from ntkexp.report.pivot import Pivot
    from ntkexp.report.run import Run


class Format(StrEnum):
    """The output format of a report."""

    html = "html"
    md = "md"
    text = "text"
    csv = "csv"
    json = "json"
    latex = "latex"


def report(
    named: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN|SWEEP]...",
            help="Run folders, sweeps, or folders of them; all if none is given.",
        ),
    ] = None,
    form: Annotated[
        Format | None,
        typer.Option(
            "--format",
            metavar="|".join(Format),
            help="A page (html), or tables for a paper or a program.",
        ),
    ] = None,
    table: Annotated[
        bool,
        typer.Option(
            "--table",
            help="A result by two settings: rows=model.width columns=init.alpha value=error:left.",
        ),
    ] = False,
    where: Annotated[
        list[str] | None,
        typer.Option(
            "--where",
            metavar="KEY=VALUE",
            help="Use only runs with this setting in the table.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR|FILE",
            help="The folder of outputs; for other formats than html, the file to write.",
        ),
    ] = None,
) -> None:
    """Write a page about finished runs and sweeps.

    The page is outputs/report/index.html.
    """
    from ntkexp.report.drawing import uncollected
    from ntkexp.report.material import gather, what_came_out, what_was_run

    if table:
        write_pivot(named or [], where or [], form or Format.text, out)
        return
    if where:
        raise Mistake(f"--where={where[0]}: it selects runs of --table; add --table")
    if form is Format.latex:
        raise Mistake("--format=latex: it is a format of --table; add --table")
    form = form or Format.html
    with uncollected():
        outputs = (
            out.expanduser() if out is not None and form is Format.html else OUTPUTS
        )
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
            raise Mistake(
                f"--out={outputs}: {error.strerror}; it takes a folder that can be written to"
            ) from None
        sentences = f"{what_was_run(material)}\n{what_came_out(material.runs)}"
        write_out(f"{wrap(sentences)}\n{written}\n")


def write_pivot(
    words: Sequence[str], where: Sequence[str], form: Format, out: Path | None
) -> None:
    """Write a table of a result over two settings (`--table`)."""
    from ntkexp.report.drawing import uncollected
    from ntkexp.report.material import gather
    from ntkexp.report.pivot import pivot, read_request

    if form is Format.html:
        raise Mistake("--format=html: --table writes text, md, csv, json or latex")
    request, names = read_request(words, where)
    with uncollected():
        material = gather(names, OUTPUTS)
        found = pivot(material.runs, request)
    for line in filter(None, (material.left_out_line, found.remark)):
        sys.stderr.write(f"ntkexp: {line}\n")
    write_table(format_pivot(found, form), out)


def format_pivot(found: Pivot, form: Format) -> str:
    from ntkexp.report.pivot import format_latex, pivot_frame, pivot_table

    match form:
        case Format.latex:
            return f"{format_latex(found)}\n"
        case Format.csv:
            return format_csv(pivot_frame(found))
        case Format.json:
            return format_json(json_rows(table_of_frame(pivot_frame(found))))
        case Format.md:
            return f"{format_markdown(pivot_table(found))}\n\n{found.caption}\n"
    return f"{format_text(pivot_table(found)).rstrip()}\n\n{found.caption}\n"


def write_table(text: str, out: Path | None) -> None:
    """Print a table, or write it into the file `out`."""
    if out is None:
        write_out(text)
        return
    out = out.expanduser()
    try:
        out.write_text(printable_lines(text), encoding="utf-8")
    except (
        FileNotFoundError,
        IsADirectoryError,
        NotADirectoryError,
        PermissionError,
    ) as error:
        raise Mistake(
            f"--out={out}: {error.strerror}; it takes the name of a file in a folder that exists"
        ) from None


def format_runs(material: Material, form: Format) -> str:
    """Format the table of all runs. Text and Markdown also contain the laws
    of sweeps."""
    from ntkexp.report.analysis.laws import summary
    from ntkexp.report.comparison import combined
    from ntkexp.report.material import tabulate_fits
    from ntkexp.report.page.build import markdown

    match form:
        case Format.md:
            return markdown(material)
        case Format.csv:
            return format_csv(combined(material.runs))
        case Format.json:
            return format_json(json_rows(table_of_frame(combined(material.runs))))
    laws = [
        f"{summary(analysis.laws, analysis.draws)}\n{format_text(table_of_frame(tabulate_fits(analysis))).rstrip()}\n\n"
        for analysis in material.analyses
        if analysis.laws
    ]
    return (
        "".join(laws)
        + format_text(table_of_frame(combined(material.runs))).rstrip("\n")
        + "\n"
    )


def runs(
    filters: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="Show only the runs with model.width=64 or state=dead.",
        ),
    ] = None,
    out: OutputsFolder = OUTPUTS,
    remove: Annotated[
        bool, typer.Option("--delete", help="Delete the runs that are listed.")
    ] = False,
    confirmed: Annotated[
        bool, typer.Option("--yes", help="Do not ask before deleting.")
    ] = False,
    columns: Annotated[
        str,
        typer.Option(
            metavar="KEY,…",
            help="Also list these settings, such as model.width.",
        ),
    ] = "",
    as_json: AsJson = False,
) -> None:
    """List runs with their results, or delete some."""
    from ntkexp.report.inventory import filter_runs, list_runs
    from ntkexp.report.run_list import format_within, remarks, tabulate_runs

    folder = out.expanduser() / "runs"
    listed_runs = filter_runs(list_runs(folder), filters or [])
    if as_json:
        from ntkexp.records.atomic import Json

        rows: list[Json] = [
            {
                "run": str(run.path),
                "state": run.state,
                "said": run.outcome,
                "config": run.facts,
            }
            for run in listed_runs
        ]
        write_json(rows)
    elif listed_runs:
        table = tabulate_runs(listed_runs, [key for key in columns.split(",") if key])
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else math.inf
        lines = [
            format_within(table, width),
            *([""] if remarks(listed_runs) else []),
            *remarks(listed_runs),
        ]
        write_out("\n".join(lines) + "\n")
    else:
        write_out(f"no run in {folder}{' passes the filters' if filters else ''}\n")
    if remove and listed_runs:
        delete(listed_runs, confirmed)


def delete(runs: Sequence[ListedRun], confirmed: bool) -> None:
    """Delete run folders after a confirmation.
    Raise if some of them cannot be deleted."""
    from ntkexp.report.inventory import delete

    count = f"{len(runs)} run folder{'s' * (len(runs) != 1)}"
    if not confirmed and not sys.stdin.isatty():
        raise Mistake(
            f"--delete would remove {count}; without a terminal, --yes confirms it"
        )
    if not confirmed:
        typer.confirm(f"Delete {count}?", abort=True, err=True)
    refused = []
    for run in runs:
        try:
            delete(run)
        except Mistake as mistake:
            refused.append(with_advice(mistake))
    write_out(f"deleted {len(runs) - len(refused)}\n")
    if refused:
        raise Mistake("; ".join(refused))


def compare(
    first: Annotated[
        str,
        typer.Argument(
            metavar="RUN|SWEEP", help="The folder of a run, or a sweep by its name."
        ),
    ],
    second: Annotated[
        str, typer.Argument(metavar="RUN|SWEEP", help="Another run or sweep.")
    ],
    out: OutputsFolder = OUTPUTS,
) -> None:
    """Compare two runs, or two sweeps run by run."""
    first_material, second_material = (
        gather_one(name, out.expanduser()) for name in (first, second)
    )
    if first_material.analyses and second_material.analyses:
        compare_sweeps(first_material, second_material)
    elif len(first_material.runs) == len(second_material.runs) == 1:
        compare_runs(first_material.runs[0], second_material.runs[0])
    else:
        raise Mistake(
            f"two runs or two sweeps can be compared; {first} and {second} are neither"
        )


def gather_one(name: str, out: Path) -> Material:
    from ntkexp.report.material import NothingLeft, gather

    try:
        return gather([name], out)
    except NothingLeft as mistake:
        reason = str(mistake).removeprefix("nothing is left to report: ")
        raise Mistake(
            f"{reason}; two finished runs or two sweeps are compared, each by its path, or by its name in {out}"
        ) from None


def compare_runs(first: Run, second: Run) -> None:
    from ntkexp.report.comparison import (
        compare_configs,
        compare_results,
        numbers_of_one_alone,
    )

    write_out(
        f"first   {first.name}: {first.outcome}\nsecond  {second.name}: {second.outcome}\n\n"
    )
    differing = compare_configs(first, second)
    if len(differing):
        write_out(f"{format_text(table_of_frame(differing))}\n\n")
    else:
        write_out("their configurations are the same\n\n")
    differences = compare_results(first, second)
    if len(differences):
        write_out(f"{format_text(table_of_frame(differences))}\n")
    else:
        write_out("they share no number\n")
    for name, run, only_here in zip(
        ("first", "second"),
        (first, second),
        numbers_of_one_alone(first, second),
        strict=True,
    ):
        if run.diverged:
            write_out(f"{name} diverged, so it has no numbers\n")
        elif only_here and not (first.diverged or second.diverged):
            write_out(f"{name} alone has {', '.join(only_here)}\n")


def compare_sweeps(first: Material, second: Material) -> None:
    from ntkexp.report.analysis.tables import compare

    for material in (first, second):
        if material.left_out_line:
            sys.stderr.write(f"ntkexp: {material.left_out_line}\n")
    write_out(
        f"{format_text(table_of_frame(compare(first.analyses[0], second.analyses[0])))}\n"
    )
