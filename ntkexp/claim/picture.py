"""The default picture of a claim, and figures of papers drawn again in their own axes from the judged rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from ntkexp.claim.expectation import AbstractExpectation, select_rows
from ntkexp.claim.judge import judge_part
from ntkexp.claim.judged import AbstractPicture, JudgedClaim
from ntkexp.claim.look import MAIN, SECOND
from ntkexp.mistake import Mistake
from ntkexp.report.analysis.estimate import SHARE, mean_of
from ntkexp.text import short

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


MOST = 3
HEIGHT = 2.5  # inches


class JudgedRows(AbstractPicture):
    """The rows of the first look, those of the second behind them, and what was expected.

    A claim that says nothing of its picture has this one.

    Each part of the claim has a place of its own, up to three of them, that which decides first; blue is the first
    look, orange the second.
    """

    def figure(self, judged: JudgedClaim) -> Figure:
        from matplotlib.figure import Figure  # noqa: PLC0415  slow, and judging needs none

        from ntkexp.report.plots.style import BLUE, NARROW, ORANGE, WIDE, heading, wrapped  # noqa: PLC0415  the same

        looks, parts = {SECOND: ORANGE, MAIN: BLUE}, pairs_of_parts(judged)
        figure = Figure(figsize=(NARROW if len(parts) == 1 else WIDE, HEIGHT), layout="constrained")
        for axes, of_looks in zip(
            figure.subplots(1, len(parts), squeeze=False)[0], parts, strict=True
        ):
            for (name, colour), part in zip(looks.items(), of_looks, strict=True):
                rows = drawable(part, judged.tables[name])
                for group in () if rows is None else part.levels(rows).values():
                    part.draw(axes, group, colour)
            of_looks[-1].mark(axes)
            if len(parts) > 1:
                axes.set_title("\n".join(wrapped(of_looks[-1].whole_words, 44 // len(parts) * 2)))
        # The title: what was found, with its interval and the verdict
        record, main = judged.record, judged.record.main
        found = f"{short(main.figure)}, 95 % {short(main.low)} to {short(main.high)}"
        heading(figure, f"{record.name.replace('_', ' ').capitalize()}: {record.verdict} ({found})")
        return figure

    def here(self, judged: JudgedClaim) -> str:
        there, shown = len(judged.looks[MAIN].expectation), len(pairs_of_parts(judged))
        missing = (
            f"; of {there} parts that are expected, {shown} are drawn" if shown < there else ""
        )
        return f"blue is the claim's own look, orange the second{missing}."


def pairs_of_parts(judged: JudgedClaim) -> list[tuple[AbstractExpectation, ...]]:
    """The parts that are drawn, as the second look and as the first has them: that first which decides the first."""
    pairs = zip(*(judged.looks[name].expectation for name in (SECOND, MAIN)), strict=False)
    return sorted(
        pairs, key=lambda part: not judged.record.main.expected.startswith(part[-1].whole_words)
    )[:MOST]


def drawable(part: AbstractExpectation, table: pd.DataFrame) -> pd.DataFrame | None:
    """Find the rows that can be drawn, if the part could speak of them."""
    try:
        rows = select_rows(table, part.where)
        rows = rows[rows["value"].notna()]
        return rows if len(rows) and judge_part(part, rows) else None
    except Mistake:
        return None


# --- Figures of papers, drawn again in their own axes from rows that were judged.


GUIDES = {"1/√n": (-0.5, "--"), "1/n": (-1.0, ":")}
"""Powers of the width that changes are drawn beside, each with its line."""

ROOM = 1.15
"""The axis of errors ends so far above the highest mean: single seeds may be far above."""

FAINT = 0.2  # the first of several curves; the last is not


def draw_change_by_width(
    rows: pd.DataFrame, along: str, panels: Mapping[str, Mapping[str, str]], answer: str
) -> Figure:
    """Draw how far training moves what a network is made of: columns of the rows, faint seeds, and the geometric mean
    of them, beside lines of 1/√n and 1/n.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415  slow, and judging needs none

    from ntkexp.report.plots import style  # noqa: PLC0415  the same

    colours = (style.BLUE, style.GREEN, style.ORANGE, style.VERMILION, style.BLACK)
    figure = Figure(figsize=(style.WIDE, 2.7), layout="constrained")
    for axes, (title, lines) in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True
    ):
        style.log_axis(axes, "x")
        style.log_axis(axes, "y")
        ends = []
        for (name, column), colour in zip(lines.items(), colours, strict=False):
            for _, seed in rows.sort_values(along).groupby("seed"):
                axes.plot(
                    seed[along], seed[column], color=colour, alpha=0.2, linewidth=0.7, zorder=1
                )
            means = (
                rows[column].astype(float).map(math.log).groupby(rows[along]).mean().map(math.exp)
            )
            axes.plot(means.index, means, "o-", color=colour, zorder=3)
            ends.append(style.End(name, float(means.iloc[-1]), colour))
        # both powers, from above the highest line's beginning
        height = max(rows.loc[rows[along] == rows[along].min(), list(lines.values())].mean())
        widths = np.array([rows[along].min(), rows[along].max()], dtype=float)
        for name, (power, dashes) in GUIDES.items():
            heights = 1.6 * height * (widths / widths[0]) ** power
            axes.plot(widths, heights, dashes, color=style.GREY, linewidth=0.8, zorder=0)
            middle = np.sqrt(widths.prod()), np.sqrt(heights.prod())
            axes.annotate(
                name,
                middle,
                xytext=(2, 2),
                textcoords="offset points",
                color=style.GREY,
                fontsize=7,
            )
        style.tick(axes, sorted(rows[along].unique().tolist()))
        style.name_ends(axes, ends)
        axes.set(xlabel="width n", title=title)
    style.heading(figure, answer)
    return figure


def draw_interpolation_peak(rows: pd.DataFrame, threshold: float, answer: str) -> Figure:
    """Draw whether the test error peaks where a network begins to fit all targets, and falls again: rows with
    `parameters`, `test_error`, `train_error` and `condition`.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415  slow, and judging needs none

    from ntkexp.report.plots import style  # noqa: PLC0415  the same

    figure = Figure(figsize=(style.WIDE, 2.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    means = rows.groupby("parameters")[["test_error", "train_error"]].mean()
    ends, faint = [], 0.5 / math.sqrt(rows["seed"].nunique())
    for name, colour in (("test_error", style.BLUE), ("train_error", style.ORANGE)):
        for _, seed in rows.sort_values("parameters").groupby("seed"):
            left.plot(
                seed["parameters"], seed[name], color=colour, alpha=faint, linewidth=0.6, zorder=1
            )
        left.plot(means.index, means[name], "o-", color=colour, zorder=3)
        ends.append(style.End(name.partition("_")[0], float(means[name].iloc[-1]), colour))
    left.set(ylim=(0, ROOM * means.to_numpy().max()), ylabel="squared error / variance")
    full = rows[
        rows["parameters"] >= threshold
    ]  # with fewer parameters the kernel has no full rank
    middle = full["condition"].map(math.log).groupby(full["parameters"]).mean().map(math.exp)
    right.plot(
        full["parameters"],
        full["condition"],
        ".",
        color=style.GREEN,
        alpha=0.25,
        markersize=2,
        zorder=1,
    )
    right.plot(middle.index, middle, "o-", color=style.GREEN, zorder=3)
    right.set(ylabel="condition number of the kernel")
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set(
            xlabel="number of parameters",
            xlim=(rows["parameters"].min() / 1.1, rows["parameters"].max() * 1.1),
        )
        axes.axvline(threshold, color=style.GREY, linestyle="--", linewidth=0.8, zorder=0)
        style.tick(axes, sorted(rows["parameters"].unique().tolist()))
    style.log_axis(right, "y")
    left.annotate(
        "interpolation\nthreshold", (threshold, 1), xycoords=("data", "axes fraction"), xytext=(-3, -2),
        textcoords="offset points", ha="right", va="top", fontsize=7, color=style.GREY,
    )  # fmt: skip
    style.name_ends(left, ends)
    style.heading(figure, answer)
    return figure


def draw_accuracies(
    rows: pd.DataFrame, names: Mapping[str, str], published: Mapping[int, float], answer: str
) -> Figure:
    """Draw how accuracies grow with the number of examples, and where they lead: rows with `examples`, `accuracy` and
    `predicted`, of the kernels that are named, means over seeds with their intervals, and published accuracies.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415  slow, and judging needs none

    from ntkexp.report.plots import style  # noqa: PLC0415  the same

    figure, ends = Figure(figsize=(style.WIDE, 2.7), layout="constrained"), list[style.End]()
    axes = figure.subplots()
    for (kernel, name), colour in zip(names.items(), (style.BLUE, style.ORANGE), strict=False):
        for column, line, inside, said in (
            ("accuracy", "o-", colour, ""),
            ("predicted", "o:", "white", ", predicted"),
        ):
            given = rows[(rows["kernel"] == kernel) & rows[column].notna()]
            figures = given[column].groupby(given["examples"]).agg(list)
            if len(figures):
                means = [mean_of(each, SHARE) for each in figures]
                middle, low, high = (
                    100 * np.array([(each.value, each.low, each.high) for each in means]).T
                )
                ends.append(style.End(name + said, middle[-1], colour))
                axes.errorbar(
                    figures.index, middle, yerr=(middle - low, high - middle), fmt=line, color=colour, capsize=2,
                    markerfacecolor=inside, zorder=2,
                )  # fmt: skip
    if published:
        heights = [100 * share for share in published.values()]
        axes.plot([*published], heights, "*", color=style.BLACK, markersize=7, zorder=3)
        ends.append(style.End("published", heights[-1], style.BLACK))
    style.log_axis(axes, "x")
    axes.set(xlabel="number of training examples", ylabel="accuracy, %")
    style.name_ends(axes, ends)
    style.heading(figure, answer)
    return figure


def draw_scalar_step(
    rows: pd.DataFrame,
    observation: tuple[float, float],
    kernels: Sequence[tuple[str, pd.Series[float]]],
    answer: str,
) -> Figure:
    """Draw what a step on one observation does to the other values of a function: rows with `x`, `before` and `after`,
    and kernels over the same x by their names.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415  slow, and judging needs none

    from ntkexp.report.plots import style  # noqa: PLC0415  the same

    figure = Figure(figsize=(style.WIDE, 2.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    x, (position, value) = rows["x"], observation
    for name, colour, size in (("before", style.GREY, 2.5), ("after", style.BLACK, 2)):
        left.plot(x, rows[name], "o", color=colour, markersize=size)
        left.plot(x, rows[name], color=colour, linewidth=0.5, alpha=0.5)
    left.plot([position], [value], "X", color=style.VERMILION, markersize=7, zorder=4)
    left.annotate(
        "observation", (position, value), xytext=(0, 7), textcoords="offset points", ha="center", fontsize=7,
        color=style.VERMILION,
    )  # fmt: skip
    left.set(xlabel="x", ylabel="f(x)")
    named = {"before": style.GREY, "after": style.BLACK}
    style.name_ends(
        left, [style.End(name, rows[name].iloc[-1], colour) for name, colour in named.items()]
    )
    prepare_kernel_axes(right, x, position)
    ends = []
    for (name, share), colour in zip(
        kernels, (style.BLUE, style.GREEN, style.PURPLE), strict=False
    ):
        right.plot(x, share, "o", color=colour, markersize=2.5)
        right.plot(x, share, color=colour, linewidth=0.7, alpha=0.5)
        ends.append(style.End(name, share.iloc[-1], colour))
    if len(kernels) > 1:
        style.name_ends(right, ends)
    style.heading(figure, answer)
    return figure


def draw_scalar_training(rows: pd.DataFrame, position: float, answer: str) -> Figure:
    """Draw how the kernel changes while f(x′) is raised: rows with `x`, `before` and `share` of each number of steps,
    the later the darker.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415  slow, and judging needs none

    from ntkexp.report.plots import style  # noqa: PLC0415  the same

    figure = Figure(figsize=(style.WIDE, 2.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    prepare_kernel_axes(right, rows["x"], position)
    curves = [curve for _, curve in rows.groupby("ascended")]
    for axes, name, colour in ((left, "before", style.BLACK), (right, "share", style.BLUE)):
        for k, curve in enumerate(curves):
            depth = FAINT + (1 - FAINT) * k / max(1, len(curves) - 1)
            axes.plot(
                curve["x"],
                curve[name],
                "o-",
                color=colour,
                alpha=depth,
                linewidth=0.7,
                markersize=2,
            )
        ends = [curve.iloc[-1] for curve in (curves[0], curves[-1])]
        style.name_ends(
            axes, [style.End(f"{end['ascended']} steps", end[name], colour) for end in ends]
        )
    left.set(xlabel="x", ylabel="f(x)")
    style.heading(figure, answer)
    return figure


def prepare_kernel_axes(axes: Axes, x: pd.Series[int], position: float) -> None:
    """Prepare axes for kernels with x′ at this place, as shares of k(x′, x′)."""
    from ntkexp.report.plots.style import PALE  # noqa: PLC0415  drawing is slow to load

    axes.axhline(0, color=PALE, linewidth=0.6, zorder=0)
    axes.axvline(position, color=PALE, linewidth=0.6, zorder=0)
    axes.set(
        xlabel="x",
        ylabel=f"k(x, {position:g})/k({position:g}, {position:g})",
        xlim=(x.min() - 0.5, x.max() + 0.5),
    )
