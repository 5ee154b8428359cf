"""A thousand simulated sweeps with known laws, to count correct intervals and false verdicts.

    log y = p log x + c (log x)²/2 + height and slope of the seed + noise of the run

The fit is linear in log y, so one call of `unit_weights` serves all sweeps of a design.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ntkexp.records.sweep import Expected
from ntkexp.report.analysis.estimate import Estimate, compare, mean_of
from ntkexp.report.analysis.laws import WORD_OF_PLACE
from ntkexp.report.analysis.power_law import unit_weights, units

Array = NDArray[np.float64]
WIDTHS = np.array([32.0, 64.0, 128.0, 256.0, 512.0, 1024.0])
MIDDLE = float(np.log(WIDTHS).mean())
SWEEPS = 1000


@dataclass(frozen=True)
class Design:
    """The runs of a sweep, and their scatter: a height and slope for each seed, and noise for each run."""

    missing: tuple[int, ...] = ()  # missing widths of the first seed, counted from the widest
    alone: int = 0  # seeds that have only the narrowest width
    apart: bool = False  # every run has its own seed
    tilt: float = 0.05
    by_width: tuple[float, float] = (1.0, 1.0)
    by_seed: tuple[float, float] = (1.0, 1.0)

    def runs(self, seeds: int) -> tuple[Array, NDArray[np.int64]]:
        """Return the width and the seed of each run."""
        lacking = len(WIDTHS) - 1 - np.array(self.missing, dtype=int)
        x, which = np.delete([np.tile(WIDTHS, seeds), np.repeat(np.arange(seeds), len(WIDTHS))], lacking, axis=1)
        x, which = np.append(x, np.full(self.alone, WIDTHS[0])), np.append(which, seeds + np.arange(self.alone))
        return x, np.arange(len(x)) if self.apart else which.astype(np.int64)

    def scatter(self, rng: np.random.Generator, x: Array, which: NDArray[np.int64], sweeps: int) -> Array:
        """Draw the noise of log y, [run, sweep]."""
        log_x = np.log(x) - MIDDLE
        height, slope = rng.normal(size=(2, which.max() + 1, sweeps))
        by_width = np.geomspace(*self.by_width, len(WIDTHS))[np.searchsorted(WIDTHS, x)]
        by_seed = np.geomspace(*self.by_seed, which.max() + 1)[which]
        noise = 0.1 * (by_width * by_seed)[:, None] * rng.normal(size=(len(x), sweeps))
        return np.asarray(0.3 * height[which] + self.tilt * slope[which] * log_x[:, None] + noise)


DESIGNS: Mapping[str, Design] = {
    "complete": Design(),
    "a point missing": Design(missing=(0,)),
    "two points missing": Design(missing=(0, 1)),
    "one point left": Design(missing=(0, 1, 2, 3, 4)),
    "seeds alone at one width": Design(alone=3),
    "seeds that differ": Design(tilt=0.3, missing=(0,)),
    "seeds that differ, one alone": Design(tilt=0.3, alone=1),
    "noise by width": Design(by_width=(4.0, 0.5)),
    "noise by seed": Design(by_seed=(1.0, 2.0), missing=(0,)),
    "a seed a run": Design(apart=True),
}


@dataclass(frozen=True)
class Laws:
    """The fitted exponents and curvatures of sweeps with zero exponent and curvature."""

    exponents: Sequence[Estimate]
    curvatures: Sequence[Estimate]

    def coverage(self) -> float:
        """Return how often the interval contains the exponent."""
        return float(np.mean([law.covers(0.0) is True for law in self.exponents]))

    def bends(self, curvature: float = 0.0) -> float:
        """Return how often laws of this curvature are judged curved."""
        return float(np.mean([law.covers(-curvature) is False for law in self.curvatures]))

    def words(self, expected: Expected, scale: float = 1.0) -> Mapping[str, float]:
        """Return the share of each verdict on laws with the exponent zero, with scaled noise."""
        laws = (Estimate(scale * law.value, scale * law.error, law.freedom) for law in self.exponents)
        found = Counter(WORD_OF_PLACE[compare(law, expected).where] for law in laws)
        return {word: found[word] / len(self.exponents) for word in WORD_OF_PLACE.values()}


def laws(design: Design, seeds: int, sweeps: int = SWEEPS) -> Laws:
    """Fit sweeps whose exponent and curvature are zero."""
    x, which = design.runs(seeds)
    log_x, scatter = np.log(x) - MIDDLE, design.scatter(np.random.default_rng([seeds, 11]), x, which, sweeps)
    asked, lines = unit_weights(np.vander(log_x, 2, increasing=True), units(x, which))
    able = [unit for unit in asked if len(unit) > 2]
    _, parabolas = unit_weights(np.vander(log_x, 3, increasing=True) / [1, 1, 2], able)
    return Laws(estimates(lines[:, 1] @ scatter), estimates(parabolas[:, 2] @ scatter))


def estimates(found: Array) -> list[Estimate]:
    """Return estimates from [unit, sweep]."""
    return [mean_of(values) for values in found.T.tolist()]
