"""Hinge loss ℓ = max(0, 1 − y f) with y = ±1, one-vs-rest and summed over outputs.

>>> import torch
>>> f, y = torch.tensor([[0.5, 2.0]], dtype=torch.float64), torch.ones(1, 2, dtype=torch.float64)
>>> Hinge().value(f, y).item(), Hinge().output_gradient(f, y).tolist()
(0.5, [[-1.0, -0.0]])
"""

from __future__ import annotations

from typing import ClassVar

from jaxtyping import Float, Int
from torch import Tensor

from ntkexp.loss.base import AbstractLoss, signs


class Hinge(AbstractLoss):
    """Piecewise linear, so ℓ″ bounds nothing; 1 is taken by convention, as for the squared error."""

    curvature: ClassVar[float] = 1.0
    smooth: ClassVar[bool] = False

    def encode(self, labels: Int[Tensor, " example"], classes: int) -> Float[Tensor, "example out"]:
        return signs(labels, classes)

    def value(
        self, outputs: Float[Tensor, "example out"], targets: Float[Tensor, "example out"]
    ) -> Float[Tensor, " example"]:
        return (1 - targets * outputs).clamp(min=0).sum(1)

    def output_gradient(
        self, outputs: Float[Tensor, "example out"], targets: Float[Tensor, "example out"]
    ) -> Float[Tensor, "example out"]:
        return -targets * (targets * outputs < 1)
