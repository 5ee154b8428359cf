"""Cross-entropy ℓ = log Σ_c exp f_c − f_y, with one output per class.

>>> f, y = torch.zeros(1, 2, dtype=torch.float64), torch.tensor([[1.0, 0.0]], dtype=torch.float64)
>>> CrossEntropy().output_gradient(f, y).tolist()
[[-0.5, 0.5]]
"""

from __future__ import annotations

from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ntkexp.loss.base import AbstractLoss


class CrossEntropy(AbstractLoss):
    """The Hessian diag(p) − ppᵀ has no eigenvalue above ½."""

    curvature: ClassVar[float] = 0.5

    def encode(self, labels: Int[Tensor, " example"], classes: int) -> Float[Tensor, "example out"]:
        return torch.nn.functional.one_hot(labels, classes).double()

    def value(
        self, outputs: Float[Tensor, "example out"], targets: Float[Tensor, "example out"]
    ) -> Float[Tensor, " example"]:
        return -(targets * outputs.log_softmax(1)).sum(1)

    def output_gradient(
        self, outputs: Float[Tensor, "example out"], targets: Float[Tensor, "example out"]
    ) -> Float[Tensor, "example out"]:
        return outputs.softmax(1) - targets
