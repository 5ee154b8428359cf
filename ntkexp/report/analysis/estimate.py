"""Estimates from independent repetitions: intervals, the units that are independent, power laws, and how an estimate
stands to what was expected.

A number and the interval that holds it with 95 % confidence, from a few independent repetitions.

    mean ± t_{ν} s/√n,    ν = n − 1

With one repetition nothing is known of the spread, and the ends of the interval are NaN. Repetitions of unequal
variance may be averaged all the same: at this confidence Student's interval then holds the mean more often than it
says, never less (Bakirov & Székely 2006, doi:10.1007/s10958-006-0366-5; Ibragimov & Müller 2010,
doi:10.1198/jbes.2009.08046).

A quantity with a range has its interval on a scale g that maps the range to all real numbers. The error of g(mean) is
that of the mean times the slope g′(mean):

    ends = g⁻¹(g(mean) ± t_{ν} g′(mean) s/√n)
    any number         g(v) = v
    positive           g(v) = log v                   losses, distances, relative errors
    from a to b        g(v) = log((v − a)/(b − v))    shares, cosines

The mean stays the arithmetic one, and the interval never leaves the range.

>>> estimate = mean_of([1.0, 2.0, 3.0])
>>> estimate.value, round(estimate.low, 3), round(estimate.high, 3)
(2.0, -0.484, 4.484)
>>> estimate.covers(4.0), estimate.covers(5.0)
(True, False)
>>> positive = mean_of([1.0, 2.0, 3.0], POSITIVE)
>>> positive.value, round(positive.low, 3), round(positive.high, 3)
(2.0, 0.578, 6.926)

A power law, y = A xᵖ, fitted by least squares to log y = log A + p log x, seed by seed.

    log y = log A + p log x + c (log x − middle)²/2    whether c is zero: whether it is a power law at all

Every seed has an exponent of its own. The law's exponent is their mean, and its interval is Student's. Where all seeds
were run at all places, this is the fit through all runs.

>>> x = np.array([1.0, 2.0, 4.0, 1.0, 2.0, 4.0])
>>> law = power_law(x, 3 * x**-0.5, np.array([0, 0, 0, 1, 1, 1]))
>>> round(law.exponent.value, 12), round(law.prefactor, 12), law.curved
(-0.5, 3.0, False)

How an estimate stands to what was expected of it: the expectation leaves a range, and the whole interval counts.

    inside           the interval lies in the range             (equivalence: two one-sided tests, each at 2.5 %)
    above, below     the interval lies beyond it
    across           anything else; nothing is known if there is one repetition alone

Laws of sweeps say of it `agrees`, `larger`, `smaller`, `undecided`; claims `supported`, `refuted`, `refuted`,
`undecided`.

An exponent leaves exponent ± margin; one that bounds from above leaves (−∞, exponent + margin], one from below
[exponent − margin, ∞). So few repetitions are never evidence for anything: their interval is too wide.

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
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ntkexp.mistake import Mistake
from ntkexp.records.sweep import Expected

CONFIDENCE = 0.95
FAR = 700.0  # of the logarithm of odds: beyond, they overflow
LARGEST = math.log(sys.float_info.max)
ROUNDING = 1e-9  # a curvature below is that of rounded logarithms; a value so far beyond its range is rounded

Range: TypeAlias = tuple[float, float]
"""The ends between which a quantity lies; an end may be infinite."""
POSITIVE: Range = (0.0, math.inf)
SHARE: Range = (0.0, 1.0)


@dataclass(frozen=True)
class Estimate:
    """A value with its standard error and its degrees of freedom.

    Of a number that lies `within` a … b, as shares and correlations do, the interval lies there too: it is that of
    log((value − a)/(b − value)), whose error is the value's times the slope of this logarithm there. Of numbers near
    an end, such as shares around 8/9, Student's own interval lies wholly too near that end twice as often as this one.
    Above a alone, as of positive numbers, it is that of log(value − a).
    """

    value: float
    error: float = math.nan
    freedom: int = 0
    within: Range | None = None

    @property
    def known(self) -> bool:
        """Whether there is an interval."""
        return self.freedom >= 1 and math.isfinite(self.error)

    @property
    def reach(self) -> float:
        """How far the interval reaches on both sides of the value."""
        return student(self.freedom, (1 + CONFIDENCE) / 2) * self.error if self.known else math.nan

    @property
    def low(self) -> float:
        return self.ends(self.reach)[0]

    @property
    def high(self) -> float:
        return self.ends(self.reach)[1]

    def interval(self, level: float) -> tuple[float, float]:
        """The ends of the interval that misses the value with a probability of `level`.

        >>> [round(end, 3) for end in mean_of([1.0, 2.0, 3.0]).interval(0.01)]
        [-3.73, 7.73]
        >>> [round(end, 3) for end in replace(mean_of([0.98, 0.99, 1.0]), within=(0, 1)).interval(0.05)]
        [0.89, 0.999]
        """
        return self.ends(
            student(self.freedom, 1 - level / 2) * self.error if self.known else math.nan
        )

    def ends(self, reach: float) -> tuple[float, float]:
        """The ends of an interval that reaches so far, on a scale which near the value is its own."""
        if self.scale is None:
            return self.inside(self.value - reach), self.inside(self.value + reach)
        a, b, at_value, slope = self.scale
        ends = at_value - slope * reach, at_value + slope * reach
        if math.isinf(b):
            low, high = (a + math.exp(min(end, LARGEST)) for end in ends)
        else:
            low, high = (a + (b - a) / (1 + math.exp(-min(max(end, -FAR), FAR))) for end in ends)
        return low, high

    def inside(self, end: float) -> float:
        """Move an end of Student's own interval into the range, if the value lies at an end of it.

        >>> Estimate(1.0, error=1e-17, freedom=1, within=SHARE).high
        1.0
        """
        if self.within is None or not self.within[0] <= self.value <= self.within[1]:
            return end
        return end if math.isnan(end) else min(max(end, self.within[0]), self.within[1])

    def way_to(self, place: float) -> float:
        """How far a place lies above the value, on the same scale.

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
        """a, b, g(value) and g′(value); None of a value without a range, or at an end of it."""
        if self.within is None or math.isinf(self.within[0]):
            return None
        if not self.within[0] < self.value < self.within[1]:
            return None
        below, above = self.value - self.within[0], self.within[1] - self.value
        if math.isinf(above):
            return *self.within, math.log(below), 1 / below
        return *self.within, math.log(below / above), 1 / below + 1 / above

    def covers(self, value: float) -> bool | None:
        """Whether the interval holds a value; None where there is no interval."""
        return self.low <= value <= self.high if self.known else None


def mean_of(values: Sequence[float], within: Range | None = None) -> Estimate:
    """Average independent numbers that are finite; NaN of none.

    A value beyond the range by rounding counts as the end. If a value lies farther out, the range is not that of the
    quantity, as of a user's loss that may be negative, and the interval is Student's own.

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
    """The standard deviation, with n − 1; NaN of fewer than two."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else math.nan


def student(freedom: int, share: float) -> float:
    """The number below which so large a share of Student's distribution lies."""
    from scipy.special import stdtrit  # noqa: PLC0415  slow, and a report without intervals needs none

    return float(stdtrit(freedom, share))


# --- The independent units of a fit: which runs are one draw.
#
# A sweep repeats every place with the same seeds. Runs of one seed share what the seed drew, so a seed with its
# runs at all places is one unit, whichever places it lacks, and a law is fitted to each unit by itself: what its
# runs share, such as a kernel that is large at every width, cancels. A seed at one place alone knows of no
# change. Only where fewer than two seeds were run at several places are such single seeds put together, the k-th
# of each place, as if they were one.


Unit: TypeAlias = NDArray[np.int64]
"""Which runs."""


def units(x: NDArray[np.float64], seeds: NDArray[np.int64]) -> list[Unit]:
    """Sort runs at these places with these seeds into units.

    >>> [unit.tolist() for unit in units(np.array([1.0, 2.0, 1.0, 2.0, 1.0]), np.array([0, 0, 1, 1, 2]))]
    [[0, 1], [2, 3]]
    >>> [unit.tolist() for unit in units(np.array([1.0, 1.0, 2.0, 2.0]), np.array([0, 1, 2, 3]))]
    [[0, 2], [1, 3]]
    """
    of_seeds = [np.flatnonzero(seeds == seed) for seed in np.unique(seeds)]
    shared = [unit for unit in of_seeds if np.ptp(x[unit]) > 0]
    if len(shared) > 1:
        return shared
    # Seeds that were run at one place each, the k-th of every place as if they were one
    single = [unit for unit in of_seeds if np.ptp(x[unit]) == 0]
    groups = [[unit for unit in single if x[unit[0]] == value] for value in np.unique(x)]
    rounds = ([unit for unit in turn if unit is not None] for turn in zip_longest(*groups))
    return shared + [np.concatenate(turn) for turn in rounds if len(turn) > 1]


def most_informative(values: Sequence[float]) -> list[int]:
    """Choose the units to ask, by how much each knows: those that make the expected interval shortest.

        t_{k−1} √(Σ 1/known)/k    of the k that know most

    Of three seeds at all widths, and one at two neighbouring widths, the last would only blur the mean.

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
    """A fitted law: its coefficients, and how much it was fitted to."""

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
        """Whether the curvature is significant: a straight line in the log–log plot will not do."""
        return self.curvature.covers(0.0) is False and abs(self.curvature.value) > ROUNDING

    def at(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        """y at these places."""
        return np.asarray(self.prefactor * x**self.exponent.value)


def power_law(x: NDArray[np.float64], y: NDArray[np.float64], seeds: NDArray[np.int64]) -> PowerLaw:
    """Fit the law through runs at `x` that gave `y`; what is not positive and finite has no logarithm and is left."""
    fit = np.flatnonzero(np.isfinite(x) & np.isfinite(y) & (x > 0) & (y > 0))
    places = np.unique(x[fit])
    if len(places) < 2:
        raise Mistake(
            f"a power law needs positive numbers at two places or more, and has them at {len(places)}"
        )
    middle = float(np.log(places).mean())
    log_x, log_y = np.log(x[fit]) - middle, np.log(y[fit])
    units_used, lines = unit_weights(
        np.vander(log_x, 2, increasing=True), units(x[fit], seeds[fit])
    )
    heights, slopes = (lines @ log_y).T
    used = np.concatenate(units_used)

    # The curvature c, by the units with three places or more
    curvature = Estimate(math.nan)
    if able := [unit for unit in units_used if len(np.unique(log_x[unit])) > 2]:
        _, parabolas = unit_weights(np.vander(log_x, 3, increasing=True) / [1, 1, 2], able)
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
    """Find the units that tell most of the last coefficient, and what log y is multiplied with to give each its own.

    [unit, coefficient, run], zero for the runs of others.
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
"""Repetitions beyond which their number is not reported."""


@dataclass(frozen=True)
class IntervalComparison:
    """Where the interval lies beside the range that was expected.

    `p` is the probability of so good an estimate by chance, were the truth at the edge, where the interval lies on one
    side of it. Where it lies across, `more` repetitions would probably settle it; None if far too many.
    """

    where: Literal["inside", "above", "below", "across"]
    p: float | None = None
    more: int | None = None


def compare(
    estimate: Estimate, expected: Expected, *, strict: bool = False, level: float = LEVEL
) -> IntervalComparison:
    """Compare an interval with the range that was expected; claims and the laws of sweeps are judged by this alone.

    p ≤ 2.5 % is where the whole 95 % interval lies inside or outside; another `level` is split between the sides
    as well. The edges belong to the range, unless it is `strict`: then an exact estimate at an edge lies outside.

    >>> equal = Estimate(0.0, error=0.0, freedom=4)
    >>> [compare(equal, Expected(0.0, 0.0, "lower"), strict=strict).where for strict in (False, True)]
    ['inside', 'below']
    """
    from scipy.special import stdtr  # noqa: PLC0415  slow, and a report without intervals needs none

    value = estimate.value
    if not estimate.known or math.isnan(value):
        return IntervalComparison("across")

    def chance(way: float) -> float:
        """The probability of an estimate so far beyond an edge, were the truth at that edge."""
        if math.isinf(way) or not estimate.error:
            return 0.0 if way >= 0 else 1.0
        return float(stdtr(estimate.freedom, -way / estimate.error))

    at_edge = strict and value in {expected.low, expected.high} and not estimate.error
    low, high = estimate.way_to(expected.low), estimate.way_to(expected.high)
    inside = 1.0 if at_edge else max(chance(-low), chance(high))
    if inside <= level / 2:
        return IntervalComparison("inside", inside)
    outside = min(chance(low), chance(-high))
    if outside <= level / 2:
        return IntervalComparison("above" if value >= expected.high else "below", outside)
    return IntervalComparison("across", more=missing(estimate, expected))


def missing(estimate: Estimate, expected: Expected) -> int | None:
    """Find how many more repetitions decide with a probability of 80 %, if value and spread are what they seem.

        (t_{m−1, 97.5 %} + t_{m−1, 90 %}) s/√m  ≤  the way from the value to the nearest end of the range

    90 %, because of two ends that are equally near an interval may miss either.
    """
    way = min(abs(estimate.way_to(expected.low)), abs(estimate.way_to(expected.high)))
    have = estimate.freedom + 1
    enough = np.flatnonzero(ways()[have:] * estimate.error * math.sqrt(have) <= way)
    return int(enough[0]) + 1 if len(enough) else None


@cache
def ways() -> NDArray[np.float64]:
    """What way/s above has to be at least, for m = 1, 2, …"""
    from scipy.special import stdtrit  # noqa: PLC0415  slow, and a report without intervals needs none

    total = np.arange(1, MOST + 1)
    quantiles = stdtrit(total[1:] - 1, (1 + CONFIDENCE) / 2) + stdtrit(
        total[1:] - 1, (1 + POWER) / 2
    )
    return np.append(math.inf, quantiles / np.sqrt(total[1:]))
