"""Compute the kernels of a block with the fused engine. Threads compute sub-blocks of
the block. Torch applies the layers that have no fused form.

"Both kernels" are the NNGP kernel K and the tangent kernel Θ. A field is a function of
the variance at each pixel of an example."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import isqrt, prod
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from ntkexp.capacity import MemoryBudget, split_range
from ntkexp.covariance.covariance import Covariance
from ntkexp.covariance.pairs import Pairs
from ntkexp.layer import base
from ntkexp.limit.fused.band import (
    BandGaps,
    BandShape,
    CompiledProgram,
    PairFields,
    apply_operations,
)
from ntkexp.limit.fused.functions import beyond, compiled, exponent, fill_numbers, lent
from ntkexp.limit.fused.images import ImageGrid, ImageSides, LevelTransfer, images
from ntkexp.limit.fused.program import (
    BandProgram,
    Coarsenings,
    Level,
    Tables,
    coarsenings,
    field_count,
    tables,
)
from ntkexp.limit.network import (
    COPIES,
    Kernels,
    Side,
    finite,
    kernels_of,
    symmetric,
)

Array = np.ndarray[Any, Any]
PIECE = 512
"""The number of columns in a band if the inputs are vectors: a band is then a piece of
a row of the kernel matrix. The intermediate values of this many columns fit into the
L1 cache."""
MARGIN = 64


# --- Kernels of vectors: a band is a piece of a row of the kernel matrix


class VectorSides(NamedTuple):
    """Fields (functions of the variance) of the left vectors, [example, field], and of
    the right vectors, [field, example].

    `spread` lists the left fields that are copied to every column. If `same`, the left
    vectors are also the first right vectors. Pairs below the diagonal are then not
    computed.
    """

    left: Array
    right: Array
    spread: Array
    same: bool


class KernelRows(NamedTuple):
    """Rows of three matrices: the covariances of the inputs,
    the NNGP kernel and the tangent kernel."""

    inputs: Array
    nngp: Array
    ntk: Array


@compiled
def apply_to_vectors(
    program: CompiledProgram, sides: VectorSides, matrices: KernelRows
) -> Any:
    """Compute the NNGP and the tangent kernel from the covariances of the inputs.
    Return the largest biased exponent in both, which reveals infinity and NaN."""
    same = sides.same
    spread = sides.spread
    left = lent(sides.left)
    right = sides.right
    inputs, nngp, ntk = lent(matrices)
    fields, columns = right.shape
    work = np.zeros((2 * program.registers + 4, PIECE + 2 * MARGIN), left.dtype)
    one = np.zeros(fields * PIECE, left.dtype)
    two = right.reshape(fields * columns)
    gaps = BandGaps(np.ones(PIECE, left.dtype), np.zeros((2, 0), np.int64))
    exact = program.weights.dtype.type(2)
    largest = 0
    # variables, not constants, so that vectors and images share one compiled version of
    # `apply_operations`
    begin_left: Any = np.intp(0)
    pitch: Any = np.intp(PIECE)
    single: Any = np.intp(1)
    for i in range(nngp.shape[0]):
        begin = i if same else 0
        size = columns - begin
        rows = KernelRows(inputs[i], nngp[i], ntk[i])
        for field in spread:
            fill_numbers(one, field * PIECE, size, left[i, field])
        row_fields = PairFields(
            one, two, begin_left, begin, pitch, columns, program.equal, left[i]
        )
        largest = max(
            largest, apply_to_piece(program, work, row_fields, gaps, size, rows)
        )
        if same:  # an example is paired with itself, so every correlation is 1
            row_fields = PairFields(
                one, two, begin_left, i, pitch, columns, exact, left[i]
            )
            largest = max(
                largest, apply_to_piece(program, work, row_fields, gaps, single, rows)
            )
    return largest


@compiled
def apply_to_piece(
    program: CompiledProgram,
    work: Array,
    fields: PairFields,
    gaps: BandGaps,
    size: int,
    rows: KernelRows,
) -> Any:
    """Apply all layers to `size` columns of a row. Return the largest biased exponent
    in both kernels, which reveals infinity and NaN."""
    margin: Any = np.intp(MARGIN)
    neighbour: Any = np.intp(1)
    start = fields.right_start
    inputs = rows.inputs
    nngp = rows.nngp
    ntk = rows.ntk
    for j in range(np.uintp(size)):
        work[0, margin + j] = inputs[start + j]
        work[1, margin + j] = 0
    shape = BandShape(margin, size, neighbour, neighbour)
    apply_operations(program, work, shape, fields, gaps)
    largest = exponent(work.dtype.type(0))
    for j in range(np.uintp(size)):
        nngp[start + j] = work[0, margin + j]
        ntk[start + j] = work[1, margin + j]
        largest = max(
            largest, exponent(work[0, margin + j]), exponent(work[1, margin + j])
        )
    return largest


@compiled
def mirror(whole: Array, first: int, last: int, begin: int, end: int) -> None:
    """Copy a block of rows and columns from above the diagonal to below it."""
    for j in range(max(begin, first + 1), end):
        for i in range(np.uintp(first), np.uintp(min(last, j))):
            whole[np.uintp(j), i] = whole[i, np.uintp(j)]


# --- Sub-blocks: each fits into memory, and every thread gets at least one


SubBlock = tuple[slice, slice]
Result = TypeVar("Result")


def sub_blocks(left: Side, right: Side, size: int, same: bool) -> list[SubBlock]:
    """Return all sub-blocks. If left and right examples are the same,
    omit sub-blocks below the diagonal."""
    return [
        (row, column)
        for row in split_range(0, len(left.x), size)
        for column in split_range(0, len(right.x), size)
        if not same or column.start >= row.start
    ]


def in_threads(
    work: Callable[[SubBlock], Result],
    parts: Sequence[SubBlock],
    threads: int,
    ahead: int,
) -> Iterator[Result]:
    """Yield the results of `work` on all parts, in order. Submit `ahead` parts at a
    time to the threads.

    With one thread or one part, use the calling thread: starting a thread may take
    longer than the work."""
    if min(threads, len(parts)) == 1:
        yield from map(work, parts)
        return
    with ThreadPoolExecutor(threads) as pool:
        for start in range(0, len(parts), ahead):
            yield from pool.map(work, parts[start : start + ahead])


# --- Kernels of vectors, one strip of rows at a time
#
# For each strip, compute the covariances of the inputs, then apply all layers to one
# sub-block after the other while it is in the cache. If the kernel is symmetric,
# compute only entries on and above the diagonal, and mirror them.


STRIP_ROWS = 128
"""Rows of a strip per thread. This number is large enough for a fast matrix product."""


def kernels_of_vectors(
    program: BandProgram, left: Side, right: Side, same: bool, threads: int
) -> Kernels:
    """Compute the NNGP kernel and the tangent kernel of a block,
    for examples that are vectors."""
    shape = (len(left.x), len(right.x))
    kernels = left.x.new_empty(shape), left.x.new_empty(shape)
    nngp = kernels[0].numpy()
    ntk = kernels[1].numpy()
    level = program.levels[0]
    table = tables(level, left, right)
    compiled_program = program_of(level, table)
    fields = np.ascontiguousarray(table.right.T)
    products = left.x.new_empty(min(len(left.x), STRIP_ROWS * threads), len(right.x))

    def apply_to_sub_block(block: SubBlock) -> int:
        row, column = block
        sides = VectorSides(
            table.left[row],
            np.ascontiguousarray(fields[:, column]),
            table.spread,
            same and row.start == column.start,
        )
        inputs = products.numpy()[row.start % len(products) :, column]
        matrices = KernelRows(inputs, nngp[block], ntk[block])
        largest_exponent: int = apply_to_vectors(compiled_program, sides, matrices)
        if same:
            mirror(nngp, row.start, row.stop, column.start, column.stop)
            mirror(ntk, row.start, row.stop, column.start, column.stop)
        return largest_exponent

    largest = 0
    for strip in split_range(0, len(left.x), len(products)):
        # ⟨x, x′⟩/d for the rows of the strip
        first = strip.start if same else 0
        x = left.x[strip]
        inner = products[: len(x), first:]
        columns = right.x[first:].t()
        torch.addmm(inner, x, columns, beta=0, alpha=1 / x.shape[1], out=inner)
        parts = strip_parts(strip, len(right.x), same, threads)
        largest = max(
            [largest, *in_threads(apply_to_sub_block, parts, threads, len(parts))]
        )
    if largest == beyond(nngp.dtype):
        return finite(kernels)
    return kernels


def program_of(level: Level, table: Tables) -> CompiledProgram:
    return CompiledProgram(
        table.operations, table.weights, level.registers, table.rounding
    )


def strip_parts(strip: slice, columns: int, same: bool, threads: int) -> list[SubBlock]:
    """Cut a strip of rows into sub-blocks of PIECE columns. Choose their number of rows
    so that every thread gets about two sub-blocks.

    If left and right vectors are the same, the first sub-block of each group of rows
    begins on the diagonal."""
    rows = strip.stop - strip.start
    height = rows if threads == 1 else max(1, rows // (2 * threads))
    parts = []
    for row in range(strip.start, strip.stop, height):
        for column in range(row if same else 0, columns, PIECE):
            part_rows = slice(row, min(row + height, strip.stop))
            part_columns = slice(column, min(column + PIECE, columns))
            parts.append((part_rows, part_columns))
    return parts


# --- Kernels of a block
#
# For networks of depth 5, float32 kernels have relative errors of up to 1e-6.


MEMORY_PARTS = 8
"""The inputs and fields of the images on one side of a block use at most the
fraction 1/MEMORY_PARTS of the memory."""
MAX_STORED_NUMBERS = 2**22
"""Largest number of entries of each kernel that a sub-block stores between two
levels."""
MAX_IMAGES = 32
"""Largest number of images on each side of a sub-block. With this many, laying out
bands costs little per pair."""


def kernels(
    program: BandProgram,
    left: Side,
    right: Side,
    same: bool,
    threads: int,
    budget: MemoryBudget,
) -> Kernels:
    """Compute the NNGP kernel and the tangent kernel of a block."""
    if left.x.dim() == 2:
        return kernels_of_vectors(program, left, right, same, threads)
    field_numbers = [
        field_count(level, left, right) * prod(level.sizes) for level in program.levels
    ]
    numbers = left.x[0].numel() + sum(field_numbers)
    max_examples = budget.largest_batch(MEMORY_PARTS * numbers * left.x.element_size())
    if max(len(left.x), len(right.x)) <= max_examples:
        nngp, ntk = kernels_of_images(
            program, left, right, same, threads, budget.part(threads)
        )
        if same:
            nngp = symmetric(nngp)
            ntk = symmetric(ntk)
        if program.end:
            nngp, ntk = through_rest(program, left, right, (nngp, ntk), same)
        return finite((nngp, ntk))
    # if the tables of all examples exceed the memory, cut the block
    block = [left.x.new_empty(len(left.x), len(right.x)) for _ in range(2)]
    for row, column in sub_blocks(left, right, max_examples, same):
        itself = same and row == column
        parts = kernels(
            program, left.part(row), right.part(column), itself, threads, budget
        )
        for values, part in zip(block, parts, strict=True):
            values[row, column] = part
            if same and not itself:
                values[column, row] = part.t()
    return block[0], block[1]


def kernels_of_images(
    program: BandProgram,
    left: Side,
    right: Side,
    same: bool,
    threads: int,
    budget: MemoryBudget,
) -> Kernels:
    """Compute the NNGP kernel and the tangent kernel of a block of images. They are the
    kernels after the layer `program.end`, or of the outputs if `program.end` is None.

    For the outputs, apply the remaining layers in torch to one sub-block after another.
    If both sides are the same, fill only sub-blocks on and above the diagonal.
    """
    levels = [tables(level, left, right) for level in program.levels]
    coarse = [
        coarsenings(*ends, levels[0].left.dtype)
        for ends in zip(program.levels, program.coarse_pairs, strict=True)
    ]
    size = sub_block_size(program, levels, budget)
    if threads > 1:  # about two sub-blocks per thread
        size = max(1, min(size, isqrt(len(left.x) * len(right.x) // (2 * threads))))
    parts = sub_blocks(left, right, size, same)
    pixel_pair_count = program.levels[-1].pairs.count
    nngp = left.x.new_zeros(len(left.x), len(right.x))
    ntk = left.x.new_zeros(len(left.x), len(right.x))

    def last_bands(block: SubBlock) -> Kernels:
        sums = np.zeros((2, len(left.x[block[0]]), len(right.x[block[1]])))
        itself = same and block[0] == block[1]
        departed = through_levels(program, levels, coarse, itself, block, sums)
        if not program.end:
            return pixel_pairs(program, departed)
        first, second = torch.from_numpy(sums / pixel_pair_count).to(left.x)
        return first, second

    results = in_threads(last_bands, parts, threads, threads)
    for (row, column), last in zip(parts, results, strict=True):
        itself = same and row == column
        bands = (
            last
            if program.end
            else through_rest(program, left.part(row), right.part(column), last, itself)
        )
        nngp[row, column], ntk[row, column] = bands
    return nngp, ntk


def sub_block_size(
    program: BandProgram, levels: Sequence[Tables], budget: MemoryBudget
) -> int:
    """Return the largest number of images on each side of a sub-block
    that fits into the memory.

    Laying out the bands needs three copies of the fields of each side. At most two
    levels store coarse bands at the same time."""
    layout_bytes = max(table.left[0].nbytes for table in levels)
    stored_numbers = [
        2 * len(level.coarsenings) * pairs.count
        for level, pairs in zip(program.levels, program.coarse_pairs, strict=True)
    ]
    numbers = budget.largest_batch(COPIES * levels[0].left.itemsize, MAX_STORED_NUMBERS)
    size = budget.largest_batch(6 * layout_bytes, MAX_IMAGES)
    return max(1, min(size, isqrt(2 * numbers // max(1, *stored_numbers))))


def through_levels(
    program: BandProgram,
    levels: Sequence[Tables],
    coarse: Sequence[Coarsenings],
    same: bool,
    block: SubBlock,
    sums: Array,
) -> Array:
    """Apply all levels (groups of operations on images of one size) to a sub-block.

    If the last level averages its bands onto a coarser grid (`Level.coarsenings`),
    return the averages. Otherwise add the sums over the pixels of its bands to `sums`.
    """
    row, column = block
    departed = np.zeros((0,) * 5, levels[0].left.dtype)
    for level, table, coarsening, after in zip(
        program.levels, levels, coarse, program.coarse_pairs, strict=True
    ):
        channels = 0 if level.arrivals else program.channels
        departures = len(coarsening.registers)
        pixel_count = after.count if departures else 0
        transfer = LevelTransfer(
            arriving=np.array(level.arrivals, np.int64),
            source=departed,
            departing=coarsening.registers,
            shares=coarsening.shares,
            slots=coarsening.slots,
            order=coarsening.order,
            target=np.zeros((departures, *sums.shape, pixel_count), departed.dtype),
        )
        images(
            program_of(level, table),
            ImageSides(table.left[row], table.right[column], channels, same),
            ImageGrid(level.sizes, level.reach, level.around),
            tuple(np.array(offsets) for offsets in level.pairs.offsets),
            transfer,
            sums,
        )
        departed = transfer.target
    return departed


def pixel_pairs(program: BandProgram, departed: Array) -> Kernels:
    """Return the kernels at all pixel pairs of the last level, [left, right, offset,
    pixel, offset, pixel, …]. There is an offset axis and a pixel axis
    for each axis of the image."""
    pairs = program.levels[-1].pairs
    axes: list[int] = []
    for offsets, pixels in zip(pairs.offsets, pairs.pixels, strict=True):
        axes += (len(offsets), pixels)
    bands = torch.from_numpy(departed[0]).view(
        2, *departed.shape[2:4], *axes[::2], *axes[1::2]
    )
    bands = bands.permute(0, 1, 2, 3, 6, 4, 7, 5, 8)
    image_axes = len(program.rest_shape[1:])
    first, second = bands.reshape(*bands.shape[:3], *axes[-2 * image_axes :])
    return first, second


def through_rest(
    program: BandProgram, left: Side, right: Side, kernels: Kernels, same: bool
) -> Kernels:
    """Apply the remaining layers in torch."""
    pairs = base.input_pairs(program.rest, Pairs((), ()), program.rest_shape)
    operations = [
        operation for level in program.levels for operation in level.operations
    ]
    nonlinear_layers = sum(operation.fields_of is not None for operation in operations)
    start = Covariance(
        *kernels, pairs, left.variances, right.variances, same, nonlinear_layers
    )
    return kernels_of(base.push(program.rest, start, program.rest_shape))
