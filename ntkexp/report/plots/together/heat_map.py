"""The kernel change and the error of the frozen kernel
in a sweep over two keys, as heat maps.

Each cell is the arithmetic mean over the runs with its pair of values. A cross marks a
cell with a run that did not train: its last loss is more than half of its first loss,
or it has no result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, to_rgb
from matplotlib.figure import Figure
from numpy.typing import NDArray

from ntkexp.records.sweep import Level
from ntkexp.report.analysis.quantities import describe
from ntkexp.report.analysis.tables import Analysis
from ntkexp.report.plots.canvas import Canvas
from ntkexp.report.plots.rendering import SweepPicture
from ntkexp.report.plots.style import (
    NARROW,
    ON_DARK,
    ON_LIGHT,
    PALE,
    WIDE,
    brief,
    luminance,
    wrapped,
)
from ntkexp.report.plots.together.errors import levels_in_order
from ntkexp.report.run import Run
from ntkexp.text import listed, short

TRAINED = 0.5
"""A run has trained if its last loss is at most this fraction of its first loss."""
ERROR_SPLITS = ("frozen_start.query", "frozen_start.test", "frozen_start.train")
CELL_INCHES = 0.3
DARK = 0.178  # text on colours with a smaller luminance is white


def pictures(
    analysis: Analysis, runs: Mapping[Path, Run], *, quantity: str | None = None
) -> Iterator[SweepPicture]:
    """Yield one picture, of the two keys with the most values.

    `quantity`, such as "frozen_start.test", replaces the default quantities. Yield no
    picture if fewer than two keys have several values.
    """
    keys = sorted(analysis.sweep.axes, key=lambda key: -len(analysis.sweep.axes[key]))
    axes = keys[:2]
    if len(axes) < 2 or len(analysis.sweep.axes[axes[1]]) < 2:
        return
    names = [*[name for name in ERROR_SPLITS if name in analysis.quantities][:1]]
    if "kernel_change" in analysis.quantities:
        names.insert(0, "kernel_change")
    if quantity is not None:
        names = [quantity]
    cells = cells_of(analysis, runs, axes, names)
    drawn = [name for name in names if (cells[name] > 0).any()]
    if drawn:
        levels = [levels_in_order(analysis.sweep, key) for key in axes]
        averaged = [key for key in keys[2:] if len(analysis.sweep.axes[key]) > 1]
        draw = partial(draw_cells, cells, axes, levels, drawn, averaged)
        yield SweepPicture("", cells, draw)


def cells_of(
    analysis: Analysis,
    runs: Mapping[Path, Run],
    axes: Sequence[str],
    names: Sequence[str],
) -> pd.DataFrame:
    """Return a row for each pair of values: the mean of each quantity,
    and the numbers of runs."""
    trained = [
        run.folder in runs and has_trained(runs[run.folder])
        for run in analysis.sweep.runs
    ]
    table = analysis.runs.assign(untrained=np.logical_not(trained))
    groups = table.groupby(list(axes), sort=False, dropna=False)
    cells = groups[list(names)].mean()
    cells["runs"] = groups.size()
    cells["untrained"] = groups["untrained"].sum()
    return cells.reset_index()


def has_trained(run: Run) -> bool:
    """Return True if the run did not diverge, and if the last loss is at most `TRAINED`
    times the first loss."""
    losses = run.metrics["loss"].to_numpy(dtype=float)
    if run.diverged or not len(losses):
        return False
    return bool(losses[-1] <= TRAINED * losses[0])


def draw_cells(
    cells: pd.DataFrame,
    axes: Sequence[str],
    levels: Sequence[Sequence[Level]],
    names: Sequence[str],
    averaged: Sequence[str],
    canvas: Canvas,
) -> Figure:
    """Draw a panel for each quantity. The longer axis is horizontal.

    A cell is also a mean over the values of the keys `averaged`.
    """
    rows = len(levels[1])
    width = NARROW if len(names) == 1 else WIDE
    size = (width, 1.1 + CELL_INCHES * rows)
    panels = canvas.panels(size, 1, len(names))
    for panel, name in zip(panels[0], names, strict=True):
        draw_panel(panel, cells, axes, levels, name)
        panel.set_title("\n".join(wrapped(describe(name), 40)))
    crossed = int((cells["untrained"] > 0).sum())
    caption = "Cells are arithmetic means over runs."
    if averaged:
        caption = (
            "Cells are arithmetic means over runs, "
            f"with all values of {listed(averaged)}."
        )
    if crossed:
        caption += f" × in {crossed} of {len(cells)} cells: runs whose loss did not fall by half."
    return canvas.finish(answer(cells, names[0]), caption)


def draw_panel(
    panel: Axes,
    cells: pd.DataFrame,
    axes: Sequence[str],
    levels: Sequence[Sequence[Level]],
    name: str,
) -> None:
    """Draw the mean of a quantity as the colour and the number of each cell."""
    across, up = axes

    def grid(column: str) -> NDArray[Any]:
        table = cells.pivot(index=up, columns=across, values=column)
        table = table.reindex(index=list(levels[1]), columns=list(levels[0]))
        return table.to_numpy(dtype=float)

    values = grid(name)
    crosses = grid("untrained") > 0
    positive = values[values > 0]
    norm = LogNorm(positive.min(), positive.max() * (1 + 1e-9))
    colours = colormaps["viridis"].with_extremes(bad=PALE)
    panel.imshow(
        np.ma.masked_invalid(values),
        cmap=colours,
        norm=norm,
        aspect="auto",
        origin="lower",
    )
    for (row, column), value in np.ndenumerate(values):
        text = f"{short(value)}" if np.isfinite(value) else ""
        mark = f"{text} ×".strip() if crosses[row, column] else text
        ink = (
            ink_on(to_rgb(colours(norm(value))[:3])) if np.isfinite(value) else ON_LIGHT
        )
        panel.text(
            column, row, mark, ha="center", va="center", fontsize="small", color=ink
        )
    panel.set_xticks(range(len(levels[0])), [*map(name_of, levels[0])])
    panel.set_yticks(range(len(levels[1])), [*map(name_of, levels[1])])
    panel.tick_params(length=0)
    panel.set(xlabel=across, ylabel=up)
    for spine in panel.spines.values():
        spine.set_visible(False)


def ink_on(cell: tuple[float, float, float]) -> str:
    """Return the colour of text on a cell of this colour."""
    return ON_DARK if luminance(cell) < DARK else ON_LIGHT


def name_of(level: Level) -> str:
    if isinstance(level, float):
        return short(level)
    return str(level)


def answer(cells: pd.DataFrame, name: str) -> str:
    """Return the title: the range of a quantity over the cells."""
    low = short(float(cells[name].min()))
    high = short(float(cells[name].max()))
    words = describe(name)
    title = f"{words[0].upper()}{words[1:]} from {low} to {high}"
    return brief(title, f"Means from {low} to {high}")
