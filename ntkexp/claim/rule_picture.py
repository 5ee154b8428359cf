"""Pictures of one rule of a claim: the judged rows and the expected range."""

from __future__ import annotations

import math
from functools import singledispatch
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from ntkexp.claim.expectation import (
    AbstractAverage,
    AbstractExpectation,
    Identity,
    Location,
    Order,
    Slope,
)
from ntkexp.report.analysis.laws import limit
from ntkexp.report.plots.style import VERMILION, End, log_axis, name_ends, tick

SMALLEST_DRAWN = 1e-18
"""Smaller errors are drawn at this value, because zero has no logarithm."""


@singledispatch
def draw_rows(
    rule: AbstractExpectation, axes: Axes, table: pd.DataFrame, colour: str
) -> None:
    """Draw the rows of a rule. By default, draw a dot per row."""
    axes.plot(range(len(table)), table["value"], "o", color=colour, zorder=3)


@singledispatch
def mark_range(rule: AbstractExpectation, axes: Axes) -> None:
    """Draw the expected range of a rule, and label the axes."""
    axes.set(xlabel="row", ylabel="figure")


@draw_rows.register(Identity)
def _(rule: Identity, axes: Axes, table: pd.DataFrame, colour: str) -> None:
    errors = table["value"].abs().to_numpy(dtype=float)
    drawn = np.sort(np.maximum(errors, SMALLEST_DRAWN))
    axes.plot(
        np.arange(1, len(drawn) + 1) / len(drawn), drawn, "o", color=colour, zorder=3
    )


@mark_range.register(Identity)
def _(rule: Identity, axes: Axes) -> None:
    log_axis(axes, "y")
    axes.axhline(rule.tolerance, color=VERMILION, linewidth=0.8, linestyle="--")
    axes.set(xlabel="share of rows with a smaller error", ylabel="error")


@draw_rows.register(AbstractAverage)
def _(rule: AbstractAverage, axes: Axes, table: pd.DataFrame, colour: str) -> None:
    figures = np.array(rule.figures(table))
    mean = figures.mean()
    if rule.is_log:
        figures = np.exp(figures)
        mean = math.exp(mean)
    axes.plot(range(len(figures)), figures, "o", color=colour, zorder=3)
    axes.axhline(mean, color=colour, linewidth=0.8, zorder=2)


@mark_range.register(AbstractAverage)
def _(rule: AbstractAverage, axes: Axes) -> None:
    # the band and the limits of the axis, on the scale of the axis
    ends = [rule.expected.low, rule.expected.high]
    if rule.is_log:
        log_axis(axes, "y")
    low, high = axes.get_ylim()
    if rule.is_log:
        low, high = math.log(low), math.log(high)

    # Show every finite end of the band, and a strip of the band beyond it if no row lies
    # there. Replace an infinite end by the limit of the axis.
    finite = [end for end in ends if math.isfinite(end)]
    strip = 0.1 * (max([high, *finite]) - min([low, *finite]))
    lowest = min([low, *(end - strip for end in finite if end < low)])
    highest = max([high, *(end + strip for end in finite if end > high)])
    band = np.clip(ends, lowest, highest)
    if rule.is_log:
        band = np.exp(band)
    axes.axhspan(*band, color=VERMILION, alpha=0.15, linewidth=0, zorder=0)
    label = "figure of a seed"
    if isinstance(rule, Order):
        label = f"{rule.above} {'/' if rule.is_log else '−'} {rule.below}"
    axes.set(xlabel="seed", ylabel=label, xticks=[])


FAINT = {"alpha": 0.25, "linewidth": 0.8}


def draw_seeds(
    axes: Axes, table: pd.DataFrame, along: str, column: str, **look: Any
) -> None:
    """Draw a line for each seed."""
    for _, seed in table.sort_values(along).groupby("seed"):
        axes.plot(seed[along], seed[column], zorder=1, **look)


@draw_rows.register(Slope)
def _(rule: Slope, axes: Axes, table: pd.DataFrame, colour: str) -> None:
    draw_seeds(axes, table, rule.along, "value", color=colour, **FAINT)
    positive = table[table["value"] > 0]
    means = positive["value"].astype(float).groupby(positive[rule.along]).mean()
    axes.plot(means.index, means, "o", color=colour, zorder=3)


@mark_range.register(Slope)
def _(rule: Slope, axes: Axes) -> None:
    """Draw a line with the expected slope through the geometric mean
    of the last drawn points."""
    log_axis(axes, "x")
    log_axis(axes, "y")
    points = [line for line in axes.get_lines() if line.get_linestyle() == "None"]
    if points:
        x = np.asarray(points[-1].get_xdata(), dtype=float)
        y = np.asarray(points[-1].get_ydata(), dtype=float)
        tick(axes, sorted(x.tolist()))
        heights = (
            np.exp(np.log(y).mean()) * (x / np.exp(np.log(x).mean())) ** rule.value
        )
        axes.plot(x, heights, "--", color=VERMILION, linewidth=0.8, zorder=2)
        end = End(f"expected {limit(rule.expected)}", float(heights[-1]), VERMILION)
        name_ends(axes, [end])
    axes.set(xlabel=rule.along, ylabel="figure")


@draw_rows.register(Location)
def _(rule: Location, axes: Axes, table: pd.DataFrame, colour: str) -> None:
    draw_seeds(axes, table, rule.along, "value", color=colour, **FAINT)
    means = table.set_index(rule.along)["value"].astype(float).groupby(level=0).mean()
    axes.plot(means.index, means, "o-", color=colour, zorder=3)


@mark_range.register(Location)
def _(rule: Location, axes: Axes) -> None:
    log_axis(axes, "x")
    low = math.exp(rule.expected.low)
    high = math.exp(rule.expected.high)
    axes.axvspan(low, high, color=VERMILION, alpha=0.15, linewidth=0, zorder=0)
    axes.set(xlabel=rule.along, ylabel="figure")
