"""Layers as a network whose limit is taken, and the readable engine: the recursion in torch, on any device,
differentiable.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import isqrt, prod

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ntkexp.covariance.covariance import Covariance, Signal, Variances
from ntkexp.covariance.pairs import Pairs
from ntkexp.layer import base
from ntkexp.layer.base import AbstractLayer
from ntkexp.layer.linear import Flatten
from ntkexp.mistake import Mistake

CHUNK = 2**20  # numbers in a tensor, so that what follows one another meets in the cache
Kernels = tuple[Float[Tensor, "row column"], Float[Tensor, "row column"]]
"""NNGP and tangent kernel."""


def network(layers: tuple[AbstractLayer, ...], shape: tuple[int, ...]) -> Network:
    """The network for examples of this shape: the layers fit it, have a limit, and end in vectors, or are refused.

    >>> from ntkexp.layer.linear import MaxPool
    >>> network((MaxPool(), Flatten()), (3, 8, 8))
    Traceback (most recent call last):
    ntkexp.mistake.Mistake: MaxPool has no known limit of infinite width
    """
    if not layers:
        raise Mistake("a network without layers has no kernel; give it at least one")
    if 0 in shape or not shape:
        raise Mistake(
            f"examples of shape {list(shape)} have no kernel; give them a channel and a pixel at least"
        )
    if isinstance(layers[0], Flatten):  # of inputs: their kernel is that of vectors
        return (
            network((*layers[1:],), (prod(shape),))
            if len(layers) > 1
            else Network((), (prod(shape),))
        )
    after = base.shapes(layers, shape)[-1]
    if len(after) > 1:
        raise Mistake(
            f"the layers end in {list(after)}, an image; end them with Flatten or GlobalAvgPool, and Dense"
        )
    base.carry(layers, Signal())
    return Network(layers, shape)


@dataclass(frozen=True)
class Network:
    """Layers, and the shape of the examples that reach the first of them."""

    layers: tuple[AbstractLayer, ...]
    shape: tuple[int, ...]

    @cached_property
    def pairs(self) -> Pairs:
        """The pairs of pixels of two inputs that play a part."""
        return base.need(self.layers, Pairs((), ()), self.shape)

    @cached_property
    def own(self) -> Pairs:
        """The pairs of pixels of an input with itself that play a part."""
        return base.need_own(self.layers, None, self.shape) or Pairs.equal(self.shape[1:])

    @property
    def work(self) -> int:
        """What a pair of examples takes: pairs of pixels times layers."""
        return self.pairs.count * max(1, len(self.layers))

    def side(self, x: Float[Tensor, "example *shape"]) -> Side:
        """Examples as one side of a kernel: their variances are found once, not once for every pair."""
        x = x.reshape(-1, *self.shape)
        parts = torch.split(x, max(1, CHUNK // self.own.count))
        found = [
            base.push(self.layers, Covariance.alone(part, self.own), self.shape).left
            for part in parts
        ]
        return Side(x, tuple(torch.cat(each) for each in zip(*found, strict=True)))


@dataclass(frozen=True)
class Side:
    """Examples, and the variances that each nonlinear layer meets."""

    x: Float[Tensor, "example *shape"]
    variances: Variances

    def part(self, rows: slice | Int[Tensor, " row"]) -> Side:
        """Take the side of some of the examples."""
        return Side(self.x[rows], tuple(variance[rows] for variance in self.variances))


def finite(kernels: Kernels) -> Kernels:
    """The same kernels, if all entries are finite."""
    for name, values in zip(("NNGP", "tangent"), kernels, strict=True):
        # A sum is quick, and not finite if an entry is not.
        if not values.detach().sum().isfinite() and not values.isfinite().all():
            kind = str(values.dtype).removeprefix("torch.")
            raise Mistake(
                f"the {name} kernel has entries beyond {kind}; lower W_std, or scale the inputs down"
            )
    return kernels


# --- The readable engine: the recursion in torch, on any device and in any precision, differentiable.
#
# A block is cut into chunks so that memory is bounded, and so that on a CPU a chunk's tensors stay in the cache.
# Where both sides are the same, each pair of chunks is computed once, and the kernels are symmetric to the last
# bit.


COPIES = 32  # tensors of a chunk's size that live at once: 19 to 29 on dense, pooled, residual and GELU networks


def kernels(network: Network, left: Side, right: Side, same: bool, memory_gb: float) -> Kernels:
    rows, columns = chunk(network, left, right, memory_gb)
    shape = (len(left.x), len(right.x))
    nngp, ntk = left.x.new_empty(shape), left.x.new_empty(shape)
    for row in cuts(shape[0], rows):
        for column in cuts(shape[1], rows if same else columns):
            if same and column.start < row.start:
                continue
            one, two, itself = left.part(row), right.part(column), same and row == column
            start = Covariance.between(
                one.x, two.x, network.pairs, one.variances, two.variances, itself
            )
            kernels = kernels_of(base.push(network.layers, start, network.shape))
            for whole, values in zip((nngp, ntk), kernels, strict=True):
                whole[row, column] = symmetric(values) if itself else values
                if same and not itself:
                    whole[column, row] = values.t()
    return finite((nngp, ntk))


def kernels_of_pairs(
    network: Network, left: Side, right: Side, same: bool
) -> tuple[Tensor, Tensor]:
    """K and Θ of each example on the left with the one on the right at the same place, from their distances: no digits
    of nearly equal or opposite examples cancel."""
    size = max(1, CHUNK // max(network.pairs.count, left.x[0].numel()))
    nngp, ntk = list[Tensor](), list[Tensor]()
    for part in cuts(len(left.x), size):
        one, two = left.part(part), right.part(part)
        start = Covariance.of_pairs(one.x, two.x, network.pairs, one.variances, two.variances, same)
        kernels = kernels_of(base.push(network.layers, start, network.shape))
        nngp.append(kernels[0][:, 0])
        ntk.append(kernels[1][:, 0])
    return torch.cat(nngp), torch.cat(ntk)


def kernels_of(covariance: Covariance) -> Kernels:
    """K and Θ of two sides."""
    assert covariance.ntk is not None
    return covariance.nngp, covariance.ntk


def chunk(network: Network, left: Side, right: Side, memory_gb: float) -> tuple[int, int]:
    """The number of rows, and of columns, that are computed at a time."""
    if any(values.requires_grad for side in (left, right) for values in (side.x, *side.variances)):
        return len(left.x), len(right.x)  # the graph keeps everything, however it is cut
    pairs = network.pairs.count
    most = int(memory_gb * 1e9 / (COPIES * left.x.element_size()))
    if most < pairs:
        needed = 1.05 * COPIES * left.x.element_size() * pairs / 1e9  # rounded, it is still enough
        raise Mistake(
            f"one pair of these examples needs {needed:.2g} GB, and a block may take {memory_gb:g}; raise memory_gb"
        )
    if left.x.device.type == "cpu":
        most = min(most, max(CHUNK, pairs))
    rows = min(len(left.x), max(1, isqrt(most // pairs)))
    return rows, max(1, most // (pairs * rows))


def cuts(count: int, size: int) -> Iterator[slice]:
    """The slices into which a length is cut.

    >>> list(cuts(5, 3))
    [slice(0, 3, None), slice(3, 5, None)]
    """
    return (slice(start, min(start + size, count)) for start in range(0, count, max(1, size)))


def symmetric(values: Tensor) -> Tensor:
    """A matrix whose upper triangle is put on both sides."""
    return values.triu() + values.triu(1).t()
