"""The numbers that diagnostics measured during training. Each panel shows one quantity.

If a diagnostic measures a quantity for each layer, the panel has one line for each
layer, from blue for the first layer to orange for the last."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ntkexp.records.diagnostics import COLUMN
from ntkexp.report.plots.canvas import Canvas
from ntkexp.report.plots.style import NARROW, End, name_ends, shade
from ntkexp.report.run import Run


def draw(run: Run, canvas: Canvas) -> Figure | None:
    panels = by_quantity(run)
    if not panels:
        return None
    size = (NARROW, 0.7 + 1.3 * len(panels))
    rows = canvas.panels(size, len(panels), 1, sharex=True)[:, 0]
    for axes, (quantity, columns) in zip(rows, panels.items(), strict=True):
        draw_quantity(axes, run, quantity, columns)
    rows[-1].set_xlabel("step")
    rows[-1].xaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
    return canvas.finish("Diagnostics during training")


def table(run: Run) -> pd.DataFrame:
    columns = [column for columns in by_quantity(run).values() for column in columns]
    return run.metrics[["step", *columns]].dropna(subset=columns, how="all")


def by_quantity(run: Run) -> dict[str, list[str]]:
    """Return the columns of each quantity. Columns without finite numbers are left out.

    The quantity of the column "diagnostics.layer_alignment.labels.network.1" is
    "layer_alignment.labels", and "network.1" is the name of its line.
    """
    panels: dict[str, list[str]] = {}
    for column in map(str, run.metrics):
        if column.startswith(COLUMN) and len(run.series(column)):
            quantity = ".".join(column.removeprefix(COLUMN).split(".")[:2])
            panels.setdefault(quantity, []).append(column)
    return panels


def draw_quantity(axes: Axes, run: Run, quantity: str, columns: list[str]) -> None:
    ends = []
    for number, column in enumerate(columns):
        series = run.series(column)
        ink = shade(number, len(columns))
        axes.plot(series["step"], series[column], ".-", color=ink, linewidth=1)
        name = column.removeprefix(f"{COLUMN}{quantity}").removeprefix(".")
        ends.append(End(name, float(series[column].iloc[-1]), ink))
    if len(ends) > 1:
        name_ends(axes, ends)
    axes.set_title(
        quantity.replace(".", ": ").replace("_", " "), loc="left", fontsize="medium"
    )
