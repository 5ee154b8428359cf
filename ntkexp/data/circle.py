"""Points on the unit circle, and a sum of waves.

    x = (cos a, sin a),  a uniform in [0, 2π),    y = Σ_k cos(k a) + sin(k a)

>>> inputs = Circle(train=3, probe=0, test=0).split().train.inputs
>>> torch.allclose(inputs.norm(dim=1), torch.ones(3, dtype=torch.float64))
True
"""

from __future__ import annotations

from math import pi

import torch
from pydantic import Field

from ntkexp.component import Count
from ntkexp.data.base import Examples
from ntkexp.data.synthetic import AbstractSynthetic


class Circle(AbstractSynthetic):
    """Regression; `frequencies` are the k."""

    frequencies: tuple[Count, ...] = Field((1, 2, 3), min_length=1)

    def examples(self, generator: torch.Generator) -> Examples:
        angle = 2 * pi * torch.rand(self.size, 1, generator=generator, dtype=torch.float64)
        phase = angle * torch.tensor(self.frequencies, dtype=torch.float64)
        target = (phase.cos() + phase.sin()).sum(1, keepdim=True)
        return Examples(torch.cat([angle.cos(), angle.sin()], 1), target)
