"""Estimates from independent repetitions: 95 % intervals, power laws, and comparisons with expected values.

Means. The interval of a mean is

    mean ± t_{ν} s/√n,    ν = n − 1

With one repetition the spread is unknown, and the ends of the interval are NaN. Repetitions may have unequal variances:
Student's interval then covers the mean at least as often as stated (Bakirov & Székely 2006,
doi:10.1007/s10958-006-0366-5; Ibragimov & Müller 2010, doi:10.1198/jbes.2009.08046).

If a quantity has a range, its interval is computed on a scale g that maps the range to all real numbers. The error of
g(mean) is the error of the mean times g′(mean):

    ends = g⁻¹(g(mean) ± t_{ν} g′(mean) s/√n)
    any number         g(v) = v
    positive           g(v) = log v                   losses, distances, relative errors
    from a to b        g(v) = log((v − a)/(b − v))    shares, cosines

The mean is always the arithmetic mean, and the interval never leaves the range.

>>> estimate = mean_of([1.0, 2.0, 3.0])
>>> estimate.value, round(estimate.low, 3), round(estimate.high, 3)
(2.0, -0.484, 4.484)
>>> estimate.covers(4.0), estimate.covers(5.0)
(True, False)
>>> positive = mean_of([1.0, 2.0, 3.0], POSITIVE)
>>> positive.value, round(positive.low, 3), round(positive.high, 3)
(2.0, 0.578, 6.926)

Power laws. y = A xᵖ is fitted by least squares to log y = log A + p log x for each seed. The exponent is the mean of
the seeds' exponents, with Student's interval. If all seeds have runs at all x, this is the fit to all runs. The
curvature c tests whether the data follow a power law at all:

    log y = log A + p log x + c (log x − middle)²/2

>>> x = np.array([1.0, 2.0, 4.0, 1.0, 2.0, 4.0])
>>> law = power_law(x, 3 * x**-0.5, np.array([0, 0, 0, 1, 1, 1]))
>>> round(law.exponent.value, 12), round(law.prefactor, 12), law.curved
(-0.5, 3.0, False)

Comparisons. The interval of an estimate is compared with an expected range:

                     interval                 law of a sweep   claim
    inside           in the range             agrees           supported    (two one-sided tests, each at 2.5 %)
    above, below     outside the range        larger, smaller  refuted
    across           anything else, or none   undecided        undecided

The range of an exponent is exponent ± margin. An upper bound has the range (−∞, exponent + margin], and a lower bound
[exponent − margin, ∞). Few repetitions are never evidence, because their interval is too wide.

>>> law = Estimate(-0.97, error=0.02, freedom=4)
>>> [compare(law, expected).where for expected in (Expected(-1.0), Expected(-0.5), Expected(-0.5, bound="upper"))]
['inside', 'below', 'inside']
>>> compare(Estimate(-0.97, error=0.1, freedom=1), Expected(-1.0))
IntervalComparison(where='across', p=None, more=43)
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import zip_longest
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ntkexp.mistake import Mistake
from ntkexp.records.sweep import Expected

CONFIDENCE = 0.95
MAX_LOG_ODDS = 700.0  # the exponential of larger numbers overflows
MAX_LOG = math.log(sys.float_info.max)
ROUNDING = (
    1e-9  # relative; smaller curvatures, and smaller distances from a range, are rounding errors
)

Range: TypeAlias = tuple[float, float]
"""The ends of a range. An end may be infinite."""
POSITIVE: Range = (0.0, math.inf)
SHARE: Range = (0.0, 1.0)


@dataclass(frozen=True)
class Estimate:
    """A value with its standard error and its degrees of freedom.

    If the value lies `within` a … b, as shares and correlations do, its interval is computed on the scale
    log((value − a)/(b − value)), or log(value − a) if b is infinite, and also lies within a … b. Near an end, such as
    for shares around 8/9, Student's interval on the original scale misses on the side of this end twice as often.
    """

    value: float
    error: float = math.nan
    freedom: int = 0
    within: Range | None = None

    @property
    def known(self) -> bool:
        """Whether the estimate has an interval."""
        return self.freedom >= 1 and math.isfinite(self.error)

    @property
    def reach(self) -> float:
        """Half of the length of Student's interval."""
        return student(self.freedom, (1 + CONFIDENCE) / 2) * self.error if self.known else math.nan

    @property
    def low(self) -> float:
        return self.ends(self.reach)[0]

    @property
    def high(self) -> float:
        return self.ends(self.reach)[1]

    def interval(self, level: float) -> tuple[float, float]:
        """Return the ends of the interval that misses the true value with probability `level`.

        >>> [round(end, 3) for end in mean_of([1.0, 2.0, 3.0]).interval(0.01)]
        [-3.73, 7.73]
        >>> [round(end, 3) for end in replace(mean_of([0.98, 0.99, 1.0]), within=(0, 1)).interval(0.05)]
        [0.89, 0.999]
        """
        reach = math.nan
        if self.known:
            reach = student(self.freedom, 1 - level / 2) * self.error
        return self.ends(reach)

    def ends(self, reach: float) -> tuple[float, float]:
        """Return the ends of the interval with half-length `reach`, on the scale of the range."""
        if self.scale is None:
            return self.inside(self.value - reach), self.inside(self.value + reach)
        # g⁻¹(g(value) ± g′(value) · reach)
        a, b, g, slope = self.scale

        def back(end: float) -> float:
            if math.isinf(b):
                return a + math.exp(min(end, MAX_LOG))
            log_odds = min(max(end, -MAX_LOG_ODDS), MAX_LOG_ODDS)
            return a + (b - a) / (1 + math.exp(-log_odds))

        return back(g - slope * reach), back(g + slope * reach)

    def inside(self, end: float) -> float:
        """Return an end of Student's interval, clipped to the range if the value lies in it.

        >>> Estimate(1.0, error=1e-17, freedom=1, within=SHARE).high
        1.0
        """
        if self.within is None or not self.within[0] <= self.value <= self.within[1]:
            return end
        return end if math.isnan(end) else min(max(end, self.within[0]), self.within[1])

    def way_to(self, place: float) -> float:
        """Return the signed distance from the value to a place, in units of the value, on the scale of the range.

        >>> near = Estimate(0.9, error=0.05, freedom=9, within=(0, 1))
        >>> [round(near.way_to(place), 3) for place in (near.ends(0.1)[1], 0.9, 1.0)]
        [0.1, 0.0, inf]
        """
        if self.scale is None:
            return place - self.value
        a, b, at_value, slope = self.scale
        if not a < place < b:
            return -math.inf if place <= a else math.inf
        at_place = math.log(place - a) if math.isinf(b) else math.log((place - a) / (b - place))
        return (at_place - at_value) / slope

    @property
    def scale(self) -> tuple[float, float, float, float] | None:
        """a, b, g(value) and g′(value). None if the value has no range, or is not inside it."""
        if self.within is None or math.isinf(self.within[0]):
            return None
        low, high = self.within
        if not low < self.value < high:
            return None
        below = self.value - low
        above = high - self.value
        if math.isinf(above):
            return low, high, math.log(below), 1 / below
        return low, high, math.log(below / above), 1 / below + 1 / above

    def covers(self, value: float) -> bool | None:
        """Return whether the interval contains a value; None without an interval."""
        return self.low <= value <= self.high if self.known else None

    def widened(self, factor: float) -> Estimate:
        """Return the estimate with its error multiplied by a factor."""
        return replace(self, error=self.error * factor)


def mean_of(values: Sequence[float], within: Range | None = None) -> Estimate:
    """Return the mean of independent finite numbers; NaN if there are none.

    Values that leave the range by rounding only are clipped. If a value lies farther out, such as a negative value of a
    user's loss, the range is ignored.

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
    return Estimate(float(np.mean(numbers)), error, len(numbers) - 1, within)


def deviation(values: Sequence[float]) -> float:
    """Return the standard deviation, with n − 1; NaN for fewer than two values."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else math.nan


def student(freedom: int, share: float) -> float:
    """Return a quantile of Student's distribution."""
    from scipy.special import stdtrit  # noqa: PLC0415  slow, and a report without intervals needs none

    return float(stdtrit(freedom, share))


# --- The independent units of a fit: groups of runs that are one random draw.
#
# A sweep repeats every place x with the same seeds. The runs of one seed share random numbers, so they are one unit,
# and a law is fitted to each unit separately: common deviations, such as a kernel that is large at every width,
# cancel. Seeds with runs at one place only show no change. If fewer than two seeds have runs at several places, such
# single seeds are combined into units: the k-th seed of each place.


Unit: TypeAlias = NDArray[np.int64]
"""The indices of the runs of a unit."""


def units(x: NDArray[np.float64], seeds: NDArray[np.int64]) -> list[Unit]:
    """Group runs at these places with these seeds into units.

    >>> [unit.tolist() for unit in units(np.array([1.0, 2.0, 1.0, 2.0, 1.0]), np.array([0, 0, 1, 1, 2]))]
    [[0, 1], [2, 3]]
    >>> [unit.tolist() for unit in units(np.array([1.0, 1.0, 2.0, 2.0]), np.array([0, 1, 2, 3]))]
    [[0, 2], [1, 3]]
    """
    of_seeds = [np.flatnonzero(seeds == seed) for seed in np.unique(seeds)]
    shared = [unit for unit in of_seeds if np.ptp(x[unit]) > 0]
    if len(shared) > 1:
        return shared
    # combine the k-th single seeds of all places
    single = [unit for unit in of_seeds if np.ptp(x[unit]) == 0]
    groups = [[unit for unit in single if x[unit[0]] == value] for value in np.unique(x)]
    rounds = ([unit for unit in turn if unit is not None] for turn in zip_longest(*groups))
    return shared + [np.concatenate(turn) for turn in rounds if len(turn) > 1]


def most_informative(values: Sequence[float]) -> list[int]:
    """Return the units that make the expected interval shortest, given the information of each unit.

        t_{k−1} √(Σ 1/information)/k    of the k units with the most information

    For example, of three seeds at all widths and one at two neighbouring widths, the last is left out.

    >>> most_informative([17.5, 10.0, 17.5]), most_informative([17.5, 17.5, 17.5, 0.5])
    ([0, 1, 2], [0, 1, 2])
    """
    best_first = sorted(range(len(values)), key=lambda unit: -values[unit])
    doubts = np.cumsum([1 / values[unit] for unit in best_first])
    reach = [
        student(k - 1, (1 + CONFIDENCE) / 2) * math.sqrt(doubts[k - 1]) / k
        for k in range(2, len(values) + 1)
    ]
    return sorted(best_first[: 2 + int(np.argmin(reach))] if reach else best_first)


@dataclass(frozen=True)
class PowerLaw:
    """A fitted power law, and the number of its data."""

    exponent: Estimate
    prefactor: float
    curvature: Estimate
    start: float
    stop: float
    points: int
    runs: int
    seeds: int
    units: int
    left_out: int

    @property
    def curved(self) -> bool:
        """Whether the curvature is significant."""
        return self.curvature.covers(0.0) is False and abs(self.curvature.value) > ROUNDING

    def at(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return y at these x."""
        return np.asarray(self.prefactor * x**self.exponent.value)

    def widened(self, factor: float) -> PowerLaw:
        """Return the law with the errors multiplied by a factor."""
        exponent = self.exponent.widened(factor)
        return replace(self, exponent=exponent, curvature=self.curvature.widened(factor))


def power_law(x: NDArray[np.float64], y: NDArray[np.float64], seeds: NDArray[np.int64]) -> PowerLaw:
    """Fit a power law to runs. Leave out numbers that are not positive and finite."""
    fit = np.flatnonzero(np.isfinite(x) & np.isfinite(y) & (x > 0) & (y > 0))
    places = np.unique(x[fit])
    if len(places) < 2:
        raise Mistake(
            f"a power law needs positive numbers at two places or more, and has them at {len(places)}"
        )
    middle = float(np.log(places).mean())
    log_x = np.log(x[fit]) - middle
    log_y = np.log(y[fit])
    candidates = units(x[fit], seeds[fit])

    # log y = log A + p log x, for each unit
    units_used, lines = unit_weights(np.vander(log_x, 2, increasing=True), candidates)
    heights, slopes = (lines @ log_y).T
    used = np.concatenate(units_used)

    # the curvature c, from the units with three places or more
    curvature = Estimate(math.nan)
    long_units = [unit for unit in units_used if len(np.unique(log_x[unit])) > 2]
    if long_units:
        _, parabolas = unit_weights(np.vander(log_x, 3, increasing=True) / [1, 1, 2], long_units)
        curvature = mean_of((parabolas[:, 2] @ log_y).tolist())
    exponent = mean_of(slopes.tolist())
    return PowerLaw(
        exponent=exponent,
        prefactor=math.exp(heights.mean() - exponent.value * middle),
        curvature=curvature,
        start=float(x[fit][used].min()),
        stop=float(x[fit][used].max()),
        points=len(np.unique(x[fit][used])),
        runs=len(used),
        seeds=len(np.unique(seeds[fit][used])),
        units=len(units_used),
        left_out=len(x) - len(used),
    )


def unit_weights(
    columns: NDArray[np.float64], candidates: Sequence[Unit]
) -> tuple[list[Unit], NDArray[np.float64]]:
    """Return the units that determine the last coefficient best, and their least-squares weights.

    The weights [unit, coefficient, run] times log y are the coefficients of each unit. They are 0 for the runs of other
    units.
    """
    inverses = np.zeros((len(candidates), columns.shape[1], len(columns)))
    for inverse, unit in zip(inverses, candidates, strict=True):
        inverse[:, unit] = np.linalg.pinv(columns[unit])
    chosen = most_informative((1 / (inverses[:, -1] ** 2).sum(1)).tolist())
    return [candidates[k] for k in chosen], inverses[chosen]


LEVEL = 1 - CONFIDENCE
CHANCE = LEVEL / 2
POWER = 0.8
MOST = 1000
"""The largest number of repetitions that is reported."""


@dataclass(frozen=True)
class IntervalComparison:
    """The place of an interval relative to the expected range.

    If the interval is inside or outside, `p` is the probability of such an estimate if the true value were at the edge
    of the range. If it lies across an edge, `more` repetitions will probably decide; None if that takes too many.
    """

    where: Literal["inside", "above", "below", "across"]
    p: float | None = None
    more: int | None = None


def compare(
    estimate: Estimate, expected: Expected, *, strict: bool = False, level: float = LEVEL
) -> IntervalComparison:
    """Compare an interval with the expected range. All claims and all laws of sweeps are judged by this function.

    p ≤ 2.5 % if the whole 95 % interval is inside or outside. Half of any other `level` goes to each side. The edges
    belong to the range. If the range is `strict`, an exact estimate at an edge is outside.

    >>> equal = Estimate(0.0, error=0.0, freedom=4)
    >>> [compare(equal, Expected(0.0, 0.0, "lower"), strict=strict).where for strict in (False, True)]
    ['inside', 'below']
    """
    from scipy.special import stdtr  # noqa: PLC0415  slow, and a report without intervals needs none

    value = estimate.value
    if not estimate.known or math.isnan(value):
        return IntervalComparison("across")

    def chance(way: float) -> float:
        """Return the probability of an estimate this far beyond an edge, if the true value were at the edge."""
        if math.isinf(way) or not estimate.error:
            return 0.0 if way >= 0 else 1.0
        return float(stdtr(estimate.freedom, -way / estimate.error))

    at_edge = strict and value in {expected.low, expected.high} and not estimate.error
    low = estimate.way_to(expected.low)
    high = estimate.way_to(expected.high)
    inside = 1.0 if at_edge else max(chance(-low), chance(high))
    if inside <= level / 2:
        return IntervalComparison("inside", inside)
    outside = min(chance(low), chance(-high))
    if outside <= level / 2:
        return IntervalComparison("above" if value >= expected.high else "below", outside)
    return IntervalComparison("across", more=missing(estimate, expected))


def missing(estimate: Estimate, expected: Expected) -> int | None:
    """Return the number of further repetitions that decide with a probability of 80 %.

        (t_{m−1, 97.5 %} + t_{m−1, 90 %}) s/√m  ≤  distance from the value to the nearest end of the range

    The value and the spread s are taken from the estimate. The quantile is 90 %, because an interval may miss either of
    two ends at equal distances.
    """
    distance = min(abs(estimate.way_to(expected.low)), abs(estimate.way_to(expected.high)))
    have = estimate.freedom + 1
    enough = np.flatnonzero(min_distances()[have:] * estimate.error * math.sqrt(have) <= distance)
    return int(enough[0]) + 1 if len(enough) else None


@cache
def min_distances() -> NDArray[np.float64]:
    """Return the smallest distance/s that m repetitions resolve, for m = 1, 2, …"""
    from scipy.special import stdtrit  # noqa: PLC0415  slow, and a report without intervals needs none

    total = np.arange(1, MOST + 1)
    quantiles = stdtrit(total[1:] - 1, (1 + CONFIDENCE) / 2) + stdtrit(
        total[1:] - 1, (1 + POWER) / 2
    )
    return np.append(math.inf, quantiles / np.sqrt(total[1:]))
