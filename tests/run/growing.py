"""An optimizer of a user."""

from __future__ import annotations

from ntkexp.optimizer.base import LinearStep, Memory, Sizes
from ntkexp.optimizer.descent import Momentum
from ntkexp.shapes import Weights


class GrowingMomentum(Momentum):
    """Momentum whose decay rate β grows with the step."""

    def at(self, step: int) -> Momentum:
        return Momentum(momentum=self.momentum * (1 - 0.5 ** (step + 1)), batch=self.batch)

    def update(
        self, step: int, weights: Weights, gradient: Weights, sizes: Sizes, memory: Memory
    ) -> tuple[Weights, Memory]:
        return self.at(step).update(step, weights, gradient, sizes, memory)

    def recursion(self, step: int, sizes: Sizes, memory: Memory) -> dict[str, LinearStep]:
        return self.at(step).recursion(step, sizes, memory)
