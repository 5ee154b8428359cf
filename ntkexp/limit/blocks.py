"""Kernels of many examples, block by block, in bounded memory.

    for block in blocks(network(layers, shape), x1, memory_gb=4):
        store(block.place.rows, block.place.columns, block.nngp, block.ntk)

The places of the blocks follow from shapes alone, and each block from its own examples: they can be computed in any
order, by any process, and again after a kill, to the same bits. Without x2 the kernel is symmetric, and only the blocks
on and above the diagonal are computed; `mirrored` gives the others.

>>> from ntkexp.layer.affine import Dense
>>> net = network((Dense(features=1),), (2,))
>>> [(place.rows, place.columns) for place in places(net, 5, None, side=3)]
[(slice(0, 3, None), slice(0, 3, None)), (slice(0, 3, None), slice(3, 5, None)), (slice(3, 5, None), slice(3, 5, None))]
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isqrt

from jaxtyping import Float
from torch import Tensor

from ntkexp.limit.engine import Engine, engine_of
from ntkexp.limit.network import Network, network
from ntkexp.limit.torch_engine import cuts

WORK = 2**32  # pairs of pixels times layers in a block: seconds to a minute
SIDES = (16, 2048)

__all__ = ["BlockPlace", "KernelBlock", "blocks", "compute", "network", "places"]


@dataclass(frozen=True)
class BlockPlace:
    """A block has this place; the rows and columns of a `same` block are the same examples."""

    rows: slice
    columns: slice
    same: bool


@dataclass(frozen=True)
class KernelBlock:
    """Both kernels are known at a place."""

    place: BlockPlace
    nngp: Float[Tensor, "row column"]
    ntk: Float[Tensor, "row column"]

    @property
    def mirrored(self) -> KernelBlock:
        """The block on the other side of the diagonal is this one, transposed."""
        place = BlockPlace(self.place.columns, self.place.rows, self.place.same)
        return KernelBlock(place, self.nngp.t(), self.ntk.t())


def places(net: Network, rows: int, columns: int | None, side: int | None = None) -> list[BlockPlace]:
    """Find the places of all blocks, row by row; of a symmetric kernel (`columns` is None) those on and above the
    diagonal.
    """
    size = side or usual_side(net)
    return [
        BlockPlace(row, column, columns is None and row == column)
        for row in cuts(rows, size)
        for column in cuts(rows if columns is None else columns, size)
        if columns is not None or column.start >= row.start
    ]


def usual_side(net: Network) -> int:
    """Choose the side of a block: what is done once per example costs little beside it, and little is lost with a
    block.
    """
    least, most = SIDES
    return min(most, max(least, isqrt(WORK // net.work)))


def compute(
    net: Network,
    place: BlockPlace,
    x1: Float[Tensor, "row *shape"],
    x2: Float[Tensor, "column *shape"] | None = None,
    *,
    memory_gb: float = 4.0,
    engine: Engine = "auto",
    threads: int | None = None,
) -> KernelBlock:
    """Compute one block of both kernels between `x1` and `x2` (or `x1` itself), by the engine that suits it, in about
    `memory_gb`.
    """
    left = net.side(x1[place.rows])
    right = left if place.same else net.side((x1 if x2 is None else x2)[place.columns])
    run = engine_of(engine, net, left.x, len(left.x) * len(right.x), memory_gb, threads)
    return KernelBlock(place, *run(left, right, place.same))


def blocks(
    net: Network,
    x1: Float[Tensor, "row *shape"],
    x2: Float[Tensor, "column *shape"] | None = None,
    *,
    memory_gb: float = 4.0,
    engine: Engine = "auto",
    threads: int | None = None,
    side: int | None = None,
) -> Iterator[KernelBlock]:
    """Compute all blocks of both kernels, one at a time; `side` is how many examples long they are, if not as long as
    usual.
    """
    for place in places(net, len(x1), None if x2 is None else len(x2), side):
        yield compute(net, place, x1, x2, memory_gb=memory_gb, engine=engine, threads=threads)
