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
    names = list(dict.fromkeys((row.machine, row.detail) for row in rows))
    exact = {id(row): likeness(row) is Likeness.EXACT for row in rows}
    controls = {row.machine for row in rows if row.control}
    heights = dict(
        zip(names, rows_of([machine in controls for machine, _ in names]), strict=True)
    )
    size = (NARROW, 1.55 + 0.19 * len(names))
    others = [row.relative_error or 0.0 for row in rows if not exact[id(row)]]
    rounding = [row.relative_error or 0.0 for row in rows if exact[id(row)]]
    panels = ErrorPanels.of(canvas, size, others, rounding)
    for row in rows:
        panels.plot(
            row.relative_error or 0.0,
            heights[row.machine, row.detail],
            MARKER.get(row.split, "o"),
            is_exact=exact[id(row)],
            color=colour(row.machine),
            markersize=4,
            alpha=0.8,
        )

    # the errors on the main split, to the right of the axes
    main = main_split(rows)
    on_main = {
        (row.machine, row.detail): row.relative_error
        for row in rows
        if row.split == main
    }
    numbers = [short(on_main.get(name)) for name in names]
    machines = [machine for machine, _ in names]
    panels.name_rows(machines, list(heights.values()), numbers, f"{main} error")
    for row in rows:
        if row.control and row.split == main and exact[id(row)]:
            place = (0, heights[row.machine, row.detail])
            write(panels.axes, "by construction", place, color=GREY)

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
