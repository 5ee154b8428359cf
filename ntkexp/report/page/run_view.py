"""What the page shows of runs: each by itself, pictures of as many as there is room for, and all in one table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path

from ntkexp.records.timings import of_machines, read_timings
from ntkexp.report.configuration import differing, flat
from ntkexp.report.ladder import ladder_rows, notes
from ntkexp.report.material import Material
from ntkexp.report.page.inline import slug
from ntkexp.report.page.picture import Shown, command_of, link, of_run, of_sweep
from ntkexp.report.page.table import Table, table, tabled
from ntkexp.report.plots.strip import strip
from ntkexp.report.run import Run
from ntkexp.report.sentence import sentence
from ntkexp.report.table import combined

ROOM = 4_000_000
"""Bytes for pictures of single runs; what does not fit is linked to."""


@dataclass(frozen=True)
class RunView:
    """The page shows this of a run."""

    anchor: str
    name: str
    href: str
    differences: tuple[tuple[str, str], ...]
    sentence: str
    outcome: str
    command: str
    ladder: Table
    notes: tuple[str, ...]
    figures: tuple[Shown, ...]
    files: tuple[tuple[str, str], ...]


def lead(material: Material, command: str, folder: Path) -> Shown | None:
    """Find the first picture where there is no sweep to begin with."""
    picture = strip(material.runs)
    return None if picture is None else of_sweep(picture, "runs", command, folder)


def run_views(material: Material, folder: Path) -> Iterator[RunView]:
    """Show every run; pictures of those that stand for a point come first, as long as there is room."""
    configs = {run.path: flat(run.config) for run in material.runs}
    keys = differing(list(configs.values()))
    names, pictured = anchors(material.runs), pictures(material, folder)
    for run in material.runs:
        different = tuple((key, str(configs[run.path][key])) for key in keys if key in configs[run.path])
        yield run_view(run, names[run.path], different, pictured.get(run.path, ()), folder)


def anchors(runs: Sequence[Run]) -> dict[Path, str]:
    """Find what each run is called in links; of namesakes from several places, the later ones are numbered."""
    taken: dict[str, Path] = {}
    for run in runs:
        plain = f"run-{slug(run.name)}"
        taken[next(name for name in chain([plain], (f"{plain}-{k}" for k in count(2))) if name not in taken)] = run.path
    return {path: name for name, path in taken.items()}


def run_view(
    run: Run, anchor: str, differences: tuple[tuple[str, str], ...], figures: tuple[Shown, ...], folder: Path
) -> RunView:
    """Show one run."""
    header, rungs = ladder_rows(run.ladder, of_machines(read_timings(run.path / "timings.csv")))
    rows = [(name, detail, *numbers) for name, detail, numbers in rungs]
    caption = f"The ladder of {run.name}: relative errors"
    names = ["results.csv", "metrics.csv", "config.json", "provenance.json"]
    drawn = sorted(path.name for path in (run.path / "plots").glob("*.svg"))
    there = [name for name in names if (run.path / name).is_file()] + [f"plots/{name}" for name in drawn]
    return RunView(
        anchor=anchor,
        name=run.name,
        href=link(run.path, folder),
        differences=differences,
        sentence=sentence(run.ladder, diverged=run.diverged),
        outcome=run.outcome,
        command=command_of(run),
        ladder=tabled(header, [k > 1 for k in range(len(header))], rows, f"ladder-of-{anchor}", caption),
        notes=tuple(notes(run.ladder)),
        figures=figures,
        files=tuple((name, link(run.path / name, folder)) for name in there),
    )


def pictures(material: Material, folder: Path) -> dict[Path, tuple[Shown, ...]]:
    """Show the pictures of as many runs as there is room for."""
    left, found, names = ROOM, {}, anchors(material.runs)
    for run in representatives(material):
        if sum(path.stat().st_size for path in (run.path / "plots").glob("*.svg")) <= left:
            found[run.path] = tuple(of_run(run, names[run.path], folder))
            left -= sum(len(shown.svg) for shown in found[run.path])
    return found


def representatives(material: Material) -> list[Run]:
    """Sort the runs, the first seed of every point of a sweep before all others."""
    first: dict[tuple[object, ...], Run] = {}
    for analysis in material.analyses:
        for place in analysis.sweep.runs:
            if place.folder in material.by_folder:
                first.setdefault((analysis.sweep.name, *place.point), material.by_folder[place.folder])
    return list({run.path: run for run in [*first.values(), *material.runs]}.values())


def overview(material: Material) -> Table:
    """Show all runs in one table."""
    links = [f"#{name}" for name in anchors(material.runs).values()]
    return table(combined(material.runs), "all-runs", "Every run, what sets it apart, and its relative errors", links)
