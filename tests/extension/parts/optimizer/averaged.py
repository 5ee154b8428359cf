"""Steps along a running mean of the gradients: m ← βm + (1 − β)g from m = 0, θ ← θ − ηm."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field

from ntkexp.optimizer import AbstractBatched, AbstractStable
from ntkexp.optimizer.base import LinearStep, Memory, Sizes, after_step
from ntkexp.shapes import Weights


class Averaged(AbstractBatched, AbstractStable):
    """S = η,  α = 1 − β."""

    beta: float = Field(0.5, ge=0, lt=1)

    needs_backward_sum: ClassVar[bool] = True

    def update(
        self, step: int, weights: Weights, gradient: Weights, sizes: Sizes, memory: Memory
    ) -> tuple[Weights, Memory]:
        gradient = self.with_decay(gradient, weights)
        before = memory.get("mean") or {name: torch.zeros_like(part) for name, part in gradient.items()}
        mean = {name: torch.lerp(before[name], part, 1 - self.beta) for name, part in gradient.items()}
        return after_step(weights, mean, sizes), {"mean": mean}

    def recursion(self, step: int, sizes: Sizes, memory: Memory) -> dict[str, LinearStep]:
        return {
            name: LinearStep(size, momentum_decay=self.beta, momentum_gain=1 - self.beta)
            for name, size in sizes.items()
        }
