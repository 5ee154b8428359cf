"""How does a number change along an axis? A power law in a log–log plot, beside the theory's exponent.

Each seed is a faint line, their geometric means are dots, the fit is a line with the wedge of its interval.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ntkexp.records.sweep import Expected
from ntkexp.report.analysis.estimate import PowerLaw
from ntkexp.report.analysis.laws import Fitted, law_in_words, limit, number
from ntkexp.report.analysis.tables import Analysis
from ntkexp.report.plots.style import BLUE, NARROW, PALE, VERMILION, End, heading, name_ends, tick, wrapped
from ntkexp.report.run import Run, describe


def draw(analysis: Analysis, runs: Mapping[Path, Run]) -> Iterator[tuple[str, Figure, pd.DataFrame]]:
    for place, found in enumerate(analysis.laws, start=1):
        if found.law is not None:
            table = chosen(analysis, found)
            yield f"-{place}", picture(found, found.law, table), table


def chosen(analysis: Analysis, found: Fitted) -> pd.DataFrame:
    """Choose the runs that were fitted."""
    here = analysis.runs
    for key, value in found.others.items():
        here = here[here[key] == value]
    table = here[["run", found.fit.axis, "seed", found.fit.quantity]]
    return table[(table[found.fit.quantity] > 0) & (table[found.fit.axis] > 0)].reset_index(drop=True)


def picture(found: Fitted, law: PowerLaw, table: pd.DataFrame) -> Figure:
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
    ends = [fit_line(axes, law)]
    if found.fit.expected is not None:
        ends.append(theory_line(axes, law, found.fit.expected))
    name_ends(axes, ends)
    heading(figure, law_in_words(found, law))
    return figure


def fit_line(axes: Axes, law: PowerLaw) -> End:
    """Draw the fitted law over its range, with the wedge of its exponents."""
    x = np.geomspace(law.start, law.stop, 50)
    pivot = np.sqrt(law.start * law.stop)
    height = law.at(np.array([pivot]))[0]
    axes.plot(x, law.at(x), color=BLUE, zorder=2)
    if law.exponent.known:
        low, high = (height * (x / pivot) ** end for end in (law.exponent.low, law.exponent.high))
        axes.fill_between(x, low, high, color=BLUE, alpha=0.15, linewidth=0, zorder=0)
    return End(f"fit {number(law.exponent.value)}", float(law.at(x)[-1]), BLUE)


def theory_line(axes: Axes, law: PowerLaw, expected: Expected) -> End:
    """Draw the theory's slope through the middle of the fit."""
    x = np.array([law.start, law.stop])
    pivot = np.sqrt(law.start * law.stop)
    heights = law.at(np.array([pivot])) * (x / pivot) ** expected.value
    axes.plot(x, heights, "--", color=VERMILION, linewidth=0.7, zorder=2)
    return End(f"theory {limit(expected)}", float(heights[-1]), VERMILION)
