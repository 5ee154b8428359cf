"""Figures of papers, drawn again in their own axes from tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ntkexp.report.plots.style import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PALE,
    PURPLE,
    VERMILION,
    WIDE,
    End,
    heading,
    log_axis,
    name_ends,
)
from ntkexp.report.plots.together.laws import tick

# --- How far does training move what a network is made of? Each part against width, beside lines of 1/√n and 1/n.


COLOURS = (BLUE, GREEN, ORANGE, VERMILION, BLACK)
GUIDES = {"1/√n": -0.5, "1/n": -1.0}


def draw_change_by_width(
    rows: pd.DataFrame, along: str, panels: Mapping[str, Mapping[str, str]], answer: str
) -> Figure:
    """Draw columns of the rows: faint seeds, and the geometric mean of them."""
    figure = Figure(figsize=(WIDE, 2.7), layout="constrained")
    for axes, (title, lines) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        log_axis(axes, "x")
        log_axis(axes, "y")
        ends = [
            line(axes, rows, along, End(name, 0, colour), column)
            for (name, column), colour in zip(lines.items(), COLOURS, strict=False)
        ]
        guide(axes, rows[along], max(rows.loc[rows[along] == rows[along].min(), list(lines.values())].mean()))
        tick(axes, sorted(rows[along].unique().tolist()))
        name_ends(axes, ends)
        axes.set(xlabel="width n", title=title)
    heading(figure, answer)
    return figure


def line(axes: Axes, rows: pd.DataFrame, along: str, end: End, column: str) -> End:
    """Draw one column, and give where it ends."""
    for _, seed in rows.sort_values(along).groupby("seed"):
        axes.plot(seed[along], seed[column], color=end.colour, alpha=0.2, linewidth=0.7, zorder=1)
    means = rows[column].astype(float).map(math.log).groupby(rows[along]).mean().map(math.exp)
    axes.plot(means.index, means, "o-", color=end.colour, zorder=3)
    return end._replace(height=float(means.iloc[-1]))


def guide(axes: Axes, widths: pd.Series[float], height: float) -> None:
    """Draw the two powers from above the highest line's beginning."""
    ends = np.array([widths.min(), widths.max()], dtype=float)
    for (name, power), style in zip(GUIDES.items(), ("--", ":"), strict=True):
        heights = 1.6 * height * (ends / ends[0]) ** power
        axes.plot(ends, heights, style, color=GREY, linewidth=0.8, zorder=0)
        middle = np.sqrt(ends.prod()), np.sqrt(heights.prod())
        axes.annotate(name, middle, xytext=(2, 2), textcoords="offset points", color=GREY, fontsize=7)


# --- Does the test error peak where a network begins to fit all targets, and fall again? Errors and condition number.


ROOM = 1.15
"""The axis of errors ends so far above the highest mean: single seeds may be far above."""


def draw_interpolation_peak(rows: pd.DataFrame, threshold: float, answer: str) -> Figure:
    """Draw rows with `parameters`, `test_error`, `train_error` and `condition`."""
    figure = Figure(figsize=(WIDE, 2.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    means = rows.groupby("parameters")[["test_error", "train_error"]].mean()
    ends, faint = [], 0.5 / math.sqrt(rows["seed"].nunique())
    for name, colour in (("test_error", BLUE), ("train_error", ORANGE)):
        for _, seed in rows.sort_values("parameters").groupby("seed"):
            left.plot(seed["parameters"], seed[name], color=colour, alpha=faint, linewidth=0.6, zorder=1)
        left.plot(means.index, means[name], "o-", color=colour, zorder=3)
        ends.append(End(name.partition("_")[0], float(means[name].iloc[-1]), colour))
    left.set(ylim=(0, ROOM * means.to_numpy().max()), ylabel="squared error / variance")
    full = rows[rows["parameters"] >= threshold]  # with fewer parameters the kernel has no full rank
    middle = full["condition"].map(math.log).groupby(full["parameters"]).mean().map(math.exp)
    right.plot(full["parameters"], full["condition"], ".", color=GREEN, alpha=0.25, markersize=2, zorder=1)
    right.plot(middle.index, middle, "o-", color=GREEN, zorder=3)
    right.set(ylabel="condition number of the kernel")
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set(xlabel="number of parameters", xlim=(rows["parameters"].min() / 1.1, rows["parameters"].max() * 1.1))
        axes.axvline(threshold, color=GREY, linestyle="--", linewidth=0.8, zorder=0)
        tick(axes, sorted(rows["parameters"].unique().tolist()))
    log_axis(right, "y")
    left.annotate(
        "interpolation\nthreshold", (threshold, 1), xycoords=("data", "axes fraction"), xytext=(-3, -2),
        textcoords="offset points", ha="right", va="top", fontsize=7, color=GREY,
    )  # fmt: skip
    name_ends(left, ends)
    heading(figure, answer)
    return figure


# --- What does a step on one observation do to the other values of a function? f before and after, beside its kernel.


STEP_COLOURS = (BLUE, GREEN, PURPLE)


def draw_scalar_step(
    rows: pd.DataFrame, observation: tuple[float, float], kernels: Sequence[tuple[str, pd.Series[float]]], answer: str
) -> Figure:
    """Draw rows with `x`, `before` and `after`, and kernels over the same x by their names."""
    figure = Figure(figsize=(WIDE, 2.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    x, (place, value) = rows["x"], observation
    for name, colour, size in (("before", GREY, 2.5), ("after", BLACK, 2)):
        left.plot(x, rows[name], "o", color=colour, markersize=size)
        left.plot(x, rows[name], color=colour, linewidth=0.5, alpha=0.5)
    left.plot([place], [value], "X", color=VERMILION, markersize=7, zorder=4)
    left.annotate(
        "observation", (place, value), xytext=(0, 7), textcoords="offset points", ha="center", fontsize=7,
        color=VERMILION,
    )  # fmt: skip
    left.set(xlabel="x", ylabel="f(x)")
    name_ends(left, [End(name, rows[name].iloc[-1], colour) for name, colour in (("before", GREY), ("after", BLACK))])
    over_x(right, x, place)
    for (_, share), colour in zip(kernels, STEP_COLOURS, strict=False):
        right.plot(x, share, "o", color=colour, markersize=2.5)
        right.plot(x, share, color=colour, linewidth=0.7, alpha=0.5)
    if len(kernels) > 1:
        name_ends(
            right,
            [End(name, share.iloc[-1], c) for (name, share), c in zip(kernels, STEP_COLOURS, strict=False)],
        )
    heading(figure, answer)
    return figure


def over_x(axes: Axes, x: pd.Series[int], place: float) -> None:
    """Prepare axes for kernels with x′ at this place, as shares of k(x′, x′)."""
    axes.axhline(0, color=PALE, linewidth=0.6, zorder=0)
    axes.axvline(place, color=PALE, linewidth=0.6, zorder=0)
    axes.set(xlabel="x", ylabel=f"k(x, {place:g})/k({place:g}, {place:g})", xlim=(x.min() - 0.5, x.max() + 0.5))


# --- How does the kernel change while f(x′) is raised? The function after more and more steps, beside its kernel.


FAINT = 0.2


def draw_scalar_training(rows: pd.DataFrame, place: float, answer: str) -> Figure:
    """Draw rows with `x`, `before` and `share` of each number of steps, the later the darker."""
    figure = Figure(figsize=(WIDE, 2.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    over_x(right, rows["x"], place)
    curves = [curve for _, curve in rows.groupby("ascended")]
    for axes, name, colour in ((left, "before", BLACK), (right, "share", BLUE)):
        for k, curve in enumerate(curves):
            depth = FAINT + (1 - FAINT) * k / max(1, len(curves) - 1)
            axes.plot(curve["x"], curve[name], "o-", color=colour, alpha=depth, linewidth=0.7, markersize=2)
        ends = [curve.iloc[-1] for curve in (curves[0], curves[-1])]
        name_ends(axes, [End(f"{end['ascended']} steps", end[name], colour) for end in ends])
    left.set(xlabel="x", ylabel="f(x)")
    heading(figure, answer)
    return figure
