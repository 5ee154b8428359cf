"""The relative error of each kernel machine against the seconds that it takes.

The line is the Pareto front: it connects the kernel machines for which no other one is
both more accurate and faster. The seconds count only the prediction, with kernels that
training has accumulated.

A run has no timings before it is finished, so this picture is not
one of the files of a run."""

from __future__ import annotations

import math
from contextlib import suppress

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ntkexp.mistake import Mistake
from ntkexp.records.results import of_machines, read_timings
from ntkexp.report.plots.canvas import STRIP, Canvas
from ntkexp.report.plots.style import (
    GREY,
    LEAST,
    NARROW,
    PALE,
    End,
    brief,
    colour,
    log_axis,
    name_ends,
)
from ntkexp.report.run import Run
from ntkexp.report.sentence import Likeness, likeness, main_split
from ntkexp.text import short, spoken

COLUMNS = ["machine", "seconds", "relative_error", "exact", "control", "on_front"]
STRIP_HEIGHT = 0.2  # height of the strip of exact machines, relative to the log axis
RUN = "run"  # the row of timings.csv with the time of training


def draw(run: Run, canvas: Canvas) -> Figure | None:
    machines = table(run)
    if machines.empty:
        return None
    exact = machines[machines["exact"]]
    others = machines[~machines["exact"]]
    if exact.empty or others.empty:
        axes = canvas.panels((NARROW, 2.8))[0, 0]
        draw_machines(axes, machines)
    else:
        ratios = [1, STRIP_HEIGHT]
        axes, strip = canvas.panels(
            (NARROW, 3.2), 2, 1, sharex=True, height_ratios=ratios
        )[:, 0]
        draw_machines(axes, others)
        axes.spines["bottom"].set_visible(False)
        axes.tick_params(bottom=False, which="both")
        draw_strip(strip, exact)
    log_axis(axes, "x")
    front = others[others["on_front"]].sort_values("seconds")
    axes.plot(
        front["seconds"], front["relative_error"], color=GREY, linewidth=0.8, zorder=1
    )
    split = main_split(run.ladder)
    axes.set_ylabel(f"relative error ({split})")
    canvas.grid[-1, 0].set_xlabel("seconds of prediction")
    return canvas.finish(answer(machines), caption(run))


def draw_machines(axes: Axes, machines: pd.DataFrame) -> None:
    """Draw a dot for each kernel machine, with a line to its name."""
    heights = np.maximum(machines["relative_error"].to_numpy(dtype=float), LEAST)
    ends = []
    for machine, seconds, height in zip(
        machines["machine"], machines["seconds"], heights, strict=True
    ):
        axes.plot(
            [seconds], [height], "o", color=colour(machine), markersize=4, zorder=3
        )
        ends.append(End(spoken(machine), float(height), colour(machine), seconds))
    log_axis(axes, "y")
    name_ends(axes, ends)


def draw_strip(strip: Axes, exact: pd.DataFrame) -> None:
    """Draw the kernel machines whose error is only rounding, without a scale."""
    strip.set_label(STRIP)
    strip.set_facecolor(PALE)
    ends = []
    for machine, seconds in zip(exact["machine"], exact["seconds"], strict=True):
        strip.plot([seconds], [0.5], "o", color=colour(machine), markersize=4)
        ends.append(End(spoken(machine), 0.5, colour(machine), seconds))
    strip.set(ylim=(0, 1), yticks=[])
    strip.set_ylabel("exact", color=GREY, rotation=0, ha="right", va="center")
    name_ends(strip, ends)


def table(run: Run) -> pd.DataFrame:
    """Return the seconds and the error of each kernel machine on the main split."""
    seconds = dict[str, float]()
    if run.finished:
        # ignore damaged timings: like missing ones, they only leave machines out of the
        # picture
        with suppress(Mistake):
            seconds = of_machines(read_timings(run.path / "timings.csv"))
    split = main_split(run.ladder)
    rows = []
    for row in run.ladder:
        error = row.relative_error
        if row.split != split or error is None or not math.isfinite(error):
            continue
        if row.machine in seconds and seconds[row.machine] > 0:
            is_exact = likeness(row) is Likeness.EXACT
            rows.append(
                [row.machine, seconds[row.machine], error, is_exact, row.control]
            )
    machines = pd.DataFrame(rows, columns=COLUMNS[:-1])
    machines[["exact", "control"]] = machines[["exact", "control"]].astype(bool)
    ranked = machines["relative_error"].mask(machines["exact"], 0.0)
    on_front = []
    for k, time in enumerate(machines["seconds"]):
        faster = machines["seconds"] < time
        on_front.append(bool((ranked[faster] > ranked[k]).all()))
    return machines.assign(on_front=on_front)


def answer(machines: pd.DataFrame) -> str:
    own = machines[~machines["control"]]
    if own.empty:
        return "Error and time of the kernel machines"
    fastest = own.sort_values("seconds").iloc[0]
    error = (
        "exact"
        if fastest["exact"]
        else f"error {short(float(fastest['relative_error']))}"
    )
    title = f"The fastest machine is {spoken(fastest['machine'])}: {error}"
    return brief(title, "Error and time of the kernel machines")


def caption(run: Run) -> str:
    words = "Seconds of prediction with kernels that training has accumulated"
    training = read_timings(run.path / "timings.csv").get(RUN)
    if training is not None:
        words += f"; training took {short(training.wall)} s"
    return f"{words}. Grey line: no other machine is both nearer to the network and faster."
