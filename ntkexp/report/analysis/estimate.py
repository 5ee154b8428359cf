"""A number and the interval that holds it with 95 % confidence, from a few independent repetitions.

    mean ± t_{ν} s/√n,    ν = n − 1

With one repetition nothing is known of the spread, and the ends of the interval are NaN. Repetitions of unequal
variance may be averaged all the same: at this confidence Student's interval then holds the mean more often than it
says, never less (Bakirov & Székely 2006, doi:10.1007/s10958-006-0366-5; Ibragimov & Müller 2010,
doi:10.1198/jbes.2009.08046).

>>> estimate = mean_of([1.0, 2.0, 3.0])
>>> estimate.value, round(estimate.low, 3), round(estimate.high, 3)
(2.0, -0.484, 4.484)
>>> estimate.covers(4.0), estimate.covers(5.0)
(True, False)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """An estimate is a value with its standard error, which was found with so many degrees of freedom."""

    value: float
    error: float = math.nan
    freedom: int = 0

    @property
    def known(self) -> bool:
        """Whether there is an interval."""
        return self.freedom >= 1 and math.isfinite(self.error)

    @property
    def reach(self) -> float:
        """The interval reaches so far on both sides of the value."""
        return student(self.freedom, (1 + CONFIDENCE) / 2) * self.error if self.known else math.nan

    @property
    def low(self) -> float:
        """The interval begins here."""
        return self.value - self.reach

    @property
    def high(self) -> float:
        """The interval ends here."""
        return self.value + self.reach

    def covers(self, value: float) -> bool | None:
        """Whether the interval holds a value; None where there is no interval."""
        return self.low <= value <= self.high if self.known else None

    def widened(self, factor: float) -> Estimate:
        """The same value is given, known less well."""
        return replace(self, error=self.error * factor)


def mean_of(values: Sequence[float]) -> Estimate:
    """Average independent numbers that are finite; NaN of none."""
    if not len(values):
        return Estimate(math.nan)
    return Estimate(float(np.mean(values)), deviation(values) / math.sqrt(len(values)), len(values) - 1)


def deviation(values: Sequence[float]) -> float:
    """Find the standard deviation, with n − 1; NaN of fewer than two."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else math.nan


def student(freedom: int, share: float) -> float:
    """Find the number below which so large a share of Student's distribution lies."""
    from scipy.special import stdtrit  # noqa: PLC0415  slow, and a report without intervals needs none

    return float(stdtrit(freedom, share))
