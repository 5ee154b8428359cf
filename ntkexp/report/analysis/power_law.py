"""Power laws y = A xᵖ, fitted to several seeds.

The exponent p of each seed is fitted by least squares on log y = log A + p log x. The
exponent of the law is the mean over seeds, with Student's interval. If every seed was
run at every x, this mean equals the least-squares exponent of all runs. The curvature c
tests if the data follow a power law:

    log y = log A + p log x + c (log x − mean log x)²/2

>>> x = np.array([1.0, 2.0, 4.0, 1.0, 2.0, 4.0])
>>> law = power_law(x, 3 * x**-0.5, np.array([0, 0, 0, 1, 1, 1]))
>>> round(law.exponent.value, 12), round(law.prefactor, 12), law.curved
(-0.5, 3.0, False)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ntkexp.mistake import Mistake
from ntkexp.report.analysis.estimate import CONFIDENCE, Estimate, mean_of, student

MIN_CURVATURE = 1e-9
"""Smaller curvatures are rounding errors of the logarithms."""

Array: TypeAlias = NDArray[np.float64]
Unit: TypeAlias = NDArray[np.int64]
"""The indices of runs that together are one independent repetition."""


@dataclass(frozen=True)
class PowerLaw:
    """The coefficients of a fitted power law, and the size of the sample.

    A unit is an independent repetition: a seed, or several seeds that were run at a
    single x each (see `units`). `start` and `stop` are the smallest and largest x.
    `left_out` counts the runs that were not used: runs whose x or y is not positive and
    finite, and runs of unused units."""

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
        """True if the curvature differs significantly from 0."""
        return (
            self.curvature.covers(0.0) is False
            and abs(self.curvature.value) > MIN_CURVATURE
        )

    def at(self, x: Array) -> Array:
        """Return the values A xᵖ of the law at x."""
        return np.asarray(self.prefactor * x**self.exponent.value)


def power_law(x: Array, y: Array, seeds: NDArray[np.int64]) -> PowerLaw:
    """Fit a power law to runs with results `y` at `x`.
    Omit runs whose x or y has no logarithm."""
    has_logarithm = np.isfinite(x) & np.isfinite(y) & (x > 0) & (y > 0)
    positive = np.flatnonzero(has_logarithm)
    x_fitted = x[positive]
    seeds_fitted = seeds[positive]
    places = np.unique(x_fitted)
    if len(places) < 2:
        raise Mistake(
            "a power law needs positive numbers at two places or more, "
            f"and has them at {len(places)}"
        )
    middle = float(np.log(places).mean())
    log_x = np.log(x_fitted) - middle
    log_y = np.log(y[positive])

    # height and slope of the line of each unit
    line_columns = np.vander(log_x, 2, increasing=True)
    units_used, line_weights = unit_weights(line_columns, units(x_fitted, seeds_fitted))
    heights, slopes = (line_weights @ log_y).T
    used = np.concatenate(units_used)

    # curvature c of each unit with three or more different x
    curvature = Estimate(math.nan)
    curvable = [unit for unit in units_used if len(np.unique(log_x[unit])) > 2]
    if curvable:
        parabola_columns = np.vander(log_x, 3, increasing=True) / [1, 1, 2]
        _, parabola_weights = unit_weights(parabola_columns, curvable)
        curvature = mean_of((parabola_weights[:, 2] @ log_y).tolist())

    exponent = mean_of(slopes.tolist())
    return PowerLaw(
        exponent=exponent,
        prefactor=math.exp(heights.mean() - exponent.value * middle),
        curvature=curvature,
        start=float(x_fitted[used].min()),
        stop=float(x_fitted[used].max()),
        points=len(np.unique(x_fitted[used])),
        runs=len(used),
        seeds=len(np.unique(seeds_fitted[used])),
        units=len(units_used),
        left_out=len(x) - len(used),
    )


def units(x: Array, seeds: NDArray[np.int64]) -> list[Unit]:
    """Group runs into independent units, given the value of x and the seed of each run.

    Runs with the same seed have correlated errors, so each seed is one unit, even if it
    was not run at every x. An error that all runs of a seed share, such as a kernel
    that is large at every width, does not change the slope of the seed. A seed with a
    single x has no slope, and is left out. But if fewer than two seeds have a slope,
    such seeds are combined: the k-th of them at each x form one unit.

    >>> seeds = np.array([0, 0, 1, 1, 2])
    >>> [unit.tolist() for unit in units(np.array([1.0, 2.0, 1.0, 2.0, 1.0]), seeds)]
    [[0, 1], [2, 3]]
    >>> [unit.tolist() for unit in units(np.array([1.0, 1.0, 2.0, 2.0]), np.arange(4))]
    [[0, 2], [1, 3]]
    """
    by_seed = [np.flatnonzero(seeds == seed) for seed in np.unique(seeds)]
    several_places = [unit for unit in by_seed if np.ptp(x[unit]) > 0]
    if len(several_places) > 1:
        return several_places

    # Use the seeds that have a single x. The k-th such seeds at all x form one unit.
    by_place: dict[float, list[Unit]] = {value: [] for value in np.unique(x).tolist()}
    for unit in by_seed:
        if np.ptp(x[unit]) == 0:
            by_place[float(x[unit[0]])].append(unit)
    combined = []
    for row in zip_longest(*by_place.values()):
        present = [unit for unit in row if unit is not None]
        if len(present) > 1:
            combined.append(np.concatenate(present))
    return several_places + combined


def unit_weights(
    columns: Array, candidates: Sequence[Unit]
) -> tuple[list[Unit], Array]:
    """Choose the most informative units. Return these units and their least-squares
    weights.

    The weights have the shape [unit, coefficient, run], so that weights[unit,
    coefficient] @ log y is the coefficient of the unit. A unit has weight 0 for the
    runs of other units. The information of a unit is the inverse variance of its last
    coefficient, for noise of variance 1."""
    runs, coefficients = columns.shape
    weights = np.zeros((len(candidates), coefficients, runs))
    for k, unit in enumerate(candidates):
        weights[k][:, unit] = np.linalg.pinv(columns[unit])
    variances = (weights[:, -1] ** 2).sum(1)
    chosen = most_informative((1 / variances).tolist())
    return [candidates[k] for k in chosen], weights[chosen]


def most_informative(information: Sequence[float]) -> list[int]:
    """Choose the units whose mean has the shortest expected interval.

    For the k units with the most information, half of the length of the interval is

        t_{k−1} √(Σ 1/information)/k

    For example, if three seeds were run at all widths and a fourth at only two
    neighbouring widths, the fourth would only widen the interval.

    >>> most_informative([17.5, 10.0, 17.5]), most_informative([17.5, 17.5, 17.5, 0.5])
    ([0, 1, 2], [0, 1, 2])
    """
    best_first = sorted(range(len(information)), key=lambda unit: -information[unit])
    if len(best_first) < 2:
        return best_first
    variances = np.cumsum([1 / information[unit] for unit in best_first])
    half_lengths = []
    for k in range(2, len(best_first) + 1):
        quantile = student(k - 1, (1 + CONFIDENCE) / 2)
        half_lengths.append(quantile * math.sqrt(variances[k - 1]) / k)
    count = 2 + int(np.argmin(half_lengths))
    return sorted(best_first[:count])
