"""One figure per seed, averaged over seeds: on its own scale, or by logarithms, where margins are shares.

linear   value ± margin                log   value/(1 + margin) … value·(1 + margin)
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pydantic import Field

from ntkexp.claim.expectation.base import SEEDS, AbstractExpectation
from ntkexp.claim.finding import Finding, decide
from ntkexp.mistake import Mistake
from ntkexp.records.fit import Expected
from ntkexp.report.analysis.estimate import mean_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TOGETHER = {"mean": "mean", "least": "min", "largest": "max"}


class AbstractAverage(AbstractExpectation):
    """Rows of a seed are put together into its figure: their mean, the least, or the largest of them."""

    strict: ClassVar[bool] = False  # whether a figure at the edge of what is expected is none that was expected
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
        found = decide(mean_of(self.figures(table)), self.expected, strict=self.strict)
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

    def draw(self, axes: Axes, table: pd.DataFrame, colour: str) -> None:
        """Draw the figure of each seed, and their mean."""
        figures = np.array(self.figures(table))
        shown = np.exp(figures) if self.scale == "log" else figures
        mean = math.exp(figures.mean()) if self.scale == "log" else figures.mean()
        axes.plot(range(len(shown)), shown, "o", color=colour, zorder=3)
        axes.axhline(mean, color=colour, linewidth=0.8, zorder=2)

    def mark(self, axes: Axes) -> None:
        """Shade the range that is expected."""
        from ntkexp.report.plots.style import VERMILION, log_axis  # noqa: PLC0415  drawing is slow to load

        if self.scale == "log":
            log_axis(axes, "y")
        low, high = axes.get_ylim()
        ends = [math.exp(end) if self.scale == "log" else end for end in (self.expected.low, self.expected.high)]
        axes.axhspan(*np.clip(ends, *outside(low, high, ends)), color=VERMILION, alpha=0.15, linewidth=0, zorder=0)
        axes.set(xlabel="seed", ylabel=self.label, xticks=[])

    @property
    def label(self) -> str:
        """What a figure is, for the axis."""
        return "figure of a seed"

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


def outside(low: float, high: float, ends: Sequence[float]) -> tuple[float, float]:
    """Find the extent of a picture that shows these ends, where they are finite.

    >>> outside(1.0, 2.0, [0.5, math.inf])
    (0.5, 2.0)
    """
    finite = [end for end in ends if math.isfinite(end) and end != 0]
    return min([low, *finite]), max([high, *finite])
