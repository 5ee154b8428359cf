"""Kernels of images: for one offset after the other, a tile for every pair of images.

For an offset (o₁, o₂) the pixel p of the first image meets (p + o) mod n of the second. Where p + o wraps around, the
tile has a seam of zeros as wide as a window reaches, as it has at its ends: nothing leaks from one side of the image to
the other. What a pair needs of each image, inputs and √q, 1/√q at every nonlinear layer, is laid out once per offset.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ntkexp.limit.fused.jit import compiled
from ntkexp.limit.fused.loops import cleaned, moved, total
from ntkexp.limit.fused.tile import walked

Array = np.ndarray[Any, Any]


@compiled
def images(
    operations: Array,
    weights: Array,
    registers: int,
    left: Array,
    right: Array,
    channels: int,
    downs: Array,
    acrosses: Array,
    rows: int,
    columns: int,
    down: int,
    across: int,
    same: bool,
    equal: Any,
    sums: Array,
    kept: Array,
) -> None:
    """Sums over pixels of K and Θ into sums [2, left, right], over the offsets that are combined of two lists.

    A side is [image, field, pixel]. Unless it is empty, kept [2, left, right, down, row, across, column] gets both as
    they are. If both sides are the same, only pairs on and above the diagonal are computed.
    """
    stride, fields, first_count, second_count = columns + 2 * across, left.shape[1], left.shape[0], right.shape[0]
    size = padded((rows + 2 * down) * stride)
    margin, band = padded(down * stride + across), rows * stride
    work = np.zeros((2 * registers + 4, margin + size + margin), left.dtype)
    one, two = np.zeros(first_count * fields * size, left.dtype), np.zeros(second_count * fields * size, left.dtype)
    bands1 = np.zeros(first_count * fields * band, left.dtype)
    bands2 = np.zeros(second_count * fields * band, left.dtype)
    inside, filled, banded = (
        np.zeros(size, left.dtype),
        np.ones((1, 1, rows * columns), left.dtype),
        np.zeros(band, left.dtype),
    )
    for k2 in range(acrosses.shape[0]):
        o2 = acrosses[k2]
        shifted(left, bands1, rows, columns, o2, 0, across)
        shifted(right, bands2, rows, columns, o2, o2, across)
        shifted(filled, banded, rows, columns, o2, 0, across)
        for k1 in range(downs.shape[0]):
            o1 = downs[k1]
            stacked(bands1, one, first_count * fields, rows, stride, o1, 0, down, size)
            stacked(bands2, two, second_count * fields, rows, stride, o1, o1, down, size)
            stacked(banded, inside, 1, rows, stride, o1, 0, down, size)
            for i in range(first_count):
                for j in range(i if same else 0, second_count):
                    # An example and itself, pixel by pixel: every correlation is one.
                    itself = same and i == j and o1 == 0 and o2 == 0
                    near = weights.dtype.type(2) if itself else equal
                    first, second = i * fields * size, j * fields * size
                    paired(
                        operations, weights, work, margin, size, stride, near, one, two, first, second, channels, inside
                    )
                    if kept.shape[0]:
                        stored(work, margin, stride, down, across, o1, o2, kept[:, i, j, k1, :, k2, :])
                    else:
                        sums[0, i, j] += total(work[0], margin, size)
                        sums[1, i, j] += total(work[1], margin, size)


@compiled
def paired(
    operations: Array,
    weights: Array,
    work: Array,
    margin: int,
    size: int,
    stride: int,
    equal: Any,
    one: Array,
    two: Array,
    first: int,
    second: int,
    channels: int,
    inside: Array,
) -> None:
    """The tile of two images at one offset: from the products of their inputs through all layers."""
    multiplied(one, two, first, second, channels, work[0], margin, size)
    work[1, :] = 0
    roots, other_roots = first + channels * size, second + channels * size
    walked(operations, weights, work, margin, size, stride, equal, one, two, roots, other_roots, size, size, inside)


@compiled
def padded(count: int) -> int:
    """The smallest multiple of what a processor handles at a time that is no less."""
    return (count + 63) // 64 * 64


@compiled
def shifted(source: Array, target: Array, rows: int, columns: int, apart: int, start: int, seam: int) -> None:
    """Rows that begin at column `start` and go around, with seams at the end and where a pair wraps around."""
    stride, before = columns + 2 * seam, columns - apart
    numbers, second = source.reshape(source.size), (start + before) % columns
    for row in range(source.shape[0] * source.shape[1] * rows):
        here, there = row * stride, row * columns
        moved(numbers, there + start, target, here, before)
        cleaned(target, here + before, seam)
        moved(numbers, there + second, target, here + before + seam, apart)
        cleaned(target, here + columns + seam, seam)


@compiled
def stacked(
    source: Array, target: Array, count: int, rows: int, stride: int, apart: int, start: int, seam: int, size: int
) -> None:
    """Rows of rows, those from row `start` and around."""
    before = (rows - apart) * stride
    for k in range(count):
        base, there = k * size, k * rows * stride
        moved(source, there + start * stride, target, base, before)
        moved(
            source,
            there + (start * stride + before) % (rows * stride),
            target,
            base + before + seam * stride,
            rows * stride - before,
        )
        cleaned(target, base + before, seam * stride)
        cleaned(target, base + (rows + seam) * stride, size - (rows + seam) * stride)


@compiled
def multiplied(
    one: Array, two: Array, first: int, second: int, channels: int, target: Array, margin: int, size: int
) -> None:
    """The mean over channels of products of inputs."""
    start, count = np.uintp(margin), np.uintp(size)
    share = target.dtype.type(1) / target.dtype.type(channels)
    a, b = np.uintp(first), np.uintp(second)
    for j in range(count):
        target[j + start] = share * one[a + j] * two[b + j]
    for channel in range(1, channels):
        a, b = np.uintp(first + channel * size), np.uintp(second + channel * size)
        for j in range(count):
            target[j + start] += share * one[a + j] * two[b + j]


@compiled
def stored(work: Array, margin: int, stride: int, down: int, across: int, o1: int, o2: int, out: Array) -> None:
    """The pixels of a tile, without what lies between them, into out [2, row, column]."""
    _, rows, columns = out.shape
    for y in range(rows):
        here = margin + (y + (down if y >= rows - o1 else 0)) * stride
        for x in range(columns):
            place = here + x + (across if x >= columns - o2 else 0)
            out[0, y, x], out[1, y, x] = work[0, place], work[1, place]
