"""Confidence intervals from a few independent repetitions,
compared with an expected range.

The 95 % interval of a mean is Student's:

    mean ± t_{ν} s/√n,    ν = n − 1

With a single repetition, the ends of the interval are NaN. Repetitions may have unequal
variances: at 95 % confidence, the interval is then conservative (Bakirov & Székely
2006, doi:10.1007/s10958-006-0366-5; Ibragimov & Müller 2010,
doi:10.1198/jbes.2009.08046).

If the values of a quantity lie in a range, the interval is computed on a scale g, which
maps the range onto the real line. The standard error of g(mean) is g′(mean) times the
standard error of the mean:

    ends = g⁻¹(g(mean) ± t_{ν} g′(mean) s/√n)
    any number         g(v) = v
    above a            g(v) = log(v − a)              losses, distances, relative errors
    from a to b        g(v) = log((v − a)/(b − v))    shares, cosines

The reported mean is the arithmetic mean. The interval never leaves the range. This
matters near an end of the range. For example, for shares around 8/9, the plain Student
interval misses the true value on the side of the end twice as often as the interval on
the scale g.

>>> estimate = mean_of([1.0, 2.0, 3.0])
>>> estimate.value, round(estimate.low, 3), round(estimate.high, 3)
(2.0, -0.484, 4.484)
>>> estimate.covers(4.0), estimate.covers(5.0)
(True, False)
>>> positive = mean_of([1.0, 2.0, 3.0], POSITIVE)
>>> positive.value, round(positive.low, 3), round(positive.high, 3)
(2.0, 0.578, 6.926)

`compare` compares the interval with an expected range:

              the interval                                         laws of sweeps   claims
    inside    lies in the range (two one-sided tests at 2.5 %)     agrees           supported
    above     lies above the range                                 larger           refuted
    below     lies below the range                                 smaller          refuted
    across    contains an edge of the range, or does not exist     undecided        undecided

The range of an expected exponent is exponent ± margin. An upper bound gives
(−∞, exponent + margin], a lower bound [exponent − margin, ∞).

>>> exponent = Estimate(-0.97, error=0.02, freedom=4)
>>> ranges = Expected(-1.0), Expected(-0.5), Expected(-0.5, bound="upper")
>>> [compare(exponent, expected).where for expected in ranges]
['inside', 'below', 'inside']
>>> compare(Estimate(-0.97, error=0.1, freedom=1), Expected(-1.0))
IntervalComparison(where='across', p=None, more=43)
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ntkexp.records.sweep import Expected

CONFIDENCE = 0.95
LEVEL = 1 - CONFIDENCE
ONE_SIDED_LEVEL = LEVEL / 2
POWER = 0.8
MAX_REPETITIONS = 1000
"""Larger numbers of repetitions that a decision would need are not reported."""
ROUNDING = 1e-9
"""A value outside of its range is clipped if its distance from the range is at most
this fraction of the largest value."""
LARGEST_LOG = math.log(sys.float_info.max)
LARGEST_LOG_ODDS = 700.0  # exp overflows for larger numbers

Range: TypeAlias = tuple[float, float]
"""The lower and upper end of the possible values of a quantity.
An end may be infinite."""
POSITIVE: Range = (0.0, math.inf)
SHARE: Range = (0.0, 1.0)


@dataclass(frozen=True)
class Scale:
    """The map g from the range (a, b) onto the real line, for confidence intervals. If
    a is infinite, g is the identity."""

    a: float = -math.inf
    b: float = math.inf

    def of(self, value: float) -> float:
        """Map a value to the real line: return g(value),
        which is ±∞ outside the range."""
        if math.isinf(self.a):
            return value
        if value <= self.a:
            return -math.inf
        if not value < self.b:
            return math.inf
        if math.isinf(self.b):
            return math.log(value - self.a)
        return math.log((value - self.a) / (self.b - value))

    def slope(self, value: float) -> float:
        """Return the derivative g′(value) of the map."""
        if math.isinf(self.a):
            return 1.0
        if math.isinf(self.b):
            return 1 / (value - self.a)
        return 1 / (value - self.a) + 1 / (self.b - value)

    def inverse(self, scaled: float) -> float:
        """Map a number back to the range: return g⁻¹(scaled)."""
        if math.isinf(self.a):
            return scaled
        if math.isinf(self.b):
            return self.a + math.exp(min(scaled, LARGEST_LOG))
        log_odds = min(max(scaled, -LARGEST_LOG_ODDS), LARGEST_LOG_ODDS)
        return self.a + (self.b - self.a) / (1 + math.exp(-log_odds))


@dataclass(frozen=True)
class Estimate:
    """A value with its standard error and degrees of freedom.

    If the quantity lies in the range `within`, its interval is computed on
    the scale g of this range."""

    value: float
    error: float = math.nan
    freedom: int = 0
    within: Range | None = None

    @property
    def known(self) -> bool:
        """True if there is an interval."""
        return self.freedom >= 1 and math.isfinite(self.error)

    @property
    def reach(self) -> float:
        """Half of the length of Student's 95 % interval."""
        return self.half_length((1 + CONFIDENCE) / 2)

    @property
    def low(self) -> float:
        return self.ends(self.reach)[0]

    @property
    def high(self) -> float:
        return self.ends(self.reach)[1]

    def interval(self, level: float) -> tuple[float, float]:
        """Return the ends of the interval that contains the true value with probability
        1 − `level`.

        >>> [round(end, 3) for end in mean_of([1.0, 2.0, 3.0]).interval(0.01)]
        [-3.73, 7.73]
        >>> [round(end, 3) for end in mean_of([0.98, 0.99, 1.0], SHARE).interval(0.05)]
        [0.89, 0.999]
        """
        return self.ends(self.half_length(1 - level / 2))

    def half_length(self, quantile: float) -> float:
        if not self.known:
            return math.nan
        return student(self.freedom, quantile) * self.error

    @property
    def scale(self) -> Scale:
        """The scale g of the interval. If there is no range, or if the value is at an
        end of the range, g is the identity."""
        if self.within is None or not self.within[0] < self.value < self.within[1]:
            return Scale()
        return Scale(*self.within)

    def ends(self, reach: float) -> tuple[float, float]:
        """Return the ends of an interval on the scale g:
        g⁻¹(g(value) ± g′(value) reach).

        >>> Estimate(1.0, error=1e-17, freedom=1, within=SHARE).high
        1.0
        """
        scale = self.scale
        center = scale.of(self.value)
        scaled_reach = scale.slope(self.value) * reach
        low = scale.inverse(center - scaled_reach)
        high = scale.inverse(center + scaled_reach)
        if self.within is None or not self.within[0] <= self.value <= self.within[1]:
            return low, high

        # if the estimate is at an end of its range, the scale is the identity, so clip
        # the interval
        return max(low, self.within[0]), min(high, self.within[1])

    def distance_to(self, target: float) -> float:
        """Return the signed distance to `target` on the scale g:
        (g(target) − g(value))/g′(value).

        >>> near = Estimate(0.9, error=0.05, freedom=9, within=(0, 1))
        >>> [round(near.distance_to(target), 3) for target in (near.ends(0.1)[1], 0.9, 1.0)]
        [0.1, 0.0, inf]
        """
        scale = self.scale
        return (scale.of(target) - scale.of(self.value)) / scale.slope(self.value)

    def covers(self, value: float) -> bool | None:
        """Return True if the interval contains `value`,
        or None if there is no interval."""
        if not self.known:
            return None
        return self.low <= value <= self.high


def mean_of(values: Sequence[float], within: Range | None = None) -> Estimate:
    """Estimate the mean of independent finite numbers. Without numbers,
    the value is NaN.

    Values that are outside of the range by a rounding error are clipped to the range.
    If a value is farther outside, such as a negative value of a user's loss, the range
    is ignored.

    >>> mean_of([0.9, 1 + 1e-15], SHARE).within, mean_of([0.5, -0.1], POSITIVE).within
    ((0.0, 1.0), None)
    """
    if not len(values):
        return Estimate(math.nan)
    numbers = np.asarray(values, dtype=float)
    if within is not None:
        clipped = np.clip(numbers, *within)
        if np.abs(clipped - numbers).max() <= ROUNDING * np.abs(numbers).max():
            numbers = clipped
        else:
            within = None
    error = deviation(numbers.tolist()) / math.sqrt(len(numbers))
    value = float(np.mean(numbers))
    if error == 0:  # the mean of equal numbers is not rounded
        value = float(numbers[0])
    return Estimate(value, error, len(numbers) - 1, within)


def deviation(values: Sequence[float]) -> float:
    """Return the standard deviation with divisor n − 1, or NaN for fewer than two
    values. The deviation of equal values is exactly 0.

    >>> deviation([0.1] * 7)
    0.0
    """
    if len(values) < 2:
        return math.nan
    if math.isfinite(values[0]) and all(value == values[0] for value in values):
        return 0.0
    return float(np.std(values, ddof=1))


def student(freedom: int, share: float) -> float:
    """Return the quantile of Student's distribution: the number below which the
    probability is `share`."""
    from scipy.special import stdtrit  # noqa: PLC0415  slow to import

    return float(stdtrit(freedom, share))


# --- Comparison with the expected range.


@dataclass(frozen=True)
class IntervalComparison:
    """The position of an interval relative to the expected range.

    If the interval lies inside or outside the range, `p` is the probability of an
    estimate at least as far from the edge, given that the true value lies at the edge.
    If the interval crosses an edge, `more` is the number of additional repetitions that
    would probably decide. It is None if the total would exceed `MAX_REPETITIONS`."""

    where: Literal["inside", "above", "below", "across"]
    p: float | None = None
    more: int | None = None


def compare(
    estimate: Estimate,
    expected: Expected,
    *,
    strict: bool = False,
    level: float = LEVEL,
) -> IntervalComparison:
    """Compare the interval of an estimate with the expected range.

    The interval lies inside or outside the range if p ≤ `level`/2. An exact estimate
    (error 0) at an edge counts as inside, or as outside if `strict`.

    >>> equal = Estimate(0.0, error=0.0, freedom=4)
    >>> edge = Expected(0.0, 0.0, "lower")
    >>> [compare(equal, edge, strict=strict).where for strict in (False, True)]
    ['inside', 'below']
    """
    value = estimate.value
    if not estimate.known or math.isnan(value):
        return IntervalComparison("across")
    to_low = estimate.distance_to(expected.low)
    to_high = estimate.distance_to(expected.high)

    # Inside: the estimate lies far enough from both edges.
    above_low = tail_probability(estimate, -to_low)
    below_high = tail_probability(estimate, to_high)
    p_inside = max(above_low, below_high)
    if strict and not estimate.error and value in {expected.low, expected.high}:
        p_inside = 1.0
    if p_inside <= level / 2:
        return IntervalComparison("inside", p_inside)

    # Decide for "outside" if the estimate lies far enough beyond one edge of the
    # expected range.
    below_low = tail_probability(estimate, to_low)
    above_high = tail_probability(estimate, -to_high)
    p_outside = min(below_low, above_high)
    if p_outside <= level / 2:
        if value >= expected.high:
            return IntervalComparison("above", p_outside)
        return IntervalComparison("below", p_outside)
    return IntervalComparison("across", more=missing_repetitions(estimate, expected))


def tail_probability(estimate: Estimate, distance: float) -> float:
    """Return P(T ≥ distance/error): the p-value of an estimate at this distance."""
    from scipy.special import stdtr  # noqa: PLC0415  slow to import

    if math.isinf(distance) or not estimate.error:
        if distance >= 0:
            return 0.0
        return 1.0
    return float(stdtr(estimate.freedom, -distance / estimate.error))


def missing_repetitions(estimate: Estimate, expected: Expected) -> int | None:
    """Return the number of additional repetitions after which `compare` decides with
    probability 80 %.

    Assume that the value and the standard deviation s stay the same.
    The total m is the smallest number with

        (t_{m−1, 97.5 %} + t_{m−1, 90 %}) s/√m  ≤  distance from the value to the nearest edge

    The second quantile is 90 %, because the interval may cross either of two equally
    near edges. Return None if m exceeds `MAX_REPETITIONS`."""
    distances = [estimate.distance_to(edge) for edge in (expected.low, expected.high)]
    nearest = min(map(abs, distances))
    repetitions = estimate.freedom + 1
    needed = needed_distances()[repetitions:] * estimate.error * math.sqrt(repetitions)
    enough = np.flatnonzero(needed <= nearest)
    if not len(enough):
        return None
    return int(enough[0]) + 1


@cache
def needed_distances() -> NDArray[np.float64]:
    """Return (t_{m−1, 97.5 %} + t_{m−1, 90 %})/√m for m = 1, 2, … repetitions (see
    `missing_repetitions`). The number for m = 1 is infinite."""
    from scipy.special import stdtrit  # noqa: PLC0415  slow to import

    repetitions = np.arange(2, MAX_REPETITIONS + 1)
    freedom = repetitions - 1
    quantiles = stdtrit(freedom, (1 + CONFIDENCE) / 2) + stdtrit(
        freedom, (1 + POWER) / 2
    )
    return np.append(math.inf, quantiles / np.sqrt(repetitions))
