"""A power law, y = A xᵖ, fitted by least squares to log y = log A + p log x, with intervals over seeds.

    log y = log A + p log x + c (log x − mean log x)²/2    whether c is zero: whether it is a power law at all

>>> x = np.array([1.0, 2.0, 4.0, 1.0, 2.0, 4.0])
>>> law = power_law(x, 3 * x**-0.5, np.array([0, 0, 0, 1, 1, 1]))
>>> round(law.exponent.value, 12), round(law.prefactor, 12), law.curved
(-0.5, 3.0, False)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ntkexp.mistake import Mistake
from ntkexp.report.analysis.bootstrap import Resamples, resamples
from ntkexp.report.analysis.estimate import Estimate

Verdict: TypeAlias = Literal["agrees", "larger", "smaller", ""]

ROUNDING = 1e-9  # a curvature below is that of rounded logarithms


@dataclass(frozen=True)
class PowerLaw:
    """A fitted law, and what it was fitted to."""

    exponent: Estimate
    prefactor: float
    curvature: Estimate
    start: float
    stop: float
    points: int
    runs: int
    seeds: int
    left_out: int

    @property
    def curved(self) -> bool:
        """Whether the curvature is significant: a straight line in the log–log plot will not do."""
        return self.curvature.covers(0.0) is False and abs(self.curvature.value) > ROUNDING

    def at(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        """What the law says."""
        return np.asarray(self.prefactor * x**self.exponent.value)

    def verdict(self, theory: float | None) -> Verdict:
        """How the exponent stands to the theory's; nothing where there is no theory or no interval."""
        covered = None if theory is None else self.exponent.covers(theory)
        if covered is None or theory is None:
            return ""
        return "agrees" if covered else "larger" if self.exponent.value > theory else "smaller"


def power_law(x: NDArray[np.float64], y: NDArray[np.float64], seeds: NDArray[np.int64]) -> PowerLaw:
    """The law through runs at `x` that gave `y`; what is not positive and finite has no logarithm and is left out."""
    fit = (np.isfinite(x) & np.isfinite(y)) & (x > 0) & (y > 0)
    places = np.unique(x[fit])
    if len(places) < 2:
        raise Mistake(f"a power law needs positive numbers at two places or more, and has them at {len(places)}")
    log_x, log_y = np.log(x[fit]), np.log(y[fit])
    middle = float(np.log(places).mean())
    drawn = resamples(x[fit], seeds[fit])
    line = np.stack([np.ones_like(log_x), log_x - middle], axis=1)
    height, slope = solve(line, log_y, np.ones((1, len(log_y))))[0]
    slopes = solve(line, log_y, drawn.counts)[:, 1]
    return PowerLaw(
        exponent=drawn.interval(float(slope), slopes),
        prefactor=math.exp(height - slope * middle),
        curvature=bend(line, log_y, drawn),
        start=float(places[0]),
        stop=float(places[-1]),
        points=len(places),
        runs=int(fit.sum()),
        seeds=len(set(seeds[fit].tolist())),
        left_out=int((~fit).sum()),
    )


def bend(line: NDArray[np.float64], log_y: NDArray[np.float64], drawn: Resamples) -> Estimate:
    """The curvature c, from three places on."""
    if len(np.unique(line[:, 1])) < 3:
        return Estimate(math.nan)
    parabola = np.column_stack([line, line[:, 1] ** 2 / 2])
    best = solve(parabola, log_y, np.ones((1, len(log_y))))[0, 2]
    return drawn.interval(float(best), solve(parabola, log_y, drawn.counts)[:, 2])


def solve(columns: NDArray[np.float64], log_y: NDArray[np.float64], counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Least squares with each run counted so often, [draw, coefficient]; NaN where too few places were drawn."""
    runs, size = columns.shape
    normal = (counts @ (columns[:, :, None] * columns[:, None, :]).reshape(runs, -1)).reshape(-1, size, size)
    right = counts @ (columns * log_y[:, None])
    place = columns[:, 1:2] == np.unique(columns[:, 1])
    enough = np.count_nonzero(counts @ place, axis=1) >= size
    found = np.full(right.shape, np.nan)
    found[enough] = np.linalg.solve(normal[enough], right[enough][..., None])[..., 0]
    return found
