"""The leave-out check in one line: whether effects can be believed, from all trainings that left examples out.

Removals weigh alike: the changes of each, predicted and actual, are divided by the size of the actual ones. Then

    r      the correlation of predicted with actual changes, over all removals, points and outputs
    size   how large predicted changes are, relative to actual ones, √(Σ predicted²/Σ actual²)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite, nan, sqrt

import numpy as np
from numpy.typing import NDArray

from ntkexp.records.contributions import LeaveOut
from ntkexp.text import counted, percent, short

BELIEVED, CHAOS = 0.5, 1e3
"""The least correlation, and the most growth of differences along the training, with which effects are believed."""

REMEDY = (
    "smooth activations (tanh, gelu), smaller steps or a larger optimizer.eps make it predictable"
)


@dataclass(frozen=True)
class Agreement:
    """What all removals together say of the effects."""

    removals: int
    correlation: float
    size: float
    growth: float

    @property
    def believed(self) -> bool:
        """Whether effects may be spoken of without a warning."""
        return self.correlation >= BELIEVED and self.growth <= CHAOS

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
            return f"{sentence}, and are {off(self.size)}"
        if not self.growth <= CHAOS:
            sentence += f" and differences grow {short(self.growth)}-fold along the training"
        return f"{sentence}, so what would change is not predictable here; {REMEDY}"


def remarks_on_trainings(examples: int, doubts: Sequence[str], check: LeaveOut | None) -> list[str]:
    """Say of effects that they came of trainings, what makes one doubt these, and whether effects add up."""
    notes = [f"effects are changes in {examples} trainings, each without one example", *doubts]
    if check is not None:
        notes.append(f"of groups, sums of effects: {agreement_of(check, growth=1.0).sentence}")
    return notes


def off(size: float) -> str:
    """Say how large predicted changes are beside actual ones.

    >>> off(0.85), off(1.004), off(1.2)
    ('15 % too small', 'of the right size', '20 % too large')
    """
    if abs(size - 1) < 0.01:
        return "of the right size"
    return f"{percent(abs(size - 1))} too {'small' if size < 1 else 'large'}"


def agreement_of(retrained: LeaveOut, growth: float) -> Agreement:
    """Compare all predictions with what came of them; points whose effects are not known say nothing."""
    known = ~np.isnan(retrained.predicted)
    predicted, actual = (
        scaled_pairs(retrained, known)
        if np.isfinite(retrained.actual[known]).all()
        else (np.zeros(0), np.zeros(0))
    )
    moved = float(predicted.std() * actual.std()) if len(actual) else 0.0
    if not 0 < moved < inf:
        return Agreement(len(retrained.removals), nan, nan, growth)
    correlation = float(np.mean((predicted - predicted.mean()) * (actual - actual.mean()))) / moved
    size = sqrt(float((predicted**2).sum() / (actual**2).sum()))
    return Agreement(len(retrained.removals), correlation, size, growth)


def scaled_pairs(
    retrained: LeaveOut, known: NDArray[np.bool_]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Bring predicted and actual changes of all removals to one scale, one after another, where they are known."""
    predicted, actual = [np.zeros(0)], [np.zeros(0)]
    for one_predicted, one_actual, here in zip(
        retrained.predicted, retrained.actual, known, strict=True
    ):
        scale = float(np.sqrt(np.mean(one_actual[here] ** 2))) if here.any() else 0.0
        if scale > 0:
            predicted.append(one_predicted[here] / scale)
            actual.append(one_actual[here] / scale)
    return np.concatenate(predicted), np.concatenate(actual)
