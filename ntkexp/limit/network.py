"""A network of infinite width, and the engine that computes its kernels in torch. This
engine is differentiable and runs on every device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import isqrt, prod

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ntkexp.capacity import MemoryBudget, split_range
from ntkexp.covariance.covariance import Covariance, Signal, Variances
from ntkexp.covariance.pairs import Pairs
from ntkexp.layer import base
from ntkexp.layer.base import LayerChain
from ntkexp.layer.linear import Flatten
from ntkexp.mistake import Mistake
from ntkexp.shapes import Shape

CHUNK_NUMBERS = 2**20
"""Number of elements in a tensor of a chunk (a part of a block). Tensors of this size
stay in the cache between operations."""
Kernels = tuple[Float[Tensor, "row column"], Float[Tensor, "row column"]]
"""NNGP and tangent kernel."""


def network(layers: LayerChain, shape: Shape) -> Network:
    """Return the network for examples of this shape.

    Raise if the layers do not fit the shape, have no infinite-width limit,
    or end in images.

    >>> from ntkexp.layer.linear import MaxPool
    >>> network((MaxPool(), Flatten()), (3, 8, 8))
    Traceback (most recent call last):
    ntkexp.mistake.Mistake: MaxPool has no known limit of infinite width
    """
    if not layers:
        raise Mistake("a network without layers has no kernel; give it at least one")
    if 0 in shape or not shape:
        raise Mistake(
            f"examples of shape {list(shape)} have no kernel; give them a channel and a pixel at "
            "least"
        )
    if isinstance(layers[0], Flatten):  # the inputs are vectors
        vector_shape = (prod(shape),)
        if len(layers) == 1:
            return Network((), vector_shape)
        return network(layers[1:], vector_shape)
    output_shape = base.shapes(layers, shape)[-1]
    if len(output_shape) > 1:
        raise Mistake(
            f"the layers end in {list(output_shape)}, an image; end them with Flatten or "
            "GlobalAvgPool, and Dense"
        )
    base.carry(layers, Signal())
    return Network(layers, shape)


@dataclass(frozen=True)
class Network:
    """The layers of an infinitely wide network, and the shape of an example."""

    layers: LayerChain
    shape: Shape

    @cached_property
    def pairs(self) -> Pairs:
        """The pixel pairs at which the covariances of two inputs determine the kernels
        of the outputs."""
        return base.input_pairs(self.layers, Pairs((), ()), self.shape)

    @cached_property
    def self_pairs(self) -> Pairs:
        """The pixel pairs at which the covariances of one input determine its variances
        at nonlinear layers."""
        return base.input_self_pairs(self.layers, None, self.shape) or Pairs.equal(
            self.shape[1:]
        )

    @property
    def work(self) -> int:
        """The work for one pair of examples: pixel pairs times layers."""
        return self.pairs.count * max(1, len(self.layers))

    def side(self, x: Float[Tensor, " example *shape"]) -> Side:
        """Compute the variances of examples. All pairs with these examples share these
        variances."""
        x = x.reshape(-1, *self.shape)
        by_part = []
        for part in torch.split(x, max(1, CHUNK_NUMBERS // self.self_pairs.count)):
            start = Covariance.alone(part, self.self_pairs)
            by_part.append(base.push(self.layers, start, self.shape).left)
        variances = [torch.cat(of_layer) for of_layer in zip(*by_part, strict=True)]
        return Side(x, tuple(variances))


@dataclass(frozen=True)
class Side:
    """The examples of a block's rows or columns, and their variances at the input of
    each nonlinear layer."""

    x: Float[Tensor, " example *shape"]
    variances: Variances

    def part(self, rows: slice | Int[Tensor, " row"]) -> Side:
        """Select the examples `rows`."""
        return Side(self.x[rows], tuple(variance[rows] for variance in self.variances))


def finite(kernels: Kernels) -> Kernels:
    """Return the kernels, or raise if an entry is not finite."""
    for name, values in zip(("NNGP", "tangent"), kernels, strict=True):
        # check the sum first, which is fast: it is not finite if any entry is not
        # finite
        if not values.detach().sum().isfinite() and not values.isfinite().all():
            dtype = str(values.dtype).removeprefix("torch.")
            raise Mistake(
                f"the {name} kernel has entries beyond {dtype}; lower W_std, or scale the inputs "
                "down"
            )
    return kernels


# --- The engine in torch
#
# The engine cuts a block into chunks, so that memory stays bounded and tensors stay in
# the CPU's cache. If both sides are the same, the engine computes each pair of chunks
# only once, so that the kernels are exactly symmetric.


COPIES = 32
"""Upper bound on the number of tensors of a chunk's size that exist at once.

Between 19 and 29 were measured on several architectures.
"""


def kernels(
    network: Network, left: Side, right: Side, same: bool, budget: MemoryBudget
) -> Kernels:
    """Compute the NNGP kernel and the tangent kernel of a block."""
    rows, columns = chunk(network, left, right, budget)
    shape = (len(left.x), len(right.x))
    if same:
        columns = rows
    pairs = network.pairs
    block = left.x.new_empty(shape), left.x.new_empty(shape)
    for row, column in product(
        split_range(0, shape[0], rows), split_range(0, shape[1], columns)
    ):
        if same and column.start < row.start:
            continue
        one = left.part(row)
        two = right.part(column)
        itself = same and row == column
        start = Covariance.between(
            one.x, two.x, pairs, one.variances, two.variances, itself
        )
        chunks = kernels_of(base.push(network.layers, start, network.shape))
        for kernel, values in zip(block, chunks, strict=True):
            if itself:
                kernel[row, column] = symmetric(values)
                continue
            kernel[row, column] = values
            if same:
                kernel[column, row] = values.t()
    return finite(block)


def kernels_of_pairs(
    network: Network, left: Side, right: Side, same: bool
) -> tuple[Tensor, Tensor]:
    """Compute K(xₖ, x′ₖ) and Θ(xₖ, x′ₖ) from distances, where xₖ and x′ₖ are the k-th
    left and right examples.

    The result is accurate even if the two examples are nearly equal or opposite.
    """
    pairs = network.pairs
    size = CHUNK_NUMBERS // max(pairs.count, left.x[0].numel())
    nngp_parts: list[Tensor] = []
    ntk_parts: list[Tensor] = []
    for part in split_range(0, len(left.x), size):
        one = left.part(part)
        two = right.part(part)
        start = Covariance.of_pairs(
            one.x, two.x, pairs, one.variances, two.variances, same
        )
        nngp, ntk = kernels_of(base.push(network.layers, start, network.shape))
        nngp_parts.append(nngp[:, 0])
        ntk_parts.append(ntk[:, 0])
    return torch.cat(nngp_parts), torch.cat(ntk_parts)


def kernels_of(covariance: Covariance) -> Kernels:
    assert covariance.ntk is not None
    return covariance.nngp, covariance.ntk


def chunk(
    network: Network, left: Side, right: Side, budget: MemoryBudget
) -> tuple[int, int]:
    """Return the number of rows and columns of a chunk."""
    tensors = [left.x, *left.variances, right.x, *right.variances]
    if any(values.requires_grad for values in tensors):
        return len(left.x), len(right.x)  # autograd stores all chunks anyway
    pairs = network.pairs.count
    bytes_per_number = COPIES * left.x.element_size()
    budget.require(pairs * bytes_per_number, "one pair of these examples")
    max_numbers = budget.largest_batch(bytes_per_number)
    if left.x.device.type == "cpu":
        max_numbers = min(max_numbers, max(CHUNK_NUMBERS, pairs))
    rows = min(len(left.x), max(1, isqrt(max_numbers // pairs)))
    return rows, max(1, max_numbers // (pairs * rows))


def symmetric(values: Tensor) -> Tensor:
    """Return the symmetric matrix with the upper triangle of `values`."""
    return values.triu() + values.triu(1).t()
