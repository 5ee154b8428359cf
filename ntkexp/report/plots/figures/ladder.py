"""The relative error of each kernel machine on every split, on a log axis."""

from __future__ import annotations

import math

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ntkexp.report.plots.style import (
    GREY,
    LEAST,
    NARROW,
    PALE,
    colour,
    heading,
    log_axis,
    machine_rows,
    wrapped,
    write_beside,
)
from ntkexp.report.run import Run
from ntkexp.report.sentence import ladder_sentence, main_split
from ntkexp.text import short

MARKER = {"train": "^", "query": "o", "test": "s"}
TITLE_LINES = 4  # a longer title makes the figure higher


def draw(run: Run) -> Figure | None:
    rows = [row for row in run.ladder if row.relative_error is not None]
    rows = [row for row in rows if math.isfinite(row.relative_error or 0.0)]
    if not rows:
        return None
    names = list(dict.fromkeys((row.machine, row.detail) for row in rows))
    title = ladder_sentence(run.ladder, diverged=run.diverged)
    more_lines = max(0, len(wrapped(title, int(14 * NARROW))) - TITLE_LINES)
    height = 1.2 + 0.19 * len(names) + 0.14 * more_lines
    figure = Figure(figsize=(NARROW, height), layout="constrained")
    axes = figure.subplots()
    axes.axvspan(LEAST / 3, max(row.tolerance for row in rows), color=PALE, linewidth=0, zorder=0)
    for row in rows:
        axes.plot(
            max(row.relative_error or 0.0, LEAST),
            names.index((row.machine, row.detail)),
            MARKER.get(row.split, "o"),
            color=colour(row.machine),
            markersize=4,
            alpha=0.8,
            markeredgewidth=0,
        )
    log_axis(axes, "x")
    axes.set_xlim(LEAST / 3, max(2.0, 3 * max(row.relative_error or 0.0 for row in rows)))
    machine_rows(axes, [machine for machine, _ in names])
    axes.set_xlabel("relative error")

    # write the errors on the main split to the right of the axes
    for row in rows:
        if row.split == main_split(rows):
            place = names.index((row.machine, row.detail))
            write_beside(axes, short(row.relative_error), place)

    # add a legend for the band of rounding errors and for the markers
    axes.annotate(
        "exact to rounding", (0, 1), xytext=(2, 2), xycoords="axes fraction", textcoords="offset points",
        fontsize=6, color=GREY,
    )  # fmt: skip
    splits = [split for split in MARKER if any(row.split == split for row in rows)]
    marks = [
        Line2D([], [], linestyle="", marker=MARKER[split], color=GREY, markersize=4)
        for split in splits
    ]
    axes.legend(marks, splits, loc="lower left", bbox_to_anchor=(0.42, 0.97), ncols=3, handletextpad=0.1,
                columnspacing=0.8, borderaxespad=0)  # fmt: skip
    heading(figure, title)
    return figure


def table(run: Run) -> pd.DataFrame:
    return run.results
