"""Linear maps without weights: flattening and averages."""

from __future__ import annotations

from math import prod

import torch
from jaxtyping import Float
from pydantic import PositiveInt
from torch import Tensor, nn

from ntkexp.layer.base import AbstractLayer
from ntkexp.mistake import Mistake

AVERAGES = {1: nn.AvgPool1d, 2: nn.AvgPool2d, 3: nn.AvgPool3d}


class Flatten(AbstractLayer):
    """All axes of an example as one.

    >>> Flatten().shape((1, 8, 8))
    (64,)
    """

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (prod(shape),)

    def build(self, shape: tuple[int, ...], generator: torch.Generator) -> nn.Module:
        return nn.Flatten()


class AvgPool(AbstractLayer):
    """The mean over windows that do not overlap; what does not fill a window is left out.

    >>> AvgPool(window=2).shape((3, 8, 7))
    (3, 4, 3)
    """

    window: PositiveInt = 2

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        pixels = tuple(n // self.window for n in shape[1:])
        if len(pixels) not in AVERAGES or 0 in pixels:
            raise Mistake(f"a pooling window of {self.window} does not fit into examples of shape {list(shape)}")
        return (shape[0], *pixels)

    def build(self, shape: tuple[int, ...], generator: torch.Generator) -> nn.Module:
        self.shape(shape)
        pooling: nn.Module = AVERAGES[len(shape) - 1](self.window)
        return pooling


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
