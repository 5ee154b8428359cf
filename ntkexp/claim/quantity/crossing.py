"""Where along an axis a figure crosses a level: the place on the straight line, in logarithms, between the neighbours
around it. Rows have one place for each seed and each value of the column `by`.

    log place = log x₀ + (log level − log y₀) (log x₁ − log x₀)/(log y₁ − log y₀)

A figure that does not cross the level, or more than once, has no place: the row is NaN.
"""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pydantic import Field

from ntkexp.claim.measured import Measured
from ntkexp.claim.quantity.base import AbstractQuantity
from ntkexp.claim.quantity.column import numbers
from ntkexp.mistake import Mistake, nearest


class Crossing(AbstractQuantity):
    """Rows have the place along `along` where the column is `level`."""

    column: str
    along: str
    by: str
    level: float = Field(1.0, gt=0)

    def of(self, measured: Measured) -> pd.DataFrame:
        table = measured.table
        for key, name in (("along", self.along), ("by", self.by)):
            if name not in table:
                raise Mistake(f"quantity.{key}: the table has no column {name}{nearest(name, map(str, table))}")
        asked = table.assign(figure=numbers(measured, self.column))
        asked = asked[asked[self.along].notna()]
        rows = [
            {"runs": runs, "seed": seed, self.by: by, "value": self.place(group)}
            for (runs, seed, by), group in asked.groupby(["runs", "seed", self.by], sort=True)
        ]
        return pd.DataFrame(rows)

    def place(self, group: pd.DataFrame) -> float:
        """The place of one seed at one value of `by`."""
        ordered = group.sort_values(self.along)
        x, y = (ordered[name].to_numpy(dtype=np.float64) for name in (self.along, "figure"))
        return math.nan if (x <= 0).any() or not (y > 0).all() else crossing(x, y, self.level)


def crossing(x: NDArray[np.float64], y: NDArray[np.float64], level: float) -> float:
    """Find the place.

    >>> round(crossing(np.array([1.0, 2.0, 8.0]), np.array([4.0, 2.0, 0.5]), 1.0), 12)  # y = 4/x
    4.0
    """
    log_x, log_y = np.log(x), np.log(y / level)
    changes = np.flatnonzero((log_y[:-1] >= 0) != (log_y[1:] >= 0))
    if len(changes) != 1:
        return math.nan
    k = int(changes[0])
    return float(np.exp(log_x[k] - log_y[k] * (log_x[k + 1] - log_x[k]) / (log_y[k + 1] - log_y[k])))
