"""Pooling over windows: by averages, or by the largest, which has no known limit of infinite width."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Annotated

import torch
from pydantic import BeforeValidator, PositiveInt
from torch import nn

from ntkexp.layer.base import AbstractLayer
from ntkexp.layer.named import named
from ntkexp.mistake import Mistake


class AbstractPool(AbstractLayer):
    """Windows that do not overlap; what does not fill a window is left out."""

    window: PositiveInt = 2

    @property
    @abstractmethod
    def modules(self) -> Sequence[Callable[[int], nn.Module]]:
        """torch's pooling of a window, in one, two and three dimensions."""

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        pixels = tuple(n // self.window for n in shape[1:])
        if not 1 <= len(pixels) <= len(self.modules) or 0 in pixels:
            raise Mistake(f"a pooling window of {self.window} does not fit into examples of shape {list(shape)}")
        return (shape[0], *pixels)

    def build(self, shape: tuple[int, ...], generator: torch.Generator) -> nn.Module:
        dimensions = len(self.shape(shape)) - 1
        return self.modules[dimensions - 1](self.window)


class AvgPool(AbstractPool):
    """The mean of each window.

    >>> AvgPool(window=2).shape((3, 8, 7))
    (3, 4, 3)
    """

    @property
    def modules(self) -> Sequence[Callable[[int], nn.Module]]:
        return (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)


class MaxPool(AbstractPool):
    """The largest of each window.

    >>> MaxPool(window=2).shape((3, 8, 7))
    (3, 4, 3)
    """

    @property
    def modules(self) -> Sequence[Callable[[int], nn.Module]]:
        return (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)


POOLINGS: dict[str, AvgPool | MaxPool | None] = {"none": None, "average": AvgPool(), "max": MaxPool()}

Pooling = Annotated[AvgPool | MaxPool | None, BeforeValidator(named("pooling", POOLINGS))]
"""A pooling layer, its name, or none."""
