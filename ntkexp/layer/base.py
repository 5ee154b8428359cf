"""A layer as a value: a description from which a module of finite width is built.

Layers compose by shape: each says what shape it gives to an example of a given shape, so that a list of layers is an
architecture for inputs of any shape.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import nn

from ntkexp.component import Component


class AbstractLayer(Component):
    """One step of a network: shape [*shape] → shape [*shape′] for every example."""

    @abstractmethod
    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape this layer gives to an example of the given shape."""

    @abstractmethod
    def build(self, shape: tuple[int, ...], generator: torch.Generator) -> nn.Module:
        """A module for examples of the given shape, its weights drawn from the generator."""


def build(layers: tuple[AbstractLayer, ...], shape: tuple[int, ...], generator: torch.Generator) -> nn.Sequential:
    """The layers one after the other, as a module for examples of the given shape."""
    modules = []
    for layer in layers:
        modules.append(layer.build(shape, generator))
        shape = layer.shape(shape)
    return nn.Sequential(*modules)
