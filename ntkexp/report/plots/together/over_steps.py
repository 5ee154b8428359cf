"""Loss, kernel change and largest eigenvalue over the steps, for one run at each point
of a sweep (each combination of swept values)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from ntkexp.report.analysis.tables import Analysis
from ntkexp.report.plots.canvas import Canvas
from ntkexp.report.plots.rendering import SweepPicture
from ntkexp.report.plots.style import (
    WIDE,
    End,
    log_axis,
    name_ends,
    shade,
    step_axis,
)
from ntkexp.report.run import Run
from ntkexp.text import percent

COURSES = {
    "loss": "loss",
    "kernel_change": "kernel change",
    "lambda_max": "largest eigenvalue",
}
MOST_NAMES = 8  # maximum number of labelled lines
MOST = 24  # maximum number of lines; readers could not distinguish more


def pictures(analysis: Analysis, runs: Mapping[Path, Run]) -> Iterator[SweepPicture]:
    """Yield one picture if several points have runs, else none."""
    # select the first readable run at each point,
    # and evenly spaced points if there are too many
    first: dict[str, Run] = {}
    for run in analysis.sweep.runs:
        name = ", ".join(
            f"{key.rpartition('.')[2]} {value}" for key, value in run.axes.items()
        )
        if run.folder in runs and name not in first:
            first[name] = runs[run.folder]
    lines = dict(list(first.items())[:: -(-len(first) // MOST) or 1])
    shown = [
        column
        for column in COURSES
        if any(len(run.series(column)) > 1 for run in lines.values())
    ]
    if len(lines) > 1 and shown:
        parts = {
            name: run.metrics.reindex(columns=["step", *shown]).dropna(thresh=2)
            for name, run in lines.items()
        }
        table = pd.concat(parts, names=["point", "row"]).reset_index("point")
        yield SweepPicture("", table, partial(draw_courses, lines, shown))


def draw_courses(
    lines: Mapping[str, Run], shown: Sequence[str], canvas: Canvas
) -> Figure:
    """Draw a panel for each quantity, with a line for each point.

    If there are more than `MOST_NAMES` lines, label only the first and the last.
    """
    panels = canvas.panels((WIDE, 2.5), 1, len(shown))
    for axes, column in zip(panels[0], shown, strict=True):
        ends = []
        for k, (name, run) in enumerate(lines.items()):
            series = run.series(column)
            ink = shade(k, len(lines))
            axes.plot(series["step"], series[column], color=ink, linewidth=1)
            if len(series):
                ends.append(End(name, float(series[column].iloc[-1]), ink))
        axes.set(ylabel=COURSES[column])
        if column == "kernel_change":
            axes.set_ylim(0, None)
        elif all(
            (run.series(column)[column].iloc[1:] > 0).all() for run in lines.values()
        ):
            log_axis(axes, "y")
        step_axis(axes, max(run.last_step for run in lines.values()))
        if column == shown[-1]:
            name_ends(axes, ends if len(ends) <= MOST_NAMES else [ends[0], ends[-1]])
    return canvas.finish(*courses_title(lines))


def courses_title(lines: Mapping[str, Run]) -> tuple[str, str]:
    """Return the title and the caption. The title states the kernel change at the first
    and at the last point whose run did not diverge."""
    trained = {name: run for name, run in lines.items() if not run.diverged}
    ends = {
        name: float(
            run.metrics.reindex(columns=["kernel_change"])["kernel_change"].iloc[-1]
        )
        for name, run in trained.items()
    }
    known = [(name, end) for name, end in ends.items() if np.isfinite(end)]
    caption = "One seed per point of the sweep, the first."
    if len(trained) < len(lines):
        caption += f" {len(lines) - len(trained)} of {len(lines)} runs diverged."
    if len(known) < 2:
        return "How training unfolds at every point", caption
    (first, start), *_, (last, end) = known
    caption += f" Title: the kernel change at {first} and at {last}."
    if len(known) < len(trained):
        unknown = len(trained) - len(known)
        caption += f" {unknown} of {len(lines)} runs end in no number."
    return f"The kernel change goes from {percent(start)} to {percent(end)}", caption
