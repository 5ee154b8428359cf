"""What the page shows of runs, of sweeps, and of explanations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path

import pandas as pd

from ntkexp.records.results import of_machines, read_timings
from ntkexp.report.analysis.laws import summary
from ntkexp.report.analysis.tables import Analysis
from ntkexp.report.explain import Explanation, known_effects, tabulate_examples, tabulate_pieces
from ntkexp.report.explain import notes as explanation_notes
from ntkexp.report.inventory import differing, flat
from ntkexp.report.ledger import LedgerEntry
from ntkexp.report.material import Material, extent, tabulate_fits, tabulate_points
from ntkexp.report.page.picture import Shown, command_of, link, pictures_of_run, show, show_and_keep, slug
from ntkexp.report.plots import examples
from ntkexp.report.plots.examples import draw, row
from ntkexp.report.plots.run_plots import Picture, exhibition, strip
from ntkexp.report.plots.style import house_style
from ntkexp.report.run import Run, combined
from ntkexp.report.sentence import notes, sentence, tabulate_ladder
from ntkexp.report.tables import PageTable, format_html, of_frame
from ntkexp.text import short

# --- What the page shows of runs: each by itself, pictures of as many as there is room for, and all in one table.


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
    ladder: PageTable
    notes: tuple[str, ...]
    figures: tuple[Shown, ...]
    files: tuple[tuple[str, str], ...]


def lead(material: Material, command: str, folder: Path) -> Shown | None:
    """Find the first picture where there is no sweep to begin with."""
    picture = strip(material.runs)
    return None if picture is None else show_and_keep(picture, "runs", command, folder)


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
    ladder = tabulate_ladder(run.ladder, of_machines(read_timings(run.path / "timings.csv")))
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
        ladder=format_html(ladder, f"ladder-of-{anchor}", f"The ladder of {run.name}: relative errors"),
        notes=tuple(notes(run.ladder)),
        figures=figures,
        files=tuple((name, link(run.path / name, folder)) for name in there),
    )


def pictures(material: Material, folder: Path) -> dict[Path, tuple[Shown, ...]]:
    """Show the pictures of as many runs as there is room for."""
    left, found, names = ROOM, {}, anchors(material.runs)
    for run in representatives(material):
        if sum(path.stat().st_size for path in (run.path / "plots").glob("*.svg")) <= left:
            found[run.path] = tuple(pictures_of_run(run, names[run.path], folder))
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


def overview(material: Material) -> PageTable:
    """Show all runs in one table."""
    links = [f"#{name}" for name in anchors(material.runs).values()]
    caption = "Every run, what sets it apart, and its relative errors"
    return format_html(of_frame(combined(material.runs)), "all-runs", caption, links)


# --- What the page shows of a sweep: its pictures, its laws and the means at its points.


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
    fits: PageTable | None
    reasons: tuple[str, ...]
    points: PageTable
    failed: tuple[str, ...]


def sweep_view(analysis: Analysis, material: Material, folder: Path) -> SweepView:
    """Show a sweep: its pictures, its laws, its points."""
    sweep, name = analysis.sweep, slug(analysis.sweep.name)
    pictures = exhibition(analysis, material.by_folder)
    reasons = dict.fromkeys(f"{law.fit.quantity}: {law.reason}" for law in analysis.laws if law.law is None)
    laws = f"Power laws, with 95 % intervals over seeds, {analysis.draws}"
    means = f"Means over seeds, {analysis.draws}, with 95 % intervals"
    return SweepView(
        anchor=f"sweep-{name}",
        name=sweep.name,
        extent=extent(sweep),
        command=sweep.command,
        base=" ".join(sweep.base),
        figures=tuple(show_and_keep(picture, name, sweep.command, folder) for picture in pictures),
        laws=summary(analysis.laws, analysis.draws),
        fits=format_html(of_frame(tabulate_fits(analysis)), f"fits-{name}", laws) if analysis.laws else None,
        reasons=tuple(reasons),
        points=format_html(of_frame(tabulate_points(analysis)), f"points-{name}", means),
        failed=tuple(f"{p.folder.name}: {p.reason or p.state}" for p in sweep.runs if p.state == "failed"),
    )


# --- What the page of explanations shows of a point: what made its output, what would change it, what a removal did.


@dataclass(frozen=True)
class PointView:
    """The page shows this of a point."""

    anchor: str
    title: str
    pieces: PageTable
    examples: PageTable
    notes: tuple[str, ...]
    pictures: tuple[Shown, ...]
    removal: str


def point_views(found: Sequence[Explanation], removed: Sequence[LedgerEntry]) -> list[PointView]:
    """Show each point, and what a removal changed there, if one was asked for."""
    entries = {entry.number: entry for entry in removed}
    return [point_view(explanation, entries.get(explanation.number)) for explanation in found]


def point_view(explanation: Explanation, entry: LedgerEntry | None) -> PointView:
    """Show one point: what its output is, and all training examples."""
    name, point = f"{explanation.split} {explanation.number}", explanation.point
    anchor = slug(name.replace(" ", "-"))
    pieces, phase = tabulate_pieces(explanation), ["phase"] if point.phase is not None else []
    pieces = replace(pieces, rows=(*pieces.rows, ("output", explanation.prediction)))
    parts = tabulate_examples(explanation).select("example", "holds", *phase, "added", "if left out", "half by")
    return PointView(
        anchor=anchor,
        title=f"{name}: {point.text or point.label}, {explanation.output} = {short(explanation.prediction)}",
        pieces=format_html(pieces, f"pieces-{anchor}", "What the output is"),
        examples=format_html(parts, f"examples-{anchor}", "All training examples"),
        notes=tuple(explanation_notes(explanation)),
        pictures=tuple(show(picture, anchor) for picture in explanation_pictures(explanation, entry)),
        removal="" if entry is None else removed(entry),
    )


def explanation_pictures(explanation: Explanation, entry: LedgerEntry | None) -> Iterator[Picture]:
    """Draw a point beside its examples, both answers as bars, when it came, and how a removal splits."""
    added = tabulate_examples(explanation).select("index", "name", "added")
    with house_style():
        numbers = pd.DataFrame(added.rows, columns=["example", "holds", "added"])
        yield Picture("examples", draw([row(explanation)]), numbers)
    yield examples.beside(explanation)
    if (moved := explanation.movement) is not None:
        yield examples.when(moved.by_step, "When training moved this output", moved.last_step)
    if entry is not None:
        yield examples.shares(entry)
        yield examples.when(entry.by_step, "At which steps leaving them out made its change")


def removed(entry: LedgerEntry) -> str:
    """Say what leaving a group out was predicted to change, and changed."""
    several = f", by the sum of {len(entry.places)} effects, which do not add" if len(entry.places) > 1 else ""
    predicted = "" if entry.predicted is None else f" (predicted: {short(entry.before + entry.predicted)}{several})"
    return (
        f"Trained again without {len(entry.places)} of the examples, the output is "
        f"{short(entry.before + entry.actual)} instead of {short(entry.before)}{predicted}."
    )


def check(run: Run) -> tuple[str, Shown | None]:
    """Say whether predicted changes came true, and draw it, where that was tried."""
    known = known_effects(run)
    if known is None or known.check is None or known.agreement is None:
        return "", None
    return known.agreement.sentence, show(examples.checked(known.check, known.agreement), "check")
