"""Clipping by norm, N = ‖g‖: p = c g with c = min(1, clip_norm/(N + 1e-6)).

Δp = c̄ Δg + ḡ Δc,        Δc = c[N, N′] ΔN,        ΔN = (g + g′)·Δg/(N + N′)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.optimizer.base import GUARD
from ntkexp.removal.pair import Pair, slope


@dataclass(frozen=True)
class Clipped:
    """A gradient at both ends, and what the optimizer makes of it before anything else."""

    gradient: Pair
    factor: Pair  # c
    bound: float | None

    @property
    def taken(self) -> Pair:
        """The gradients c g."""
        return Pair(self.factor.first * self.gradient.first, self.factor.second * self.gradient.second)

    def back(self, pulled: Float[Tensor, "direction weight"]) -> Float[Tensor, "direction weight"]:
        """The adjoint of g, given that of c g."""
        if self.bound is None:
            return pulled
        norm = Pair(self.gradient.first.norm(), self.gradient.second.norm())
        mean, whole = self.gradient.mean, norm.first + norm.second
        turned = torch.where(whole > 0, 2 / torch.where(whole > 0, whole, 1.0), 0.0) * mean
        return self.factor.mean * pulled + self.rate(norm) * (pulled @ mean)[:, None] * turned

    def rate(self, norm: Pair) -> Tensor:
        """The slope of c between both norms; across the bound, where c has a kink, it is a quotient however close."""
        short = self.factor.first < 1
        derivative = torch.where(short, -(self.bound or 0.0) / (norm.mean + GUARD) ** 2, 0.0)
        if bool(short) == bool(self.factor.second < 1):
            return slope(norm, self.factor, derivative)
        return self.factor.change / norm.change
