"""A step along the gradient of the moment: θ ← θ − η (g + λθ), which remembers nothing."""

from __future__ import annotations

from ntkexp.optimizer.base import Memory, Recursion, Sizes, filled, moved
from ntkexp.optimizer.stable_step import AbstractStable
from ntkexp.shapes import Weights


class AbstractPlain(AbstractStable):
    """U = V = η ⊙ J̄."""

    def update(
        self, step: int, weights: Weights, gradient: Weights, sizes: Sizes, memory: Memory
    ) -> tuple[Weights, Memory]:
        return moved(weights, self.with_decay(gradient, weights), sizes), {}

    def recursion(self, step: int, weights: Weights, sizes: Sizes, memory: Memory) -> Recursion:
        return Recursion(filled(weights, sizes))
