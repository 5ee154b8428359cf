"""What does a step on one observation do to the other values of a function? f before and after, beside its kernel."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ntkexp.report.plots.labels import End, name_ends
from ntkexp.report.plots.style import BLACK, BLUE, GREEN, GREY, PALE, PURPLE, VERMILION, WIDE, heading

COLOURS = (BLUE, GREEN, PURPLE)


def draw(
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
    for (_, share), colour in zip(kernels, COLOURS, strict=False):
        right.plot(x, share, "o", color=colour, markersize=2.5)
        right.plot(x, share, color=colour, linewidth=0.7, alpha=0.5)
    if len(kernels) > 1:
        name_ends(right, [End(name, share.iloc[-1], c) for (name, share), c in zip(kernels, COLOURS, strict=False)])
    heading(figure, answer)
    return figure


def over_x(axes: Axes, x: pd.Series[int], place: float) -> None:
    """Prepare axes for kernels with x′ at this place, as shares of k(x′, x′)."""
    axes.axhline(0, color=PALE, linewidth=0.6, zorder=0)
    axes.axvline(place, color=PALE, linewidth=0.6, zorder=0)
    axes.set(xlabel="x", ylabel=f"k(x, {place:g})/k({place:g}, {place:g})", xlim=(x.min() - 0.5, x.max() + 0.5))
