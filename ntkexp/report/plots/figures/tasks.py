"""The loss and accuracy on each task during training.
Dotted lines mark switches between tasks.

The curves are evaluated on queries, or on training examples if the run has no queries.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ntkexp.report.plots.canvas import Canvas
from ntkexp.report.plots.style import (
    GREY,
    NARROW,
    End,
    brief,
    line_look,
    log_axis,
    name_ends,
)
from ntkexp.report.run import Run
from ntkexp.text import fitting, percent, short

MAX_TASK_LETTERS = 16


def draw(run: Run, canvas: Canvas) -> Figure | None:
    if "phase" not in run.metrics or len(run.metrics) < 2:
        return None
    curves = {measure: tasks(run, measure) for measure in ("accuracy", "loss")}
    shown = {measure: columns for measure, columns in curves.items() if columns}
    if not shown:
        return None
    size = (NARROW, 0.6 + 1.4 * len(shown))
    panels = canvas.panels(size, len(shown), 1, sharex=True)[:, 0]
    for axes, (measure, columns) in zip(panels, shown.items(), strict=True):
        lines(axes, run, measure, columns)
    panels[-1].set_xlabel("step")
    panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
    title, sentence = answer(run)
    return canvas.finish(title, f"{sentence}. Dotted lines: the next task begins.")


def table(run: Run) -> pd.DataFrame:
    columns = [
        column for measure in ("accuracy", "loss") for column in tasks(run, measure)
    ]
    return run.metrics[["step", "phase", *columns]]


def tasks(run: Run, measure: str) -> list[str]:
    """Return the metrics columns of "accuracy" or "loss", one for each task;
    [] if missing."""
    count = len(run.data["phases"])
    for kind in (f"{measure}_query", measure):
        columns = [f"{kind}_{number}" for number in range(1, count + 1)]
        if all(column in run.metrics and len(run.series(column)) for column in columns):
            return columns
    return []


def lines(axes: Axes, run: Run, measure: str, columns: list[str]) -> None:
    """Draw a curve for each task, and a vertical line at each switch
    to the next task."""
    for switch in switches(run):
        axes.axvline(switch, color=GREY, linewidth=0.6, linestyle=":")
    unit, scale = {"accuracy": ("accuracy (%)", 100), "loss": ("loss", 1)}[measure]
    ends = []
    is_positive = True
    for number, column in enumerate(columns):
        series = run.series(column)
        values = series[column] * scale
        look = line_look(number)
        axes.plot(series["step"], values, **look)
        name = fitting(str(run.data["phases"][number]), MAX_TASK_LETTERS)
        ends.append(End(name, float(values.iloc[-1]), look["color"]))
        is_positive = is_positive and bool((values > 0).all())
    where = "query " if "_query" in columns[0] else ""
    axes.set_ylabel(f"{where}{unit}")
    if measure == "loss" and is_positive:
        log_axis(axes, "y")
    axes.set_xlim(0, max(1, run.last_step))
    name_ends(axes, ends)


def switches(run: Run) -> list[int]:
    """Return the first step of each phase after the first phase."""
    return run.metrics.loc[begins_phase(run), "step"].astype(int).tolist()


def begins_phase(run: Run) -> pd.Series[bool]:
    return run.metrics["phase"].diff() > 0


def answer(run: Run) -> tuple[str, str]:
    """Return the title, and a sentence about the task that is
    forgotten most after its phase."""
    names = run.data["phases"]
    columns = tasks(run, "accuracy") or tasks(run, "loss")
    is_accuracy = columns[0].startswith("accuracy")

    # the first row of the next phase was measured at the end of the task's phase
    next_rows = run.metrics[begins_phase(run)].set_index("phase")
    lost = []
    for number, column in enumerate(columns, start=1):
        if number + 1 in next_rows.index:
            had = float(next_rows[column].loc[number + 1])
            now = float(run.metrics[column].iloc[-1])
            amount = had - now if is_accuracy else now - had
            lost.append((amount, str(names[number - 1]), had, now))
    if not lost or not all(np.isfinite(amount) for amount, *_ in lost):
        reached = (
            f"{len(set(run.metrics['phase']))} of {len(names)} phases were reached"
        )
        return reached, reached
    amount, name, had, now = max(lost)
    measure = "loss"
    change = f"rises from {short(had)} to {short(now)}"
    remark = "No task's loss rises after its phase"
    if is_accuracy:
        measure = "accuracy"
        change = f"falls from {percent(had)} to {percent(now)}"
        remark = "No task loses accuracy after its phase"
    if amount <= 0:
        return "No task is forgotten", remark
    change_of_task = f"The {measure} on {name} {change}"
    title = brief(change_of_task, f"The {measure} on a task {change}")
    return title, f"After its phase, the {measure} on {name} {change}"
