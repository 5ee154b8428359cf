"""The outputs of each kernel machine against the outputs of the trained network."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from ntkexp.records.data import OUT_NAME
from ntkexp.report.plots.canvas import Canvas
from ntkexp.report.plots.figures.ladder import title
from ntkexp.report.plots.style import BLACK, GREY, NARROW, WIDE, colour
from ntkexp.report.run import Run, outputs_of
from ntkexp.report.sentence import ladder_sentence, main_split
from ntkexp.text import short, spoken

# a row has one of these numbers of panels: the one that leaves fewer empty panels
PANELS_PER_ROW = (4, 5)
# maximum number of points drawn as vectors per panel; if there are more, points are
# rasterized in the SVG
MAX_VECTOR_POINTS = 400


def draw(run: Run, canvas: Canvas) -> Figure | None:
    network = outputs_of(run, "f_T")
    machines = {}
    for name in run.predictions["machine"].values:
        outputs = outputs_of(run, name)
        if name not in ("f_0", "f_T") and np.isfinite(outputs).any():
            machines[str(name)] = outputs
    if not machines or not network.size or not np.isfinite(network).all():
        return None
    across = min(PANELS_PER_ROW, key=lambda columns: -len(machines) % columns)
    across = min(across, len(machines))
    down = math.ceil(len(machines) / across)
    width = WIDE if across > 2 else NARROW
    size = (width, 0.6 + (width / across) * down)
    panels = canvas.panels(size, down, across, sharex=True, sharey=True).ravel()
    split = main_split(run.ladder)
    errors = {
        row.machine: row.relative_error for row in run.ladder if row.split == split
    }
    learned = run.points.get("train", slice(0, 0))
    for axes, (name, outputs) in zip(panels, machines.items(), strict=False):
        scatter(axes, network, outputs, learned, colour(name))
        axes.set_title(spoken(name), color=colour(name))
        error = short(errors.get(name))
        axes.text(
            0.04, 0.97, error, transform=axes.transAxes, va="top", fontsize="small"
        )
    for axes in panels[len(machines) :]:
        axes.set_axis_off()
    lowest = panels[len(machines) - across : len(machines)]  # of each column
    for axes in lowest:
        axes.tick_params(labelbottom=True)
        axes.set_xlabel("network")
    for axes in panels[::across]:
        axes.set_ylabel("kernel machine")
    names = [str(name).replace("_", "-") for name in run.data.get(OUT_NAME, ["output"])]
    what = names[0] if len(names) == 1 else "measure"
    sentence = ladder_sentence(run.ladder, diverged=run.diverged).rstrip(".")
    has_training = learned.stop > learned.start
    dots = f"{what}, training examples in grey" if has_training else what
    caption = f"{sentence}. Dots: {dots}. Numbers: relative error, {split}."
    return canvas.finish(title(run.ladder), caption)


def table(run: Run) -> pd.DataFrame:
    return (
        run.predictions.to_dataframe(name="output")["output"]
        .unstack("machine", sort=False)
        .reset_index()
    )


def scatter(
    axes: Axes,
    network: NDArray[np.float64],
    outputs: NDArray[np.float64],
    learned: slice,
    ink: str,
) -> None:
    """Draw queries in the colour of the kernel machine, and training points in grey.

    Write the number of points outside the limits of the axes.
    """
    low = float(network.min())
    high = float(network.max())
    margin = 0.15 * (high - low) or 1.0
    limits = (low - margin, high + margin)
    axes.axline((low, low), slope=1, color=BLACK, linewidth=0.5, zorder=1)
    new = np.ones(len(network), dtype=bool)
    new[learned] = False
    for chosen, shade in ((~new, GREY), (new, ink)):
        axes.plot(
            network[chosen].ravel(),
            outputs[chosen].ravel(),
            "o",
            color=shade,
            markersize=1.8,
            alpha=0.6,
            markeredgewidth=0,
            rasterized=network.size > MAX_VECTOR_POINTS,
        )
    axes.set(xlim=limits, ylim=limits, aspect="equal")
    # outputs that are NaN count as inside
    outside = (outputs < limits[0]) | (outputs > limits[1])
    if outside.any():
        text = f"{outside.sum()} outside"
        axes.text(
            0.97,
            0.03,
            text,
            transform=axes.transAxes,
            ha="right",
            fontsize="small",
            color=GREY,
        )
