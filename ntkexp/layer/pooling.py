"""Pooling over windows: by averages, or by the largest, which has no known limit of infinite width."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import BeforeValidator, PositiveInt
from torch import nn

from ntkexp.layer.base import AbstractLayer
from ntkexp.layer.linear import AvgPool
from ntkexp.layer.named import named
from ntkexp.mistake import Mistake

MAXIMA = {1: nn.MaxPool1d, 2: nn.MaxPool2d, 3: nn.MaxPool3d}


class MaxPool(AbstractLayer):
    """Windows that do not overlap; what does not fill a window is left out.

    >>> MaxPool(window=2).shape((3, 8, 7))
    (3, 4, 3)
    """

    window: PositiveInt = 2

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        pixels = tuple(n // self.window for n in shape[1:])
        if len(pixels) not in MAXIMA or 0 in pixels:
            raise Mistake(f"a pooling window of {self.window} does not fit into examples of shape {list(shape)}")
        return (shape[0], *pixels)

    def build(self, shape: tuple[int, ...], generator: torch.Generator) -> nn.Module:
        self.shape(shape)
        return MAXIMA[len(shape) - 1](self.window)


POOLINGS: dict[str, AvgPool | MaxPool | None] = {"none": None, "average": AvgPool(), "max": MaxPool()}

Pooling = Annotated[AvgPool | MaxPool | None, BeforeValidator(named("pooling", POOLINGS))]
"""A pooling layer, its name, or none."""
