"""The pictures of a page: each inline, with the file of its numbers and the command that made it."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from markupsafe import Markup

from ntkexp.mistake import Mistake
from ntkexp.records.atomic import write_atomically
from ntkexp.records.json_file import read_object
from ntkexp.records.provenance import PROVENANCE
from ntkexp.report.page.inline import inline, slug
from ntkexp.report.plots.run_plots import svg
from ntkexp.report.plots.sweep_plots import Picture
from ntkexp.report.run import Run
from ntkexp.report.table import as_csv

SOURCES = {
    "ladder": "results.csv",
    "loss_and_drift": "metrics.csv",
    "spectrum": "metrics.csv",
    "time_profile": "metrics.csv",
}
"""Where the numbers of a picture lie in a run whose pictures have no tables of their own."""


@dataclass(frozen=True)
class Shown:
    """One picture stands on the page."""

    title: str
    svg: Markup
    csv: str
    csv_name: str
    command: str


def of_sweep(picture: Picture, prefix: str, command: str, folder: Path) -> Shown:
    """Show a picture that was drawn for the page; it and its numbers are kept beside the page too."""
    drawn, numbers = svg(picture.figure), as_csv(picture.table)
    name = f"{prefix}.{picture.name}"
    write_atomically(folder / f"{name}.svg", drawn)
    write_atomically(folder / f"{name}.csv", numbers)
    return with_numbers(picture, drawn, numbers, name, command)


def shown(picture: Picture, prefix: str) -> Shown:
    """Show a picture that is on the page alone."""
    numbers = as_csv(picture.table)
    return with_numbers(picture, svg(picture.figure), numbers, f"{prefix}.{picture.name}", "")


def with_numbers(picture: Picture, drawn: str, numbers: str, name: str, command: str) -> Shown:
    """Put a picture and its numbers into the page."""
    title = picture.figure.get_suptitle().replace("\n", " ") or name
    link = f"data:text/csv;base64,{base64.b64encode(numbers.encode()).decode()}"
    return Shown(title, inline(drawn, slug(name), title), link, f"{name}.csv", command)


def of_run(run: Run, anchor: str, folder: Path) -> Iterator[Shown]:
    """Show the pictures that the run drew of itself, in the order of interest; one that is none is passed over."""
    command = command_of(run)
    for path in sorted((run.path / "plots").glob("*.svg"), key=interest):
        title = f"{path.stem.replace('_', ' ')} of {run.name}"
        own = path.with_suffix(".csv")
        numbers = own if own.is_file() else run.path / SOURCES.get(path.stem, "results.csv")
        try:
            drawn = inline(path.read_text(encoding="utf-8"), slug(f"{anchor}-{path.stem}"), title)
        except (Mistake, OSError, UnicodeDecodeError):
            continue
        yield Shown(title, drawn, link(numbers, folder), numbers.name, command)


def interest(path: Path) -> tuple[bool, str]:
    """Sort the ladder first."""
    return path.stem != "ladder", path.stem


def link(path: Path, folder: Path) -> str:
    """Link a file from the page's folder by a path, whatever address its name looks like."""
    return quote(Path(os.path.relpath(path.absolute(), folder.absolute())).as_posix())


def command_of(run: Run) -> str:
    """Spell what makes the run again."""
    try:
        return str(read_object(run.path / PROVENANCE).get("command", ""))
    except Mistake:
        return ""
