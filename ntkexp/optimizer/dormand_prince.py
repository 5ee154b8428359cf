"""One step of Dormand & Prince's embedded Runge–Kutta method of order 5 (1980), for θ′ = F(θ).

    k_i = F(θ + h Σ_j a_ij k_j),    θ₁ = θ + h Σ_j a_7j k_j,    error = h Σ_i e_i k_i,

the difference from the embedded method of order 4. k_7 is the slope at the end, hence k_1 of the next step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

import torch

from ntkexp.optimizer.arc import Arc, VectorField
from ntkexp.shapes import Weights

STAGES = (
    (1 / 5,),
    (3 / 40, 9 / 40),
    (44 / 45, -56 / 15, 32 / 9),
    (19372 / 6561, -25360 / 2187, 64448 / 6561, -212 / 729),
    (9017 / 3168, -355 / 33, 46732 / 5247, 49 / 176, -5103 / 18656),
    (35 / 384, 0.0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84),
)
ERROR = (71 / 57600, 0.0, -71 / 16695, 71 / 1920, -17253 / 339200, 22 / 525, -1 / 40)
DENSE = (
    *(-12715105075 / 11282082432, 0.0, 87487479700 / 32700410799, -10690763975 / 1880347072),
    *(701980252875 / 199316789632, -1453857185 / 822651844, 69997945 / 29380423),
)


@dataclass(frozen=True)
class Attempt:
    """A step was tried: this is the arc, its end, the slope there, how far it leads, and the size of its error."""

    arc: Arc
    end: Weights
    slope: Weights
    distance: float
    error: float


def attempt(weights: Weights, slope: Weights, field: VectorField, length: float) -> Attempt:
    """A step of this length, from where the field has this slope."""
    slopes, end = [slope], weights
    for row in STAGES:
        way = combined(row, slopes, length)
        end = {name: weight + way[name] for name, weight in weights.items()}
        slopes.append(field(end))
    bend = {name: length * slope[name] - way[name] for name in way}
    back = {name: way[name] - length * slopes[-1][name] - bend[name] for name in way}
    arc = Arc(weights, (way, bend, back, combined(DENSE, slopes, length)), length)
    return Attempt(arc, end, slopes[-1], size(way), size(combined(ERROR, slopes, length)))


def combined(row: Sequence[float], slopes: Sequence[Weights], length: float) -> Weights:
    """Find the sum h Σ_j row_j k_j."""
    total = {name: torch.zeros_like(part) for name, part in slopes[0].items()}
    for coefficient, slope in zip(row, slopes, strict=True):
        for name, part in total.items() if coefficient else ():
            part.add_(slope[name], alpha=length * coefficient)
    return total


def size(weights: Weights) -> float:
    """Find the norm over all weights."""
    return sqrt(sum(float(part.square().sum()) for part in weights.values()))
