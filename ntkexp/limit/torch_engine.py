"""The readable engine: the recursion in torch, on any device and in any precision, differentiable.

A block is cut into chunks so that memory is bounded, and so that on a CPU a chunk's tensors stay in the cache. Where
both sides are the same, each pair of chunks is computed once, and the kernels are symmetric to the last bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isqrt

from torch import Tensor

from ntkexp.limit.finite import finite
from ntkexp.limit.network import CHUNK, Kernels, Network, Side
from ntkexp.mistake import Mistake

COPIES = 32  # tensors of a chunk's size that live at once: 19 to 29 on dense, pooled, residual and GELU networks


def kernels(network: Network, left: Side, right: Side, same: bool, memory_gb: float) -> Kernels:
    """Compute both kernels of a block."""
    rows, columns = chunk(network, left, right, memory_gb)
    shape = (len(left.x), len(right.x))
    nngp, ntk = left.x.new_empty(shape), left.x.new_empty(shape)
    for row in cuts(shape[0], rows):
        for column in cuts(shape[1], rows if same else columns):
            if same and column.start < row.start:
                continue
            part = network.cross(left.part(row), right.part(column), same and row == column)
            for whole, values in zip((nngp, ntk), part, strict=True):
                whole[row, column] = symmetric(values) if same and row == column else values
                if same and row != column:
                    whole[column, row] = values.t()
    return finite((nngp, ntk))


def chunk(network: Network, left: Side, right: Side, memory_gb: float) -> tuple[int, int]:
    """The number of rows, and of columns, that are computed at a time."""
    if any(values.requires_grad for side in (left, right) for values in (side.x, *side.variances)):
        return len(left.x), len(right.x)  # the graph keeps everything, however it is cut
    pairs = network.pairs.count
    most = int(memory_gb * 1e9 / (COPIES * left.x.element_size()))
    if most < pairs:
        needed = COPIES * left.x.element_size() * pairs / 1e9
        said = f"one pair of these examples needs {1.05 * needed:.2g} GB"  # rounded, it is still enough
        raise Mistake(f"{said}, and a block may take {memory_gb:g}; raise memory_gb")
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
