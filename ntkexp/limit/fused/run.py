"""A block by the fused engine: sub-blocks on threads, vectors strip by strip, then the layers that it does not know
in torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import isqrt, prod
from typing import Any, TypeVar

import numpy as np
import torch

from ntkexp.covariance.covariance import Covariance
from ntkexp.covariance.pairs import Pairs
from ntkexp.layer import base
from ntkexp.limit.fused.functions import beyond, compiled, exponent, filled, lent
from ntkexp.limit.fused.images import images
from ntkexp.limit.fused.program import (
    Coarsenings,
    Tables,
    TileProgram,
    coarsenings,
    field_count,
    tables,
)
from ntkexp.limit.fused.tile import apply_operations
from ntkexp.limit.network import COPIES, Kernels, Network, Side, cuts, finite, kernels_of, symmetric

# --- Kernels of vectors: rows of the matrix, cut into pieces that are tiles without neighbours.


Array = np.ndarray[Any, Any]
PIECE = 512
"""The most columns with which the intermediate values of a row stay in the nearest cache."""
MARGIN = 64


@compiled
def apply_to_vectors(
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
        found = max(
            found,
            apply_to_piece(
                operations, weights, work, one, two, begin, size, columns, equal, inside, halo, rows
            ),
        )
        if same:  # an example and itself: the correlation is one
            found = max(
                found,
                apply_to_piece(
                    operations,
                    weights,
                    work,
                    one,
                    two,
                    i,
                    alone,
                    columns,
                    exact,
                    inside,
                    halo,
                    rows,
                ),
            )
    return found


@compiled
def apply_to_piece(
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
    apply_operations(
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


# --- The parts of a block: sub-blocks small enough to fit into memory, and enough for every thread.


SubBlock = tuple[slice, slice]
Result = TypeVar("Result")


def sub_blocks(left: Side, right: Side, size: int, same: bool) -> list[SubBlock]:
    """The sub-blocks; where the sides are the same, those on and above the diagonal."""
    return [
        (row, column)
        for row in cuts(len(left.x), size)
        for column in cuts(len(right.x), size)
        if not same or column.start >= row.start
    ]


def in_threads(
    work: Callable[[SubBlock], Result], parts: Sequence[SubBlock], threads: int, ahead: int
) -> Iterator[Result]:
    """The results of `work` on all parts, in order, `threads` of them at a time. What one thread would do is done here:
    starting it may take longer than a small part.
    """
    if min(threads, len(parts)) == 1:
        yield from map(work, parts)
        return
    with ThreadPoolExecutor(threads) as pool:
        for start in range(0, len(parts), ahead):
            yield from pool.map(work, parts[start : start + ahead])


# --- Kernels of vectors, strip by strip of rows: the products of the inputs, then all layers on one sub-block of them
# after the other, while it is in a cache. Of a symmetric kernel that is done on and above the diagonal.


ROWS = 128
"""Left vectors of a strip for every thread: enough for a quick matrix product."""


def kernels_of_vectors(
    program: TileProgram, left: Side, right: Side, same: bool, threads: int
) -> Kernels:
    """The kernels by the recursion on every number of a matrix."""
    whole = left.x.new_empty(len(left.x), len(right.x)), left.x.new_empty(len(left.x), len(right.x))
    nngp, ntk = whole[0].numpy(), whole[1].numpy()
    level = program.levels[0]
    table = tables(level, left, right)
    fields = np.ascontiguousarray(table.right.T)
    products = left.x.new_empty(min(len(left.x), ROWS * threads), len(right.x))

    def walk(block: SubBlock) -> int:
        row, column = block
        one, two, itself = (
            table.left[row],
            np.ascontiguousarray(fields[:, column]),
            same and row.start == column.start,
        )
        inputs = products.numpy()[row.start % len(products) :, column]
        found: int = apply_to_vectors(
            *(
                table.operations,
                table.weights,
                level.registers,
                one,
                two,
                table.spread,
                itself,
                table.rounding,
            ),
            *(inputs, nngp[block], ntk[block]),
        )
        for end in (nngp, ntk) if same else ():
            mirrored(end, row.start, row.stop, column.start, column.stop)
        return found

    largest = 0
    for strip in cuts(len(left.x), len(products)):
        first, rows = strip.start if same else 0, strip.stop - strip.start
        shown = products[:rows, first:]
        torch.addmm(
            shown, left.x[strip], right.x[first:].t(), beta=0, alpha=1 / left.x.shape[1], out=shown
        )
        # So many sub-blocks that every thread has some; of equal sides the first ones begin on the diagonal.
        few = rows if threads == 1 else max(1, rows // (2 * threads))
        parts = [
            (slice(row, min(row + few, strip.stop)), slice(start, min(start + PIECE, len(right.x))))
            for row in range(strip.start, strip.stop, few)
            for start in range(row if same else 0, len(right.x), PIECE)
        ]
        largest = max([largest, *in_threads(walk, parts, threads, len(parts))])
    return finite(whole) if largest == beyond(nngp.dtype) else whole


# --- A block by the fused engine: sub-blocks on threads, then the layers that it does not know in torch.
#
# In float32 it is as exact as float32 is: on networks of depth 5 its kernels are off by up to 1e-6, relative.


TABLES = 8
"""The parts into which memory is divided; the tables of a side take one."""
NUMBERS = 2**22
"""Numbers of each kernel in a sub-block that are kept between levels."""
IMAGES = 32
"""Images on each side of a sub-block: enough that their layout costs little."""


def kernels(
    program: TileProgram,
    net: Network,
    left: Side,
    right: Side,
    same: bool,
    threads: int,
    memory_gb: float,
) -> Kernels:
    """Both kernels of a block."""
    if len(net.shape) == 1:
        return kernels_of_vectors(program, left, right, same, threads)
    numbers = left.x[0].numel() + sum(
        field_count(one, left, right) * prod(one.sizes) for one in program.levels
    )
    most = max(1, int(memory_gb * 1e9 / (TABLES * numbers * left.x.element_size())))
    if max(len(left.x), len(right.x)) <= most:
        nngp, ntk = kernels_of_images(program, left, right, same, threads, memory_gb / threads)
        if same:
            nngp, ntk = symmetric(nngp), symmetric(ntk)
        return finite(
            through_rest(program, left, right, (nngp, ntk), same) if program.end else (nngp, ntk)
        )
    # Part by part, of no more examples a side than there is room for in tables.
    whole = [left.x.new_empty(len(left.x), len(right.x)) for _ in range(2)]
    for row, column in sub_blocks(left, right, most, same):
        itself = same and row == column
        found = kernels(
            program, net, left.part(row), right.part(column), itself, threads, memory_gb
        )
        for values, part in zip(whole, found, strict=True):
            values[row, column] = part
            if same and not itself:
                values[column, row] = part.t()
    return whole[0], whole[1]


def kernels_of_images(
    program: TileProgram, left: Side, right: Side, same: bool, threads: int, memory_gb: float
) -> Kernels:
    """What the end asks for of the last tiles, or without one the kernels, the other layers being done in torch on one
    sub-block after the other.
    """
    levels = [tables(level, left, right) for level in program.levels]
    coarse = [
        coarsenings(*ends, levels[0].left.dtype)
        for ends in zip(program.levels, program.coarse_pairs, strict=True)
    ]
    size = sub_block_size(program, levels, memory_gb)
    if threads > 1:  # so short that every thread has some
        size = max(1, min(size, isqrt(len(left.x) * len(right.x) // (2 * threads))))
    parts, last = sub_blocks(left, right, size, same), program.levels[-1].pairs
    nngp, ntk = (left.x.new_zeros(len(left.x), len(right.x)) for _ in range(2))

    def tiles(block: SubBlock) -> Kernels:
        sums = np.zeros((2, len(left.x[block[0]]), len(right.x[block[1]])))
        kept = through_levels(program, levels, coarse, same and block[0] == block[1], block, sums)
        first, second = (
            torch.from_numpy(sums / last.count).to(left.x)
            if program.end
            else pixel_pairs(program, kept)
        )
        return first, second

    for (row, column), ends in zip(parts, in_threads(tiles, parts, threads, threads), strict=True):
        sides, itself = (left.part(row), right.part(column)), same and row == column
        nngp[row, column], ntk[row, column] = (
            ends if program.end else through_rest(program, *sides, ends, itself)
        )
    return nngp, ntk


def sub_block_size(program: TileProgram, levels: Sequence[Tables], memory_gb: float) -> int:
    """How many images there is room for on each side of a sub-block, each laid out in three steps, with all that
    two levels leave for coarser ones.
    """
    laid_out = max(table.left[0].nbytes for table in levels)
    numbers_left = [
        2 * len(one.coarsenings) * after.count
        for one, after in zip(program.levels, program.coarse_pairs, strict=True)
    ]
    numbers = min(NUMBERS, int(memory_gb * 1e9 / (COPIES * levels[0].left.itemsize)))
    size = max(1, min(IMAGES, int(memory_gb * 1e9 / (6 * laid_out))))
    return max(1, min(size, isqrt(2 * numbers // max(1, *numbers_left))))


def through_levels(
    program: TileProgram,
    levels: Sequence[Tables],
    coarse: Sequence[Coarsenings],
    same: bool,
    block: SubBlock,
    sums: Array,
) -> Array:
    """The tiles of a sub-block through all levels, to their sums, or to the pixels of the last."""
    row, column = block
    kept = np.zeros((0,) * 5, levels[0].left.dtype)
    for level, table, coarsening, after in zip(
        program.levels, levels, coarse, program.coarse_pairs, strict=True
    ):
        # what the level leaves for coarser pixels, added up tile by tile
        target = np.zeros(
            (
                len(coarsening.registers),
                *sums.shape,
                after.count if len(coarsening.registers) else 0,
            ),
            kept.dtype,
        )
        images(
            table.operations,
            table.weights,
            level.registers,
            table.left[row],
            table.right[column],
            0 if level.arrivals else program.channels,
            tuple(np.array(offsets) for offsets in level.pairs.offsets),
            level.sizes,
            level.reach,
            level.around,
            same,
            table.rounding,
            np.array(level.arrivals, np.int64),
            kept,
            (coarsening.registers, coarsening.shares, coarsening.slots, coarsening.order),
            target,
            sums,
        )
        kept = target
    return kept


def pixel_pairs(program: TileProgram, kept: Array) -> Kernels:
    """What was kept of the last level, as pairs of pixels of an image with as many axes as it has."""
    pairs = program.levels[-1].pairs
    axes = [n for kept, n in zip(pairs.offsets, pairs.pixels, strict=True) for n in (len(kept), n)]
    tiles = (
        torch.from_numpy(kept[0])
        .view(2, *kept.shape[2:4], *axes[::2], *axes[1::2])
        .permute(0, 1, 2, 3, 6, 4, 7, 5, 8)
    )
    first, second = tiles.reshape(*tiles.shape[:3], *axes[-2 * len(program.rest_shape[1:]) :])
    return first, second


def through_rest(
    program: TileProgram, left: Side, right: Side, kernels: Kernels, same: bool
) -> Kernels:
    """The kernels after the layers that are left, in torch."""
    pairs = base.need(program.rest, Pairs((), ()), program.rest_shape)
    met = sum(
        operation.ends is not None for level in program.levels for operation in level.operations
    )
    start = Covariance(*kernels, pairs, left.variances, right.variances, same, met)
    return kernels_of(base.push(program.rest, start, program.rest_shape))
