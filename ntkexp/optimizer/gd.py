"""Gradient descent on all training examples: θ ← θ − η ∇L."""

from __future__ import annotations

from jaxtyping import Int
from torch import Tensor

from ntkexp.optimizer.base import AbstractOptimizer, descend
from ntkexp.shapes import Weights


class GradientDescent(AbstractOptimizer):
    """Full-batch gradient descent."""

    def batch_indices(self, step: int, examples: int, seed: int) -> Int[Tensor, " batch"] | None:
        return None

    def update(self, weights: Weights, gradient: Weights, step_size: float) -> Weights:
        return descend(weights, gradient, step_size)
