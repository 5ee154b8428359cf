"""Corners of a square with noise. Opposite corners have the same class."""

from __future__ import annotations

import torch
from pydantic import NonNegativeFloat

from ntkexp.data import AbstractSynthetic, Examples


class Corners(AbstractSynthetic):
    """Two classes; `noise` is the standard deviation of each coordinate."""

    noise: NonNegativeFloat = 0.2

    def examples(self, generator: torch.Generator) -> Examples:
        bits = torch.randint(2, (self.size, 2), generator=generator)
        noise = self.noise * torch.randn(self.size, 2, generator=generator, dtype=torch.float64)
        return Examples(2.0 * bits - 1 + noise, bits.sum(1) % 2, ("same", "other"))
