"""Networks of radial basis functions: Gaussian units, each with a centre and a width that are trained as well.

    f(x) = readout of φ_j(x) = exp(−½ ‖z_j‖²),    j = 1 … width,    x ∈ ℝᵈ

    ntk, mean_field    z_j = W_std/√d · w_j (x − c_j)    w_j = 1 at the start
    standard           z_j = w_j (x − c_j)               w_j = W_std/√d at the start

1/w_j is the width of a unit, and its centre c_j ~ N(0, 1) lies where inputs that are standardised lie (Broomhead & Lowe
1988). The square is multiplied out, ‖x‖² − 2 x·c + ‖c‖², so that no array of examples × units × inputs is needed.

>>> units = Gaussians(torch.zeros(1, 2), torch.ones(1), gain=1.0)
>>> units(torch.tensor([[1.0, 1.0]])).item() == float(torch.tensor(-1.0).exp())
True
"""

from __future__ import annotations

from math import prod, sqrt

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ntkexp.component import Count
from ntkexp.init.base import AbstractInit
from ntkexp.model.base import AbstractArchitecture
from ntkexp.model.learning_task import LearningTask


class RBFNetwork(AbstractArchitecture):
    """`width` Gaussian units, then a linear readout."""

    width: Count = 128

    def network(self, init: AbstractInit, task: LearningTask, generator: torch.Generator) -> nn.Module:
        task.refuse_tokens(self.option)
        inputs = prod(task.shape)
        centres = torch.randn(self.width, inputs, generator=generator, dtype=torch.float64)
        inverse, scale = torch.ones(self.width, dtype=torch.float64), init.W_std / sqrt(inputs)
        standard = init.param == "standard"
        units = Gaussians(centres, scale * inverse, 1.0) if standard else Gaussians(centres, inverse, scale)
        return nn.Sequential(nn.Flatten(), units, init.readout(task.outputs).build((self.width,), generator))


class Gaussians(nn.Module):
    """φ_j(x) = exp(−½ (gain · w_j ‖x − c_j‖)²)."""

    def __init__(self, centre: Float[Tensor, "unit input"], inverse: Float[Tensor, " unit"], gain: float) -> None:
        super().__init__()
        self.centre, self.inverse, self.gain = nn.Parameter(centre), nn.Parameter(inverse), gain

    def forward(self, x: Float[Tensor, "example input"]) -> Float[Tensor, "example unit"]:
        products = torch.mm(x, self.centre.t())
        distances = x.square().sum(1, keepdim=True) - 2 * products + self.centre.square().sum(1)
        return torch.exp(-(self.gain**2) / 2 * (self.inverse.square() * distances))
