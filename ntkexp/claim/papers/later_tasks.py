"""Forgetting: the effect of training on a later task on the outputs
for an earlier task."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ntkexp.claim.quantity import AbstractQuantity, Measured
from ntkexp.component import Count
from ntkexp.mistake import Mistake
from ntkexp.records.contributions import BY_PHASE
from ntkexp.report.forgetting import (
    Forgetting,
    LaterPhase,
    later_phases,
    predicted_change,
)
from ntkexp.report.run import Run

Fact = Literal[
    "closure", "forgetting", "top_share", "switch", "shuffled", "selectivity", "gained"
]


class LaterTask(AbstractQuantity):
    """The change of an earlier task's outputs during a later task,
    for runs of `data=sequence`.

    The rows hold the numbers in `facts`, labelled by the column `quantity`. They are
    measured at the points x of the earlier `task`, over the training phase of the later
    task `during`. Tasks are counted from 1. 𝒮(x, xᵢ) is the contribution of a later
    example, 𝒟 the contribution of weight decay, and Δf the change of the outputs.

        closure       ‖Σᵢ 𝒮(x, xᵢ) + 𝒟(x) − Δf(x)‖/‖Δf(x)‖
        forgetting    the rise of the mean ½‖f − y‖², relative to the mean ½‖y‖²
        top_share     the share of the margin's decrease that the most harmful tenth of the later
                      examples caused
        switch        the correlation of Δf with its prediction from the kernel at the task switch
                      (`report.forgetting`)
        shuffled      `switch` with the kernels of other examples (a control)
        selectivity   the selectivity of the hidden units at the end (`diagnostics`)
        gained        the increase of the selectivity since the start

    Closure tests the path kernel identity (P. Domingos 2020, arXiv:2012.00152,
    theorem 1) across tasks."""

    facts: tuple[Fact, ...] = ("closure", "forgetting", "top_share")
    task: Count = 1
    during: Count = 2
    split: str = "query"

    def of(self, measured: Measured) -> pd.DataFrame:
        return measured.by_run(self.measure, self.facts)

    def measure(self, run: Run) -> Mapping[str, float]:
        # Select the training phase of the later task,
        # and the points of the earlier task
        if BY_PHASE not in run.contributions or self.split not in run.points:
            raise Mistake(
                f"quantity: {run.name} has no tasks with {self.split} points; use data=sequence"
            )
        phases = {phase.during: phase for phase in later_phases(run, self.split)}
        later = phases.get(self.during)
        tasks = run.contributions["point_phase"].to_numpy()[run.points[self.split]]
        here = np.flatnonzero(tasks == self.task)
        if later is None or not len(here) or self.task >= self.during:
            count = run.contributions.sizes["phase"]
            raise Mistake(
                f"quantity.task={self.task}, quantity.during={self.during}: {run.name} learns "
                f"{count} tasks; choose an earlier task with {self.split} points, and a later one"
            )
        return {name: self.fact(name, later, here) for name in self.facts}

    def fact(self, name: Fact, later: LaterPhase, here: NDArray[np.int64]) -> float:
        change = later.change[here]
        match name:
            case "closure":  # ‖Σᵢ 𝒮ᵢ + 𝒟 − Δf‖ / ‖Δf‖
                missing = later.parts[here].sum(axis=2) + later.decay[here] - change
                value = float(np.linalg.norm(missing) / np.linalg.norm(change))
            case "forgetting":  # the rise of the squared error, relative to the targets
                targets = later.run.data[f"{later.split}_targets"][here]
                before = later.before[here]
                rise = np.square(before + change - targets) - np.square(
                    before - targets
                )
                value = float(rise.sum() / np.square(targets).sum())
            case "top_share":
                harm = later.effect_on(self.task)
                value = math.nan
                if harm is not None and harm.harm:
                    value = share_of_tenth(harm)
            case "switch":
                value = correlate_with_predicted(later, here, shift=0)
            case "shuffled":
                in_phase = later.run.contributions["example_phase"] == later.during
                value = correlate_with_predicted(
                    later, here, shift=int(in_phase.sum()) // 2
                )
            case "selectivity" | "gained":
                units = later.run.metrics["selectivity"].dropna()
                value = math.nan
                if name == "selectivity" and len(units):
                    value = float(units.iloc[-1])
                elif name == "gained" and len(units) > 1:
                    value = float(units.iloc[-1] - units.iloc[0])
        return value


def share_of_tenth(forgetting: Forgetting) -> float:
    """Return the share of the margin's decrease that the most harmful tenth
    of examples caused."""
    tenth = math.ceil(forgetting.learned_in.count(forgetting.during) / 10)
    return -sum(forgetting.by[k] for k in forgetting.worst[:tenth]) / forgetting.harm


def correlate_with_predicted(
    later: LaterPhase, here: NDArray[np.int64], shift: int
) -> float:
    """Return the correlation of the change with its prediction from the kernel
    at the task switch.

    With `shift`, each example gets the kernel of the example that many positions later
    (a control). The correlation is rounded to six digits, so that it does not depend on
    rounding errors."""
    change = predicted_change(later.run, later.during, shift)
    if change is None:
        raise Mistake(
            f"quantity: {later.run.name} stores no kernel from which a change could be "
            "predicted; use optimizer=gd without decay, clipping or layers, and "
            "loss=squared"
        )
    expected = change[later.run.points[later.split]][here]
    correlation = np.corrcoef(expected.ravel(), later.change[here].ravel())[0, 1]
    return round(float(correlation), 6)
