"""Parity, the generalised XOR: a label that no single coordinate, and no smaller set of them, tells anything about.

    y = sign(x_1 · x_2 ⋯ x_order)

Corners of the cube are drawn without repetition, lest a test example be a training example.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.component import Count
from ntkexp.data.base import Examples
from ntkexp.data.synthetic import AbstractSynthetic
from ntkexp.mistake import Mistake


class Parity(AbstractSynthetic):
    """Two classes; the inputs are corners of the cube {−1, 1}^dimension, or Gaussian."""

    dimension: Count = 10
    order: Count = 2
    inputs: Literal["signs", "gaussian"] = "signs"

    def examples(self, generator: torch.Generator) -> Examples:
        if self.order > self.dimension:
            raise Mistake(f"data.order={self.order} coordinates are multiplied, but data.dimension={self.dimension}")
        if self.inputs == "signs":
            inputs = corners(self.size, self.dimension, generator)
        else:
            inputs = torch.randn(self.size, self.dimension, generator=generator, dtype=torch.float64)
        positive = inputs[:, : self.order].sign().prod(1) > 0
        return Examples(inputs, positive.long(), ("odd", "even"))


def corners(count: int, dimension: int, generator: torch.Generator) -> Float[Tensor, "example dimension"]:
    """Different corners of the cube, every set of them equally likely."""
    if count > 2**dimension:
        raise Mistake(
            f"data.train, data.probe and data.test ask for {count} examples, and a cube of data.dimension={dimension} "
            f"has {2**dimension} corners; lower one of them, or raise data.dimension"
        )
    found = torch.empty(0, dimension, dtype=torch.float64)
    while len(found) < count:
        drawn = 2.0 * torch.randint(0, 2, (count, dimension), generator=generator) - 1.0
        found = torch.unique(torch.cat([found, drawn.double()]), dim=0)
    return found[torch.randperm(len(found), generator=generator)[:count]]
