"""An architecture: a value from which a network of any width is built, for inputs of any shape."""

from __future__ import annotations

from abc import abstractmethod

import torch
from pydantic import Field

from ntkexp.component import Component
from ntkexp.init.base import AbstractInit
from ntkexp.layer.base import AbstractLayer, build
from ntkexp.model.output import Reading, read


class AbstractArchitecture(Component):
    """What is trained. `width` scales every architecture."""

    width: int = Field(512, ge=1)

    @abstractmethod
    def layers(self, init: AbstractInit, outputs: int) -> tuple[AbstractLayer, ...]:
        """The layers, from an example to its outputs."""

    def module(self, init: AbstractInit, shape: tuple[int, ...], outputs: int, generator: torch.Generator) -> Reading:
        """The network at the start of training, read as `init` says."""
        return read(build(self.layers(init, outputs), shape, generator), init)
