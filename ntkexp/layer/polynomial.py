"""Polynomial activations: Mehler's series ends, so that their kernels are exact.

>>> kappa, slope = Hermite(degree=2).dual(*torch.tensor([1.0, 0.5, 1.0], dtype=torch.float64))
>>> abs(float(kappa) - 0.25) < 1e-14, abs(float(slope) - 2 * 0.5) < 1e-14
(True, True)
"""

from __future__ import annotations

from math import sqrt
from typing import Annotated

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from ntkexp.layer.smooth import AbstractSmooth

MOST = 16  # degrees, at which the trapezoid sums of squares still end before their nodes do


class Polynomial(AbstractSmooth):
    """σ(z) = Σ_k powers[k] zᵏ, from the constant on."""

    powers: Annotated[tuple[float, ...], Field(min_length=1, max_length=MOST + 1)]

    def order(self, variance: float) -> int:
        return len(self.powers) - 1

    def apply(self, z: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        total = torch.full_like(z, self.powers[-1])
        for power in reversed(self.powers[:-1]):
            total = total * z + power
        return total


class Hermite(AbstractSmooth):
    """σ(z) = He_d(z)/√d!, of degree d."""

    degree: int = Field(2, ge=0, le=MOST)

    def order(self, variance: float) -> int:
        return self.degree

    def apply(self, z: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        before, value = torch.zeros_like(z), torch.ones_like(z)
        for k in range(self.degree):
            before, value = value, (z * value - sqrt(k) * before) / sqrt(k + 1)
        return value
