"""What regression says of examples that it was not given, in closed form. Without the examples of a fold F,

    f_{∖F}(X_F) = y_F − ((R⁻¹)_FF)⁻¹ (R⁻¹ y)_F

(folds of one: leave-one-out; Rasmussen & Williams 2006, 5.4.2), so that one eigendecomposition tries every ridge.

>>> from ntkexp.closed_form.modes import modes_of
>>> theta = torch.tensor([[2.0, 1.0], [1.0, 2.0]], dtype=torch.float64)
>>> found = held_out(modes_of(theta), 0.0, torch.tensor([[2.0], [4.0]], dtype=torch.float64), folds(2, 2))
>>> [round(float(each), 12) for each in found]
[2.0, 1.0]
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.closed_form.gain import FOREVER
from ntkexp.closed_form.modes import Modes

GRID = tuple(10.0 ** (k / 2) for k in range(-16, 3))  # ridges, as multiples of the mean of the kernel's diagonal


def held_out(
    modes: Modes, ridge: float, targets: Float[Tensor, "entry column"], folds: Sequence[Tensor]
) -> Float[Tensor, "entry column"]:
    """Predict each entry by the others' targets, its fold left out."""
    inverse, coefficients = modes.vectors * FOREVER(modes.values + ridge), modes.at(FOREVER, ridge)(targets)
    predicted = torch.empty_like(targets)
    for fold in folds:
        block = inverse[fold] @ modes.vectors[fold].mH
        predicted[fold] = targets[fold] - torch.linalg.solve(block, coefficients[fold])
    return predicted


def folds(examples: int, count: int, entries: int = 1) -> list[Tensor]:
    """Every `count`-th example, with all its entries.

    >>> [fold.tolist() for fold in folds(3, 2, entries=2)]
    [[0, 1, 4, 5], [2, 3]]
    """
    rows = torch.arange(examples * entries).view(examples, entries)
    return [rows[k::count].flatten() for k in range(min(count, examples))]


def ridges(matrix: Float[Tensor, "entry entry"]) -> list[float]:
    """The ridges that are worth trying."""
    return [multiple * float(matrix.diagonal().mean()) for multiple in GRID]
