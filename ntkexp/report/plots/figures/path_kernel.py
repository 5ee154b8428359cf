"""The path kernel between training examples, 𝒦(X, X), ordered by class or by target.

If there are several outputs, draw the trace over the attributed outputs. 𝒦 can be
asymmetric: its left factor is averaged along each step, and its right factor is
evaluated at the start of the step."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter
from numpy.typing import NDArray

from ntkexp.records.contributions import explained_rule
from ntkexp.report.plots.canvas import Canvas
from ntkexp.report.plots.examples import MAX_LABEL_LETTERS
from ntkexp.report.plots.style import BLACK, NARROW, brief
from ntkexp.report.run import Run
from ntkexp.text import fitting, short, shown_name

Array: TypeAlias = NDArray[np.float64]
# maximum number of pixels per axis; more examples are averaged in blocks
MAX_PIXELS = 256


def read(run: Run) -> tuple[Array, NDArray[np.int64]] | None:
    """Return the path kernel between training examples, and the order of the examples
    by class or target. Return None if the run has no such kernel."""
    rule = explained_rule(
        name.removeprefix("path_")
        for name in map(str, run.kernels)
        if name.startswith("path_")
    )
    if rule is None or "train" not in run.points:
        return None
    blocks = run.kernels[f"path_{rule}"].isel(query=run.points["train"]).to_numpy()
    # the outputs that `path.outputs` selected
    selected = np.isfinite(blocks).all(axis=(0, 2, 3))
    kernel = np.einsum("qcmc->qm", blocks[:, selected][..., selected])
    if not kernel.size or not selected.any():
        return None
    target = run.data["train_target"]
    if not len(run.data["classes"]):
        target = target.reshape(len(target), -1)[:, 0]
    return kernel, np.argsort(target, kind="stable")


def draw(run: Run, canvas: Canvas) -> Figure | None:
    kernel_and_order = read(run)
    if kernel_and_order is None:
        return None
    kernel, order = kernel_and_order
    target = run.data["train_target"]
    classes = [
        fitting(shown_name(str(name)), MAX_LABEL_LETTERS)
        for name in run.data["classes"]
    ]
    axes = canvas.panels((NARROW, 3.2))[0, 0]
    if canvas.is_new:
        # leave a margin, because tick labels of the colour bar may get a digit longer
        canvas.figure.set_layout_engine("constrained", rect=(0, 0, 0.98, 1))
    heat(canvas.figure, axes, kernel[np.ix_(order, order)])
    caption = "The path kernel between training examples"
    if run.outputs > 1:
        caption += ", traced over outputs"
    if classes:
        mark_classes(axes, target[order], classes)
        title, means = answer_by_class(kernel, target)
    else:
        axes.set(xticks=[], yticks=[], xlabel="training examples, target rising →")
        title, means = answer(kernel)
    return canvas.finish(title, f"{caption}. Arithmetic means over pairs: {means}.")


def table(run: Run) -> pd.DataFrame:
    """Return the drawn matrix. Rows and columns have the same order. The columns have
    the indices of the examples in the data set, unless examples are averaged."""
    kernel_and_order = read(run)
    if kernel_and_order is None:
        return pd.DataFrame()
    kernel, order = kernel_and_order
    drawn = pd.DataFrame(coarse(kernel[np.ix_(order, order)]))
    if len(drawn) == len(kernel):
        drawn.columns = pd.Index(run.data["train_index"][order])
    return drawn


def heat(figure: Figure, axes: Axes, kernel: Array) -> None:
    """Draw the kernel as an image. If signs differ,
    use a diverging colour map centred on zero."""
    examples = len(kernel)
    extent = (0, examples, examples, 0)
    image = axes.imshow(
        coarse(kernel), cmap="viridis", extent=extent, interpolation="nearest"
    )
    if (kernel < 0).any() and (kernel > 0).any():
        top = float(np.abs(kernel).max())
        image.set(cmap="RdBu_r", clim=(-top, top))
    numbers = ScalarFormatter()
    numbers.set_powerlimits((-2, 3))
    bar = figure.colorbar(image, ax=axes, shrink=0.8, pad=0.02, format=numbers)
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=2)


def coarse(kernel: Array) -> Array:
    """Average over square blocks, so that at most `MAX_PIXELS` rows remain.

    Omit an incomplete last block.
    """
    block = -(-len(kernel) // MAX_PIXELS)
    side = len(kernel) // block
    blocks = kernel[: side * block, : side * block].reshape(side, block, side, block)
    return np.asarray(blocks.mean(axis=(1, 3)))


def mark_classes(axes: Axes, labels: NDArray[Any], classes: list[str]) -> None:
    """Draw lines between classes, and label each class at the middle
    of its examples."""
    ends = np.searchsorted(labels, np.arange(len(classes)), side="right")
    middles = (np.concatenate([[0], ends[:-1]]) + ends) / 2
    for end in ends[:-1]:
        axes.axhline(end, color=BLACK, linewidth=0.5)
        axes.axvline(end, color=BLACK, linewidth=0.5)
    axes.set_xticks(middles, classes)
    axes.set_yticks(middles, classes)
    axes.tick_params(length=0)
    if max(map(len, classes)) > 3:
        # rotate the names of an axis on which they would overlap
        axis: Literal["x", "y"] = "y" if len(classes) <= 3 else "x"
        axes.tick_params(axis=axis, labelrotation=90)
    axes.set(xlabel="training example, by class", ylabel="training example, by class")


def answer(kernel: Array) -> tuple[str, str]:
    """Return the title, and two means of the path kernel: of an example with itself,
    and of two different examples."""
    apart = ~np.eye(len(kernel), dtype=bool)
    itself = short(mean(kernel[~apart]))
    other = short(mean(kernel[apart]))
    return (
        "The path kernel of training examples",
        f"{itself} with itself, {other} with another example",
    )


def answer_by_class(kernel: Array, labels: NDArray[Any]) -> tuple[str, str]:
    """Return the title, and the mean path kernel within classes and between classes."""
    apart = ~np.eye(len(kernel), dtype=bool)
    alike = labels[:, None] == labels[None, :]
    within = mean(kernel[apart & alike])
    between = mean(kernel[~alike])
    means = f"{short(within)} within a class, {short(between)} between classes"
    title = "The path kernel within and between classes"
    if within > 0 and between > 0:
        ratio = short(within / between)
        title = brief(
            f"The path kernel is {ratio} times as large within a class", title
        )
    return title, means


def mean(values: Array) -> float:
    if not values.size:
        return float("nan")
    return float(values.mean())
