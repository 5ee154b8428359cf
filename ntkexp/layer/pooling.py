"""Pooling over windows: by averages, or by the largest, which has no known limit of infinite width.

An average is K′[p′, q′] = mean of K[p, q] over the pixels p in window p′ and q in window q′, and Θ goes the same way.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import torch
from pydantic import BeforeValidator
from torch import nn

from ntkexp.component import Depth
from ntkexp.covariance.coarse import Coarse, needed
from ntkexp.covariance.covariance import Covariance
from ntkexp.covariance.operation import Operations, coarsen
from ntkexp.covariance.pairs import Pairs
from ntkexp.covariance.signal import Signal
from ntkexp.layer.base import AbstractLayer
from ntkexp.layer.by_name import named
from ntkexp.mistake import Mistake


class AbstractPool(AbstractLayer):
    """Windows that do not overlap; what does not fill a window is left out."""

    window: Depth | tuple[Depth, ...] = 2

    @property
    @abstractmethod
    def modules(self) -> Sequence[Callable[[Any], nn.Module]]:
        """torch's pooling of a window, in one, two and three dimensions."""

    def windows(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Lay out one window for each axis of pixels."""
        return (self.window,) * (len(shape) - 1) if isinstance(self.window, int) else self.window

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        windows = self.windows(shape)
        if len(shape) == 1:
            raise Mistake(f"a pool takes [channels, *pixels], and was given {list(shape)}; put it before the Flatten")
        if len(windows) != len(shape) - 1 or not 1 <= len(windows) <= len(self.modules):
            raise Mistake(f"a pooling window {list(windows)} does not fit examples of shape {list(shape)}")
        pixels = tuple(n // window for n, window in zip(shape[1:], windows, strict=True))
        if 0 in pixels:
            raise Mistake(f"a pooling window of {self.window} does not fit into examples of shape {list(shape)}")
        return (shape[0], *pixels)

    def build(self, shape: tuple[int, ...], generator: torch.Generator) -> nn.Module:
        dimensions = len(self.shape(shape)) - 1
        return self.modules[dimensions - 1](self.windows(shape))


class AvgPool(AbstractPool):
    """The mean of each window.

    >>> AvgPool(window=2).shape((3, 8, 7))
    (3, 4, 3)
    """

    @property
    def modules(self) -> Sequence[Callable[[Any], nn.Module]]:
        return (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)

    def carry(self, signal: Signal) -> Signal:
        return signal

    def coarse(self, shape: tuple[int, ...]) -> list[Coarse]:
        """The windows, as a map of pixels."""
        return [Coarse.windows(n, window) for n, window in zip(shape[1:], self.windows(shape), strict=True)]

    def need(self, wanted: Pairs, shape: tuple[int, ...]) -> Pairs:
        return needed(self.coarse(shape), wanted, shape[1:])

    def push(self, covariance: Covariance, shape: tuple[int, ...]) -> Covariance:
        return covariance.coarse(self.coarse(shape))

    def fused(self, shape: tuple[int, ...], register: int, free: int) -> Operations:
        return (coarsen(register, self.coarse(shape)),)


class MaxPool(AbstractPool):
    """The largest of each window.

    >>> MaxPool(window=2).shape((3, 8, 7))
    (3, 4, 3)
    """

    @property
    def modules(self) -> Sequence[Callable[[Any], nn.Module]]:
        return (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)


POOLINGS: dict[str, AvgPool | MaxPool | None] = {"none": None, "average": AvgPool(), "max": MaxPool()}

Pooling = Annotated[AvgPool | MaxPool | None, BeforeValidator(named("pooling", POOLINGS))]
"""A pooling layer, its name, or none."""
