"""How far are the kernel machines from the networks? A row a machine, a dot a run, a bar at the median of all runs.

What is no number has no dot: it is counted beside the row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from ntkexp.report.ladder import main_split
from ntkexp.report.likeness import Likeness, likeness
from ntkexp.report.plots.style import BLACK, NARROW, WIDE, colour, heading, house_style, log_axis
from ntkexp.report.plots.sweep_plots import Picture
from ntkexp.report.run import Run
from ntkexp.text import counted, listed, short, spoken

LEAST = 1e-17  # where an error of exactly zero is drawn


def strip(runs: Sequence[Run]) -> Picture | None:
    """Draw the picture, if any machine was compared with any network."""
    rows = {
        (k, row.machine): (
            *(run.name, row.machine, row.split, row.relative_error),
            *(likeness(row) is Likeness.EXACT, row.control),
        )
        for k, run in enumerate(runs)
        for row in run.ladder
        if row.split == main_split(run.ladder) and row.relative_error is not None
    }
    columns = ["run", "machine", "split", "relative_error", "exact", "control"]
    table = pd.DataFrame(rows.values(), [k for k, _ in rows], columns)  # by number: namesakes may lie in two places
    if not np.isfinite(table["relative_error"].to_numpy(dtype=float)).any():
        return None
    with house_style():
        return Picture("machines", draw(table, len(runs)), table)


def draw(table: pd.DataFrame, runs: int) -> Figure:
    """Draw one row a machine, in the order of the ladder."""
    names = list(dict.fromkeys(table["machine"]))
    figure = Figure(figsize=(NARROW if runs == 1 else WIDE, 0.9 + 0.19 * len(names)), layout="constrained")
    axes = figure.subplots()
    log_axis(axes, "x")
    for height, name in enumerate(names):
        found = table.loc[table["machine"] == name, "relative_error"]
        errors = found[np.isfinite(found)].clip(lower=LEAST)
        axes.plot(errors, [height] * len(errors), "o", color=colour(name), alpha=1 if runs == 1 else 0.4,
                  markeredgewidth=0)  # fmt: skip
        axes.plot([errors.median()], [height], "|", color=BLACK, markersize=0 if runs == 1 else 7)
        axes.annotate(
            beside(found), (1, height), xytext=(3, 0), xycoords=("axes fraction", "data"),
            textcoords="offset points", va="center", fontsize=7,
        )  # fmt: skip
    axes.set_yticks(range(len(names)), [spoken(name) for name in names])
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.xaxis.set_major_locator(LogLocator(numticks=6))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(f"relative error ({', '.join(dict.fromkeys(table['split']))})")
    heading(figure, answer(table, runs))
    return figure


def beside(errors: pd.Series[float]) -> str:
    """Say the errors of a machine in words: one, or the median and the worst, and how many are no number.

    >>> beside(pd.Series([1e-15])), beside(pd.Series([0.01, 0.02, 0.3, float("nan")]))
    ('1e-15', '0.02, worst 0.3; 1 not finite')
    """
    finite = errors[np.isfinite(errors)]
    said = [short(float(finite.median()))] if len(finite) else []
    worst = [f", worst {short(float(finite.max()))}"] if len(finite) > 1 else []
    wrong = [f"{len(errors) - len(finite)} not finite"] if len(finite) < len(errors) else []
    return "; ".join(["".join(said + worst)] * bool(said) + wrong)


def answer(table: pd.DataFrame, runs: int) -> str:
    """Write the title: which machine is nearest to the network in most runs, controls aside; exact ones are equally
    near.
    """
    own = table[~table["control"].astype(bool) & np.isfinite(table["relative_error"])]
    ranks = own["relative_error"].mask(own["exact"].astype(bool), 0.0)
    least = ranks.groupby(level=0).transform("min")
    times = own.loc[(ranks == least).to_numpy(), "machine"].value_counts(sort=False)
    if not len(times):
        return f"No machine that knows the network has a finite error in {counted(runs, 'run')}"
    first = listed([spoken(str(name)) for name in times.index[times == times.max()]])
    often = f" in {times.max()} of {runs} runs" if runs > 1 else ""
    return f"Nearest to the network {'is' if (times == times.max()).sum() == 1 else 'are'} {first}{often}"
