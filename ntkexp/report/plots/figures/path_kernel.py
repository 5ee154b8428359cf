"""Which training examples does the path kernel tie together? 𝒦(X, X), ordered by class or by target.

With several outputs, the trace over those at which the path was read. 𝒦 need not be symmetric: the rows are read along
the step, the columns at its start.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import ScalarFormatter
from numpy.typing import NDArray

from ntkexp.records.contributions import explained_rule
from ntkexp.report.plots.examples import fitting
from ntkexp.report.plots.style import BLACK, NARROW, heading
from ntkexp.report.run import Run
from ntkexp.text import short, shown_name

MOST = 256  # more examples than this are averaged in blocks: a page has no room for them


def read(run: Run) -> tuple[NDArray[np.float64], NDArray[np.int64]] | None:
    """Read the path kernel among training examples, traced over outputs, and their order by class or target."""
    rule = explained_rule(
        name.removeprefix("path_") for name in map(str, run.kernels) if name.startswith("path_")
    )
    if rule is None or "train" not in run.points:
        return None
    blocks = run.kernels[f"path_{rule}"].isel(probe=run.points["train"]).to_numpy()
    read = np.isfinite(blocks).all(axis=(0, 2, 3))  # path.outputs limits them
    kernel = np.einsum("qcmc->qm", blocks[:, read][..., read])
    if not kernel.size or not read.any():
        return None
    target = run.data["train_target"]
    key = target if len(run.data["classes"]) else target.reshape(len(target), -1)[:, 0]
    return kernel, np.argsort(key, kind="stable")


def draw(run: Run) -> Figure | None:
    found = read(run)
    if found is None:
        return None
    kernel, order = found
    target, classes = (
        run.data["train_target"],
        [fitting(shown_name(str(name))) for name in run.data["classes"]],
    )
    room = ConstrainedLayoutEngine(
        rect=(0, 0, 0.98, 1)
    )  # numbers beside the colours may turn out a digit longer
    figure = Figure(figsize=(NARROW, 3.2), layout=room)
    axes = figure.subplots()
    heat(figure, axes, kernel[np.ix_(order, order)])
    if classes:
        mark_classes(axes, target[order], classes)
    else:
        axes.set(xticks=[], yticks=[], xlabel="training examples, target rising →")
    heading(figure, answer(kernel, target if classes else None))
    return figure


def table(run: Run) -> pd.DataFrame:
    found = read(run)
    return (
        pd.DataFrame()
        if found is None
        else pd.DataFrame(coarse(found[0][np.ix_(found[1], found[1])]))
    )


def heat(figure: Figure, axes: Axes, kernel: NDArray[np.float64]) -> None:
    """Draw colours centred on zero if signs differ; an axis runs over examples, whatever is averaged."""
    examples = len(kernel)
    means, top = coarse(kernel), float(np.abs(kernel).max())
    signed = bool((kernel < 0).any() and (kernel > 0).any())
    image = axes.imshow(
        means, cmap="RdBu_r" if signed else "viridis", vmin=-top if signed else None, vmax=top if signed else None,
        extent=(0, examples, examples, 0), interpolation="nearest",
    )  # fmt: skip
    numbers = ScalarFormatter()
    numbers.set_powerlimits((-2, 3))
    bar = figure.colorbar(image, ax=axes, shrink=0.8, pad=0.02, format=numbers)
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=2)


def coarse(kernel: NDArray[np.float64]) -> NDArray[np.float64]:
    """Average over blocks of equal size, so that no more than MOST remain a side; a last, smaller block is left out."""
    block = -(-len(kernel) // MOST)
    side = len(kernel) // block
    return np.asarray(
        kernel[: side * block, : side * block].reshape(side, block, side, block).mean(axis=(1, 3))
    )


def mark_classes(axes: Axes, labels: NDArray[Any], classes: list[str]) -> None:
    """Draw lines between classes, and write their names in the middle of each."""
    ends = np.searchsorted(labels, np.arange(len(classes)), side="right")
    middles = (np.concatenate([[0], ends[:-1]]) + ends) / 2
    for end in ends[:-1]:
        axes.axhline(end, color=BLACK, linewidth=0.5)
        axes.axvline(end, color=BLACK, linewidth=0.5)
    axes.set_xticks(middles, classes)
    axes.set_yticks(middles, classes)
    axes.tick_params(length=0)
    if max(map(len, classes)) > 3:
        # names stand beside each other where there is room for that, and above each other where there is not
        axes.tick_params(axis="y" if len(classes) <= 3 else "x", labelrotation=90)
    axes.set(xlabel="training example, by class", ylabel="training example, by class")


def answer(kernel: NDArray[np.float64], labels: NDArray[Any] | None) -> str:
    """Write the title: how much more two examples of a class share than two of different ones."""
    apart = ~np.eye(len(kernel), dtype=bool)
    if labels is None:
        itself, other = short(mean(kernel[~apart])), short(mean(kernel[apart]))
        return f"An example has on average a path kernel of {itself} with itself and of {other} with another"
    alike = labels[:, None] == labels[None, :]
    within, between = mean(kernel[apart & alike]), mean(kernel[~alike])
    if within > 0 and between > 0:
        return f"The path kernel within a class is on average {short(within / between)} times that between classes"
    return f"The path kernel is on average {short(within)} within a class and {short(between)} between classes"


def mean(values: NDArray[np.float64]) -> float:
    return float(values.mean()) if values.size else float("nan")
