"""Linear maps without weights: flattening, and the mean over an image."""

from __future__ import annotations

from math import prod

import torch
from jaxtyping import Float
from torch import Tensor, nn

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


class GlobalAvgPool(AbstractLayer):
    """The mean over all pixels.

    >>> GlobalAvgPool().shape((3, 8, 8))
    (3,)
    """

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape[:1]

    def build(self, shape: tuple[int, ...], generator: torch.Generator) -> nn.Module:
        return MeanOverPixels()


class MeanOverPixels(nn.Module):
    """[example, channel, *pixels] → [example, channel]."""

    def forward(self, x: Float[Tensor, "example channel *pixels"]) -> Float[Tensor, "example channel"]:
        return x.flatten(2).mean(2)
