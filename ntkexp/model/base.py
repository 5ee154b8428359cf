"""An architecture: a value from which a network of any width is built, for inputs of any shape."""

from __future__ import annotations

from abc import abstractmethod

import torch
from pydantic import Field
from torch import nn

from ntkexp.component import Component
from ntkexp.init.base import AbstractInit
from ntkexp.layer.base import AbstractLayer, build
from ntkexp.model.output import Reading, read


class AbstractArchitecture(Component):
    """What is trained. `width` scales every architecture."""

    width: int = Field(512, ge=1)

    @abstractmethod
    def network(
        self, init: AbstractInit, shape: tuple[int, ...], outputs: int, generator: torch.Generator
    ) -> nn.Module:
        """A network for examples of the given shape, its weights drawn from the generator."""

    def module(self, init: AbstractInit, shape: tuple[int, ...], outputs: int, generator: torch.Generator) -> Reading:
        """The network at the start of training, read as `init` says."""
        return read(self.network(init, shape, outputs, generator), init)


class AbstractLayered(AbstractArchitecture):
    """An architecture that is a list of layers."""

    @abstractmethod
    def layers(self, init: AbstractInit, shape: tuple[int, ...], outputs: int) -> tuple[AbstractLayer, ...]:
        """The layers, from an example of the given shape to its outputs."""

    def network(
        self, init: AbstractInit, shape: tuple[int, ...], outputs: int, generator: torch.Generator
    ) -> nn.Module:
        return build(self.layers(init, shape, outputs), shape, generator)
