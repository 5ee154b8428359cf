"""`ntkexp report`, `compare` and `runs`: finished runs and sweeps as a page or a table, without torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ntkexp.cli.surroundings import options, with_advice
from ntkexp.mistake import Mistake
from ntkexp.records.folder import command

if TYPE_CHECKING:
    from ntkexp.report.inventory import FoundRun
    from ntkexp.report.material import Material


# --- `ntkexp report`: finished runs and sweeps as a page or a table, without torch.


def report(named: Sequence[str], form: str, out: Path | None) -> None:
    """Write the page, or a table."""
    from ntkexp.report.painter import uncollected

    with uncollected():
        write(named, form, out)


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
    from ntkexp.report.run import combined
    from ntkexp.report.sweeps import tabulate_fits
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


# --- `ntkexp compare`: two runs, or two sweeps in pairs of runs.


def compare(first: str, second: str, out: Path) -> None:
    """Show what differs between two runs or two sweeps, in configuration and in result."""
    one, other = (gathered(name, out.expanduser()) for name in (first, second))
    if one.analyses and other.analyses:
        sweeps(one, other)
    elif len(one.runs) == len(other.runs) == 1:
        compare_runs(one, other)
    else:
        raise Mistake(f"{first} and {second} are compared if they are two runs or two sweeps, and they are neither")


def gathered(name: str, out: Path) -> Material:
    """Read what one of the names stands for."""
    from ntkexp.report.material import NothingLeft, gather

    try:
        return gather([name], out)
    except NothingLeft as mistake:
        reason = str(mistake).removeprefix("nothing is left to report: ")
        raise Mistake(
            f"{reason}; two finished runs or two sweeps are compared, each by its path, or by its name in {out}"
        ) from None


def compare_runs(one: Material, other: Material) -> None:
    """Show what differs between two runs."""
    from ntkexp.report.run import compare_configs, compare_results, numbers_of_one_alone
    from ntkexp.report.tables import format_text, of_frame

    first, second = one.runs[0], other.runs[0]
    sys.stdout.write(f"first   {first.name}: {first.outcome}\nsecond  {second.name}: {second.outcome}\n\n")
    differing = compare_configs(first, second)
    sys.stdout.write(
        f"{format_text(of_frame(differing))}\n\n" if len(differing) else "their configurations are the same\n\n"
    )
    found = compare_results(first, second)
    sys.stdout.write(f"{format_text(of_frame(found))}\n" if len(found) else "they share no number\n")
    for name, run, alone in zip(("first", "second"), (first, second), numbers_of_one_alone(first, second), strict=True):
        if run.diverged:
            sys.stdout.write(f"{name} diverged, so it has no numbers\n")
        elif alone and not (first.diverged or second.diverged):
            sys.stdout.write(f"{name} alone has {', '.join(alone)}\n")


def sweeps(one: Material, other: Material) -> None:
    """Show two sweeps, pair by pair."""
    from ntkexp.report.analysis.tables import compare
    from ntkexp.report.tables import format_text, of_frame

    for material in (one, other):
        if material.left_out_line:
            sys.stderr.write(f"ntkexp: {material.left_out_line}\n")
    sys.stdout.write(f"{format_text(of_frame(compare(one.analyses[0], other.analyses[0])))}\n")


# --- `ntkexp runs`: list run folders, and delete those that are no longer wanted.


def runs(filters: Sequence[str], out: Path, *, remove: bool, sure: bool, as_json: bool) -> None:
    """List the runs, one on a line; with `remove`, delete what is listed."""
    from ntkexp.report.inventory import filter_runs, found_runs, tabulate_runs
    from ntkexp.report.tables import format_text

    place = out.expanduser() / "runs"
    found = filter_runs(found_runs(place), filters)
    if as_json:
        from ntkexp.records.atomic import Json, to_text

        rows: list[Json] = [
            {"run": str(one.path), "state": one.state, "said": one.said, "config": one.facts} for one in found
        ]
        sys.stdout.write(to_text(rows))
    elif found:
        sys.stdout.write(f"{format_text(tabulate_runs(found))}\n")
    else:
        sys.stdout.write(f"no run in {place}{' passes' if filters else ''}\n")
    if remove and found:
        delete(found, sure)


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
