"""σ(z) = max(0, z) + 1. With ReLU's κ and κ̇, its κ is κ + (√q₁ + √q₂)/√2π + 1, and its κ̇ is κ̇."""

from __future__ import annotations

from math import pi

import torch
from torch import Tensor

from ntkexp.layer import ReLU


class Lifted(ReLU):
    """A layer with a limit, and without the fused form of its parent, which has another formula."""

    def apply(self, z: Tensor) -> Tensor:
        return torch.relu(z) + 1

    def dual(self, q1: Tensor, c: Tensor, q2: Tensor) -> tuple[Tensor, Tensor]:
        value, slope = super().dual(q1, c, q2)
        return value + (q1.sqrt() + q2.sqrt()) / (2 * pi) ** 0.5 + 1, slope

    def alone(self, q: Tensor) -> tuple[Tensor, Tensor]:
        return self.dual(q, q, q)
