"""The relative error of each kernel machine on every split. Controls come last."""

from __future__ import annotations

import math

import pandas as pd
from matplotlib.figure import Figure

from ntkexp.records.results import Result
from ntkexp.report.plots.canvas import Canvas
from ntkexp.report.plots.error_panels import ErrorPanels, rows_of
from ntkexp.report.plots.style import GREY, NARROW, brief, colour, write
from ntkexp.report.run import Run
from ntkexp.report.sentence import Likeness, exact_machines, likeness, main_split
from ntkexp.text import listed, short, spoken

MARKER = {"train": "^", "query": "o", "test": "s"}
# the same markers as text, for captions
MARK = {"train": "▲", "query": "●", "test": "■"}


def draw(run: Run, canvas: Canvas) -> Figure | None:
    rows = [row for row in run.ladder if row.relative_error is not None]
    rows = [row for row in rows if math.isfinite(row.relative_error or 0.0)]
    if not rows:
        return None
    # move controls to the end; the stable sort keeps the order of all other rows
    rows.sort(key=lambda row: row.control)
    controls = {row.machine for row in rows if row.control}
    names = list(dict.fromkeys((row.machine, row.detail) for row in rows))
    places = rows_of([machine in controls for machine, _ in names])
    heights = dict(zip(names, places, strict=True))
    size = (NARROW, 1.55 + 0.19 * len(names))
    others = [row.relative_error or 0.0 for row in rows if not is_exact(row)]
    rounding = [row.relative_error or 0.0 for row in rows if is_exact(row)]
    panels = ErrorPanels.of(canvas, size, others, rounding)
    for row in rows:
        panels.plot(
            row.relative_error or 0.0,
            heights[row.machine, row.detail],
            MARKER.get(row.split, "o"),
            is_exact=is_exact(row),
            color=colour(row.machine),
            markersize=4,
            alpha=0.8,
        )
    main = main_split(rows)
    name_rows(panels, [row for row in rows if row.split == main], heights, main)

    splits = [split for split in MARKER if any(row.split == split for row in rows)]
    if not canvas.is_new:  # the caption of a new figure explains the markers
        for split in splits:
            panels.axes.plot(
                [], [], MARKER[split], color=GREY, markersize=4, label=split
            )
        panels.axes.legend()
    return canvas.finish(
        title(run.ladder), caption(splits, main, has_controls=bool(controls))
    )


def is_exact(row: Result) -> bool:
    return likeness(row) is Likeness.EXACT


def name_rows(
    panels: ErrorPanels,
    rows: list[Result],
    heights: dict[tuple[str, str], int],
    split: str,
) -> None:
    """Write the names of the kernel machines on the left, and their errors on the main
    split on the right. `rows` are the rows of this split."""
    errors = {(row.machine, row.detail): row.relative_error for row in rows}
    numbers = [short(errors.get(name)) for name in heights]
    machines = [machine for machine, _ in heights]
    panels.name_rows(machines, list(heights.values()), numbers, f"{split} error")
    for row in rows:
        if row.control and is_exact(row):
            place = (0, heights[row.machine, row.detail])
            write(panels.axes, "by construction", place, color=GREY)


def caption(splits: list[str], main: str, *, has_controls: bool) -> str:
    marks = ", ".join(f"{MARK[split]} {split}" for split in splits)
    words = f"‖f̂ − f_T‖/‖f_T − f_0‖ on {marks}; numbers: {main}."
    if not has_controls:
        return words
    return f"{words} Controls do not know the network."


def title(results: tuple[Result, ...]) -> str:
    """Name the kernel machines that equal the network.

    >>> title((Result("test", "secant", relative_error=1e-15, floor=1e-13),))
    'Exact to rounding: secant'
    """
    controls = {row.machine for row in results if row.control}
    exact = [spoken(name) for name in exact_machines(results) if name not in controls]
    if exact:
        few = f"{len(exact)} kernel machines are exact to rounding"
        return brief(f"Exact to rounding: {listed(exact)}", few)
    return "No kernel machine equals the trained network"


def table(run: Run) -> pd.DataFrame:
    return run.results
