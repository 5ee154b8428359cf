"""The straight line of `scalar_linear` with its offset in another unit: the same function, with another kernel.

    f(x) = θ₁ x + gain · θ₂,    k(x, x′) = x x′ + gain²

So the kernel, and how training generalises, depends on the parametrisation and not on the functions that there are
(Huszár 2020).

>>> import torch
>>> from ntkexp.library import tangent_kernel
>>> x = torch.tensor([[10.0], [-1.0]], dtype=torch.float64)
>>> tangent_kernel(ReparametrisedLinear().function(), x)[:, 0, 0, 0].tolist()
[200.0, 90.0]
"""

from __future__ import annotations

from torch import nn

from ntkexp.model.scalar import AbstractScalar
from ntkexp.model.scalar_linear import Line


class ReparametrisedLinear(AbstractScalar):
    """The line starts with this slope and this parameter, of which the offset is `gain` times as much."""

    slope: float = 3.0
    parameter: float = 0.1
    gain: float = 10.0

    def function(self) -> nn.Module:
        return Line(self.slope, self.parameter, self.gain)
