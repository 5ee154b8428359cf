"""Points on a sphere, and a polynomial of low degree.

    x uniform on S^{d−1},    y = Σ_{k ≤ degree} h_k(√d w_k·x),    w_k random unit vectors

h_k are the normalised Hermite polynomials, √k! h_k = He_k: in high dimension every degree has the same share of y.

    h_0 = 1,    h_1 = z,    √(k+1) h_{k+1} = z h_k − √k h_{k−1}

>>> z = torch.tensor([2.0], dtype=torch.float64)
>>> [round(value.item(), 4) for value in hermite(z, 2)]
[1.0, 2.0, 2.1213]
"""

from __future__ import annotations

from math import sqrt

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor
from torch.nn.functional import normalize

from ntkexp.component import LARGEST, Depth
from ntkexp.data.base import Examples
from ntkexp.data.synthetic import AbstractSynthetic


class Sphere(AbstractSynthetic):
    """Regression; the inputs have `dimension` coordinates."""

    dimension: int = Field(10, ge=2, le=LARGEST)
    degree: Depth = 2

    def examples(self, generator: torch.Generator) -> Examples:
        directions = normalize(torch.randn(self.degree, self.dimension, generator=generator, dtype=torch.float64))
        inputs = normalize(torch.randn(self.size, self.dimension, generator=generator, dtype=torch.float64))
        along = sqrt(self.dimension) * inputs @ directions.t()
        target = sum(hermite(z, k)[k] for k, z in enumerate(along.unbind(1), start=1))
        return Examples(inputs, torch.as_tensor(target)[:, None])


def hermite(z: Float[Tensor, " example"], degree: int) -> list[Float[Tensor, " example"]]:
    """h_0(z) … h_degree(z)."""
    values = [torch.ones_like(z), z]
    for k in range(1, degree):
        values.append((z * values[k] - sqrt(k) * values[k - 1]) / sqrt(k + 1))
    return values
