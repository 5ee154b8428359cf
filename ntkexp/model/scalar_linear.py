"""A straight line with two parameters, whose kernel tells the origin from every other place:

    f(x) = θ₁ x + θ₂,    k(x, x′) = x x′ + 1

An observation at x′ = 10 moves values at x < −0.1 the other way (Huszár 2020).

>>> from ntkexp.library import tangent_kernel
>>> x = torch.tensor([[10.0], [-1.0]], dtype=torch.float64)
>>> tangent_kernel(ScalarLinear().function(), x)[:, 0, 0, 0].tolist()
[101.0, -9.0]
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ntkexp.model.scalar import AbstractScalar, parameter


class ScalarLinear(AbstractScalar):
    """A line starts with this slope and this offset."""

    slope: float = 3.0
    offset: float = 1.0

    def function(self) -> nn.Module:
        return Line(self.slope, self.offset, 1.0)


class Line(nn.Module):
    """f(x) = θ₁ x + gain · θ₂."""

    def __init__(self, slope: float, offset: float, gain: float) -> None:
        super().__init__()
        self.slope, self.offset, self.gain = parameter(slope), parameter(offset), gain

    def forward(self, x: Float[Tensor, "example one"]) -> Float[Tensor, "example one"]:
        return torch.mul(x, self.slope) + self.gain * self.offset
