"""How far the path kernel among training examples is from what a kernel must be: symmetric, with no negative values.

    asymmetry    ‖𝒦 − 𝒦ᵀ‖ / ‖𝒦‖                    over [example, output] × [example, output]
    negativity   max(0, −λ_min) / λ_max            of (𝒦 + 𝒦ᵀ)/2

Rows are told apart by the columns `rule` and `defect`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ntkexp.claim.measured import Measured
from ntkexp.claim.quantity.base import AbstractQuantity
from ntkexp.report.run import Run


class SymmetryDefect(AbstractQuantity):
    """Rows have the defects of these rules' path kernels; the runs read the training examples."""

    rules: tuple[str, ...] = ("secant",)

    def of(self, measured: Measured) -> pd.DataFrame:
        rows = [
            {**place, "rule": rule, "defect": name, "value": value}
            for place in measured.table.to_dict("records")
            if (run := measured.run(str(place["run"]))) is not None
            for rule in self.rules
            for name, value in defects(square(run, rule)).items()
        ]
        return pd.DataFrame(rows)


def square(run: Run, rule: str) -> NDArray[Any]:
    """Read one path kernel among the training examples, as a matrix."""
    kernel = run.kernels[f"path_{rule}"].to_numpy()
    side = kernel.shape[2] * kernel.shape[3]
    return np.asarray(kernel[run.points["train"]]).reshape(side, side)


def defects(kernel: NDArray[Any]) -> dict[str, float]:
    """Find both defects of a matrix.

    >>> defects(np.diag([2.0, -1.0]))
    {'asymmetry': 0.0, 'negativity': 0.5}
    """
    values = np.linalg.eigvalsh((kernel + kernel.T) / 2)
    return {
        "asymmetry": float(np.linalg.norm(kernel - kernel.T) / np.linalg.norm(kernel)),
        "negativity": max(0.0, -float(values[0])) / float(values[-1]),
    }
