"""The leave-out check: do predicted leave-out effects agree
with retrainings without the examples?

The predicted and actual changes of each removal are divided by the root mean square of
its actual changes, so that all removals have the same weight. The check reports two
numbers over all removals, queries and outputs:

    correlation   the correlation of predicted with actual changes
    size          the ratio √(Σ predicted²/Σ actual²)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite, nan, sqrt

import numpy as np
from numpy.typing import NDArray

from ntkexp.records.contributions import LeaveOut
from ntkexp.text import counted, percent, short

# If the correlation of predicted effects with retrainings is lower, tables show a
# warning instead of the effects.
MIN_CORRELATION = 0.5
# If training amplifies small differences of the weights by more than this factor,
# leave-out effects mostly reflect chance.
MAX_GROWTH = 1e3

REMEDY = "smooth activations (tanh, gelu), smaller steps or a larger optimizer.eps make it predictable"


@dataclass(frozen=True)
class Agreement:
    """The agreement of predicted leave-out effects with all retrainings of a run."""

    removals: int
    correlation: float
    size: float
    growth: float

    @property
    def believed(self) -> bool:
        """True if tables may show the predicted effects."""
        return self.correlation >= MIN_CORRELATION and self.growth <= MAX_GROWTH

    @property
    def sentence(self) -> str:
        """The agreement in one sentence.

        >>> Agreement(8, 0.981, 0.85, 1.2).sentence
        '8 retrainings: predicted changes correlate 0.98 with actual ones, and are 15 % too small'
        >>> Agreement(8, 0.2, 0.85, 1.2).sentence.partition(",")[2][:40]
        ' so the change cannot be predicted here;'
        """
        head = f"{counted(self.removals, 'retraining')}: predicted changes"
        if not isfinite(self.correlation):
            return f"{head} cannot be compared with actual ones, which do not vary or are not finite"
        sentence = f"{head} correlate {self.correlation:.2f} with actual ones"
        if self.believed:
            return f"{sentence}, and are {size_error(self.size)}"
        if not self.growth <= MAX_GROWTH:
            sentence += (
                f" and differences grow {short(self.growth)}-fold along the training"
            )
        return f"{sentence}, so the change cannot be predicted here; {REMEDY}"


def remarks_on_trainings(
    examples: int, doubts: Sequence[str], check: LeaveOut | None
) -> list[str]:
    """Return remarks on effects that retraining measured: the number of trainings,
    doubts about the effects, and how well sums of effects predict the removal of
    groups."""
    notes = [
        f"effects are changes in {examples} trainings, each without one example",
        *doubts,
    ]
    if check is not None:
        notes.append(
            f"for groups of examples, effects are summed; {agreement_of(check, growth=1.0).sentence}"
        )
    return notes


def size_error(size: float) -> str:
    """Describe how much too large or too small predicted changes are.

    >>> size_error(0.85), size_error(1.004), size_error(1.2)
    ('15 % too small', 'of the right size', '20 % too large')
    """
    if abs(size - 1) < 0.01:
        return "of the right size"
    return f"{percent(abs(size - 1))} too {'small' if size < 1 else 'large'}"


def agreement_of(retrained: LeaveOut, growth: float) -> Agreement:
    """Compare all known predicted changes with the changes that retraining measured."""
    known = ~np.isnan(retrained.predicted)
    if not np.isfinite(retrained.actual[known]).all():
        return Agreement(len(retrained.removals), nan, nan, growth)
    predicted, actual = scaled_changes(retrained, known)
    spread = float(predicted.std() * actual.std()) if len(actual) else 0.0
    if not 0 < spread < inf:
        return Agreement(len(retrained.removals), nan, nan, growth)
    covariance = float(
        np.mean((predicted - predicted.mean()) * (actual - actual.mean()))
    )
    size = sqrt(float((predicted**2).sum() / (actual**2).sum()))
    return Agreement(len(retrained.removals), covariance / spread, size, growth)


def removal_scales(
    retrained: LeaveOut, known: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """Return the root mean square of the actual changes of each removal, [removal].

    Use only the changes that have a prediction. A removal without predictions gets 0.
    """
    scales = np.zeros(len(retrained.removals))
    for removal, is_known in enumerate(known):
        if is_known.any():
            actual = retrained.actual[removal][is_known]
            scales[removal] = np.sqrt(np.mean(actual**2))
    return scales


def scaled_changes(
    retrained: LeaveOut, known: NDArray[np.bool_]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the predicted and actual changes of all removals that have a prediction.

    The changes of each removal are divided by the root mean square
    of its actual changes."""
    predicted = [np.zeros(0)]
    actual = [np.zeros(0)]
    scales = removal_scales(retrained, known)
    for removal, (is_known, scale) in enumerate(zip(known, scales, strict=True)):
        if scale > 0:
            predicted.append(retrained.predicted[removal][is_known] / scale)
            actual.append(retrained.actual[removal][is_known] / scale)
    return np.concatenate(predicted), np.concatenate(actual)
