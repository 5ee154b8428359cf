"""Residual layers: the sum of two branches."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ntkexp.layer.base import AbstractLayer, build
from ntkexp.mistake import Mistake


class Residual(AbstractLayer):
    """branch(x) + shortcut(x); an empty shortcut is the identity.

    >>> Residual(branch=()).shape((4, 8))
    (4, 8)
    """

    branch: tuple[AbstractLayer, ...]
    shortcut: tuple[AbstractLayer, ...] = ()

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        ends = [through(layers, shape) for layers in (self.branch, self.shortcut)]
        if ends[0] != ends[1]:
            raise Mistake(f"the branches of a residual layer disagree: {list(ends[0])} and {list(ends[1])}")
        return ends[0]

    def build(self, shape: tuple[int, ...], generator: torch.Generator) -> nn.Module:
        self.shape(shape)
        return Sum(build(self.branch, shape, generator), build(self.shortcut, shape, generator))


class Sum(nn.Module):
    """Two modules side by side."""

    def __init__(self, branch: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.branch, self.shortcut = branch, shortcut

    def forward(self, x: Float[Tensor, "example *shape"]) -> Float[Tensor, "example *shape_"]:
        total: Tensor = self.branch(x) + self.shortcut(x)
        return total


def through(layers: tuple[AbstractLayer, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape after these layers."""
    for layer in layers:
        shape = layer.shape(shape)
    return shape
