"""The leave-out check in one line: do predicted effects agree with trainings that left examples out?

All removals have the same weight: the predicted and actual changes of each are divided by the size of its actual
changes. Then

    correlation   of predicted with actual changes, over all removals, queries and outputs
    size          of predicted relative to actual changes, √(Σ predicted²/Σ actual²)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite, nan, sqrt

import numpy as np
from numpy.typing import NDArray

from ntkexp.records.contributions import LeaveOut
from ntkexp.text import counted, percent, short

MIN_CORRELATION = 0.5  # of believed effects
MAX_GROWTH = (
    1e3  # of differences along the training; beyond it, rounding and chance dominate effects
)

REMEDY = (
    "smooth activations (tanh, gelu), smaller steps or a larger optimizer.eps make it predictable"
)


@dataclass(frozen=True)
class Agreement:
    """The agreement of predicted effects with all trainings that left examples out."""

    removals: int
    correlation: float
    size: float
    growth: float

    @property
    def believed(self) -> bool:
        """True if effects may be shown without a warning."""
        return self.correlation >= MIN_CORRELATION and self.growth <= MAX_GROWTH

    @property
    def sentence(self) -> str:
        """Say it in one line.

        >>> Agreement(8, 0.981, 0.85, 1.2).sentence
        '8 retrainings: predicted changes correlate 0.98 with actual ones, and are 15 % too small'
        >>> Agreement(8, 0.2, 0.85, 1.2).sentence.partition(",")[2][:40]
        ' so what would change is not predictable'
        """
        head = f"{counted(self.removals, 'retraining')}: predicted changes"
        if not isfinite(self.correlation):
            return f"{head} cannot be compared with actual ones, which are none or not finite"
        sentence = f"{head} correlate {self.correlation:.2f} with actual ones"
        if self.believed:
            return f"{sentence}, and are {size_error(self.size)}"
        if not self.growth <= MAX_GROWTH:
            sentence += f" and differences grow {short(self.growth)}-fold along the training"
        return f"{sentence}, so what would change is not predictable here; {REMEDY}"


def remarks_on_trainings(examples: int, doubts: Sequence[str], check: LeaveOut | None) -> list[str]:
    """Return remarks on effects that trainings measured: their number, doubts, and whether effects add up."""
    notes = [f"effects are changes in {examples} trainings, each without one example", *doubts]
    if check is not None:
        notes.append(f"of groups, sums of effects: {agreement_of(check, growth=1.0).sentence}")
    return notes


def size_error(size: float) -> str:
    """Say how much too large or too small predicted changes are.

    >>> size_error(0.85), size_error(1.004), size_error(1.2)
    ('15 % too small', 'of the right size', '20 % too large')
    """
    if abs(size - 1) < 0.01:
        return "of the right size"
    return f"{percent(abs(size - 1))} too {'small' if size < 1 else 'large'}"


def agreement_of(retrained: LeaveOut, growth: float) -> Agreement:
    """Compare all known predictions with the changes of trainings."""
    known = ~np.isnan(retrained.predicted)
    if not np.isfinite(retrained.actual[known]).all():
        return Agreement(len(retrained.removals), nan, nan, growth)
    predicted, actual = scaled_changes(retrained, known)
    spread = float(predicted.std() * actual.std()) if len(actual) else 0.0
    if not 0 < spread < inf:
        return Agreement(len(retrained.removals), nan, nan, growth)
    covariance = float(np.mean((predicted - predicted.mean()) * (actual - actual.mean())))
    size = sqrt(float((predicted**2).sum() / (actual**2).sum()))
    return Agreement(len(retrained.removals), covariance / spread, size, growth)


def scaled_changes(
    retrained: LeaveOut, known: NDArray[np.bool_]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the known predicted and actual changes of all removals, each divided by the size of its actual changes."""
    predicted = [np.zeros(0)]
    actual = [np.zeros(0)]
    for removal, is_known in enumerate(known):
        actual_changes = retrained.actual[removal][is_known]
        scale = float(np.sqrt(np.mean(actual_changes**2))) if is_known.any() else 0.0
        if scale > 0:
            predicted.append(retrained.predicted[removal][is_known] / scale)
            actual.append(actual_changes / scale)
    return np.concatenate(predicted), np.concatenate(actual)
