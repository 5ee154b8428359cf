"""Pictures of claims with the axes of a paper's figure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from ntkexp.claim.rule_picture import draw_seeds
from ntkexp.report.analysis.estimate import SHARE, Range, mean_of
from ntkexp.report.plots.canvas import Canvas
from ntkexp.report.plots.style import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    NARROW,
    ORANGE,
    PALE,
    PURPLE,
    VERMILION,
    WIDE,
    End,
    line_look,
    log_axis,
    name_ends,
    tick,
)

GUIDES = {"1/√n": (-0.5, "--"), "1/n": (-1.0, ":")}
"""Guide lines, as label → (power of the width, line style)."""

HEADROOM = 1.15
"""The end of the error axis, relative to the highest mean. Single seeds may lie far
above."""

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
    canvas = Canvas()
    row = canvas.panels((WIDE, 2.7), 1, len(panels))[0]
    for axes, (title, lines) in zip(row, panels.items(), strict=True):
        log_axis(axes, "x")
        log_axis(axes, "y")
        ends = []
        for k, (name, column) in enumerate(lines.items()):
            look = line_look(k)
            draw_seeds(axes, rows, along, column, alpha=0.2, linewidth=0.7, **look)
            means = rows[column].astype(float).groupby(rows[along]).mean()
            axes.plot(means.index, means, marker="o", zorder=3, **look)
            ends.append(End(name, float(means.iloc[-1]), look["color"]))
        # the guide lines start above the highest measured line
        narrowest = rows[rows[along] == rows[along].min()]
        height = 1.6 * max(narrowest[list(lines.values())].mean())
        draw_guides(axes, np.array([rows[along].min(), rows[along].max()]), height)
        tick(axes, sorted(rows[along].unique().tolist()))
        name_ends(axes, ends)
        axes.set(xlabel="width n", ylabel="relative change, mean", title=title)
    caption = f"{answer}. Dots are arithmetic means over seeds."
    return canvas.finish("Changes during training, and the width", caption)


def draw_guides(axes: Axes, ends: NDArray[Any], height: float) -> None:
    """Draw the lines of `GUIDES` between two widths, from this height on."""
    widths = ends.astype(float)
    for name, (power, dashes) in GUIDES.items():
        heights = height * (widths / widths[0]) ** power
        axes.plot(widths, heights, dashes, color=GREY, linewidth=0.8, zorder=0)
        middle = np.sqrt(widths.prod()), np.sqrt(heights.prod())
        axes.annotate(
            name, middle, xytext=(2, 2), textcoords="offset points", color=GREY, fontsize=7,
        )  # fmt: skip


def draw_interpolation_peak(
    rows: pd.DataFrame, threshold: float, answer: str
) -> Figure:
    """Draw test error, train error and condition number against the number
    of parameters.

    The rows have the columns `parameters`, `test_error`, `train_error` and `condition`.
    `threshold` is the interpolation threshold, a number of parameters."""
    canvas = Canvas()
    left, right = canvas.panels((WIDE, 2.8), 1, 2)[0]
    ends = draw_errors(left, rows)
    # With fewer parameters, the kernel is singular.
    draw_conditions(right, rows[rows["parameters"] >= threshold])
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set(
            xlabel="number of parameters",
            xlim=(rows["parameters"].min() / 1.1, rows["parameters"].max() * 1.1),
        )
        axes.axvline(threshold, color=GREY, linestyle="--", linewidth=0.8, zorder=0)
        tick(axes, sorted(rows["parameters"].unique().tolist()))
    log_axis(right, "y")
    left.annotate(
        "interpolation\nthreshold", (threshold, 1), xycoords=("data", "axes fraction"),
        xytext=(-3, -2), textcoords="offset points", ha="right", va="top", fontsize=7,
        color=GREY,
    )  # fmt: skip
    name_ends(left, ends)
    return canvas.finish("Errors around the interpolation threshold", f"{answer}.")


def draw_errors(axes: Axes, rows: pd.DataFrame) -> list[End]:
    """Draw test and train errors: faint lines for seeds, dots for means. Return the
    labels of the lines."""
    means = rows.groupby("parameters")[["test_error", "train_error"]].mean()
    ends = []
    faint = 0.5 / math.sqrt(rows["seed"].nunique())
    for name, colour in (("test_error", BLUE), ("train_error", ORANGE)):
        look = {"color": colour, "alpha": faint, "linewidth": 0.6}
        draw_seeds(axes, rows, "parameters", name, **look)
        axes.plot(means.index, means[name], "o-", color=colour, zorder=3)
        ends.append(End(name.partition("_")[0], float(means[name].iloc[-1]), colour))
    axes.set(
        ylim=(0, HEADROOM * means.to_numpy().max()),
        ylabel="squared error / variance, mean",
    )
    return ends


def draw_conditions(axes: Axes, rows: pd.DataFrame) -> None:
    """Draw condition numbers, and their medians. Near the interpolation threshold they
    have no mean."""
    sizes = rows["parameters"]
    look: dict[str, Any] = {"alpha": 0.25, "markersize": 2, "zorder": 1}
    axes.plot(sizes, rows["condition"], ".", color=GREEN, **look)
    medians = rows.groupby("parameters")["condition"].median()
    axes.plot(medians.index, medians, "o-", color=GREEN, zorder=3)
    axes.set(ylabel="condition number of the kernel, median")


COLOURS_OF_KERNELS = (BLUE, ORANGE, GREEN, GREY)


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
    canvas = Canvas()
    axes = canvas.panels((WIDE, 2.7))[0, 0]
    ends = []
    for (kernel, name), colour in zip(names.items(), COLOURS_OF_KERNELS, strict=False):
        for column, line, fill, suffix in (
            ("accuracy", "-", colour, ""),
            ("predicted", ":", "white", ", predicted"),
        ):
            known = rows[(rows["kernel"] == kernel) & rows[column].notna()]
            percents = 100 * known[column]
            figures = percents.groupby(known["examples"]).agg(list)
            if not len(figures):
                continue
            look = {"color": colour, "linestyle": line, "markerfacecolor": fill}
            last = draw_means(axes, [*figures.index], [*figures], (0.0, 100.0), look)
            ends.append(End(name + suffix, last, colour))
    if published:
        heights = [100 * share for share in published.values()]
        axes.plot([*published], heights, "*", color=BLACK, markersize=7, zorder=3)
        ends.append(End("published", heights[-1], BLACK))
    log_axis(axes, "x")
    axes.set(xlabel="number of training examples", ylabel="accuracy, %")
    name_ends(axes, ends)
    title = "Accuracy against the number of training examples"
    return canvas.finish(title, f"{answer}.")


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
    canvas = Canvas()
    axes = canvas.panels((NARROW, 2.7))[0, 0]
    ends = []
    for k, (name, table) in enumerate(tables.items()):
        of_seeds = table.groupby(along)["value"].agg(list)
        look = line_look(k)
        last = draw_means(axes, [*of_seeds.index], [*of_seeds], SHARE, look)
        ends.append(End(name, last, look["color"]))
    log_axis(axes, "x")
    axes.set(xlabel="scale α of the outputs", ylabel="accuracy on new inputs")
    name_ends(axes, ends)
    return canvas.finish(title, f"{answer}.")


def draw_means_by_level(
    panels: Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]],
    axis_names: tuple[str, str],
    title: str,
    answer: str,
) -> Figure:
    """Draw means over seeds of numbers from 0 to 1, at the levels of a column.

    `panels` maps titles to lines, lines to levels, and levels to the figures of seeds.
    A single line is drawn as dots, without its name. Labels of levels have a line for
    each word. `axis_names` are the names of both axes."""
    canvas = Canvas()
    row = canvas.panels((WIDE, 2.7), 1, len(panels), sharey=True)[0]
    for axes, (name, lines) in zip(row, panels.items(), strict=True):
        ends = []
        for k, (line, of_levels) in enumerate(lines.items()):
            places = range(len(of_levels))
            look = line_look(k)
            if len(lines) == 1:
                look = look | {"linestyle": "none"}
            last = draw_means(axes, places, [*of_levels.values()], SHARE, look)
            ends.append(End(line, last, look["color"]))
            labels = [level.replace(" ", "\n") for level in of_levels]
            axes.set_xticks(places, labels)
        if len(lines) > 1:
            name_ends(axes, ends)
        axes.set(xlabel=axis_names[0], title=name)
    row[0].set_ylabel(axis_names[1])
    return canvas.finish(title, f"{answer}.")


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
    canvas = Canvas()
    activations = rows["activation"].unique().tolist()
    panels = canvas.panels((WIDE, 2.7), 1, len(activations), sharey=True)[0]
    for axes, activation in zip(panels, activations, strict=True):
        ends = []
        for k, (score, name) in enumerate(scores.items()):
            known = rows[(rows["activation"] == activation) & (rows["score"] == score)]
            by_training = known.groupby("training")["value"].agg(list)
            of_seeds = [by_training[key] for key in trainings]
            places = range(len(trainings))
            look = line_look(k) | {"markersize": 6 - k}
            last = draw_means(axes, places, of_seeds, CORRELATION, look)
            ends.append(End(name, last, look["color"]))
        axes.set_xticks(range(len(trainings)), [*trainings.values()])
        axes.set(xlabel=xlabel, title=activation)
        name_ends(axes, ends)
    panels[0].set_ylabel("correlation with retraining")
    return canvas.finish("Scores of one run against retraining", f"{answer}.")


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
    canvas = Canvas()
    left, right = canvas.panels((WIDE, 2.6), 1, 2)[0]
    x = rows["x"]
    position, value = observation
    ends = []
    for name, colour, size in (("before", GREY, 2.5), ("after", BLACK, 2)):
        left.plot(x, rows[name], "o", color=colour, markersize=size)
        left.plot(x, rows[name], color=colour, linewidth=0.5, alpha=0.5)
        ends.append(End(name, rows[name].iloc[-1], colour))
    left.plot([position], [value], "X", color=VERMILION, markersize=7, zorder=4)
    left.annotate(
        "observation", (position, value), xytext=(0, 7), textcoords="offset points", ha="center",
        fontsize=7, color=VERMILION,
    )  # fmt: skip
    left.set(xlabel="x", ylabel="f(x)")
    name_ends(left, ends)
    prepare_kernel_axes(right, x, position)
    ends = []
    for (name, share), colour in zip(kernels, (BLUE, GREEN, PURPLE), strict=False):
        right.plot(x, share, "o", color=colour, markersize=2.5)
        right.plot(x, share, color=colour, linewidth=0.7, alpha=0.5)
        ends.append(End(name, share.iloc[-1], colour))
    if len(kernels) > 1:
        name_ends(right, ends)
    return canvas.finish("One step on one observation", f"{answer}.")


def draw_scalar_training(rows: pd.DataFrame, position: float, answer: str) -> Figure:
    """Draw a scalar function and its kernel after several numbers
    of ascent steps on f(x′).

    The rows have the columns `x`, `before` (f), `share` (k(x, x′)/k(x′, x′)) and
    `ascended` (the number of steps). `position` is x′. Later curves are darker."""
    canvas = Canvas()
    left, right = canvas.panels((WIDE, 2.6), 1, 2)[0]
    prepare_kernel_axes(right, rows["x"], position)
    curves = [curve for _, curve in rows.groupby("ascended")]
    for axes, name, colour in ((left, "before", BLACK), (right, "share", BLUE)):
        for k, curve in enumerate(curves):
            depth = FIRST_ALPHA + (1 - FIRST_ALPHA) * k / max(1, len(curves) - 1)
            look = {"alpha": depth, "linewidth": 0.7, "markersize": 2}
            axes.plot(curve["x"], curve[name], "o-", color=colour, **look)
        ends = [curve.iloc[-1] for curve in (curves[0], curves[-1])]
        name_ends(
            axes,
            [End(f"{end['ascended']} steps", end[name], colour) for end in ends],
        )
    left.set(xlabel="x", ylabel="f(x)")
    title = "A scalar function and its kernel during training"
    return canvas.finish(title, f"{answer}.")


def prepare_kernel_axes(axes: Axes, x: pd.Series[int], position: float) -> None:
    """Label the axes of a plot of k(x, x′)/k(x′, x′), where x′ is `position`."""
    axes.axhline(0, color=PALE, linewidth=0.6, zorder=0)
    axes.axvline(position, color=PALE, linewidth=0.6, zorder=0)
    axes.set(
        xlabel="x",
        ylabel=f"k(x, {position:g})/k({position:g}, {position:g})",
        xlim=(x.min() - 0.5, x.max() + 0.5),
    )
