"""Nesterov's momentum, as PyTorch has it: v ← μv + g, at the first step v = g; θ ← θ − η(g + μv)."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field

from ntkexp.optimizer.base import Memory, Recursion, Sizes, filled, moved
from ntkexp.optimizer.batches import AbstractBatched
from ntkexp.optimizer.stable_step import AbstractStable
from ntkexp.shapes import Weights


class Nesterov(AbstractBatched, AbstractStable):
    """U ← ηJ̄ + μU,  V = μU + ηJ̄."""

    momentum: float = Field(0.9, gt=0, lt=1)

    remembers: ClassVar[bool] = True

    def update(
        self, step: int, weights: Weights, gradient: Weights, sizes: Sizes, memory: Memory
    ) -> tuple[Weights, Memory]:
        gradient = self.with_decay(gradient, weights)
        velocity = gradient
        if step:
            velocity = {name: self.momentum * memory["velocity"][name] + part for name, part in gradient.items()}
        ahead = {name: torch.add(part, velocity[name], alpha=self.momentum) for name, part in gradient.items()}
        return moved(weights, ahead, sizes), {"velocity": velocity}

    def recursion(self, step: int, weights: Weights, sizes: Sizes, memory: Memory) -> Recursion:
        return Recursion(filled(weights, sizes), self.momentum, self.momentum, sizes)
