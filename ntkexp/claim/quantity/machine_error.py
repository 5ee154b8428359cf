"""The relative error of a kernel machine, beside what rounding explains of it.

bound = max(10⁻¹², floor, 10 ε Σ|𝒮|/|Σ𝒮|)      a sum whose parts cancel loses as many digits as they exceed it
"""

from __future__ import annotations

import math

import pandas as pd

from ntkexp.claim.measured import Measured
from ntkexp.claim.quantity.base import AbstractQuantity
from ntkexp.report.run import Run

EPS = 2.0**-52


class MachineError(AbstractQuantity):
    """Rows have the error of this machine on this split, of every run."""

    machine: str
    split: str = "probe"

    def of(self, measured: Measured) -> pd.DataFrame:
        errors = [self.error(measured.run(name)) for name in measured.table["run"]]
        return measured.table.assign(value=[error for error, _ in errors], bound=[bound for _, bound in errors])

    def error(self, run: Run | None) -> tuple[float, float]:
        """The error in one ladder, and its bound; NaN where the machine did not come to one."""
        rows = () if run is None else run.ladder
        found = [row for row in rows if (row.machine, row.split) == (self.machine, self.split)]
        if not found or found[0].relative_error is None:
            return math.nan, math.nan
        return found[0].relative_error, max(found[0].tolerance, 10 * EPS * cancellation(run, self.machine))


def cancellation(run: Run | None, rule: str) -> float:
    """How many times the parts exceed their sum, where a rule with this name summed them."""
    facts = {} if run is None or rule not in run.rules else run.parts(rule).attrs
    return float(facts.get("cancellation", 0.0))
