"""The hierarchical bootstrap: resample what was drawn at random, at the highest level where it was.

A sweep repeats every point with the same seeds, and a seed fixes the data and the start of training: runs of one seed
are one draw. So whole seeds are resampled, each with its runs at all points. Only where seeds are not shared between
points are runs resampled within their points.

A resample is a count for each run. Its spread is too small by √((n − 1)/n) for n things resampled, which is put right,
and Student's t stands in for the normal: with a handful of seeds, percentiles would be too narrow by half.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ntkexp.report.analysis.estimate import Estimate, around

DRAWS = 2000
SEED = 0  # the same intervals each time


@dataclass(frozen=True)
class Resamples:
    """How often each run is drawn, [draw, run], and what turns the spread over draws into a standard error."""

    counts: NDArray[np.float64]
    correction: float
    freedom: int

    def interval(self, value: float, draws: NDArray[np.float64]) -> Estimate:
        """The interval around a value, from its counterpart in every draw; NaN where a draw had none."""
        found = draws[np.isfinite(draws)]
        if self.freedom < 1 or len(found) < 2:
            return Estimate(value)
        return around(value, float(found.std()) * self.correction, self.freedom)


def resamples(points: NDArray[np.float64], seeds: NDArray[np.int64]) -> Resamples:
    """Resamples of runs at these points with these seeds."""
    rng = np.random.default_rng(SEED)
    shared = all(len(set(points[seeds == seed].tolist())) > 1 for seed in set(seeds.tolist()))
    return of_seeds(seeds, rng) if shared else of_runs(points, rng)


def of_seeds(seeds: NDArray[np.int64], rng: np.random.Generator) -> Resamples:
    """Whole seeds, each with all its runs."""
    unique, which = np.unique(seeds, return_inverse=True)
    counts = drawn(len(unique), rng)[:, which]
    return Resamples(counts, widening(len(unique)), len(unique) - 1)


def of_runs(points: NDArray[np.float64], rng: np.random.Generator) -> Resamples:
    """Runs within their points; the point with the fewest runs decides how much is known of the spread."""
    counts, fewest = np.empty((DRAWS, len(points))), len(points)
    for point in np.unique(points):
        here = np.flatnonzero(points == point)
        counts[:, here], fewest = drawn(len(here), rng), min(fewest, len(here))
    freedom = len(points) - len(np.unique(points)) if fewest > 1 else 0
    return Resamples(counts, widening(fewest), freedom)


def drawn(things: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """How often each thing comes up when as many are drawn as there are."""
    return np.asarray(rng.multinomial(things, np.full(things, 1 / things), size=DRAWS), dtype=np.float64)


def widening(things: int) -> float:
    """√(n/(n − 1))."""
    return math.sqrt(things / (things - 1)) if things > 1 else math.nan
