"""The pictures of a sweep, each with the numbers that it shows: its laws, errors and courses along an axis."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from ntkexp.report.analysis.estimate import PowerLaw
from ntkexp.report.analysis.laws import Fitted, law_in_words, limit, number
from ntkexp.report.analysis.tables import Analysis
from ntkexp.report.plots.run_plots import LEAST, Picture
from ntkexp.report.plots.style import (
    BLUE,
    NARROW,
    PALE,
    VERMILION,
    WIDE,
    End,
    colour,
    heading,
    house_style,
    log_axis,
    name_ends,
    step_axis,
    tick,
    wrapped,
)
from ntkexp.report.run import Run, describe
from ntkexp.text import percent, short, spoken


def exhibition(analysis: Analysis, runs: Mapping[Path, Run]) -> Iterator[Picture]:
    """Draw every picture of a sweep that applies, those with laws first."""
    with house_style():
        for place, found in enumerate(analysis.laws, start=1):
            if found.law is not None:
                table = fitted_runs(analysis, found)
                yield Picture(f"laws-{place}", draw_law(found, found.law, table), table)
        for split in ("probe", "test", "train"):
            columns = {
                name.removesuffix(f".{split}"): name for name in analysis.quantities if name.endswith(f".{split}")
            }
            if columns and analysis.sweep.axes:
                axis = max(analysis.sweep.axes, key=lambda key: len(analysis.sweep.axes[key]))
                table = analysis.runs[["run", *analysis.sweep.axes, "seed", *columns.values()]]
                figure = draw_errors(table, axis, list(analysis.sweep.axes[axis]), columns, split)
                yield Picture(f"errors-{split}", figure, table)
                break
        lines = first_seeds(analysis, runs)
        shown = [column for column in COURSES if any(len(run.series(column)) > 1 for run in lines.values())]
        if len(lines) > 1 and shown:
            parts = {
                name: run.metrics.reindex(columns=["step", *shown]).dropna(thresh=2) for name, run in lines.items()
            }
            table = pd.concat(parts, names=["point", "row"]).reset_index("point")
            yield Picture("over_steps", draw_courses(lines, shown), table)


# --- How does a number change along an axis? A power law in a log–log plot, beside the theory's exponent.
#
# Each seed is a faint line, their geometric means are dots, the fit is a line with the wedge of its interval.


def fitted_runs(analysis: Analysis, found: Fitted) -> pd.DataFrame:
    """Choose the runs that were fitted."""
    here = analysis.runs
    for key, value in found.others.items():
        here = here[here[key] == value]
    table = here[["run", found.fit.axis, "seed", found.fit.quantity]]
    return table[(table[found.fit.quantity] > 0) & (table[found.fit.axis] > 0)].reset_index(drop=True)


def draw_law(found: Fitted, law: PowerLaw, table: pd.DataFrame) -> Figure:
    """Draw one law."""
    axis, quantity = found.fit.axis, found.fit.quantity
    figure = Figure(figsize=(NARROW, 2.9), layout="constrained")
    axes = figure.subplots()
    axes.set(xscale="log", yscale="log", xlabel=axis, ylabel="\n".join(wrapped(describe(quantity), 28)))
    for _, seed in table.groupby("seed"):
        axes.plot(seed[axis], seed[quantity], color=PALE, linewidth=0.8, zorder=1)
    means = np.exp(np.log(table.set_index(axis)[quantity]).groupby(level=0).mean())
    axes.plot(means.index, means, "o", color=BLUE, zorder=3)
    tick(axes, [float(x) for x in means.index])

    # The law over its range, with the wedge of its exponents
    x = np.geomspace(law.start, law.stop, 50)
    pivot = np.sqrt(law.start * law.stop)
    middle = law.at(np.array([pivot]))
    axes.plot(x, law.at(x), color=BLUE, zorder=2)
    if law.exponent.known:
        low, high = (middle[0] * (x / pivot) ** end for end in (law.exponent.low, law.exponent.high))
        axes.fill_between(x, low, high, color=BLUE, alpha=0.15, linewidth=0, zorder=0)
    ends = [End(f"fit {number(law.exponent.value)}", float(law.at(x)[-1]), BLUE)]

    # Theory's slope through the middle of the fit
    if (expected := found.fit.expected) is not None:
        border = np.array([law.start, law.stop])
        heights = middle * (border / pivot) ** expected.value
        axes.plot(border, heights, "--", color=VERMILION, linewidth=0.7, zorder=2)
        ends.append(End(f"theory {limit(expected)}", float(heights[-1]), VERMILION))
    name_ends(axes, ends)
    heading(figure, law_in_words(found, law))
    return figure


# --- Which kernel machines come closer along an axis? Relative errors: a dot a run, a line through geometric means.
#
# A run that has no such number, as it diverged or its machine did not apply, has no dot; the title counts these runs.


def draw_errors(table: pd.DataFrame, axis: str, levels: list[object], columns: Mapping[str, str], split: str) -> Figure:
    """Draw a line a machine, from its column of errors."""
    figure = Figure(figsize=(WIDE, 3.2), layout="constrained")
    axes = figure.subplots()
    axes.set(yscale="log", xlabel=axis, ylabel=f"relative error ({split})")
    places = place_levels(axes, levels)
    ends = []
    for machine, column in columns.items():
        errors = table[[axis, column]].dropna()
        heights = np.maximum(errors[column].to_numpy(dtype=float), LEAST)
        x = np.array([places[levels.index(value)] for value in errors[axis]])
        middle = pd.Series(np.log(heights)).groupby(x).mean().map(math.exp)
        axes.plot(x, heights, "o", color=colour(machine), alpha=0.35, markersize=2.2, markeredgewidth=0)
        axes.plot(middle.index, middle, color=colour(machine))
        ends.append(End(spoken(machine), float(middle.iloc[-1]), colour(machine)))
    axes.yaxis.set_major_locator(LogLocator(numticks=8))
    axes.yaxis.set_major_formatter(lambda value, position: short(value))  # not as a formula, which is slow to draw
    axes.yaxis.set_minor_locator(NullLocator())
    name_ends(axes, ends, gap=0.065)
    heading(figure, errors_title(table, axis, columns, levels))
    return figure


def place_levels(axes: Axes, levels: list[object]) -> list[float]:
    """Place the levels: numbers to scale, by their logarithms where they are positive; others side by side."""
    if any(isinstance(level, bool) or not isinstance(level, int | float) for level in levels):
        axes.set_xticks(range(len(levels)), [str(level) for level in levels])
        return [float(k) for k in range(len(levels))]
    numbers = [float(str(level)) for level in levels]
    if min(numbers) > 0 and max(numbers) > 5 * min(numbers):
        axes.set_xscale("log")
    every = -(-len(numbers) // 10)
    axes.set_xticks(sorted(numbers)[::every], [short(number) for number in sorted(numbers)[::every]])
    axes.xaxis.set_minor_locator(NullLocator())
    return numbers


def errors_title(table: pd.DataFrame, axis: str, columns: Mapping[str, str], levels: list[object]) -> str:
    """What becomes of the frozen kernel, which is what theory speaks of, or of the machine that is worst."""
    name = "frozen_start" if "frozen_start" in columns else max(columns, key=lambda each: table[columns[each]].max())
    column = columns[name]
    means = {level: mean for level in levels if (mean := geometric_mean(table, axis, level, column)) is not None}
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
    """Average the logarithms of a column at a level; nothing where it has no number.

    >>> table = pd.DataFrame({"width": [1, 1, 2, 3], "error": [1.0, 1.0, 0.0, float("nan")]})
    >>> [geometric_mean(table, "width", level, "error") for level in (1, 2, 3)]
    [1.0, 0.0, None]
    """
    here = np.array([value == level for value in table[axis]])
    values = table[column][here].dropna().to_numpy(dtype=float)
    if not len(values):
        return None
    return float(np.exp(np.log(values).mean())) if values.all() else 0.0


# --- How do drift and spectrum unfold along an axis? One seed at every point, from dark to light along the axis.


COURSES = {"loss": "loss", "drift": "movement of the kernel", "lambda_max": "largest eigenvalue"}
MOST = 24  # lines that can still be told apart


def first_seeds(analysis: Analysis, runs: Mapping[Path, Run]) -> dict[str, Run]:
    """Choose the first seed at every point that has one, by what the point is called; evenly fewer of too many."""
    found: dict[str, Run] = {}
    for place in analysis.sweep.runs:
        name = ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in place.axes.items())
        if place.folder in runs and name not in found:
            found[name] = runs[place.folder]
    every = -(-len(found) // MOST)
    return dict(list(found.items())[::every])


def draw_courses(lines: Mapping[str, Run], shown: Sequence[str]) -> Figure:
    """Draw a panel a quantity, a line a point; the first and the last of many are named."""
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
        if column == "drift":
            axes.set_ylim(0, None)
        elif all((run.series(column)[column].iloc[1:] > 0).all() for run in lines.values()):
            log_axis(axes, "y")
        step_axis(axes, max(int(run.metrics["step"].iloc[-1]) for run in lines.values()))
        if column == shown[-1]:
            name_ends(axes, ends if len(ends) <= 5 else [ends[0], ends[-1]])
    heading(figure, courses_title(lines))
    return figure


def courses_title(lines: Mapping[str, Run]) -> str:
    """How far the kernel moves at the first point and at the last."""
    ends = {name: float(run.metrics.reindex(columns=["drift"])["drift"].iloc[-1]) for name, run in lines.items()}
    known = [(name, end) for name, end in ends.items() if np.isfinite(end)]
    if len(known) < 2:
        return "How training unfolds at every point"
    (first, start), *_, (last, end) = known
    missing = f"; {len(lines) - len(known)} of {len(lines)} runs end in no number" if len(known) < len(lines) else ""
    return f"The kernel ends {percent(start)} from where it began at {first}, and {percent(end)} at {last}{missing}"
