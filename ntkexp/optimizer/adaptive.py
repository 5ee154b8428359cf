"""The step of Adam (Kingma & Ba 2015), and of AMSGrad (Reddi, Kale & Kumar 2018), as PyTorch has them:

    m ← β₁m + (1 − β₁)g,   v ← β₂v + (1 − β₂)g²,   θ ← θ − η/(1 − β₁ˢ⁺¹) · D ⊙ m,   D = 1/(√(v/(1 − β₂ˢ⁺¹)) + ε)

AMSGrad takes the largest v so far. Along a recorded run D is a number for every weight and step, so steps are linear
in past gradients, and their sum is exact.
"""

from __future__ import annotations

from math import sqrt
from typing import Annotated, ClassVar

import torch
from pydantic import Field, PositiveFloat
from torch import Tensor

from ntkexp.optimizer.base import Memory, Recursion, Sizes, Spread
from ntkexp.optimizer.batches import AbstractBatched
from ntkexp.shapes import Weights


class AbstractAdam(AbstractBatched):
    """U ← η/(1 − β₁ʳ⁺¹) D ⊙ J̄ + β₁U,  V = (1 − β₁) U."""

    step_size: PositiveFloat = 1e-3
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8
    amsgrad: bool = False

    remembers: ClassVar[bool] = True
    records: ClassVar[tuple[str, ...]] = ("square",)
    elementwise: ClassVar[bool] = True

    def chosen_step(self, largest_stable: float) -> float:
        return self.step_size

    def update(
        self, step: int, weights: Weights, gradient: Weights, sizes: Sizes, memory: Memory
    ) -> tuple[Weights, Memory]:
        gradient = gradient if self.decouples else self.with_decay(gradient, weights)
        memory = memory or {part: {name: torch.zeros_like(g) for name, g in gradient.items()} for part in PARTS}
        first, second = self.betas
        mean = {name: torch.lerp(memory["mean"][name], g, 1 - first) for name, g in gradient.items()}
        latest = {name: torch.addcmul(second * memory["latest"][name], g, g, value=1 - second)
                  for name, g in gradient.items()}  # fmt: skip
        square = latest
        if self.amsgrad:
            square = {name: torch.maximum(memory["square"][name], part) for name, part in latest.items()}
        after = {
            name: torch.addcdiv(
                self.shrunk(weight, sizes[name]),
                mean[name],
                self.spread(step, square[name]),
                value=-sizes[name] / (1 - first ** (step + 1)),
            )
            for name, weight in weights.items()
        }
        return after, {"mean": mean, "latest": latest, "square": square}

    def shrunk(self, weight: Tensor, size: float) -> Tensor:
        """The weight after its decay, where that is no business of the memory."""
        return weight * (1 - size * self.weight_decay) if self.decouples else weight

    def spread(self, step: int, square: Tensor) -> Tensor:
        """The factors 1/D of the weights."""
        return (square.sqrt() / sqrt(1 - self.betas[1] ** (step + 1))).add_(self.eps)

    def spread_at(self, step: int) -> Spread:
        return Spread(self.betas[1], sqrt(1 - self.betas[1] ** (step + 1)), self.eps, self.amsgrad)

    @property
    def differentiated(self) -> tuple[str, ...]:
        return ("mean", "latest") if self.amsgrad else ("mean",)

    def recursion(self, step: int, weights: Weights, sizes: Sizes, memory: Memory) -> Recursion:
        first = self.betas[0]
        scale = {
            name: sizes[name] / (1 - first ** (step + 1)) / self.spread(step, square)
            for name, square in memory["square"].items()
        }
        return Recursion(scale, first, 1 - first)


PARTS = ("mean", "latest", "square")
