"""The scalar results of a run, by name. Sweeps tabulate, fit and compare them.

    <measure>             a column of metrics.csv, at the last step where it was measured
    limit_distance_start  `limit_distance` at the first step
    weights_moved.<name>  `weights_moved` of one parameter
    <machine>.<split>     the relative error of a kernel machine, ‖f̂ − f_T‖/‖f_T − f_0‖

A run that diverged has no such results. Its outcome states the step at
which training stopped.

>>> describe("kernel_change"), describe("frozen_start.test")
('kernel change', 'error of frozen start (test)')
"""

from __future__ import annotations

import math

import numpy as np

from ntkexp.mistake import Mistake, nearest
from ntkexp.records.results import SPLITS
from ntkexp.report.analysis.estimate import POSITIVE, SHARE, Range
from ntkexp.report.run import Run
from ntkexp.text import spoken

MEASURES = {
    "kernel_change": "kernel change",
    "weights_moved": "change of the weights",
    "loss": "training loss",
    "loss_query": "loss on new points",
    "accuracy": "training accuracy",
    "accuracy_query": "accuracy on new points",
    "alignment": "alignment of the kernel with the first",
    "limit_distance": "distance of the kernel from the infinite one",
    "limit_distance_start": "distance of the first kernel from the infinite one",
    "limit_alignment": "alignment of the kernel with the infinite one",
    "label_alignment": "alignment of the kernel with the labels",
    "trace": "trace of the kernel",
    "lambda_max": "largest eigenvalue of the kernel",
    "condition": "condition number of the kernel",
    "effective_rank": "effective rank of the kernel",
    "pattern_change": "share of units that switched",
    "stability": "largest eigenvalue, as a share of the edge of stability",
    "closure": "error of one step's sum",
    "selectivity": "selectivity of the hidden units",
}
LAYER = "weights_moved."
SHARES = {
    *("accuracy", "accuracy_query", "pattern_change", "selectivity"),
    # cosines between kernels, which are ≥ 0
    *("alignment", "limit_alignment", "label_alignment"),
}
FROM_ONE = {"condition", "effective_rank"}


def range_of(quantity: str) -> Range:
    """Return the range of possible values of a quantity.

    Quantities without a special range are ≥ 0.
    """
    if quantity in SHARES:
        return SHARE
    if quantity in FROM_ONE:
        return 1.0, math.inf
    return POSITIVE


def quantities(run: Run) -> dict[str, float]:
    """Return the finite scalar results of a run, by name."""
    if run.diverged:
        return {}
    columns = [
        name
        for name in map(str, run.metrics)
        if name in MEASURES or name.startswith(LAYER)
    ]
    values = run.metrics[columns].astype(float)
    measured = dict[str, float]()
    if len(values):
        last = values.ffill().iloc[-1].tolist()
        measured = dict(zip(columns, last, strict=True))
    if measured and "limit_distance" in values:
        measured["limit_distance_start"] = float(values["limit_distance"].iloc[0])
    errors = {f"{row.machine}.{row.split}": row.relative_error for row in run.ladder}
    return {
        name: value
        for name, value in (measured | errors).items()
        if value is not None and np.isfinite(value)
    }


def describe(quantity: str) -> str:
    """Describe a quantity in words. Raise if there is no quantity of this name."""
    if quantity in MEASURES:
        return MEASURES[quantity]
    if quantity.startswith(LAYER):
        return f"change of {quantity.removeprefix(LAYER)}"
    machine, _, split = quantity.rpartition(".")
    if machine and split in SPLITS:
        return f"error of {spoken(machine)} ({split})"
    raise Mistake(
        f"'{quantity}' is not a number of a run{nearest(quantity, MEASURES)}; "
        f"there are {', '.join(MEASURES)}, and MACHINE.SPLIT such as left.test"
    )
