"""A layer as a value: one description with two readings, a module of finite width and a step of the kernel's recursion.

Layers compose by shape: each says what shape it gives to an example of a given shape, so that a list of layers is an
architecture for inputs of any shape. The kernels of infinite width are read from the same list: `carry` says whether
there is a limit, `need` is asked from the last layer to the first, which pairs of pixels must be known, and `push`
takes the kernels through the layer. A layer may also say its form for the engine that is fused for CPUs, `fused`.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import nn

from ntkexp.component import Component
from ntkexp.covariance.covariance import Covariance
from ntkexp.covariance.operation import NoFusedForm, Operations
from ntkexp.covariance.pairs import Pairs
from ntkexp.covariance.signal import Signal
from ntkexp.mistake import Mistake


class AbstractLayer(Component):
    """A layer is one step of a network: shape [*shape] → shape [*shape′] for every example."""

    averages: ClassVar[bool] = False  # whether it is the mean over the pairs of pixels that it needs, a vector

    @abstractmethod
    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape this layer gives to an example of the given shape."""

    @abstractmethod
    def build(self, shape: tuple[int, ...], generator: torch.Generator) -> nn.Module:
        """Make a module for examples of the given shape, its weights drawn from the generator."""

    def carry(self, signal: Signal) -> Signal:
        """What is known of the signal after this layer; a layer without a limit of infinite width says so here."""
        raise Mistake(f"{type(self).__name__} has no known limit of infinite width")

    def need(self, wanted: Pairs, shape: tuple[int, ...]) -> Pairs:
        """The pairs of pixels before this layer that those after it are made of."""
        return wanted

    def need_own(self, wanted: Pairs | None, shape: tuple[int, ...]) -> Pairs | None:
        """The pairs of an example with itself that are needed before this layer: none, unless a layer asks for
        variances.
        """
        return None if wanted is None else self.need(wanted, shape)

    def push(self, covariance: Covariance, shape: tuple[int, ...]) -> Covariance:
        """Take covariances through this layer."""
        raise NotImplementedError(type(self).__name__)  # `carry` refuses a layer that cannot do this

    def fused(self, shape: tuple[int, ...], register: int, free: int) -> Operations:
        """`push` as operations on a tile, the registers from `free` on being to spare; one `bend` for each variance
        that it meets. Without them the layer is left to torch.
        """
        raise NoFusedForm(type(self).__name__)


def build(layers: tuple[AbstractLayer, ...], shape: tuple[int, ...], generator: torch.Generator) -> nn.Sequential:
    """Put the layers one after the other, as a module for examples of the given shape."""
    modules = []
    for layer in layers:
        modules.append(layer.build(shape, generator))
        shape = layer.shape(shape)
    return nn.Sequential(*modules)
