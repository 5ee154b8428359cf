"""One figure per seed, averaged over seeds: on its own scale, or by logarithms, where margins are shares.

linear   value ± margin                log   value/(1 + margin) … value·(1 + margin)
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pydantic import Field

from ntkexp.claim.expectation.base import SEEDS, AbstractExpectation
from ntkexp.claim.finding import Finding, decide
from ntkexp.mistake import Mistake
from ntkexp.records.fit import Expected
from ntkexp.report.analysis.estimate import mean_of

TOGETHER = {"mean": "mean", "least": "min", "largest": "max"}


class AbstractAverage(AbstractExpectation):
    """Rows of a seed are put together into its figure: their mean, the least, or the largest of them."""

    margin: float = Field(ge=0)
    scale: Literal["linear", "log"] = "linear"
    rows: Literal["mean", "least", "largest"] = "mean"

    @property
    @abstractmethod
    def expected(self) -> Expected:
        """The range that is expected, on the scale."""

    @abstractmethod
    def figures(self, table: pd.DataFrame) -> list[float]:
        """One figure per seed, on the scale."""

    @abstractmethod
    def table_of(self, figures: NDArray[np.float64]) -> pd.DataFrame:
        """Make a table in which seeds have these figures."""

    def decide(self, table: pd.DataFrame) -> Finding:
        found = decide(mean_of(self.figures(table)), self.expected)
        if self.scale == "log":
            return found.mapped(*np.exp([found.low, found.figure, found.high]).tolist())
        return found

    def scaled(self, value: float) -> float:
        """A number of the configuration, on the scale."""
        if self.scale == "log" and value <= 0:
            raise Mistake(f"{value} has no logarithm; it takes numbers above 0 with scale: log")
        return math.log(value) if self.scale == "log" else value

    @property
    def reach(self) -> float:
        """The margin, on the scale."""
        return math.log1p(self.margin) if self.scale == "log" else self.margin

    def per_seed(self, table: pd.DataFrame) -> pd.Series[float]:
        """Put the rows of each seed together."""
        values = table["value"].astype(float)
        if self.scale == "log":
            if (values <= 0).any():
                raise Mistake("scale: log takes figures above 0, and some are not; write scale: linear")
            values = values.map(math.log)
        found: pd.Series[float] = values.groupby(table["seed"]).agg(TOGETHER[self.rows])
        return found

    def invent(self, place: float, generator: np.random.Generator) -> pd.DataFrame:
        """Invent figures of seeds; the unit is the margin, or 1 where there is none."""
        expected, unit = self.expected, self.reach or 1.0
        middle = expected.value if expected.bound is None else expected.high if expected.bound == "upper" else None
        edge = expected.low if expected.bound == "lower" else expected.high
        outwards = -1.0 if expected.bound == "lower" else 1.0
        truth = (
            middle if place < 0 and expected.bound is None and middle is not None else edge + outwards * place * unit
        )
        figures = truth + 0.4 * unit * generator.standard_normal(SEEDS)
        return self.table_of(np.exp(figures) if self.scale == "log" else figures)
