"""Heavy-ball momentum (Polyak 1964), as PyTorch has it: v ← μv + (1 − τ)g, at the first step v = g; θ ← θ − ηv."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field

from ntkexp.optimizer.base import Memory, Recursion, Sizes, filled, moved
from ntkexp.optimizer.batches import AbstractBatched
from ntkexp.optimizer.stable_step import AbstractStable
from ntkexp.shapes import Weights


class Momentum(AbstractBatched, AbstractStable):
    """U ← ηJ̄ + μU,  V = (1 − τ[r > 0]) U."""

    momentum: float = Field(0.9, ge=0, lt=1)
    dampening: float = Field(0.0, ge=0, lt=1)

    remembers: ClassVar[bool] = True

    def update(
        self, step: int, weights: Weights, gradient: Weights, sizes: Sizes, memory: Memory
    ) -> tuple[Weights, Memory]:
        gradient = self.with_decay(gradient, weights)
        velocity = gradient
        if step:
            velocity = {
                name: torch.add(self.momentum * memory["velocity"][name], part, alpha=1 - self.dampening)
                for name, part in gradient.items()
            }
        return moved(weights, velocity, sizes), {"velocity": velocity}

    def recursion(self, step: int, weights: Weights, sizes: Sizes, memory: Memory) -> Recursion:
        return Recursion(filled(weights, sizes), self.momentum, 1 - self.dampening * (step > 0))
