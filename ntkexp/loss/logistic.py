"""Logistic loss ℓ = log(1 + exp(−y f)) with y = ±1, one-vs-rest and summed over outputs.

>>> f, y = torch.zeros(1, 1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64)
>>> Logistic().output_gradient(f, y).item()
-0.5
"""

from __future__ import annotations

from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ntkexp.loss.base import AbstractLoss, signs


class Logistic(AbstractLoss):
    """ℓ″ = σ(yf)σ(−yf) ≤ ¼."""

    curvature: ClassVar[float] = 0.25

    def encode(self, labels: Int[Tensor, " example"], classes: int) -> Float[Tensor, "example out"]:
        return signs(labels, classes)

    def value(
        self, outputs: Float[Tensor, "example out"], targets: Float[Tensor, "example out"]
    ) -> Float[Tensor, " example"]:
        return -torch.nn.functional.logsigmoid(targets * outputs).sum(1)

    def output_gradient(
        self, outputs: Float[Tensor, "example out"], targets: Float[Tensor, "example out"]
    ) -> Float[Tensor, "example out"]:
        return -targets * torch.sigmoid(-targets * outputs)
