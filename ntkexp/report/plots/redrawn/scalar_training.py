"""How does the kernel change while f(x′) is raised? The function after more and more steps, beside its kernel."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from ntkexp.report.plots.labels import End, name_ends
from ntkexp.report.plots.redrawn.scalar_step import over_x
from ntkexp.report.plots.style import BLACK, BLUE, WIDE, heading

FAINT = 0.2


def draw(rows: pd.DataFrame, place: float, answer: str) -> Figure:
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
