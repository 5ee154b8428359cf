"""Stochastic gradient descent: θ ← θ − η ∇L_B on a mini-batch B.

Batches are a function of (seed, step) alone, so a run that is resumed draws the same ones.

>>> SGD(batch=2).batch_indices(step=0, examples=4, seed=0).shape
torch.Size([2])
"""

from __future__ import annotations

import torch
from jaxtyping import Int
from pydantic import PositiveInt
from torch import Tensor

from ntkexp.optimizer.base import AbstractOptimizer, descend
from ntkexp.shapes import Weights


class SGD(AbstractOptimizer):
    """Mini-batches; without replacement, each epoch passes over a new permutation and its last batch may be short."""

    batch: PositiveInt = 32
    replacement: bool = False

    def batch_indices(self, step: int, examples: int, seed: int) -> Int[Tensor, " batch"] | None:
        if self.replacement:
            return torch.randint(examples, (self.batch,), generator=self.generator(seed, step))
        epoch, turn = divmod(step, -(-examples // self.batch))
        order = torch.randperm(examples, generator=self.generator(seed, epoch))
        return order[turn * self.batch : (turn + 1) * self.batch]

    @staticmethod
    def generator(seed: int, count: int) -> torch.Generator:
        """An independent stream for every pair of numbers."""
        return torch.Generator().manual_seed(seed * 1_000_003 + count)

    def update(self, weights: Weights, gradient: Weights, step_size: float) -> Weights:
        return descend(weights, gradient, step_size)
