"""Kernels of vectors: rows of the matrix, cut into pieces that are tiles without neighbours."""

from __future__ import annotations

from typing import Any

import numpy as np

from ntkexp.limit.fused.exponent import exponent
from ntkexp.limit.fused.jit import compiled
from ntkexp.limit.fused.lent import lent
from ntkexp.limit.fused.loops import filled
from ntkexp.limit.fused.tile import walked

Array = np.ndarray[Any, Any]
PIECE = 512
"""At most so many columns: what is kept of a row in between stays in the nearest cache."""
MARGIN = 64


@compiled
def vectors(
    operations: Array,
    weights: Array,
    registers: int,
    left: Array,
    right: Array,
    spread: Array,
    same: bool,
    equal: Any,
    inputs: Array,
    nngp: Array,
    ntk: Array,
) -> Any:
    """Both kernels from the products of the inputs, and the largest exponent in them; a side is [example, field] or
    [field, example].

    The left side's examples come first, the right side's fields do. If the sides are the `same`, the left one may have
    fewer examples, and pairs below the diagonal are left out.
    """
    left, inputs, nngp, ntk = lent(left), lent(inputs), lent(nngp), lent(ntk)
    fields, columns = right.shape
    work = np.zeros((2 * registers + 4, PIECE + 2 * MARGIN), left.dtype)
    one, inside = np.zeros(fields * PIECE, left.dtype), np.ones(PIECE, left.dtype)
    halo = np.zeros((2, 0), np.int64)
    two = right.reshape(fields * columns)
    exact, alone, found = weights.dtype.type(2), np.intp(1), 0
    for i in range(nngp.shape[0]):
        begin = i if same else 0
        size, rows = columns - begin, (left[i], inputs[i], nngp[i], ntk[i])
        for field in spread:
            filled(one, field * PIECE, size, left[i, field])
        found = max(found, piece(operations, weights, work, one, two, begin, size, columns, equal, inside, halo, rows))
        if same:  # an example and itself: the correlation is one
            found = max(found, piece(operations, weights, work, one, two, i, alone, columns, exact, inside, halo, rows))
    return found


@compiled
def piece(
    operations: Array,
    weights: Array,
    work: Array,
    one: Array,
    two: Array,
    start: int,
    size: int,
    columns: int,
    equal: Any,
    inside: Array,
    halo: Array,
    rows: tuple[Array, Array, Array, Array],
) -> Any:
    """One piece of a row, some of its columns, and the largest exponent in it; rows are those of the fields, of the
    products of the inputs, and of both kernels.

    What is constant here is not for images; given as variables, the layers are compiled once for both.
    """
    margin, beside, first, pitch = np.intp(MARGIN), np.intp(1), np.intp(0), np.intp(PIECE)
    numbers, inputs, nngp, ntk = rows
    for j in range(np.uintp(size)):
        work[0, margin + j] = inputs[start + j]
        work[1, margin + j] = 0
    walked(
        operations,
        weights,
        work,
        margin,
        size,
        beside,
        beside,
        equal,
        one,
        two,
        first,
        start,
        pitch,
        columns,
        inside,
        halo,
        numbers,
    )
    found = exponent(work.dtype.type(0))
    for j in range(np.uintp(size)):
        nngp[start + j] = work[0, margin + j]
        ntk[start + j] = work[1, margin + j]
        found = max(found, exponent(work[0, margin + j]), exponent(work[1, margin + j]))
    return found


@compiled
def mirrored(whole: Array, first: int, last: int, begin: int, end: int) -> None:
    """Numbers above the diagonal, of rows from the first to before the last and columns from begin to before the end,
    are repeated below it.
    """
    for j in range(max(begin, first + 1), end):
        for i in range(np.uintp(first), np.uintp(min(last, j))):
            whole[np.uintp(j), i] = whole[i, np.uintp(j)]
