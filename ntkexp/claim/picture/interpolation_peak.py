"""Test and train error against the number of parameters, with the threshold from which on training examples are fitted.

The axes are those of M. Belkin et al., "Reconciling modern machine-learning practice and the classical bias–variance
trade-off" (2019), arXiv:1812.11118, figure 4; the kernel's condition number is on the same axis.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd
from pydantic import Field

from ntkexp.claim.picture.base import AbstractPicture
from ntkexp.text import short

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ntkexp.claim.judged_claim import JudgedClaim

FITTED = 1e-3
"""Training examples are fitted where the mean error is a smaller share of the targets' variance."""


class InterpolationPeak(AbstractPicture):
    """A trial of `WidthSweep` is drawn; `threshold` is its number of targets, M·C."""

    threshold: float = Field(gt=0)

    def figure(self, judged: JudgedClaim) -> Figure:
        from ntkexp.report.plots.redrawn.interpolation_peak import draw  # noqa: PLC0415  drawing is slow to load

        return draw(measured(judged), self.threshold, self.title(judged))

    def title(self, judged: JudgedClaim) -> str:
        """Say where the mean test error is largest, and how far it falls beyond."""
        means = over_seeds(judged)["test_error"]
        top, last = means.idxmax(), means.index[-1]
        fall = "the largest number that was tried" if top == last else f"and falls to {short(means.iloc[-1])} at {last}"
        return (
            f"The test error is largest at {top} parameters, {short(means.max())}, {fall}; "
            f"there are {short(self.threshold)} targets"
        )

    def here(self, judged: JudgedClaim) -> str:
        means = over_seeds(judged)
        fitted = means.index[means["train_error"] < FITTED]
        beyond = f"from {fitted[0]} parameters on" if len(fitted) else "nowhere"
        return (
            f"errors are shares of the targets' variance, means over {measured(judged)['seed'].nunique()} seeds; "
            f"training examples are fitted, to {FITTED}, {beyond}.{before(means, self.threshold)}"
        )


def before(means: pd.DataFrame, threshold: float) -> str:
    """Say where the test error is least below the threshold, and whether it is less beyond."""
    errors = means["test_error"]
    below, beyond = errors[errors.index < threshold], errors[errors.index > threshold]
    if below.empty or beyond.empty:
        return ""
    how = "less" if beyond.min() < below.min() else "not less"
    return (
        f" Below the threshold the test error is least at {below.idxmin()} parameters, {short(below.min())}; beyond it "
        f"is {how} than that: {short(beyond.min())} at {beyond.idxmin()}."
    )


def measured(judged: JudgedClaim) -> pd.DataFrame:
    """Find the rows that are drawn."""
    return judged.rows("parameters", "test_error", "train_error", "condition", "seed")


def over_seeds(judged: JudgedClaim) -> pd.DataFrame:
    """Average the errors over seeds, at each number of parameters."""
    return measured(judged).groupby("parameters")[["test_error", "train_error"]].mean()
