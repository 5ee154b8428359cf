"""Power laws along an axis of a sweep, in log–log plots, with the exponents of theory.

Faint lines are single seeds, and dots are arithmetic means over seeds, as in the
tables. The line is a fit of the logarithms, with a wedge for the 95 % interval of the
exponent. Geometric means are smaller than arithmetic means, so the line lies below the
dots if seeds scatter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from ntkexp.report.analysis.laws import Fitted, law_in_words, limit, number
from ntkexp.report.analysis.power_law import PowerLaw
from ntkexp.report.analysis.quantities import describe
from ntkexp.report.analysis.tables import Analysis
from ntkexp.report.plots.canvas import Canvas
from ntkexp.report.plots.rendering import SweepPicture
from ntkexp.report.plots.style import (
    BLUE,
    NARROW,
    PALE,
    VERMILION,
    End,
    brief,
    log_axis,
    name_ends,
    tick,
    wrapped,
)
from ntkexp.report.run import Run


def pictures(analysis: Analysis, runs: Mapping[Path, Run]) -> Iterator[SweepPicture]:
    """Yield a picture for each fitted law."""
    for rank, fitted in enumerate(analysis.laws, start=1):
        if fitted.law is not None:
            # select the runs of this fit
            here = [
                all(run.axes[key] == value for key, value in fitted.others.items())
                for run in analysis.sweep.runs
            ]
            axis, quantity = fitted.fit.axis, fitted.fit.quantity
            table = analysis.runs.loc[here, ["run", axis, "seed", quantity]]
            table = table[(table[quantity] > 0) & (table[axis] > 0)].reset_index(
                drop=True
            )
            law = partial(draw_law, fitted, fitted.law, table)
            yield SweepPicture(f"-{rank}", table, law)


def draw_law(
    fitted: Fitted, law: PowerLaw, table: pd.DataFrame, canvas: Canvas
) -> Figure:
    axis, quantity = fitted.fit.axis, fitted.fit.quantity
    axes = canvas.panels((NARROW, 2.9))[0, 0]
    axes.set(
        xscale="log",
        yscale="log",
        xlabel=axis,
        ylabel="\n".join(wrapped(f"{describe(quantity)}, mean", 28)),
    )
    for _, seed in table.groupby("seed"):
        axes.plot(seed[axis], seed[quantity], color=PALE, linewidth=0.8, zorder=1)
    means = table.groupby(axis)[quantity].mean()
    axes.plot(means.index, means, "o", color=BLUE, zorder=3)
    tick(axes, [float(x) for x in means.index])

    # draw the fit over its range, with a wedge for the interval of the exponent
    x = np.geomspace(law.start, law.stop, 50)
    pivot = np.sqrt(law.start * law.stop)
    middle = law.at(np.array([pivot]))
    axes.plot(x, law.at(x), color=BLUE, zorder=2)
    if law.exponent.known:
        low, high = (
            middle[0] * (x / pivot) ** end
            for end in (law.exponent.low, law.exponent.high)
        )
        axes.fill_between(x, low, high, color=BLUE, alpha=0.15, linewidth=0, zorder=0)
    ends = [End(f"fit {number(law.exponent.value)}", float(law.at(x)[-1]), BLUE)]

    # draw a line with the slope of theory through the middle of the fit
    if (expected := fitted.fit.expected) is not None:
        border = np.array([law.start, law.stop])
        heights = middle * (border / pivot) ** expected.value
        axes.plot(border, heights, "--", color=VERMILION, linewidth=0.7, zorder=2)
        ends.append(End(f"theory {limit(expected)}", float(heights[-1]), VERMILION))
    name_ends(axes, ends)
    log_axis(axes, "y")
    return canvas.finish(title(fitted, law), f"{law_in_words(fitted, law)}. {LEGEND}")


LEGEND = "Dots are arithmetic means over seeds. The line fits logarithms."


def title(fitted: Fitted, law: PowerLaw) -> str:
    """Name the quantity and its exponent."""
    axis = fitted.fit.axis.rpartition(".")[2].replace("_", " ")
    exponent = f"exponent {number(law.exponent.value)} in {axis}"
    words = describe(fitted.fit.quantity)
    return brief(
        f"{words[0].upper()}{words[1:]}: {exponent}", f"A power law: {exponent}"
    )
