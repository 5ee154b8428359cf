"""Order: figures at one level lie above those at another of the same seed, by more than the margin.

    linear   above − below > margin        log   above/below > 1 + margin

>>> table = pd.DataFrame({"rule": ["left", "secant"] * 3, "seed": [0, 0, 1, 1, 2, 2], "value": [5, 1, 6, 1, 5, 2]})
>>> Order(along="rule", above="left", below="secant", margin=1.0).judge(table).verdict
'supported'
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ntkexp.claim.expectation.average import AbstractAverage
from ntkexp.claim.expectation.base import chosen, column
from ntkexp.mistake import Mistake
from ntkexp.records.fit import Expected
from ntkexp.text import short


class Order(AbstractAverage):
    """Where the column `along` is `above`, figures are larger than where it is `below`: as large is not enough."""

    strict: ClassVar[bool] = True
    along: str
    above: Any
    below: Any

    @property
    def expected(self) -> Expected:
        return Expected(self.reach, 0.0, "lower")

    @property
    def words(self) -> str:
        if self.scale == "log":
            return f"{self.above} > {short(1 + self.margin)} × {self.below}"
        return f"{self.above} − {self.below} > {short(self.margin)}"

    @property
    def label(self) -> str:
        return f"{self.above} {'/' if self.scale == 'log' else '−'} {self.below}"

    def figures(self, table: pd.DataFrame) -> list[float]:
        column(table, self.along, "along")
        above, below = (self.per_seed(chosen(table, {self.along: one})) for one in (self.above, self.below))
        differences = (above - below).dropna()
        if len(differences) < max(len(above), len(below)):
            raise Mistake(f"along={self.along}: some seeds are at {self.above} or {self.below} alone, and have no pair")
        return differences.tolist()

    def table_of(self, figures: NDArray[np.float64]) -> pd.DataFrame:
        base = np.ones_like(figures)
        above = base * figures if self.scale == "log" else base + figures
        seeds = [*range(len(figures))] * 2
        levels = [self.above] * len(figures) + [self.below] * len(figures)
        return pd.DataFrame({self.along: levels, "seed": seeds, "value": [*above, *base]})
