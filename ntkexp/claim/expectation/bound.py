"""Bound: the mean over seeds is at most, or at least, a limit, and the margin is allowed for.

>>> table = pd.DataFrame({"seed": [0, 1, 2], "value": [0.21, 0.19, 0.2]})
>>> Bound(limit=0.5, side="upper", margin=0.0).judge(table).verdict
'supported'
>>> Bound(limit=0.5, side="lower", margin=0.1).judge(table).verdict
'refuted'
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ntkexp.claim.expectation.average import AbstractAverage
from ntkexp.records.fit import Expected
from ntkexp.text import percent, short


class Bound(AbstractAverage):
    """The mean of the figures lies on one side of `limit`: `upper` bounds it from above."""

    limit: float
    side: Literal["upper", "lower"]

    @property
    def expected(self) -> Expected:
        return Expected(self.scaled(self.limit), self.reach, self.side)

    @property
    def words(self) -> str:
        margin = percent(self.margin) if self.scale == "log" else short(self.margin)
        return f"{'≤' if self.side == 'upper' else '≥'} {short(self.limit)} ± {margin}"

    def figures(self, table: pd.DataFrame) -> list[float]:
        return self.per_seed(table).tolist()

    def table_of(self, figures: NDArray[np.float64]) -> pd.DataFrame:
        return pd.DataFrame({"seed": range(len(figures)), "value": figures})
