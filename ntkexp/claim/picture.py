"""The default picture of a claim, and pictures with the axes of a paper's figure.

A look is one statistical test of the claim. A part is one rule that the look tests.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from ntkexp.claim.expectation import AbstractExpectation, select_rows
from ntkexp.claim.judge import judge_part
from ntkexp.claim.judged import AbstractPicture, JudgedClaim
from ntkexp.claim.look import MAIN, SECOND
from ntkexp.claim.rule_picture import draw_rows, mark_range
from ntkexp.mistake import Mistake
from ntkexp.report.analysis.estimate import SHARE, Range, mean_of
from ntkexp.text import short

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


MAX_PARTS_DRAWN = 3
HEIGHT_INCHES = 2.5
TITLE_LINE = 63  # characters of a line of titles, over all panels


class JudgedRows(AbstractPicture):
    """The judged rows with the expected range: blue for the main look,
    orange for the second.

    This is the default picture. It shows up to three parts of the expectation, each
    with its own axes. The deciding part comes first."""

    has_judged_rows_only = True

    def figure(self, judged: JudgedClaim) -> Figure:
        from matplotlib.figure import Figure  # noqa: PLC0415  slow to import

        from ntkexp.report.plots import style  # noqa: PLC0415  slow to import

        colours = {SECOND: style.ORANGE, MAIN: style.BLUE}
        pairs = pairs_of_parts(judged)
        width = style.NARROW if len(pairs) == 1 else style.WIDE
        figure = Figure(figsize=(width, HEIGHT_INCHES), layout="constrained")
        panels = figure.subplots(1, len(pairs), squeeze=False)[0]
        for axes, pair in zip(panels, pairs, strict=True):
            for (name, colour), part in zip(colours.items(), pair, strict=True):
                for group in drawable_groups(part, judged.tables[name]):
                    draw_rows(part, axes, group, colour)
            main_part = pair[-1]
            mark_range(main_part, axes)
            if len(pairs) > 1:
                words = main_part.whole_words.replace(" ± 0 %", "")
                axes.set_title(
                    "\n".join(style.wrapped(words, TITLE_LINE // len(pairs)))
                )

        # the title shows the name and the verdict, and the caption shows the figure
        # with its interval
        record = judged.record
        name = record.name.replace("_", " ").capitalize()
        interval = (
            f"95 % interval {short(record.main.low)} to {short(record.main.high)}"
        )
        caption = f"Main look: {short(record.main.figure)}, {interval}."
        style.heading(figure, f"{name}: {record.verdict}", caption)
        return figure

    def here(self, judged: JudgedClaim) -> str:
        parts = len(judged.looks[MAIN].expectation)
        drawn = len(pairs_of_parts(judged))
        missing = f"; {drawn} of {parts} parts are drawn" if drawn < parts else ""
        return f"blue is the main look, orange the second look{missing}."


def pairs_of_parts(judged: JudgedClaim) -> list[tuple[AbstractExpectation, ...]]:
    """Return the parts (rules) to draw. Each is a pair: the rule of the second look and
    the rule of the main look. The deciding part comes first."""
    pairs = zip(
        *(judged.looks[name].expectation for name in (SECOND, MAIN)), strict=False
    )
    expected = judged.record.main.expected
    deciding_first = sorted(
        pairs, key=lambda pair: not expected.startswith(pair[-1].whole_words)
    )
    return deciding_first[:MAX_PARTS_DRAWN]


def drawable_groups(
    part: AbstractExpectation, table: pd.DataFrame
) -> Iterable[pd.DataFrame]:
    """Return the rows that a part (rule) selects, split by its levels. Return nothing
    if the rule cannot judge them."""
    try:
        rows = select_rows(table, part.where)
        rows = rows[rows["value"].notna()]
        if len(rows):
            judge_part(part, rows)
            return part.levels(rows).values()
    except Mistake:
        pass
    return ()


# --- Pictures with the axes of a paper's figure.


GUIDES = {"1/√n": (-0.5, "--"), "1/n": (-1.0, ":")}
"""Guide lines, as label → (power of the width, line style)."""

HEADROOM = 1.15
"""The error axis ends at this multiple of the highest mean.
Single seeds may lie far above."""

FIRST_ALPHA = 0.2
"""The opacity of the first of several curves. It increases to 1 at the last curve."""


def draw_change_by_width(
    rows: pd.DataFrame, along: str, panels: Mapping[str, Mapping[str, str]], answer: str
) -> Figure:
    """Draw relative changes during training against width n,
    with guide lines 1/√n and 1/n.

    `panels` maps the title of each panel to its lines, a mapping of names to columns.
    `along` is the column of widths, and `answer` is the caption. Single seeds are
    faint; dots are arithmetic means over seeds."""
    from matplotlib.figure import Figure  # noqa: PLC0415  slow to import

    from ntkexp.report.plots import style  # noqa: PLC0415  slow to import

    figure = Figure(figsize=(style.WIDE, 2.7), layout="constrained")
    for axes, (title, lines) in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True
    ):
        style.log_axis(axes, "x")
        style.log_axis(axes, "y")
        ends = []
        for k, (name, column) in enumerate(lines.items()):
            look = style.line_look(k)
            for _, seed in rows.sort_values(along).groupby("seed"):
                axes.plot(
                    seed[along],
                    seed[column],
                    alpha=0.2,
                    linewidth=0.7,
                    zorder=1,
                    **look,
                )
            means = rows[column].astype(float).groupby(rows[along]).mean()
            axes.plot(means.index, means, marker="o", zorder=3, **look)
            ends.append(style.End(name, float(means.iloc[-1]), look["color"]))
        # the guide lines start above the highest measured line
        height = max(
            rows.loc[rows[along] == rows[along].min(), list(lines.values())].mean()
        )
        widths = np.array([rows[along].min(), rows[along].max()], dtype=float)
        for name, (power, dashes) in GUIDES.items():
            heights = 1.6 * height * (widths / widths[0]) ** power
            axes.plot(
                widths, heights, dashes, color=style.GREY, linewidth=0.8, zorder=0
            )
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
        axes.set(xlabel="width n", ylabel="relative change, mean", title=title)
    caption = f"{answer}. Dots are arithmetic means over seeds."
    style.heading(figure, "Changes during training, and the width", caption)
    return figure


def draw_interpolation_peak(
    rows: pd.DataFrame, threshold: float, answer: str
) -> Figure:
    """Draw test error, train error and condition number against the number
    of parameters.

    The rows have the columns `parameters`, `test_error`, `train_error` and `condition`.
    `threshold` is the interpolation threshold, a number of parameters."""
    from matplotlib.figure import Figure  # noqa: PLC0415  slow to import

    from ntkexp.report.plots import style  # noqa: PLC0415  slow to import

    figure = Figure(figsize=(style.WIDE, 2.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    means = rows.groupby("parameters")[["test_error", "train_error"]].mean()
    ends = []
    faint = 0.5 / math.sqrt(rows["seed"].nunique())
    for name, colour in (("test_error", style.BLUE), ("train_error", style.ORANGE)):
        for _, seed in rows.sort_values("parameters").groupby("seed"):
            left.plot(
                seed["parameters"],
                seed[name],
                color=colour,
                alpha=faint,
                linewidth=0.6,
                zorder=1,
            )
        left.plot(means.index, means[name], "o-", color=colour, zorder=3)
        ends.append(
            style.End(name.partition("_")[0], float(means[name].iloc[-1]), colour)
        )
    left.set(
        ylim=(0, HEADROOM * means.to_numpy().max()),
        ylabel="squared error / variance, mean",
    )
    # With fewer parameters, the kernel is singular.
    full = rows[rows["parameters"] >= threshold]
    middle = full.groupby("parameters")[
        "condition"
    ].median()  # the median, because near the threshold the mean does not exist
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
    right.set(ylabel="condition number of the kernel, median")
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set(
            xlabel="number of parameters",
            xlim=(rows["parameters"].min() / 1.1, rows["parameters"].max() * 1.1),
        )
        axes.axvline(
            threshold, color=style.GREY, linestyle="--", linewidth=0.8, zorder=0
        )
        style.tick(axes, sorted(rows["parameters"].unique().tolist()))
    style.log_axis(right, "y")
    left.annotate(
        "interpolation\nthreshold", (threshold, 1), xycoords=("data", "axes fraction"),
        xytext=(-3, -2), textcoords="offset points", ha="right", va="top", fontsize=7,
        color=style.GREY,
    )  # fmt: skip
    style.name_ends(left, ends)
    style.heading(figure, "Errors around the interpolation threshold", f"{answer}.")
    return figure


def draw_accuracies(
    rows: pd.DataFrame,
    names: Mapping[str, str],
    published: Mapping[int, float],
    answer: str,
) -> Figure:
    """Draw measured, predicted and published accuracies against the number of examples.

    The rows have the columns `kernel`, `examples`, `accuracy` and `predicted`. Dots are
    means over seeds with their intervals. `names` maps values of the column `kernel` to
    labels. `published` maps numbers of examples to accuracies."""
    from matplotlib.figure import Figure  # noqa: PLC0415  slow to import

    from ntkexp.report.plots import style  # noqa: PLC0415  slow to import

    figure = Figure(figsize=(style.WIDE, 2.7), layout="constrained")
    ends = list[style.End]()
    axes = figure.subplots()
    for (kernel, name), colour in zip(
        names.items(), (style.BLUE, style.ORANGE), strict=False
    ):
        for column, line, fill, suffix in (
            ("accuracy", "o-", colour, ""),
            ("predicted", "o:", "white", ", predicted"),
        ):
            known = rows[(rows["kernel"] == kernel) & rows[column].notna()]
            figures = known[column].groupby(known["examples"]).agg(list)
            if not len(figures):
                continue
            means = [mean_of(of_seeds, SHARE) for of_seeds in figures]
            ends_of_means = np.array(
                [(mean.value, mean.low, mean.high) for mean in means]
            )
            middle, low, high = 100 * ends_of_means.T
            ends.append(style.End(name + suffix, middle[-1], colour))
            axes.errorbar(
                figures.index, middle, yerr=(middle - low, high - middle), fmt=line, color=colour,
                capsize=2, markerfacecolor=fill, zorder=2,
            )  # fmt: skip
    if published:
        heights = [100 * share for share in published.values()]
        axes.plot([*published], heights, "*", color=style.BLACK, markersize=7, zorder=3)
        ends.append(style.End("published", heights[-1], style.BLACK))
    style.log_axis(axes, "x")
    axes.set(xlabel="number of training examples", ylabel="accuracy, %")
    style.name_ends(axes, ends)
    style.heading(
        figure, "Accuracy against the number of training examples", f"{answer}."
    )
    return figure


def draw_means(
    axes: Axes,
    places: Sequence[float],
    of_seeds: Sequence[Sequence[float]],
    within: Range,
    look: Mapping[str, Any],
) -> float:
    """Draw a line through the means over seeds, with their intervals. Return the last
    mean."""
    means = [mean_of(figures, within) for figures in of_seeds]
    ends_of_means = np.array([(mean.value, mean.low, mean.high) for mean in means])
    middle, low, high = ends_of_means.T
    axes.errorbar(
        places, middle, yerr=(middle - low, high - middle), marker="o", capsize=2, **look
    )  # fmt: skip
    return float(middle[-1])


def draw_accuracy_by_scale(
    tables: Mapping[str, pd.DataFrame], along: str, title: str, answer: str
) -> Figure:
    """Draw accuracies against the scale α of the outputs.

    `tables` maps labels of lines to tables with the columns `along`, which holds α,
    `seed` and `value`."""
    from matplotlib.figure import Figure  # noqa: PLC0415  slow to import

    from ntkexp.report.plots import style  # noqa: PLC0415  slow to import

    figure = Figure(figsize=(style.NARROW, 2.7), layout="constrained")
    axes = figure.subplots()
    ends = []
    for k, (name, table) in enumerate(tables.items()):
        of_seeds = table.groupby(along)["value"].agg(list)
        look = style.line_look(k)
        last = draw_means(axes, [*of_seeds.index], [*of_seeds], SHARE, look)
        ends.append(style.End(name, last, look["color"]))
    style.log_axis(axes, "x")
    axes.set(xlabel="scale α of the outputs", ylabel="accuracy on new inputs")
    style.name_ends(axes, ends)
    style.heading(figure, title, f"{answer}.")
    return figure


CORRELATION: Range = (-1.0, 1.0)


def draw_scores(
    rows: pd.DataFrame,
    scores: Mapping[str, str],
    trainings: Mapping[str, str],
    xlabel: str,
    answer: str,
) -> Figure:
    """Draw correlations with retraining for kinds of training, one panel for each
    activation.

    The rows have the columns `activation`, `training`, `score` and `value`. `scores`
    and `trainings` map values of their columns to labels. Dots are means over seeds
    with their intervals. `answer` is the caption."""
    from matplotlib.figure import Figure  # noqa: PLC0415  slow to import

    from ntkexp.report.plots import style  # noqa: PLC0415  slow to import

    figure = Figure(figsize=(style.WIDE, 2.7), layout="constrained")
    activations = rows["activation"].unique().tolist()
    panels = figure.subplots(1, len(activations), sharey=True, squeeze=False)[0]
    for axes, activation in zip(panels, activations, strict=True):
        ends = []
        for k, (score, name) in enumerate(scores.items()):
            known = rows[(rows["activation"] == activation) & (rows["score"] == score)]
            by_training = known.groupby("training")["value"].agg(list)
            of_seeds = [by_training[key] for key in trainings]
            places = range(len(trainings))
            look = style.line_look(k) | {"markersize": 6 - k}
            last = draw_means(axes, places, of_seeds, CORRELATION, look)
            ends.append(style.End(name, last, look["color"]))
        axes.set_xticks(range(len(trainings)), [*trainings.values()])
        axes.set(xlabel=xlabel, title=activation)
        style.name_ends(axes, ends)
    panels[0].set_ylabel("correlation with retraining")
    style.heading(figure, "Scores of one run against retraining", f"{answer}.")
    return figure


def draw_scalar_step(
    rows: pd.DataFrame,
    observation: tuple[float, float],
    kernels: Sequence[tuple[str, pd.Series[float]]],
    answer: str,
) -> Figure:
    """Draw a scalar function before and after a step on one observation, and kernels
    of this function.

    The rows have the columns `x`, `before` and `after`. `observation` is the pair (x′,
    y′). `kernels` lists names and curves k(x, x′)/k(x′, x′) over the same x."""
    from matplotlib.figure import Figure  # noqa: PLC0415  slow to import

    from ntkexp.report.plots import style  # noqa: PLC0415  slow to import

    figure = Figure(figsize=(style.WIDE, 2.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    x = rows["x"]
    position, value = observation
    for name, colour, size in (("before", style.GREY, 2.5), ("after", style.BLACK, 2)):
        left.plot(x, rows[name], "o", color=colour, markersize=size)
        left.plot(x, rows[name], color=colour, linewidth=0.5, alpha=0.5)
    left.plot([position], [value], "X", color=style.VERMILION, markersize=7, zorder=4)
    left.annotate(
        "observation", (position, value), xytext=(0, 7), textcoords="offset points", ha="center",
        fontsize=7, color=style.VERMILION,
    )  # fmt: skip
    left.set(xlabel="x", ylabel="f(x)")
    named = {"before": style.GREY, "after": style.BLACK}
    style.name_ends(
        left,
        [
            style.End(name, rows[name].iloc[-1], colour)
            for name, colour in named.items()
        ],
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
    style.heading(figure, "One step on one observation", f"{answer}.")
    return figure


def draw_scalar_training(rows: pd.DataFrame, position: float, answer: str) -> Figure:
    """Draw a scalar function and its kernel after several numbers
    of ascent steps on f(x′).

    The rows have the columns `x`, `before` (f), `share` (k(x, x′)/k(x′, x′)) and
    `ascended` (the number of steps). `position` is x′. Later curves are darker."""
    from matplotlib.figure import Figure  # noqa: PLC0415  slow to import

    from ntkexp.report.plots import style  # noqa: PLC0415  slow to import

    figure = Figure(figsize=(style.WIDE, 2.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    prepare_kernel_axes(right, rows["x"], position)
    curves = [curve for _, curve in rows.groupby("ascended")]
    for axes, name, colour in (
        (left, "before", style.BLACK),
        (right, "share", style.BLUE),
    ):
        for k, curve in enumerate(curves):
            depth = FIRST_ALPHA + (1 - FIRST_ALPHA) * k / max(1, len(curves) - 1)
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
            axes,
            [style.End(f"{end['ascended']} steps", end[name], colour) for end in ends],
        )
    left.set(xlabel="x", ylabel="f(x)")
    style.heading(
        figure, "A scalar function and its kernel during training", f"{answer}."
    )
    return figure


def prepare_kernel_axes(axes: Axes, x: pd.Series[int], position: float) -> None:
    """Label the axes of a plot of k(x, x′)/k(x′, x′), where x′ is `position`."""
    from ntkexp.report.plots.style import PALE  # noqa: PLC0415  slow to import

    axes.axhline(0, color=PALE, linewidth=0.6, zorder=0)
    axes.axvline(position, color=PALE, linewidth=0.6, zorder=0)
    axes.set(
        xlabel="x",
        ylabel=f"k(x, {position:g})/k({position:g}, {position:g})",
        xlim=(x.min() - 0.5, x.max() + 0.5),
    )
