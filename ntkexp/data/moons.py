"""Two interleaving half circles with Gaussian noise, equally many points on each.

upper: (cos t, sin t)        lower: (1 − cos t, ½ − sin t)        t uniform in [0, π)
"""

from __future__ import annotations

from math import pi

import torch
from pydantic import NonNegativeFloat

from ntkexp.data.base import Examples
from ntkexp.data.scale import Standardise
from ntkexp.data.synthetic import AbstractSynthetic


class Moons(AbstractSynthetic):
    """Two classes; `noise` is the standard deviation added to both coordinates."""

    standardise: Standardise = "each"
    noise: NonNegativeFloat = 0.1

    def examples(self, generator: torch.Generator) -> Examples:
        angle = pi * torch.rand(self.size, generator=generator, dtype=torch.float64)
        labels = torch.arange(self.size) % 2
        upper = torch.stack([angle.cos(), angle.sin()], 1)
        lower = torch.stack([1 - angle.cos(), 0.5 - angle.sin()], 1)
        noise = self.noise * torch.randn(self.size, 2, generator=generator, dtype=torch.float64)
        return Examples(torch.where(labels[:, None] == 0, upper, lower) + noise, labels, ("upper", "lower"))
