"""Linear maps without weights."""

from __future__ import annotations

from math import prod

import torch
from torch import nn

from ntkexp.layer.base import AbstractLayer


class Flatten(AbstractLayer):
    """All axes of an example as one.

    >>> Flatten().shape((1, 8, 8))
    (64,)
    """

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (prod(shape),)

    def build(self, shape: tuple[int, ...], generator: torch.Generator) -> nn.Module:
        return nn.Flatten()
