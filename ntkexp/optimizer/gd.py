"""Gradient descent on all training examples: θ ← θ − η ∇L."""

from __future__ import annotations

from jaxtyping import Int
from torch import Tensor

from ntkexp.optimizer.plain import AbstractPlain


class GD(AbstractPlain):
    """Full-batch gradient descent."""

    def batch_indices(self, step: int, examples: int, seed: int) -> Int[Tensor, " batch"] | None:
        return None
