"""Location: where along an axis a figure is largest (or least), as a share of where it should be.

    log place of seed = the top of the parabola through the extreme point and its neighbours, in log axis
    expected: value/(1 + margin) … value·(1 + margin)

A seed whose extreme lies at an end of the axis has not been located, and then nothing is decided.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pydantic import Field

from ntkexp.claim.expectation.base import SEEDS, AbstractExpectation, column
from ntkexp.claim.expectation.slope import refuse_several
from ntkexp.claim.finding import Finding, decide
from ntkexp.mistake import Mistake
from ntkexp.records.fit import Expected
from ntkexp.report.analysis.estimate import mean_of
from ntkexp.text import percent, short

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Location(AbstractExpectation):
    """The figure has its extreme along `along` at `value`, up to the share `margin`."""

    along: str
    value: float = Field(gt=0)
    margin: float = Field(gt=0)
    extreme: Literal["largest", "least"] = "largest"

    @property
    def expected(self) -> Expected:
        """The range of the logarithm of the place."""
        return Expected(math.log(self.value), math.log1p(self.margin))

    @property
    def words(self) -> str:
        return f"{self.extreme} at {short(self.value)} ± {percent(self.margin)}"

    def decide(self, table: pd.DataFrame) -> Finding:
        column(table, self.along, "along")
        refuse_several(table, self.along)
        places = [self.locate(rows) for _, rows in table.groupby("seed", sort=True)]
        known = [place for place in places if not math.isnan(place)]
        found = decide(mean_of(known), self.expected)
        found = found.mapped(*np.exp([found.low, found.figure, found.high]).tolist())
        lost = len(places) - len(known)
        return found.doubted(f"{lost} of {len(places)} seeds have it at an end of the axis") if lost else found

    def locate(self, rows: pd.DataFrame) -> float:
        """Locate the extreme of one seed, as the logarithm of its place; NaN at an end."""
        ordered = rows.sort_values(self.along)
        x = ordered[self.along].to_numpy(dtype=float)
        if len(x) < 3 or (x <= 0).any():
            raise Mistake(f"along={self.along}: an extreme is located among three positive places or more")
        y = ordered["value"].to_numpy(dtype=float) * (1 if self.extreme == "largest" else -1)
        top = int(np.argmax(y))
        return math.nan if top in {0, len(y) - 1} else vertex(np.log(x[top - 1 : top + 2]), y[top - 1 : top + 2])

    def draw(self, axes: Axes, table: pd.DataFrame, colour: str) -> None:
        for _, seed in table.sort_values(self.along).groupby("seed"):
            axes.plot(seed[self.along], seed["value"], color=colour, alpha=0.25, linewidth=0.8, zorder=1)
        means = table.set_index(self.along)["value"].astype(float).groupby(level=0).mean()
        axes.plot(means.index, means, "o-", color=colour, zorder=3)

    def mark(self, axes: Axes) -> None:
        """Shade the places that are expected."""
        from ntkexp.report.plots.style import VERMILION, log_axis  # noqa: PLC0415  drawing is slow to load

        log_axis(axes, "x")
        low, high = math.exp(self.expected.low), math.exp(self.expected.high)
        axes.axvspan(low, high, color=VERMILION, alpha=0.15, linewidth=0, zorder=0)
        axes.set(xlabel=self.along, ylabel="figure")

    def invent(self, place: float, generator: np.random.Generator) -> pd.DataFrame:
        """Invent a hump for each seed, somewhere around the truth."""
        centre, reach = self.expected.value, self.expected.margin
        truth = centre if place < 0 else centre + reach * (1 + 1.5 * place)
        tops = truth + 0.4 * reach * generator.standard_normal((SEEDS, 1))
        x = centre + reach * np.arange(-6, 11)
        sign = 1 if self.extreme == "largest" else -1
        values = sign * np.exp(-(((x - tops) / (3 * reach)) ** 2))
        seeds = np.repeat(np.arange(SEEDS), len(x))
        return pd.DataFrame({self.along: np.tile(np.exp(x), SEEDS), "seed": seeds, "value": values.ravel()})


def vertex(x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    """Find the vertex of the parabola through three points, of which the middle one is highest.

    >>> round(vertex(np.array([0.0, 1.0, 3.0]), np.array([0.0, 1.0, -3.0])), 6)  # y = 2x − x²
    1.0
    """
    before, after = (y[1] - y[0]) / (x[1] - x[0]), (y[2] - y[1]) / (x[2] - x[1])
    if before == after:
        return float(x[1])
    share = before / (before - after)
    return float((x[0] + x[1]) / 2 + share * (x[2] - x[0]) / 2)
