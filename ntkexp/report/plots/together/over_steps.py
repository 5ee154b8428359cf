"""Loss, kernel change and largest eigenvalue over the steps, for one seed per point of a sweep."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from ntkexp.report.analysis.tables import Analysis
from ntkexp.report.plots.style import WIDE, End, heading, log_axis, name_ends, step_axis
from ntkexp.report.run import Run
from ntkexp.text import percent

COURSES = {"loss": "loss", "kernel_change": "kernel change", "lambda_max": "largest eigenvalue"}
MOST = 24  # maximum number of lines; readers could not distinguish more


def draw(
    analysis: Analysis, runs: Mapping[Path, Run]
) -> Iterator[tuple[str, Figure, pd.DataFrame]]:
    # select the first readable run at each point, and evenly spaced points if there are too many
    first: dict[str, Run] = {}
    for run in analysis.sweep.runs:
        name = ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in run.axes.items())
        if run.folder in runs and name not in first:
            first[name] = runs[run.folder]
    lines = dict(list(first.items())[:: -(-len(first) // MOST) or 1])
    shown = [
        column for column in COURSES if any(len(run.series(column)) > 1 for run in lines.values())
    ]
    if len(lines) > 1 and shown:
        parts = {
            name: run.metrics.reindex(columns=["step", *shown]).dropna(thresh=2)
            for name, run in lines.items()
        }
        yield (
            "",
            draw_courses(lines, shown),
            pd.concat(parts, names=["point", "row"]).reset_index("point"),
        )


def draw_courses(lines: Mapping[str, Run], shown: Sequence[str]) -> Figure:
    """Draw a panel for each quantity, with a line for each point.

    If there are more than five lines, label only the first and the last.
    """
    figure = Figure(figsize=(WIDE, 2.5), layout="constrained")
    for axes, column in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
        ends = []
        for k, (name, run) in enumerate(lines.items()):
            series = run.series(column)
            shade = to_hex(colormaps["viridis"](0.85 * k / max(1, len(lines) - 1)))
            axes.plot(series["step"], series[column], color=shade, linewidth=1)
            if len(series):
                ends.append(End(name, float(series[column].iloc[-1]), shade))
        axes.set(ylabel=COURSES[column])
        if column == "kernel_change":
            axes.set_ylim(0, None)
        elif all((run.series(column)[column].iloc[1:] > 0).all() for run in lines.values()):
            log_axis(axes, "y")
        step_axis(axes, max(int(run.metrics["step"].iloc[-1]) for run in lines.values()))
        if column == shown[-1]:
            name_ends(axes, ends if len(ends) <= 5 else [ends[0], ends[-1]])
    heading(figure, courses_title(lines))
    return figure


def courses_title(lines: Mapping[str, Run]) -> str:
    """Return the title: the kernel change at the first and at the last point."""
    ends = {
        name: float(run.metrics.reindex(columns=["kernel_change"])["kernel_change"].iloc[-1])
        for name, run in lines.items()
    }
    known = [(name, end) for name, end in ends.items() if np.isfinite(end)]
    if len(known) < 2:
        return "How training unfolds at every point"
    (first, start), *_, (last, end) = known
    missing = (
        f"; {len(lines) - len(known)} of {len(lines)} runs end in no number"
        if len(known) < len(lines)
        else ""
    )
    return f"The kernel ends {percent(start)} from where it began at {first}, and {percent(end)} at {last}{missing}"
