"""Whether examples that were badly fitted for long get large coefficients: a rank correlation over training examples.

    Spearman of  mean_x |aᵢ(x)|, aᵢ(x) = 𝒮(x, xᵢ)/𝒦(x, xᵢ),  with  ∫|ℓ′ᵢ| dt    for a network of one output

Queries x are the points of a split; where 𝒦 is small against its largest value, nothing is divided by it. The integral
goes over the kernels that were kept, by the trapezoidal rule. `lag` compares with the integral of another example.
"""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pydantic import Field

from ntkexp.claim.measured import Measured
from ntkexp.claim.quantity.base import AbstractQuantity
from ntkexp.mistake import Mistake
from ntkexp.report.run import Run

SMALL = 1e-3


class WeightRank(AbstractQuantity):
    """Rows have the rank correlation of their run."""

    rule: str = "secant"
    split: str = "probe"
    lag: int = Field(0, ge=0, le=10**6)

    def of(self, measured: Measured) -> pd.DataFrame:
        return measured.table.assign(value=[self.correlation(measured.run(name)) for name in measured.table["run"]])

    def correlation(self, run: Run | None) -> float:
        """The correlation in one run."""
        if run is None:
            return math.nan
        points = run.points[self.split]
        parts = run.parts(self.rule).to_numpy()[points]
        if (outputs := run.predictions.sizes["out"]) != 1:
            raise Mistake(f"quantity: {run.name} has {outputs} outputs, and coefficients of one are compared")
        kernel = run.kernels[f"path_{self.rule}"].to_numpy()[points, 0, :, 0]
        usable = np.abs(kernel) >= SMALL * np.abs(kernel).max()
        weights = np.abs(np.where(usable, parts[:, 0] / np.where(usable, kernel, 1.0), np.nan))
        return spearman(np.nanmean(weights, axis=0), np.roll(misfit(run), self.lag))


def misfit(run: Run) -> NDArray[np.float64]:
    """Integrate |ℓ′ᵢ| over the time of the path."""
    times = run.metrics.set_index("step")["time"].reindex(run.kernels["step"].to_numpy()).to_numpy(dtype=float)
    sizes = np.abs(run.kernels["output_gradient"].to_numpy()[:, :, 0])
    return np.asarray((np.diff(times)[:, None] * (sizes[1:] + sizes[:-1]) / 2).sum(axis=0))


def spearman(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    """Correlate ranks; ties have their mean rank.

    >>> spearman(np.array([1.0, 5.0, 7.0]), np.array([2.0, 3.0, 90.0]))
    1.0
    """
    return round(float(pd.Series(one).rank().corr(pd.Series(other).rank())), 15)
