"""A power law, y = A xᵖ, fitted by least squares to log y = log A + p log x, seed by seed.

    log y = log A + p log x + c (log x − middle)²/2    whether c is zero: whether it is a power law at all

Every seed has an exponent of its own (`ntkexp.report.analysis.units`); the law's is their mean, and its interval is
Student's. Where all seeds were run at all places, this is the fit through all runs.

>>> x = np.array([1.0, 2.0, 4.0, 1.0, 2.0, 4.0])
>>> law = power_law(x, 3 * x**-0.5, np.array([0, 0, 0, 1, 1, 1]))
>>> round(law.exponent.value, 12), round(law.prefactor, 12), law.curved
(-0.5, 3.0, False)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ntkexp.mistake import Mistake
from ntkexp.report.analysis.estimate import Estimate, mean_of
from ntkexp.report.analysis.units import Unit, most_informative, units

ROUNDING = 1e-9  # a curvature below is that of rounded logarithms


@dataclass(frozen=True)
class PowerLaw:
    """A fitted law has these coefficients, and was fitted to so much."""

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
        """The law says this at a place."""
        return np.asarray(self.prefactor * x**self.exponent.value)

    def widened(self, factor: float) -> PowerLaw:
        """The same law is given, known less well."""
        return replace(self, exponent=self.exponent.widened(factor), curvature=self.curvature.widened(factor))


def power_law(x: NDArray[np.float64], y: NDArray[np.float64], seeds: NDArray[np.int64]) -> PowerLaw:
    """Fit the law through runs at `x` that gave `y`; what is not positive and finite has no logarithm and is left."""
    fit = np.flatnonzero(np.isfinite(x) & np.isfinite(y) & (x > 0) & (y > 0))
    places = np.unique(x[fit])
    if len(places) < 2:
        raise Mistake(f"a power law needs positive numbers at two places or more, and has them at {len(places)}")
    log_x, log_y = np.log(x[fit]), np.log(y[fit])
    middle = float(np.log(places).mean())
    asked, lines = own(np.vander(log_x - middle, 2, increasing=True), units(x[fit], seeds[fit]))
    heights, slopes = (lines @ log_y).T
    used = np.concatenate(asked)
    exponent = mean_of(slopes.tolist())
    return PowerLaw(
        exponent=exponent,
        prefactor=math.exp(heights.mean() - exponent.value * middle),
        curvature=bend(log_x - middle, log_y, asked),
        start=float(x[fit][used].min()),
        stop=float(x[fit][used].max()),
        points=len(np.unique(x[fit][used])),
        runs=len(used),
        seeds=len(np.unique(seeds[fit][used])),
        units=len(asked),
        left_out=len(x) - len(used),
    )


def bend(log_x: NDArray[np.float64], log_y: NDArray[np.float64], asked: Sequence[Unit]) -> Estimate:
    """Fit the curvature c, by the units with three places or more."""
    able = [unit for unit in asked if len(np.unique(log_x[unit])) > 2]
    if not able:
        return Estimate(math.nan)
    _, parabolas = own(np.vander(log_x, 3, increasing=True) / [1, 1, 2], able)
    return mean_of((parabolas[:, 2] @ log_y).tolist())


def own(columns: NDArray[np.float64], asked: Sequence[Unit]) -> tuple[list[Unit], NDArray[np.float64]]:
    """Find the units that tell most of the last coefficient, and what log y is multiplied with to give each its own.

    [unit, coefficient, run], zero for the runs of others.
    """
    inverses = np.zeros((len(asked), columns.shape[1], len(columns)))
    for inverse, unit in zip(inverses, asked, strict=True):
        inverse[:, unit] = np.linalg.pinv(columns[unit])
    chosen = most_informative((1 / (inverses[:, -1] ** 2).sum(1)).tolist())
    return [asked[k] for k in chosen], inverses[chosen]
