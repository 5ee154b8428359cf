"""Does the test error peak where a network begins to fit all targets, and fall again? Errors and condition number."""

from __future__ import annotations

import math

import pandas as pd
from matplotlib.figure import Figure

from ntkexp.report.plots.labels import End, name_ends
from ntkexp.report.plots.style import BLUE, GREEN, GREY, ORANGE, WIDE, heading, log_axis
from ntkexp.report.plots.together.laws import tick

ROOM = 1.15
"""The axis of errors ends so far above the highest mean: single seeds may be far above."""


def draw(rows: pd.DataFrame, threshold: float, answer: str) -> Figure:
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
