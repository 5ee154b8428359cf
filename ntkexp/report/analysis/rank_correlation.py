"""Spearman's rank correlation."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

DECIMALS = 15
"""Correlations are rounded to this precision, so that equal ranks give exactly 1.0."""


def spearman(
    first: NDArray[np.float64], second: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the rank correlation of each column of `first` with the same column of
    `second`. Ties get their mean rank.

    The correlation is NaN if a column is constant or not finite.

    >>> increasing = np.array([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]])
    >>> spearman(increasing, np.array([[1.0, 7.0], [8.0, 7.0], [9.0, 7.0]]))
    array([ 1., nan])
    """
    from scipy.stats import rankdata  # noqa: PLC0415  slow to import

    # Cov(a, b)/√(Var a · Var b) of the ranks a and b
    a = rankdata(first, axis=0)
    b = rankdata(second, axis=0)
    a = a - a.mean(0)
    b = b - b.mean(0)
    size = np.sqrt((a**2).sum(0) * (b**2).sum(0))
    with np.errstate(invalid="ignore", divide="ignore"):
        correlation = (a * b).sum(0) / size
    correlation = np.round(correlation, DECIMALS)
    is_finite = np.isfinite(first).all(0) & np.isfinite(second).all(0)
    return np.where(is_finite & (size > 0), correlation, np.nan)


def mean_known(values: NDArray[np.float64]) -> float:
    """Return the mean of the finite values, or NaN if there are none."""
    known = values[np.isfinite(values)]
    if not len(known):
        return float("nan")
    return float(known.mean())
