"""What is known of the contributions of a run, by one rule: `cancellation`, `error_bar`, `coefficient_variation`, …

They are the numbers of `ntkexp.diagnostics.contributions` and the error bar of the parts, as the run has kept them.
"""

from __future__ import annotations

import math

import pandas as pd

from ntkexp.claim.measured import Measured
from ntkexp.claim.quantity.base import AbstractQuantity
from ntkexp.mistake import Mistake, nearest
from ntkexp.report.run import Run


class PathFact(AbstractQuantity):
    """Rows have this number of the path of their run."""

    fact: str
    rule: str = "secant"

    def of(self, measured: Measured) -> pd.DataFrame:
        return measured.table.assign(value=[self.number(measured.run(name)) for name in measured.table["run"]])

    def number(self, run: Run | None) -> float:
        """The number of one run; NaN where it has none."""
        if run is None or self.rule not in run.rules:
            return math.nan
        known = {str(name): fact for name, fact in run.parts(self.rule).attrs.items() if isinstance(fact, int | float)}
        if self.fact not in known:
            raise Mistake(f"quantity.fact={self.fact}: a path has {', '.join(known)}{nearest(self.fact, known)}")
        return float(known[self.fact])
