"""Whether a prediction compares a point with stored examples: what its contributors are, point by point, averaged.

    same_class       share of points whose largest contributor has the label of the prediction
    nearest_input    share of points whose nearest training example in input space has the label of the prediction
    nearest_kernel   the same of the example with the largest 𝒦(x, xᵢ)/√𝒦(xᵢ, xᵢ)
    same_example     share of points of which both are the same example
    top_share        share of Σ|𝒮| that comes from the k largest contributors; if all were equal, k/M
    chance           share of points whose prediction has the label of an example drawn at random

of a network of one output on two classes. Labels are those that were trained on; the largest contributor has most |𝒮|.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ntkexp.claim.measured import Measured
from ntkexp.claim.quantity.base import AbstractQuantity
from ntkexp.component import Count
from ntkexp.mistake import Mistake
from ntkexp.report.run import Run

Share = Literal["same_class", "nearest_input", "nearest_kernel", "same_example", "top_share", "chance"]


class StoredExamples(AbstractQuantity):
    """Rows have these shares, told apart by the column `quantity`."""

    shares: tuple[Share, ...] = ("same_class", "chance")
    rule: str = "secant"
    split: str = "probe"
    top: Count = 5

    def of(self, measured: Measured) -> pd.DataFrame:
        return measured.by_run(self.measure, self.shares)

    def measure(self, run: Run) -> Mapping[str, float]:
        """All shares in one run."""
        points, train = run.points[self.split], run.points["train"]
        parts = run.parts(self.rule).to_numpy()[points]
        targets = run.data["train_targets"]
        if (outputs := run.predictions.sizes["out"]) != 1 or not len(run.data["classes"]):
            raise Mistake(f"quantity: {run.name} has {outputs} outputs; stored examples are those of two classes")
        kernel = run.kernels[f"path_{self.rule}"].to_numpy()[:, 0, :, 0]
        predicted = np.sign(run.predictions.sel(machine="f_T").to_numpy()[points, 0])
        labels = np.sign(targets[:, 0])
        likeness = kernel[points] / np.sqrt(np.maximum(np.diag(kernel[train]), np.finfo(float).tiny))
        distance = distances(run.data[f"{self.split}_inputs"], run.data["train_inputs"])
        near, like = distance.argmin(axis=1), likeness.argmax(axis=1)
        largest = np.abs(parts[:, 0]).argmax(axis=1)
        return {
            "same_class": float((labels[largest] == predicted).mean()),
            "nearest_input": float((labels[near] == predicted).mean()),
            "nearest_kernel": float((labels[like] == predicted).mean()),
            "same_example": float((near == like).mean()),
            "top_share": top_share(parts[:, 0], self.top),
            "chance": float((labels[None] == predicted[:, None]).mean()),
        }


def top_share(parts: NDArray[np.float64], top: int) -> float:
    """Find the share of the largest, averaged over points.

    >>> top_share(np.array([[3.0, -1.0, 0.0]]), 1)
    0.75
    """
    sizes = np.sort(np.abs(parts), axis=1)[:, ::-1]
    return float((sizes[:, :top].sum(axis=1) / sizes.sum(axis=1)).mean())


def distances(points: NDArray[np.float64], examples: NDArray[np.float64]) -> NDArray[np.float64]:
    """Find the squared distance of every point from every example."""
    ones, others = points.reshape(len(points), -1), examples.reshape(len(examples), -1)
    return np.asarray((ones**2).sum(1)[:, None] - 2 * ones @ others.T + (others**2).sum(1))
