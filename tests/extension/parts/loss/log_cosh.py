"""ℓ = Σ log cosh(f − y), a parabola near the target and straight far from it."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from ntkexp.loss import AbstractLoss, signs


class LogCosh(AbstractLoss):
    """ℓ″ = 1 − tanh² ≤ 1."""

    curvature: ClassVar[float] = 1.0

    def encode(self, labels: Tensor, classes: int) -> Tensor:
        return signs(labels, classes)

    def value(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).cosh().log().sum(1)

    def output_gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).tanh()
