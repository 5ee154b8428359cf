"""The errors of kernel machines along an axis of a sweep: dots,
and lines of arithmetic means.

Means are taken over the runs at each value of the axis. A run has no dot if its error
is not defined: the run diverged, or the kernel machine does not apply to it. Kernel
machines that are exact up to rounding in every run are only listed in the caption,
because they would stretch the axis by ten decades."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeGuard

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from ntkexp.records.sweep import Level, Sweep
from ntkexp.report.analysis.tables import Analysis
from ntkexp.report.plots.canvas import Canvas
from ntkexp.report.plots.rendering import SweepPicture
from ntkexp.report.plots.style import (
    LEAST,
    WIDE,
    End,
    brief,
    colour,
    dashes,
    log_axis,
    name_ends,
)
from ntkexp.report.run import Run
from ntkexp.report.sentence import Likeness, likeness
from ntkexp.text import listed, short, spoken


def pictures(
    analysis: Analysis,
    runs: Mapping[Path, Run],
    *,
    key: str | None = None,
    split: str | None = None,
) -> Iterator[SweepPicture]:
    """Yield one picture, or none if there are no errors.

    By default, the x axis is the key with the most values, and the split is the first
    split that has errors.
    """
    of_sweep = [runs[run.folder] for run in analysis.sweep.runs if run.folder in runs]
    for shown in (split,) if split is not None else ("query", "test", "train"):
        columns = {
            name.removesuffix(f".{shown}"): name
            for name in analysis.quantities
            if name.endswith(f".{shown}")
        }
        if columns and analysis.sweep.axes:
            axis = key or max(
                analysis.sweep.axes, key=lambda key: len(analysis.sweep.axes[key])
            )
            table = analysis.runs[
                ["run", *analysis.sweep.axes, "seed", *columns.values()]
            ]
            levels = levels_in_order(analysis.sweep, axis)
            exact = exact_in_all(of_sweep, shown)
            errors = partial(draw_errors, table, axis, levels, columns, shown, exact)
            yield SweepPicture(f"-{shown}", table, errors)
            return


def exact_in_all(runs: Iterable[Run], split: str) -> list[str]:
    """Return the kernel machines whose error on a split is only rounding
    in every run."""
    is_exact: dict[str, bool] = {}
    for run in runs:
        for row in run.ladder:
            if row.split == split and row.relative_error is not None:
                exact = likeness(row) is Likeness.EXACT
                is_exact[row.machine] = is_exact.get(row.machine, True) and exact
    return [machine for machine, exact in is_exact.items() if exact]


def draw_errors(
    table: pd.DataFrame,
    axis: str,
    levels: Sequence[Level],
    columns: Mapping[str, str],
    split: str,
    exact: Sequence[str],
    canvas: Canvas,
) -> Figure:
    """Draw the dots and the line of each kernel machine.

    `columns` maps the name of a kernel machine to the column of its errors. The kernel
    machines `exact` are not drawn, unless there are no others.
    """
    axes = canvas.panels((WIDE, 3.2))[0, 0]
    axes.set(xlabel=axis, ylabel=f"relative error ({split})")
    positions = level_positions(axes, levels)
    drawn = {name: column for name, column in columns.items() if name not in exact}
    drawn = drawn or dict(columns)
    ends = []
    for machine, column in drawn.items():
        errors = table.dropna(subset=[column])
        heights = np.maximum(errors[column].to_numpy(dtype=float), LEAST)
        x = np.array([positions[k] for k in level_indices(errors[axis], levels)])
        ink = colour(machine)
        axes.plot(
            x, heights, "o", color=ink, alpha=0.35, markersize=2.2, markeredgewidth=0
        )
        means = pd.Series(heights).groupby(x).mean()
        axes.plot(means.index, means, color=ink, linestyle=dashes(machine))
        if len(means):
            ends.append(End(spoken(machine), float(means.iloc[-1]), ink))
    log_axis(axes, "y")
    name_ends(axes, ends)
    title, caption = errors_title(table, axis, drawn, levels)
    hidden = [spoken(name) for name in columns if name not in drawn]
    if hidden:
        caption += f" Exact to rounding in all runs: {listed(hidden)}."
    return canvas.finish(title, caption)


def levels_in_order(sweep: Sweep, key: str) -> list[Level]:
    """Return the values of a swept key as they are drawn: numbers in ascending order,
    other values in the order of the sweep."""
    levels = list(sweep.axes[key])
    numbers = [float(level) for level in levels if is_number(level)]
    if len(numbers) < len(levels):
        return levels
    return [levels[k] for k in np.argsort(numbers)]


def is_number(level: Level) -> TypeGuard[int | float]:
    return isinstance(level, int | float) and not isinstance(level, bool)


def level_indices(values: pd.Series, levels: Sequence[Level]) -> list[int]:
    """Return the index of each value in `levels`. Tables have NaN in place of None."""
    return [levels.index(None if pd.isna(value) else value) for value in values]


def level_positions(axes: Axes, levels: Sequence[Level]) -> list[float]:
    """Set up the x axis, and return the positions of the axis values `levels`.

    If all levels are numbers, they are drawn to scale. If all numbers are positive and
    vary by more than a factor of 5, the scale is logarithmic. Other levels are evenly
    spaced."""
    if not all(is_number(level) for level in levels):
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
    table: pd.DataFrame, axis: str, columns: Mapping[str, str], levels: Sequence[Level]
) -> tuple[str, str]:
    """Return the title and the caption. The title is about the frozen kernel. If it is
    not drawn, the title is about the kernel machine with the largest error."""
    name = (
        "frozen_start"
        if "frozen_start" in columns
        else max(columns, key=lambda each: table[columns[each]].max())
    )
    column = columns[name]
    by_level = table.groupby(level_indices(table[axis], levels))[column]
    means = by_level.mean().dropna()
    whole = len(table)
    present = whole - int(table[column].isna().sum())
    runs = f"{whole} runs" if present == whole else f"{present} of {whole} runs"
    caption = "Lines are arithmetic means over the runs at each value, dots are runs."
    if len(means) < 2:
        return "The errors of the kernel machines", caption
    change = f"from {short(means.iloc[0])} to {short(means.iloc[-1])}"
    title = brief(
        f"The error of {spoken(name)} goes {change}", f"An error goes {change}"
    )
    first, last = (levels[k] for k in means.index[[0, -1]])
    where = f"{spoken(name)} from {axis}={first} to {last} ({runs})"
    return title, f"Title: {where}. {caption}"
