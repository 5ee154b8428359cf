"""Layers as a network whose limit is taken: they fit the inputs, have a limit, and end in vectors.

>>> from ntkexp.layer.linear import Flatten
>>> from ntkexp.layer.pooling import MaxPool
>>> network((MaxPool(), Flatten()), (3, 8, 8))
Traceback (most recent call last):
ntkexp.mistake.Mistake: MaxPool has no known limit of infinite width
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.covariance.cross import Cross, Variances
from ntkexp.covariance.own import Own
from ntkexp.covariance.pairs import Pairs
from ntkexp.covariance.signal import Signal
from ntkexp.layer import chain
from ntkexp.layer.base import AbstractLayer
from ntkexp.layer.linear import Flatten
from ntkexp.mistake import Mistake

CHUNK = 2**20  # numbers in a tensor, so that what follows one another meets in the cache
Kernels = tuple[Float[Tensor, "row column"], Float[Tensor, "row column"]]
"""NNGP and tangent kernel."""


def network(layers: tuple[AbstractLayer, ...], shape: tuple[int, ...]) -> Network:
    """Make the network for examples of this shape; layers without a limit are refused in one line."""
    if not layers:
        raise Mistake("a network without layers has no kernel; give it at least one")
    if 0 in shape or not shape:
        raise Mistake(f"examples of shape {list(shape)} have no kernel; give them a channel and a pixel at least")
    if isinstance(layers[0], Flatten):  # of inputs: their kernel is that of vectors
        return network((*layers[1:],), (prod(shape),)) if len(layers) > 1 else Network((), (prod(shape),))
    after = chain.shapes(layers, shape)[-1]
    if len(after) > 1:
        raise Mistake(f"the layers end in {list(after)}, an image; end them with Flatten or GlobalAvgPool, and Dense")
    chain.carry(layers, Signal())
    return Network(layers, shape)


@dataclass(frozen=True)
class Network:
    """Layers, and the shape of the examples that reach the first of them."""

    layers: tuple[AbstractLayer, ...]
    shape: tuple[int, ...]

    @cached_property
    def pairs(self) -> Pairs:
        """These pairs of pixels of two inputs play a part."""
        return chain.need(self.layers, Pairs((), ()), self.shape)

    @property
    def work(self) -> int:
        """A pair of examples takes so much work: pairs of pixels times layers."""
        return self.pairs.count * max(1, len(self.layers))

    @cached_property
    def own(self) -> Pairs:
        """These pairs of pixels of an input and itself play a part."""
        found = chain.need_own(self.layers, None, self.shape)
        return found or Pairs.equal(self.shape[1:])

    def side(self, x: Float[Tensor, "example *shape"]) -> Side:
        """Make examples one side of a kernel: their variances are found once, not once for every pair."""
        x = x.reshape(-1, *self.shape)
        parts = [self.variances(part) for part in torch.split(x, max(1, CHUNK // self.own.count))]
        return Side(x, tuple(torch.cat(each) for each in zip(*parts, strict=True)))

    def variances(self, x: Float[Tensor, "example *shape"]) -> Variances:
        """The variances that nonlinear layers ask for."""
        return chain.push(self.layers, Own.of(x, self.own), self.shape).variances

    def cross(self, left: Side, right: Side, same: bool) -> Kernels:
        """NNGP and tangent kernel of two sides, in one piece."""
        start = Cross.of(left.x, right.x, self.pairs, left.variances, right.variances, same)
        end = chain.push(self.layers, start, self.shape)
        return end.nngp, end.ntk


@dataclass(frozen=True)
class Side:
    """Examples, and the variances that each nonlinear layer meets."""

    x: Float[Tensor, "example *shape"]
    variances: Variances

    def part(self, rows: slice) -> Side:
        """Take the side of some of the examples."""
        return Side(self.x[rows], tuple(variance[rows] for variance in self.variances))
