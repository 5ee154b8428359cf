"""What the page shows of a sweep: its pictures, its laws and the means at its points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from ntkexp.report.analysis.laws_in_words import allowed, summary
from ntkexp.report.analysis.tables import Analysis
from ntkexp.report.material import Material
from ntkexp.report.page.headline import extent
from ntkexp.report.page.inline import slug
from ntkexp.report.page.picture import Shown, of_sweep
from ntkexp.report.page.table import Table, table
from ntkexp.report.plots.sweep_plots import exhibition
from ntkexp.report.quantity import describe

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
