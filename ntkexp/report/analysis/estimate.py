"""A number and the interval that holds it with 95 % confidence, from a few independent repetitions.

    mean ± t_{ν} s/√n,    ν = n − 1

With one repetition nothing is known of the spread, and the ends of the interval are NaN.

>>> estimate = mean_of([1.0, 2.0, 3.0])
>>> estimate.value, round(estimate.low, 3), round(estimate.high, 3)
(2.0, -0.484, 4.484)
>>> estimate.covers(4.0), estimate.covers(5.0)
(True, False)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A value and the ends of its interval."""

    value: float
    low: float = math.nan
    high: float = math.nan

    @property
    def known(self) -> bool:
        """Whether there is an interval."""
        return math.isfinite(self.low) and math.isfinite(self.high)

    def covers(self, value: float) -> bool | None:
        """Whether the interval holds a value; None where there is no interval."""
        return self.low <= value <= self.high if self.known else None


def around(value: float, error: float, freedom: int) -> Estimate:
    """The interval of Student's t with a standard error and its degrees of freedom."""
    if freedom < 1 or not math.isfinite(error):
        return Estimate(value)
    reach = float(stdtrit(freedom, (1 + CONFIDENCE) / 2)) * error
    return Estimate(value, value - reach, value + reach)


def mean_of(values: Sequence[float]) -> Estimate:
    """The mean of independent numbers that are finite; NaN of none."""
    if not len(values):
        return Estimate(math.nan)
    error = deviation(values) / math.sqrt(len(values))
    return around(float(np.mean(values)), error, len(values) - 1)


def deviation(values: Sequence[float]) -> float:
    """The standard deviation, with n − 1; NaN of fewer than two."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else math.nan
