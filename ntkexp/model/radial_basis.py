"""Two bumps and an offset, five numbers whose kernel is worth a picture:

    f(x) = a₁ exp(−(x − c₁)²/30) + a₂ exp(−(x − c₂)²/30) + b

F. Huszár, "Some intuition on the neural tangent kernel" (2020), gives the numbers (4, −10, 25, 10, 50), and a formula
in which the first of each pair is the amplitude. His text and his pictures are of the other reading: only if the first
is the centre does the kernel with x′ = 10 change its sign, and is the kernel of a finite step largest at x = 7.

    reading            (c₁, a₁, c₂, a₂, b)      k(10, 10)    k/k(10, 10) over −10 … 20
    centre_first       (4, −10, 25, 10, 50)     2.542236     −0.2785 (at 0) … 1.2042 (at 8), left tail 0.387
    amplitude_first    (−10, 4, 10, 25, 50)     2.000000      0.5 … 1 (at 10): never negative

>>> from ntkexp.library import tangent_kernel
>>> x = torch.tensor([[10.0], [0.0]], dtype=torch.float64)
>>> kernel = tangent_kernel(RadialBasis().function(), x)[:, 0, 0, 0]
>>> round(kernel[0].item(), 6), round((kernel[1] / kernel[0]).item(), 4)
(2.542236, -0.2785)
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ntkexp.model.scalar import AbstractScalar, parameter


class RadialBasis(AbstractScalar):
    """Five numbers, of which the first and the third are centres or amplitudes."""

    numbers: tuple[float, float, float, float, float] = (4.0, -10.0, 25.0, 10.0, 50.0)
    reading: Literal["centre_first", "amplitude_first"] = "centre_first"

    def function(self) -> nn.Module:
        first, second, third, fourth, offset = self.numbers
        if self.reading == "centre_first":
            return Bumps((first, third), (second, fourth), offset)
        return Bumps((second, fourth), (first, third), offset)


class Bumps(nn.Module):
    """f(x) = Σ_j a_j exp(−(x − c_j)²/30) + b."""

    def __init__(self, centre: tuple[float, float], amplitude: tuple[float, float], offset: float) -> None:
        super().__init__()
        self.centre, self.amplitude, self.offset = parameter(*centre), parameter(*amplitude), parameter(offset)

    def forward(self, x: Float[Tensor, "example one"]) -> Float[Tensor, "example one"]:
        bumps = torch.exp(-1 / 30 * torch.square(x - self.centre))
        return torch.mm(bumps, self.amplitude[:, None]) + self.offset
