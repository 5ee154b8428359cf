"""What was asked of a point, as pictures: what examples added beside what would change without them, when it came, how
a removal splits, and whether predicted changes came true.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from ntkexp.records.leave_out import LeaveOut
from ntkexp.report.explain import Explanation, Part
from ntkexp.report.leave_out import Agreement
from ntkexp.report.ledger import LedgerEntry
from ntkexp.report.plots.examples import fitting
from ntkexp.report.plots.style import BLACK, BLUE, GREY, NARROW, VERMILION, WIDE, heading, house_style
from ntkexp.report.plots.sweep_plots import Picture
from ntkexp.text import short

TOP = 12  # examples that have bars
Array = NDArray[np.float64]


def beside(explanation: Explanation) -> Picture:
    """Draw what each of the first examples added, and by how much the output would change without it, if known."""
    parts = explanation.parts[:TOP]
    tells = any(part.left_out is not None for part in parts)
    names = [name_of(part) for part in parts]
    table = pd.DataFrame({
        "example": names,
        "added": [part.added for part in parts],
        **({"if_left_out": [part.left_out for part in parts]} if tells else {}),
    })  # fmt: skip
    with house_style():
        figure = sheet(WIDE if tells else NARROW, len(parts))
        panels = np.atleast_1d(figure.subplots(1, 1 + tells, sharey=True))
        bars(panels[0], names, table["added"].to_numpy(dtype=float), "added on the way, in this training")
        if tells:
            changes = table["if_left_out"].to_numpy(dtype=float)
            bars(panels[1], names, changes, "change of the output, if left out")
        heading(figure, f"What made {explanation.split} {explanation.number}" + ", and what would change it" * tells)
    return Picture("beside", figure, table)


def shares(entry: LedgerEntry) -> Picture:
    """Draw how the change that a removal made splits over the examples that were left out, and the change itself."""
    order = np.argsort(-np.abs(entry.shares), kind="stable")[:TOP].tolist()
    names = [*(fitting(entry.names[k]) for k in order), "all of them"]
    values = np.array([*(float(entry.shares[k]) for k in order), entry.actual])
    with house_style():
        figure = sheet(NARROW, len(names))
        axes = figure.subplots()
        bars(axes, names, values, "share of the change")
        if entry.predicted is not None:
            axes.plot([entry.predicted], [len(names) - 1], "|", color=BLACK, markersize=10)
        marked = "; the mark: as predicted" if entry.predicted is not None else ""
        heading(figure, f"What leaving them out changed: {short(entry.actual)}{marked}")
    return Picture("shares", figure, pd.DataFrame({"left_out": names, "share": values}))


def when(by_step: Array, title: str, last_step: NDArray[np.int64] | None = None) -> Picture:
    """Draw what came of each step, or of each stretch up to its last step, added up from the first."""
    last = np.arange(len(by_step)) if last_step is None else last_step
    table = pd.DataFrame({"step": last + 1, "so_far": np.cumsum(by_step)})
    with house_style():
        figure = Figure(figsize=(NARROW, 2.0), layout="constrained")
        axes = figure.subplots()
        axes.plot([0, *table["step"]], [0.0, *table["so_far"]], color=BLUE)
        axes.axhline(0, color=GREY, linewidth=0.5)
        axes.set(xlabel="step", ylabel="added so far")
        heading(figure, title)
    return Picture("when", figure, table)


def checked(found: LeaveOut, agreement: Agreement) -> Picture:
    """Draw predicted over actual changes: a dot for each removal, point and output whose effect is known."""
    rows = [
        (k, removal.influential, len(removal.examples), said, came)
        for k, removal in enumerate(found.removals)
        for said, came in zip(found.predicted[k].ravel(), found.actual[k].ravel(), strict=True)
        if np.isfinite(said)
    ]
    table = pd.DataFrame(rows, columns=["removal", "influential", "left_out", "predicted", "actual"])
    with house_style():
        figure = Figure(figsize=(NARROW, NARROW), layout="constrained")
        axes = figure.subplots()
        axes.axline((0, 0), slope=1, color=BLACK, linewidth=0.5)
        most = table["influential"].astype(bool)
        others = "random examples" if most.any() else "each example by itself"
        for influential, ink, said in ((False, GREY, others), (True, BLUE, "the most influential")):
            chosen = table[most == influential]
            if chosen.empty:
                continue
            axes.plot(
                chosen["actual"], chosen["predicted"], "o", color=ink, alpha=0.6, markeredgewidth=0, label=said,
                rasterized=len(table) > 1000,
            )  # fmt: skip
        axes.set(xlabel="change that came, trained again without them", ylabel="change that was predicted")
        axes.legend()
        heading(figure, agreement.sentence)
    return Picture("checked", figure, table)


def sheet(width: float, rows: int) -> Figure:
    """Make room for so many bars."""
    return Figure(figsize=(width, 0.8 + 0.17 * rows), layout="constrained")


def bars(axes: Axes, names: Sequence[str], values: Array, label: str) -> None:
    """Draw bars downwards: blue raises the output, orange lowers it."""
    axes.barh(range(len(values)), values, color=[BLUE if value >= 0 else VERMILION for value in values])
    axes.set_yticks(range(len(values)), list(names))
    axes.set_ylim(len(values) - 0.5, -0.5)
    axes.axvline(0, color=BLACK, linewidth=0.5)
    axes.set_xlabel(label)


def name_of(part: Part) -> str:
    """Name an example beside its bar."""
    shown = replace(part.example, name=fitting(part.example.name))
    return shown.label if shown.text else f"#{shown.index} {shown.label}"
