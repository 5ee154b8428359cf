"""How good predictions are: one row per kernel, way to train and split.

    accuracy      share of right classes        rmse   √mean (f̂ − y)², over points and outputs    r2   1 − Σ(f̂ − y)²/Σy²
    log_loss, calibration_error                 of the classes' probabilities (`closed_form.probability`)

Targets are centred, so r2 compares with saying zero.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from ntkexp.closed_form.probability import calibration_error, log_loss, probabilities
from ntkexp.machine.ladder import label


@dataclass(frozen=True)
class Score:
    """One row of the table of scores tells of one kernel, way to train and split."""

    kernel: str
    when: str
    ridge: float
    split: str
    points: int
    accuracy: float | None
    rmse: float
    r2: float
    log_loss: float | None
    calibration_error: float | None
    solver: str


@dataclass(frozen=True)
class MeanAndDeviation:
    """Outputs at the points of a split, and their standard deviation over networks, where it is known."""

    mean: Float[Tensor, "point out"]
    deviation: Float[Tensor, " point"] | None


def score(
    predicted: MeanAndDeviation,
    targets: Float[Tensor, "point out"],
    labels: Int[Tensor, " point"],
    row: tuple[str, str, float, str],
    solver: str,
) -> Score:
    """Compare predictions with what is right; labels below zero are none."""
    error, classifies = predicted.mean - targets, bool((labels >= 0).all())
    spread = predicted.deviation if classifies else None
    known = None if spread is None else probabilities(predicted.mean, spread)
    return Score(
        *row,
        points=len(targets),
        accuracy=float((label(predicted.mean).long() == labels).double().mean()) if classifies else None,
        rmse=float(error.square().mean().sqrt()),
        r2=1 - float(error.square().sum() / targets.square().sum()),
        log_loss=None if known is None else log_loss(known, labels),
        calibration_error=None if known is None else calibration_error(known, labels),
        solver=solver,
    )
