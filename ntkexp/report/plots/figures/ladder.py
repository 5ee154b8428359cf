"""The relative error of each kernel machine on every split. Controls come last."""

from __future__ import annotations

import math

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ntkexp.records.results import Result
from ntkexp.report.plots.error_panels import ErrorPanels
from ntkexp.report.plots.style import GREY, NARROW, colour, heading
from ntkexp.report.run import Run
from ntkexp.report.sentence import Likeness, exact_machines, likeness, main_split
from ntkexp.text import listed, short, spoken

MARKER = {"train": "^", "query": "o", "test": "s"}


def draw(run: Run) -> Figure | None:
    rows = [row for row in run.ladder if row.relative_error is not None]
    rows = [row for row in rows if math.isfinite(row.relative_error or 0.0)]
    if not rows:
        return None
    rows.sort(key=lambda row: row.control)  # controls last; a stable sort keeps the other order
    names = list(dict.fromkeys((row.machine, row.detail) for row in rows))
    exact = {id(row): likeness(row) is Likeness.EXACT for row in rows}
    figure = Figure(figsize=(NARROW, 1.35 + 0.19 * len(names)), layout="constrained")
    others = [row.relative_error or 0.0 for row in rows if not exact[id(row)]]
    panels = ErrorPanels.of(figure, others, has_exact=any(exact.values()))
    for row in rows:
        panels.plot(
            row.relative_error or 0.0,
            names.index((row.machine, row.detail)),
            MARKER.get(row.split, "o"),
            is_exact=exact[id(row)],
            color=colour(row.machine),
            markersize=4,
            alpha=0.8,
        )

    # the errors on the main split, to the right of the axes
    main = main_split(rows)
    on_main = {(row.machine, row.detail): row.relative_error for row in rows if row.split == main}
    numbers = [short(on_main.get(name)) for name in names]
    controls = {row.machine for row in rows if row.control}
    panels.name_rows([machine for machine, _ in names], numbers, main)
    mark_controls(panels, [machine in controls for machine, _ in names])

    # a legend for the markers
    splits = [split for split in MARKER if any(row.split == split for row in rows)]
    marks = [
        Line2D([], [], linestyle="", marker=MARKER[split], color=GREY, markersize=4)
        for split in splits
    ]
    figure.legend(marks, splits, loc="outside lower center", ncols=3, handletextpad=0.1)
    heading(figure, title(run.ladder))
    return figure


def mark_controls(panels: ErrorPanels, controls: list[bool]) -> None:
    """Draw a line above the controls, which do not know the network."""
    if not any(controls) or all(controls):
        return
    height = controls.index(True) - 0.5
    for panel in (panels.strip, panels.axes):
        if panel is not None:
            panel.axhline(height, color=GREY, linewidth=0.5, linestyle=(0, (3, 3)))
    panels.axes.annotate(
        "controls", (1, height), xytext=(-2, -1), xycoords=("axes fraction", "data"),
        textcoords="offset points", ha="right", va="top", fontsize=6, color=GREY,
    )  # fmt: skip


def title(results: tuple[Result, ...]) -> str:
    """Name the kernel machines that equal the network.

    >>> title((Result("test", "secant", relative_error=1e-15, floor=1e-13),))
    'Exact to rounding: secant'
    """
    controls = {row.machine for row in results if row.control}
    exact = [spoken(name) for name in exact_machines(results) if name not in controls]
    if exact:
        return f"Exact to rounding: {listed(exact)}"
    return "No kernel machine equals the trained network"


def table(run: Run) -> pd.DataFrame:
    return run.results
