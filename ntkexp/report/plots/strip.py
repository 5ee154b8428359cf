"""How far are the kernel machines from the networks? A row a machine, a dot a run, a bar at the median of all runs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from ntkexp.report.plots.exhibition import Picture
from ntkexp.report.plots.style import BLACK, NARROW, RC, WIDE, colour, heading
from ntkexp.report.run import Run
from ntkexp.report.table import main_split
from ntkexp.report.text import short, spoken

LEAST = 1e-17  # where an error of exactly zero is drawn


def strip(runs: Sequence[Run]) -> Picture | None:
    """The picture, if any machine was compared with any network."""
    rows = [
        (run.name, row.machine, row.split, row.relative_error)
        for run in runs
        for row in run.ladder
        if row.split == main_split(run.ladder) and row.relative_error is not None and math.isfinite(row.relative_error)
    ]
    table = pd.DataFrame(rows, columns=["run", "machine", "split", "relative_error"])
    with rc_context(RC):
        return Picture("machines", draw(table), table) if rows else None


def draw(table: pd.DataFrame) -> Figure:
    """One row a machine, in the order of the ladder."""
    names = list(dict.fromkeys(table["machine"]))
    alone = table["run"].nunique() == 1
    figure = Figure(figsize=(NARROW if alone else WIDE, 0.9 + 0.19 * len(names)), layout="constrained")
    axes = figure.subplots()
    axes.set_xscale("log")
    for height, name in enumerate(names):
        errors = table.loc[table["machine"] == name, "relative_error"].clip(lower=LEAST)
        axes.plot(errors, [height] * len(errors), "o", color=colour(name), alpha=1 if alone else 0.4, markeredgewidth=0)
        axes.plot([errors.median()], [height], "|", color=BLACK, markersize=0 if alone else 7)
        axes.annotate(
            short(float(errors.median())), (1, height), xytext=(3, 0), xycoords=("axes fraction", "data"),
            textcoords="offset points", va="center", fontsize=7,
        )  # fmt: skip
    axes.set_yticks(range(len(names)), [spoken(name) for name in names])
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.xaxis.set_major_locator(LogLocator(numticks=6))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(f"relative error ({', '.join(dict.fromkeys(table['split']))})")
    best = table.groupby("machine", sort=False)["relative_error"].median()
    heading(figure, f"Nearest to the network is {spoken(str(best.idxmin()))}, farthest {spoken(str(best.idxmax()))}")
    return figure
