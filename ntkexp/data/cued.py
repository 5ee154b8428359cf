"""Gaussian inputs with a cue that says which of two tasks is asked.

x ~ N(0, I_d) and a cue, (c, 0) for the first task and (0, c) for the second;    y = w₁·x or w₂·x,  wᵢ·wⱼ = δᵢⱼ

Both tasks of one seed are asked at the same x, and differ by cue and target alone: with `data=sequence` they are
learned in turn, as in T. Flesch, K. Juechems, T. Dumbalska, A. Saxe & C. Summerfield, "Orthogonal representations for
robust context-dependent task performance in brains and neural networks", Neuron 110 (2022).

>>> from ntkexp.data.base import examples_stream
>>> one, other = (Cued(task=task, train=3, probe=1, test=0).examples(examples_stream(0)) for task in (1, 2))
>>> one.inputs[0, -2:].tolist(), other.inputs[0, -2:].tolist(), torch.equal(one.inputs[:, :-2], other.inputs[:, :-2])
([2.0, 0.0], [0.0, 2.0], True)
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field

from ntkexp.component import LARGEST
from ntkexp.data.base import Examples
from ntkexp.data.synthetic import AbstractSynthetic


class Cued(AbstractSynthetic):
    """Regression on the first task, or on the second, of two that never agree."""

    task: Literal[1, 2] = 1
    dimension: int = Field(6, ge=2, le=LARGEST)
    cue: float = Field(2.0, ge=0)

    def examples(self, generator: torch.Generator) -> Examples:
        directions = torch.linalg.qr(torch.randn(self.dimension, 2, generator=generator, dtype=torch.float64)).Q
        points = torch.randn(self.size, self.dimension, generator=generator, dtype=torch.float64)
        cue = self.cue * torch.eye(2, dtype=points.dtype)[self.task - 1].expand(len(points), 2)
        return Examples(torch.cat([points, cue], 1), points @ directions[:, self.task - 1 : self.task])
