"""Gaussian inputs, and a random network as the teacher.

x ~ N(0, I_d),    y = Σ_j a_j tanh(w_j·x) / √hidden,    w_j ~ N(0, I/d),  a_j ~ N(0, 1)
"""

from __future__ import annotations

from math import sqrt

import torch

from ntkexp.component import Count
from ntkexp.data.base import Examples
from ntkexp.data.synthetic import AbstractSynthetic


class Teacher(AbstractSynthetic):
    """Regression; the inputs have `dimension` coordinates, the teacher has `hidden` units."""

    dimension: Count = 10
    hidden: Count = 16

    def examples(self, generator: torch.Generator) -> Examples:
        first = torch.randn(self.dimension, self.hidden, generator=generator, dtype=torch.float64)
        second = torch.randn(self.hidden, 1, generator=generator, dtype=torch.float64)
        inputs = torch.randn(self.size, self.dimension, generator=generator, dtype=torch.float64)
        hidden = torch.tanh(inputs @ first / sqrt(self.dimension))
        return Examples(inputs, hidden @ second / sqrt(self.hidden))
