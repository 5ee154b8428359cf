"""How far does training move what a network is made of? Each part against width, beside lines of 1/√n and 1/n."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ntkexp.report.plots.labels import End, name_ends
from ntkexp.report.plots.style import BLACK, BLUE, GREEN, GREY, ORANGE, VERMILION, WIDE, heading, log_axis
from ntkexp.report.plots.together.laws import tick

COLOURS = (BLUE, GREEN, ORANGE, VERMILION, BLACK)
GUIDES = {"1/√n": -0.5, "1/n": -1.0}


def draw(rows: pd.DataFrame, along: str, panels: Mapping[str, Mapping[str, str]], answer: str) -> Figure:
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
