"""Equality: the mean over seeds is a value, to within a margin (equivalence by two one-sided tests).

>>> table = pd.DataFrame({"seed": [0, 1, 2], "value": [2.01, 1.99, 2.0]})
>>> Equality(value=2.0, margin=0.1).judge(table).verdict, Equality(value=3.0, margin=0.1).judge(table).verdict
('supported', 'refuted')
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pydantic import Field

from ntkexp.claim.expectation.average import AbstractAverage
from ntkexp.records.fit import Expected
from ntkexp.text import percent, short


class Equality(AbstractAverage):
    """The mean of the figures equals `value`."""

    value: float
    margin: float = Field(gt=0)

    @property
    def expected(self) -> Expected:
        return Expected(self.scaled(self.value), self.reach)

    @property
    def words(self) -> str:
        return f"{short(self.value)} ± {percent(self.margin) if self.scale == 'log' else short(self.margin)}"

    def figures(self, table: pd.DataFrame) -> list[float]:
        return self.per_seed(table).tolist()

    def table_of(self, figures: NDArray[np.float64]) -> pd.DataFrame:
        return pd.DataFrame({"seed": range(len(figures)), "value": figures})
