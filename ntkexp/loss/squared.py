"""Squared error ℓ = ½‖f − y‖², summed over outputs.

>>> f, y = torch.tensor([[3.0]]), torch.tensor([[1.0]])
>>> Squared().value(f, y), Squared().output_gradient(f, y)
(tensor([2.]), tensor([[2.]]))
"""

from __future__ import annotations

from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ntkexp.loss.base import AbstractLoss, signs


class Squared(AbstractLoss):
    """Two classes become ±1 at one output; more become one-hot vectors, centred so that each row sums to zero."""

    curvature: ClassVar[float] = 1.0
    is_quadratic: ClassVar[bool] = True

    def encode(self, labels: Int[Tensor, " example"], classes: int) -> Float[Tensor, "example out"]:
        if classes == 2:
            return signs(labels, classes)
        return torch.nn.functional.one_hot(labels, classes).double() - 1 / classes

    def real(self, values: Float[Tensor, "example value"]) -> Float[Tensor, "example out"]:
        return values

    def value(
        self, outputs: Float[Tensor, "example out"], targets: Float[Tensor, "example out"]
    ) -> Float[Tensor, " example"]:
        return (outputs - targets).square().sum(1) / 2

    def output_gradient(
        self, outputs: Float[Tensor, "example out"], targets: Float[Tensor, "example out"]
    ) -> Float[Tensor, "example out"]:
        return outputs - targets
