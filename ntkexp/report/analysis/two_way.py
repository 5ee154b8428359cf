"""The mean over random seeds and random examples, with an interval for both.

Each seed s measures a number y_se at some examples e. Seeds may share examples, for
example test pictures from one pool. The model is

    y_se = μ + a_s + b_e + ε_se        a, b and ε independent, with mean 0

The estimate of μ is the mean over seeds of ȳ_s = Σ_e p_se y_se, where p_se = 1/n_s for
the n_s examples of seed s, and 0 for other examples. For S seeds,

    Var(estimate) = A + C        A = Σ_s (ȳ_s − estimate)²/(S (S − 1))
                                 C = σ_b² × mean of Σ_e p_se p_te over pairs s ≠ t

A is the variance for fixed examples, as in `mean_of`. C is the mean covariance between
seeds, which comes from shared examples. It does not fall with more seeds. With
r_se = y_se − ȳ_s, an unbiased estimate of σ_b² is

    Σ_{s≠t} Σ_e p_se p_te r_se r_te  /  Σ_{s≠t} Σ_e p_se p_te (1 − p_se − p_te + q_st)

where q_st = Σ_e p_se p_te. A negative C is set to 0. If every seed measures all E
examples, A + C is the estimate from the analysis of variance, (MS_seeds + MS_examples −
MS_residual)/(S E), where MS are mean squares.

A bootstrap over seeds and examples estimates the same variance, but counts the variance
of ε three times (Owen 2007, doi:10.1214/07-AOAS122), and needs random numbers.

>>> seeds, examples = [0, 0, 1, 1], [5, 6, 5, 6]
>>> both = two_way_mean(seeds, examples, [1.0, 3.0, 2.0, 4.0])
>>> both.value, round(both.error**2, 12)  # A = 0.25 and C = 1
(2.5, 1.25)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ntkexp.mistake import Mistake
from ntkexp.report.analysis.estimate import Estimate, Range


@dataclass(frozen=True)
class TwoWayVariance:
    """The variance of a mean over seeds and examples, and its degrees of freedom.

    Attributes:
        seeds: A, the variance for fixed examples.
        examples: C, the part that comes from shared examples. Not negative.
        freedom: Degrees of freedom of A + C, by Satterthwaite's formula.
    """

    seeds: float
    examples: float
    freedom: int

    @property
    def total(self) -> float:
        return self.seeds + self.examples


def two_way_mean(
    seeds: Sequence[object] | NDArray[np.generic],
    examples: Sequence[object] | NDArray[np.generic],
    values: Sequence[float] | NDArray[np.float64],
    within: Range | None = None,
) -> Estimate:
    """Estimate the mean over random seeds and random examples.

    There is one value for each pair of a seed and an example. With one seed, there is
    no interval."""
    names, rows = np.unique(np.asarray(seeds), return_inverse=True)
    labels, columns = np.unique(np.asarray(examples), return_inverse=True)
    if not len(names):
        return Estimate(math.nan)
    present = np.zeros((len(names), len(labels)))
    np.add.at(present, (rows, columns), 1.0)
    if (present > 1).any():
        raise Mistake("a seed has several numbers at one example; average them first")
    numbers = np.zeros_like(present)
    numbers[rows, columns] = np.asarray(values, dtype=float)
    value = float((numbers.sum(1) / present.sum(1)).mean())
    if len(names) < 2:
        return Estimate(value, within=within)
    variance = two_way_variance(numbers, present)
    return Estimate(value, math.sqrt(variance.total), variance.freedom, within)


def two_way_variance(
    numbers: NDArray[np.float64], present: NDArray[np.float64]
) -> TwoWayVariance:
    """Estimate A and C from a table [seed, example]. `present` is 1 where the seed
    measured the example, and 0 elsewhere."""
    seeds = len(numbers)
    p = present / present.sum(1, keepdims=True)
    figures = (p * numbers).sum(1)
    between = float(figures.var(ddof=1)) / seeds  # A

    # σ_b² from products of residuals of two seeds at the same example
    residuals = p * (numbers - figures[:, None])  # p_se r_se
    squares = (residuals**2).sum()
    products = (residuals.sum(0) ** 2).sum() - squares
    pairs = ~np.eye(seeds, dtype=bool)
    overlap = p @ p.T  # q_st
    corrections = p**2 @ p.T
    weight = (overlap + overlap**2 - corrections - corrections.T)[pairs].sum()
    covariance = 0.0
    if weight > 0:
        covariance = max(0.0, float(products / weight * overlap[pairs].mean()))  # C

    # ν = (A + C)²/(A²/(S − 1) + B²/(E − 1)) for E shared examples. B estimates C plus
    # the part of ε, as mean squares do: B = C + Σ (p_se r_se)²/S².
    shared = int((present.sum(0) > 1).sum())
    uncertainty = between**2 / (seeds - 1)
    if shared > 1 and covariance:
        uncertainty += (covariance + float(squares) / seeds**2) ** 2 / (shared - 1)
    freedom = seeds - 1
    if uncertainty:
        freedom = max(1, int((between + covariance) ** 2 / uncertainty))
    return TwoWayVariance(between, covariance, freedom)
