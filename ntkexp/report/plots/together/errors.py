"""The errors of kernel machines along an axis of a sweep: dots, and lines of geometric means.

Runs without an error, because they diverged or the kernel machine does not apply, have no dot. The
title states how many runs have an error.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from ntkexp.report.analysis.tables import Analysis
from ntkexp.report.plots.style import LEAST, WIDE, End, colour, heading, name_ends
from ntkexp.report.run import Run
from ntkexp.text import short, spoken


def draw(
    analysis: Analysis, runs: Mapping[Path, Run]
) -> Iterator[tuple[str, Figure, pd.DataFrame]]:
    for split in ("query", "test", "train"):
        columns = {
            name.removesuffix(f".{split}"): name
            for name in analysis.quantities
            if name.endswith(f".{split}")
        }
        if columns and analysis.sweep.axes:
            axis = max(analysis.sweep.axes, key=lambda key: len(analysis.sweep.axes[key]))
            table = analysis.runs[["run", *analysis.sweep.axes, "seed", *columns.values()]]
            yield (
                f"-{split}",
                draw_errors(table, axis, list(analysis.sweep.axes[axis]), columns, split),
                table,
            )
            return


def draw_errors(
    table: pd.DataFrame, axis: str, levels: list[object], columns: Mapping[str, str], split: str
) -> Figure:
    """Draw the dots and the line of each kernel machine.

    `columns` maps its name to its column of errors.
    """
    figure = Figure(figsize=(WIDE, 3.2), layout="constrained")
    axes = figure.subplots()
    axes.set(yscale="log", xlabel=axis, ylabel=f"relative error ({split})")
    positions = level_positions(axes, levels)
    ends = []
    for machine, column in columns.items():
        errors = table[[axis, column]].dropna()
        heights = np.maximum(errors[column].to_numpy(dtype=float), LEAST)
        x = np.array([positions[levels.index(value)] for value in errors[axis]])
        middle = pd.Series(np.log(heights)).groupby(x).mean().map(math.exp)
        axes.plot(
            x, heights, "o", color=colour(machine), alpha=0.35, markersize=2.2, markeredgewidth=0
        )
        axes.plot(middle.index, middle, color=colour(machine))
        ends.append(End(spoken(machine), float(middle.iloc[-1]), colour(machine)))
    axes.yaxis.set_major_locator(LogLocator(numticks=8))
    # use text, because formulas are slow to draw
    axes.yaxis.set_major_formatter(lambda value, position: short(value))
    axes.yaxis.set_minor_locator(NullLocator())
    name_ends(axes, ends, gap=0.065)
    heading(figure, errors_title(table, axis, columns, levels))
    return figure


def level_positions(axes: Axes, levels: list[object]) -> list[float]:
    """Set up the x axis, and return the positions of the axis values `levels`.

    Numbers are drawn to scale. The scale is logarithmic if they are positive and vary more than
    5-fold. Other values are evenly spaced.
    """
    if any(isinstance(level, bool) or not isinstance(level, int | float) for level in levels):
        axes.set_xticks(range(len(levels)), [str(level) for level in levels])
        return [float(k) for k in range(len(levels))]
    numbers = [float(str(level)) for level in levels]
    if min(numbers) > 0 and max(numbers) > 5 * min(numbers):
        axes.set_xscale("log")
    every = -(-len(numbers) // 10)
    axes.set_xticks(
        sorted(numbers)[::every], [short(number) for number in sorted(numbers)[::every]]
    )
    axes.xaxis.set_minor_locator(NullLocator())
    return numbers


def errors_title(
    table: pd.DataFrame, axis: str, columns: Mapping[str, str], levels: list[object]
) -> str:
    """Return a sentence about the frozen kernel, or else about the machine with the largest error."""
    name = (
        "frozen_start"
        if "frozen_start" in columns
        else max(columns, key=lambda each: table[columns[each]].max())
    )
    column = columns[name]
    means = {
        level: mean
        for level in levels
        if (mean := geometric_mean(table, axis, level, column)) is not None
    }
    if len(means) < 2:
        return "The errors of the kernel machines"
    (first, start), *_, (last, end) = means.items()
    missing, whole = int(table[column].isna().sum()), len(table)
    runs = f"{whole} runs" if not missing else f"{whole - missing} of {whole} runs"
    return (
        f"The error of {spoken(name)} goes from {short(start)} at {axis}={first} to {short(end)} at {last} (geometric "
        f"means, {runs})"
    )


def geometric_mean(table: pd.DataFrame, axis: str, level: object, column: str) -> float | None:
    """Return the geometric mean of a column at the value `level` of an axis; None without numbers.

    >>> table = pd.DataFrame({"width": [1, 1, 2, 3], "error": [1.0, 1.0, 0.0, float("nan")]})
    >>> [geometric_mean(table, "width", level, "error") for level in (1, 2, 3)]
    [1.0, 0.0, None]
    """
    here = np.array([value == level for value in table[axis]])
    values = table[column][here].dropna().to_numpy(dtype=float)
    if not len(values):
        return None
    if values.all():
        return float(np.exp(np.log(values).mean()))
    return 0.0
