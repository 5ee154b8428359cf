"""The table of all runs on the first screen: settings as chips,
a curve of the loss, and errors.

Runs with the same components are grouped. A row also contains the curves of its run as
text, so that the page can draw the curves of several runs in one picture."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from ntkexp.report.comparison import (
    RunGroup,
    Settings,
    describe_loop,
    grouped,
    is_followed,
)
from ntkexp.report.run import Run
from ntkexp.report.sentence import main_split
from ntkexp.report.tables import Cell, Column, html_cell
from ntkexp.text import short, spoken

CURVES = {
    "loss": "loss",
    "loss_query": "loss at queries",
    "accuracy": "accuracy",
    "accuracy_query": "accuracy at queries",
    "kernel_change": "kernel change",
    "weights_moved": "change of the weights",
    "change": "change per step",
}
"""The columns of metrics.csv whose curves are on the page, with their names in words.
The row of a run shows the first of these curves that the run has."""
LOG_CURVES = frozenset({"loss", "loss_query"})
MAX_CURVE_POINTS = 48  # maximum number of points of a curve on the page
CURVE_DIGITS = 4  # number of significant digits of a point
SPARK_WIDTH, SPARK_HEIGHT = 96, 24  # pixels
MACHINES = {
    "secant": "secant",
    "gauss": "Gauss sum",
    "left": "textbook sum",
    "frozen_start": "frozen kernel",
}
"""The kernel machines that have a column, with the headings."""

Curve = NDArray[np.float64]
"""The points of a curve, [point, 2]: step and value."""


@dataclass(frozen=True)
class Chip:
    """A setting of a run."""

    key: str
    value: str
    label: str


@dataclass(frozen=True)
class RunRow:
    """A row of the table: a run, its settings, a curve with the last loss,
    and other numbers."""

    anchor: str
    name: str
    kind: str  # "followed loop, AdamW, 120 examples", or empty
    chips: tuple[Chip, ...]
    diverged: bool
    spark: Markup
    drawn: str  # the name of the drawn curve in words, if it is not the loss
    loss: Cell  # the last loss
    curves: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class RowGroup:
    title: str
    components: tuple[Chip, ...]
    chips: tuple[Chip, ...]
    rows: tuple[RunRow, ...]


@dataclass(frozen=True)
class RunTable:
    caption: str
    columns: tuple[Column, ...]  # the columns after the loss
    groups: tuple[RowGroup, ...]
    curves: Mapping[str, str]  # the curves of any run, with their names in words


def run_table(runs: Sequence[Run], anchors: Mapping[Path, str]) -> RunTable:
    """Return the table of all runs. `anchors` are the anchors of runs
    on the page, by path."""
    columns = columns_of(runs)
    groups = []
    for group in grouped(runs):
        chips = chips_by_run(group)
        rows = [
            row_of(run, anchors[run.path], chips[run.path], columns)
            for run in group.runs
        ]
        components = tuple(Chip(key, value, value) for key, value in group.components)
        settings = chips_of(group.settings)
        groups.append(RowGroup(group.title, components, settings, tuple(rows)))
    splits = list(dict.fromkeys(main_split(run.ladder) for run in runs))
    caption = f"Relative errors on {' or '.join(splits)}"
    names = {
        name: words
        for name, words in CURVES.items()
        if any(name in run.metrics for run in runs)
    }
    return RunTable(caption, tuple(columns.values()), tuple(groups), names)


# --- Chips: the settings in which a run differs from other runs.


def chips_by_run(group: RunGroup) -> dict[Path, tuple[Chip, ...]]:
    return {
        run.path: chips_of(settings)
        for run, settings in zip(group.runs, group.by_run, strict=True)
    }


def chips_of(settings: Settings) -> tuple[Chip, ...]:
    """Return the chips of settings. Shorten `model.width` to `width` if no other key
    ends in `width`.

    Omit empty lists, and the number of steps, which is a column of the table.

    >>> [chip.label for chip in chips_of((("model.width", "8"), ("init.seed", "1"), ("seed", "0")))]
    ['width=8', 'init.seed=1', 'seed=0']
    """
    shown = [
        (key, value) for key, value in settings if key != "steps" and value != "[]"
    ]
    last_parts = {key: key.rpartition(".")[2] for key, _ in shown}
    counts = Counter(last_parts.values())
    chips = []
    for key, value in shown:
        name = last_parts[key] if counts[last_parts[key]] == 1 else key
        chips.append(Chip(key, value, f"{name}={value}"))
    return tuple(chips)


# --- Columns and rows.


def columns_of(runs: Sequence[Run]) -> dict[str, Column]:
    """Return the columns to the right of the loss. The keys are `step`, and the names
    of metrics and kernel machines."""
    columns = {"step": Column("steps")}
    if any("kernel_change" in run.metrics for run in runs):
        columns["kernel_change"] = Column("kernel change")
    present = dict.fromkeys(
        row.machine
        for run in runs
        for row in run.ladder
        if row.relative_error is not None
    )
    machines = [name for name in MACHINES if name in present]
    # if there are only kernel machines of other packages, show the first ones
    if not machines:
        machines = list(present)[: len(MACHINES)]
    for name in machines:
        columns[name] = Column(MACHINES.get(name, spoken(name)))
    if any("accuracy_query" in run.metrics for run in runs):
        columns["accuracy_query"] = Column("accuracy")
    return columns


def row_of(
    run: Run, anchor: str, chips: tuple[Chip, ...], columns: Mapping[str, Column]
) -> RunRow:
    split = main_split(run.ladder)
    numbers: dict[str, float | None] = {
        row.machine: row.relative_error for row in run.ladder if row.split == split
    }
    numbers |= {
        name: last_number(run, name) for name in ("kernel_change", "accuracy_query")
    }
    steps = steps_of(run)
    cells = [
        html_cell(steps if name == "step" else numbers.get(name)) for name in columns
    ]
    curves = {name: curve_of(run, name) for name in CURVES if name in run.metrics}
    curves = {name: curve for name, curve in curves.items() if len(curve) > 1}
    name = next(iter(curves), "")
    return RunRow(
        anchor=anchor,
        name=run.name,
        kind=describe_loop(run) if is_followed(run) else "",
        chips=chips,
        diverged=run.diverged,
        spark=sparkline(curves[name], name) if name else Markup(""),
        drawn="" if name in ("", "loss") else CURVES[name],
        loss=html_cell(last_number(run, "loss")),
        curves=";".join(f"{key}:{curve_text(curve)}" for key, curve in curves.items()),
        cells=tuple(cells),
    )


def steps_of(run: Run) -> int | None:
    """Return the number of steps. The metrics of a run have one more row, for the end
    of training. The metrics of a followed loop have no such row."""
    if not len(run.metrics):
        return None
    last = run.last_step
    return last + 1 if is_followed(run) else last


def last_number(run: Run, name: str) -> float | None:
    """Return the last measured value of a column of metrics.csv."""
    if name not in run.metrics:
        return None
    known = run.metrics[name].dropna()
    return float(known.iloc[-1]) if len(known) else None


# --- Curves.


def curve_of(run: Run, name: str) -> Curve:
    """Return at most `MAX_CURVE_POINTS` points of a curve: evenly spaced points with
    the first and the last, among the points that can be drawn."""
    points = run.series(name).dropna().to_numpy(dtype=np.float64)
    if len(points) <= MAX_CURVE_POINTS:
        return points
    kept = np.linspace(0, len(points) - 1, MAX_CURVE_POINTS).round().astype(int)
    thinned: Curve = points[kept]
    return thinned


def curve_text(curve: Curve) -> str:
    """Format a curve as pairs of step and value.

    >>> curve_text(np.array([[0.0, 1.23456], [10.0, 1e-9]]))
    '0 1.235,10 1e-09'
    """
    return ",".join(f"{step:.0f} {value:.{CURVE_DIGITS}g}" for step, value in curve)


def sparkline(curve: Curve, name: str) -> Markup:
    """Draw a curve as a small picture without axes.
    A loss above 0 is drawn on a log scale."""
    steps = curve[:, 0]
    values = curve[:, 1]
    is_log = name in LOG_CURVES and bool((values > 0).all())
    heights = unit(np.log(values) if is_log else values)
    x = 1 + (SPARK_WIDTH - 2) * unit(steps)
    y = 1 + (SPARK_HEIGHT - 2) * (1 - heights)
    points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))
    scale = ", logarithmic" if is_log else ""
    label = f"{CURVES[name]} from {short(values[0])} to {short(values[-1])}{scale}"
    return Markup(
        '<svg class="spark" viewBox="0 0 {} {}" role="img" aria-label="{}">'
        '<polyline points="{}"/></svg>'
    ).format(SPARK_WIDTH, SPARK_HEIGHT, label, points)


def unit(values: Curve) -> Curve:
    """Scale values to the interval from 0 to 1. Equal values become ½.

    >>> unit(np.array([2.0, 3.0, 4.0])).tolist(), unit(np.array([7.0, 7.0])).tolist()
    ([0.0, 0.5, 1.0], [0.5, 0.5])
    """
    low = float(values.min())
    extent = float(values.max()) - low
    if not math.isfinite(extent) or extent <= 0:
        return np.full_like(values, 0.5)
    scaled: Curve = (values - low) / extent
    return scaled
