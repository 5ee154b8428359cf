"""What learning a later task did to an earlier one: whether the parts add up, how much is forgotten, and whether the
kernel between the tasks foretells it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ntkexp.claim.quantity import AbstractQuantity, Measured
from ntkexp.component import Count
from ntkexp.mistake import Mistake
from ntkexp.records.contributions import BY_PHASE
from ntkexp.report.forgetting import Forgetting, LaterPhase, foretold, later_phases
from ntkexp.report.run import Run

Fact = Literal["closure", "forgetting", "top_share", "switch", "shuffled", "selectivity", "gained"]


class LaterTask(AbstractQuantity):
    """What learning a later task did to an earlier one, in runs of `data=sequence`, at the points of the earlier
    task:

    Rows have these facts, told apart by the column `quantity`; tasks are counted from 1.

        closure       ‖Σᵢ 𝒮(x, xᵢ) + 𝒟(x) − Δf(x)‖/‖Δf(x)‖, while the later task was learned
        forgetting    rise of the mean ½‖f − y‖², over the mean ½‖y‖²
        top_share     of what lowers the margins, the share of a tenth of the later examples, those that lower them
                      most
        switch        correlation of Δf with what the kernel between the tasks at the switch foretells
                      (`report.forgetting`)
        shuffled      the same, with the kernels of other examples, half of all further on
        selectivity   of the hidden units at the end (`diagnostics`)
        gained        the same, less that at the start

    The identity is that of the path kernel (P. Domingos 2020, arXiv:2012.00152, theorem 1), between two tasks.
    """

    facts: tuple[Fact, ...] = ("closure", "forgetting", "top_share")
    task: Count = 1
    during: Count = 2
    split: str = "probe"

    def of(self, measured: Measured) -> pd.DataFrame:
        return measured.by_run(self.measure, self.facts)

    def measure(self, run: Run) -> Mapping[str, float]:
        """The facts of one run; NaN of one that did not come so far."""
        later, here = self.later(run)
        return {name: FACTS[name](later, here, self.task) for name in self.facts}

    def later(self, run: Run) -> tuple[LaterPhase, NDArray[np.int64]]:
        """What the later phase did, and which points of the split are of the earlier task."""
        if BY_PHASE not in run.contributions or self.split not in run.points:
            raise Mistake(f"quantity: {run.name} has no tasks with {self.split} points; use data=sequence")
        found = next((phase for phase in later_phases(run, self.split) if phase.during == self.during), None)
        here = np.flatnonzero(run.contributions["point_phase"].to_numpy()[run.points[self.split]] == self.task)
        if found is None or not len(here) or self.task >= self.during:
            count = run.contributions.sizes["phase"]
            raise Mistake(
                f"quantity.task={self.task}, quantity.during={self.during}: {run.name} learns {count} tasks, and a "
                f"task with {self.split} points before the later one is asked for"
            )
        return found, here


def closure(later: LaterPhase, here: NDArray[np.int64], _: int) -> float:
    """How much of the change is missing from the sum of contributions."""
    change = later.change[here]
    missing = later.parts[here].sum(axis=2) + later.decay[here] - change
    return float(np.linalg.norm(missing) / np.linalg.norm(change))


def forgetting(later: LaterPhase, here: NDArray[np.int64], _: int) -> float:
    """How far the squared loss rose."""
    targets = later.run.data[f"{later.split}_targets"][here]
    before = later.before[here]
    rise = np.square(before + later.change[here] - targets) - np.square(before - targets)
    return float(rise.sum() / np.square(targets).sum())


def top_share_of_harm(later: LaterPhase, _: NDArray[np.int64], task: int) -> float:
    """How much of the harm comes from a tenth of the examples."""
    found = later.to(task)
    return math.nan if found is None or not found.harm else share_of_tenth(found)


def share_of_tenth(found: Forgetting) -> float:
    """The worst tenth of the later examples did this share of all harm."""
    tenth = math.ceil(found.learned_in.count(found.during) / 10)
    return -sum(found.by[k] for k in found.worst[:tenth]) / found.harm


def switch(later: LaterPhase, here: NDArray[np.int64], _: int) -> float:
    """How well the kernels of the examples foretell the change."""
    return correlate_with_foretold(later, here, shift=0)


def shuffled(later: LaterPhase, here: NDArray[np.int64], _: int) -> float:
    """How well those of others do."""
    learned = int((later.run.contributions["example_phase"] == later.during).sum())
    return correlate_with_foretold(later, here, shift=learned // 2)


def correlate_with_foretold(later: LaterPhase, here: NDArray[np.int64], shift: int) -> float:
    """Correlate the change with what is foretold; to six digits, as rounding leaves twelve at least."""
    change = foretold(later.run, later.during, shift)
    if change is None:
        raise Mistake(
            f"quantity: {later.run.name} keeps no kernel from which a change could be foretold; use optimizer=gd "
            "without decay, clipping or layers, and loss=squared"
        )
    expected = change[later.run.points[later.split]][here]
    return round(float(np.corrcoef(expected.ravel(), later.change[here].ravel())[0, 1]), 6)


def selectivity(later: LaterPhase, _: NDArray[np.int64], __: int) -> float:
    """How selective units are in the end."""
    known = later.run.metrics["selectivity"].dropna()
    return float(known.iloc[-1]) if len(known) else math.nan


def gained(later: LaterPhase, _: NDArray[np.int64], __: int) -> float:
    """How much more selective they became."""
    known = later.run.metrics["selectivity"].dropna()
    return float(known.iloc[-1] - known.iloc[0]) if len(known) > 1 else math.nan


FACTS: Mapping[str, Callable[[LaterPhase, NDArray[np.int64], int], float]] = {
    "closure": closure,
    "forgetting": forgetting,
    "top_share": top_share_of_harm,
    "switch": switch,
    "shuffled": shuffled,
    "selectivity": selectivity,
    "gained": gained,
}
