"""When in training something came about: the share of its mass that falls into each tenth of the path's time.

    mass    `contribution_mass`, Σ|Δ𝒮| of a step; `contribution_sum`, Σ|Σᵢ Δ𝒮ᵢ|; or `kernel_mass`, η‖K‖

Rows of a run are told apart by `tenth`, 1 … 10; evenly spread, each has a share of 0.1.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ntkexp.claim.quantity.base import AbstractQuantity, Measured
from ntkexp.report.plots.figures.time_profile import profile
from ntkexp.report.run import Run


class TimeShare(AbstractQuantity):
    """Rows have the shares of ten tenths."""

    mass: Literal["contribution_mass", "contribution_sum", "kernel_mass"] = "contribution_mass"

    def of(self, measured: Measured) -> pd.DataFrame:
        shares = np.array([self.shares(measured.run(name)) for name in measured.table["run"]])
        return pd.concat([measured.table.assign(tenth=k + 1, value=shares[:, k]) for k in range(10)], ignore_index=True)

    def shares(self, run: Run | None) -> NDArray[np.float64]:
        """The shares of one run; NaN where the mass was not measured at every step."""
        steps = None if run is None else run.series("step_size", self.mass)
        if run is None or steps is None or not len(steps) or len(steps) < len(run.metrics) - 1:
            return np.full(10, np.nan)
        return profile(steps["step_size"].to_numpy(), steps[self.mass].to_numpy())
