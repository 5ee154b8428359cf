"""Slope: a figure is a power of an axis, with this exponent, to within a margin; or bounded by it from one side.

Seeds have an exponent each (`ntkexp.report.analysis.power_law`). A line that bends has a slope over its range alone,
which is said.

>>> widths = [1.0, 2.0, 4.0] * 2
>>> table = pd.DataFrame({"width": widths, "seed": [0, 0, 0, 1, 1, 1], "value": [1 / w for w in widths]})
>>> Slope(along="width", value=-1.0, margin=0.1).judge(table).verdict
'supported'
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import numpy as np
import pandas as pd
from pydantic import Field

from ntkexp.claim.expectation.base import SEEDS, AbstractExpectation, column
from ntkexp.claim.finding import Finding, decide
from ntkexp.mistake import Mistake
from ntkexp.records.fit import Expected
from ntkexp.report.analysis.laws_in_words import limit, number
from ntkexp.report.analysis.power_law import power_law
from ntkexp.text import short

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PLACES = (1.0, 2.0, 4.0, 8.0, 16.0)


class Slope(AbstractExpectation):
    """The slope of log figure against log `along` is `value`; with a bound, at most (upper) or at least (lower)."""

    along: str
    value: float
    margin: float = Field(gt=0)
    bound: Literal["upper", "lower"] | None = None

    @property
    def expected(self) -> Expected:
        """The range that is expected."""
        return Expected(self.value, self.margin, self.bound)

    @property
    def words(self) -> str:
        return f"slope {limit(self.expected)} ± {short(self.margin)}"

    def decide(self, table: pd.DataFrame) -> Finding:
        places = column(table, self.along, "along").map(as_number)
        if places.isna().any():
            raise Mistake(f"along: {self.along} is no column of numbers, so figures have no slope along it")
        refuse_several(table, self.along)
        values = np.asarray(table["value"], dtype=np.float64)
        if (values <= 0).any():
            return Finding("undecided", float("nan"), note="some figures are not above 0, and have no logarithm")
        law = power_law(np.asarray(places, dtype=np.float64), values, table["seed"].to_numpy(dtype=np.int64))
        found = decide(law.exponent, self.expected)
        return found.noted(f"the line bends, by {number(law.curvature.value)} per factor e" if law.curved else "")

    def draw(self, axes: Axes, table: pd.DataFrame, colour: str) -> None:
        for _, seed in table.sort_values(self.along).groupby("seed"):
            axes.plot(seed[self.along], seed["value"], color=colour, alpha=0.25, linewidth=0.8, zorder=1)
        positive = table[table["value"] > 0]
        logs = positive["value"].astype(float).map(math.log).groupby(positive[self.along]).mean()
        axes.plot(logs.index, logs.map(math.exp), "o", color=colour, zorder=3)

    def mark(self, axes: Axes) -> None:
        """Draw the slope that is expected through the middle of the picture."""
        from ntkexp.report.plots.labels import End, name_ends  # noqa: PLC0415  drawing is slow to load
        from ntkexp.report.plots.style import VERMILION, log_axis  # noqa: PLC0415  the same
        from ntkexp.report.plots.together.laws import tick  # noqa: PLC0415  the same

        log_axis(axes, "x")
        log_axis(axes, "y")
        for line in axes.get_lines():
            tick(axes, sorted({float(x) for x in np.asarray(line.get_xdata(), dtype=float)}))
        drawn = [line for line in axes.get_lines() if line.get_linestyle() == "None"]
        if drawn:
            x = np.asarray(drawn[-1].get_xdata(), dtype=float)
            y = np.asarray(drawn[-1].get_ydata(), dtype=float)
            heights = np.exp(np.log(y).mean()) * (x / np.exp(np.log(x).mean())) ** self.value
            axes.plot(x, heights, "--", color=VERMILION, linewidth=0.8, zorder=2)
            name_ends(axes, [End(f"expected {limit(self.expected)}", float(heights[-1]), VERMILION)])
        axes.set(xlabel=self.along, ylabel="figure")

    def invent(self, place: float, generator: np.random.Generator) -> pd.DataFrame:
        """Invent seeds with slopes of their own, and noise at each place."""
        sign = -1.0 if self.bound == "lower" else 1.0
        middle = self.value if self.bound is None else self.value - sign * self.margin
        truth = middle if place < 0 else self.value + sign * self.margin * (1 + 1.5 * place)
        slopes = truth + 0.3 * self.margin * generator.standard_normal((SEEDS, 1))
        heights = generator.standard_normal((SEEDS, 1))
        noise = 0.3 * self.margin * generator.standard_normal((SEEDS, len(PLACES)))
        values = np.exp(heights + slopes * np.log(PLACES) + noise)
        seeds = np.repeat(np.arange(SEEDS), len(PLACES))
        return pd.DataFrame({self.along: [*PLACES] * SEEDS, "seed": seeds, "value": values.ravel()})


def as_number(value: object) -> float:
    """Take a value on an axis as a number; NaN if it is none."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else float("nan")


def refuse_several(table: pd.DataFrame, along: str) -> None:
    """Refuse rows among which one seed lies twice at a place: they belong to several lines."""
    if table.duplicated([along, "seed"]).any():
        raise Mistake(f"along={along}: a seed has several rows at one place; choose a line by `where`")
