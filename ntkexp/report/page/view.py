"""What the page shows of the material, section by section."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path

import pandas as pd

from ntkexp.records.timings import of_machines, read_timings
from ntkexp.report.analysis.tables import Analysis
from ntkexp.report.analysis.told import allowed, summary
from ntkexp.report.configuration import differing, flat
from ntkexp.report.material import Material
from ntkexp.report.page.headline import extent
from ntkexp.report.page.inline import slug
from ntkexp.report.page.picture import Shown, command_of, link, of_run, of_sweep
from ntkexp.report.page.table import Table, table, tabled
from ntkexp.report.plots.strip import strip
from ntkexp.report.plots.sweep_plots import exhibition
from ntkexp.report.quantity import describe
from ntkexp.report.run import Run
from ntkexp.report.sentence import sentence
from ntkexp.report.table import combined, ladder_rows, notes

ROOM = 4_000_000
"""Bytes for pictures of single runs; what does not fit is linked to."""

TELLING = ("drift", "weights_moved", "loss")


@dataclass(frozen=True)
class SweepView:
    """The page shows this of a sweep."""

    anchor: str
    name: str
    extent: str
    command: str
    base: str
    figures: tuple[Shown, ...]
    laws: str
    fits: Table | None
    reasons: tuple[str, ...]
    points: Table
    failed: tuple[str, ...]


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


def sweep_view(analysis: Analysis, material: Material, folder: Path) -> SweepView:
    """Show a sweep: its pictures, its laws, its points."""
    sweep, name = analysis.sweep, slug(analysis.sweep.name)
    pictures = exhibition(analysis, material.by_folder)
    reasons = dict.fromkeys(f"{law.fit.quantity}: {law.reason}" for law in analysis.laws if law.law is None)
    return SweepView(
        anchor=f"sweep-{name}",
        name=sweep.name,
        extent=extent(sweep),
        command=sweep.command,
        base=" ".join(sweep.base),
        figures=tuple(of_sweep(picture, name, sweep.command, folder) for picture in pictures),
        laws=summary(analysis.laws, analysis.draws),
        fits=table(fits(analysis), f"fits-{name}", f"Power laws, with 95 % intervals over seeds, {analysis.draws}")
        if analysis.laws
        else None,
        reasons=tuple(reasons),
        points=table(points(analysis), f"points-{name}", f"Means over seeds, {analysis.draws}, with 95 % intervals"),
        failed=tuple(f"{p.folder.name}: {p.reason or p.state}" for p in sweep.runs if p.state == "failed"),
    )


def fits(analysis: Analysis) -> pd.DataFrame:
    """Show the laws in few columns."""
    found = analysis.fits.assign(theory=pd.Series(map(allowed, analysis.laws), dtype=object))
    judged = ["quantity", *analysis.sweep.axes, "exponent", "low", "high", "theory", "verdict", "more_seeds", "curved"]
    kept = [column for column in [*judged, "axis", "from", "to", "points", "seeds", "left_out"] if column in found]
    return found[kept].assign(quantity=[describe_or_name(str(name)) for name in found["quantity"]])


def describe_or_name(quantity: str) -> str:
    """Spell the quantity in words, with the name to be used in commands."""
    try:
        return f"{describe(quantity)} [{quantity}]"
    except ValueError:
        return quantity


def points(analysis: Analysis) -> pd.DataFrame:
    """Show the means that tell most, each with half its interval's width, and of how many runs; the CSV has all."""
    table, split = analysis.points, "probe" if any(q.endswith(".probe") for q in analysis.quantities) else "test"
    chosen = [q for q in analysis.quantities if q in TELLING or q.endswith(f".{split}")]
    found = table[list(analysis.sweep.axes)].copy()
    found["runs"] = [from_to(row) for row in table[[f"{name}.count" for name in chosen]].to_numpy(dtype=int).tolist()]
    for name in chosen:
        found[name] = table[f"{name}.mean"]
        if table[f"{name}.low"].notna().any():
            found[f"± {name}"] = (table[f"{name}.high"] - table[f"{name}.low"]) / 2
    return found


def from_to(counts: Sequence[int]) -> str:
    """Count how many runs numbers are means of, which need not be as many for each.

    >>> from_to([5, 5]), from_to([5, 3]), from_to([])
    ('5', '3 to 5', '0')
    """
    low, high = min(counts, default=0), max(counts, default=0)
    return str(low) if low == high else f"{low} to {high}"


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
        sentence=sentence(run.ladder),
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
