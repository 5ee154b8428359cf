"""Kernels of vectors, strip by strip of rows: the products of the inputs, then all layers on one sub-block of them
after the other, while it is in a cache. Of a symmetric kernel that is done on and above the diagonal.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ntkexp.limit.finite import finite
from ntkexp.limit.fused import tables
from ntkexp.limit.fused.exponent import beyond
from ntkexp.limit.fused.parts import SubBlock, in_threads, long_places
from ntkexp.limit.fused.program import TileProgram
from ntkexp.limit.fused.vectors import mirrored, vectors
from ntkexp.limit.network import Kernels, Side
from ntkexp.limit.torch_engine import cuts

Array = np.ndarray[Any, Any]
ROWS = 128
"""Vectors on the left side of a strip for every thread: so many that a product of matrices is quick."""


def of_vectors(program: TileProgram, left: Side, right: Side, same: bool, threads: int) -> Kernels:
    """The kernels by the recursion on every number of a matrix."""
    whole = left.x.new_empty(len(left.x), len(right.x)), left.x.new_empty(len(left.x), len(right.x))
    nngp, ntk = whole[0].numpy(), whole[1].numpy()
    level = program.levels[0]
    table = tables.of_vectors(level, left, right)
    fields = np.ascontiguousarray(table.right.T)
    products = left.x.new_empty(min(len(left.x), ROWS * threads), len(right.x))

    def walk(place: SubBlock) -> int:
        row, column = place
        one, two, itself = table.left[row], np.ascontiguousarray(fields[:, column]), same and row.start == column.start
        inputs = products.numpy()[row.start % len(products) :, column]
        found: int = vectors(
            *(table.operations, table.weights, level.registers, one, two, table.spread, itself, table.rounding),
            *(inputs, nngp[place], ntk[place]),
        )
        for end in (nngp, ntk) if same else ():
            mirrored(end, row.start, row.stop, column.start, column.stop)
        return found

    largest = 0
    for strip in cuts(len(left.x), len(products)):
        start = strip.start if same else 0
        shown = products[: strip.stop - strip.start, start:]
        torch.addmm(shown, left.x[strip], right.x[start:].t(), beta=0, alpha=1 / left.x.shape[1], out=shown)
        parts = long_places(strip, len(right.x), same, threads)
        largest = max([largest, *in_threads(walk, parts, threads, len(parts))])
    return finite(whole) if largest == beyond(nngp.dtype) else whole
