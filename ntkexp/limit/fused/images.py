"""Kernels of images: for one offset after the other, a tile for every pair of images.

For an offset (o₁, o₂) the pixel p of the first image meets (p + o) mod n of the second. Where p + o wraps around, the
tile has a seam of zeros as wide as a window reaches, as it has at its ends: nothing leaks from one side of the image to
the other. What a pair needs of each image, inputs and √q, 1/√q at every nonlinear layer, is laid out once per offset.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ntkexp.limit.fused.compiled import compiled
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
    offsets: Array,
    rows: int,
    columns: int,
    down: int,
    across: int,
    same: bool,
    equal: Any,
    out: Array,
) -> None:
    """Sums over pixels of K and Θ into out [2, left, right]; if both sides are the same, on and above the diagonal.

    A side is [image, field, pixel].
    """
    stride = columns + 2 * across
    size = padded((rows + 2 * down) * stride)
    margin = padded(down * stride + across)
    fields = left.shape[1]
    work = np.zeros((2 * registers + 4, margin + size + margin), left.dtype)
    one, two = np.zeros(left.shape[0] * fields * size, left.dtype), np.zeros(right.shape[0] * fields * size, left.dtype)
    inside, filled = np.zeros(size, left.dtype), np.ones((1, rows * columns), left.dtype)
    for k in range(offsets.shape[0]):
        o1, o2 = offsets[k, 0], offsets[k, 1]
        placed(filled, inside, 0, rows, columns, o1, o2, False, stride, down, across, size)
        for i in range(left.shape[0]):
            placed(left[i], one, i * fields * size, rows, columns, o1, o2, False, stride, down, across, size)
        for j in range(right.shape[0]):
            placed(right[j], two, j * fields * size, rows, columns, o1, o2, True, stride, down, across, size)
        for i in range(left.shape[0]):
            for j in range(i if same else 0, right.shape[0]):
                first, second = i * fields * size, j * fields * size
                multiplied(one, two, first, second, channels, work[0], margin, size)
                work[1, :] = 0
                # An example and itself, pixel by pixel: every correlation is one.
                itself = same and i == j and o1 == 0 and o2 == 0
                near = weights.dtype.type(2) if itself else equal
                walked(
                    operations,
                    weights,
                    work,
                    margin,
                    size,
                    stride,
                    near,
                    one,
                    two,
                    first + channels * size,
                    second + channels * size,
                    size,
                    size,
                    inside,
                )
                out[0, i, j] += total(work[0], margin, size)
                out[1, i, j] += total(work[1], margin, size)


@compiled
def padded(count: int) -> int:
    """Up to a multiple of what a processor handles at a time."""
    return (count + 63) // 64 * 64


@compiled
def placed(
    source: Array,
    target: Array,
    start: int,
    rows: int,
    columns: int,
    o1: int,
    o2: int,
    second: bool,
    stride: int,
    down: int,
    across: int,
    size: int,
) -> None:
    """Fields [field, pixel] laid out as tiles: of the first pixel of each pair, or of the second."""
    y2, x2 = (o1, o2) if second else (0, 0)
    for field in range(source.shape[0]):
        base = start + field * size
        for i in range(size):
            target[base + i] = 0
        for y in range(rows):
            here = base + (y + (down if y >= rows - o1 else 0)) * stride
            there = (y + y2) % rows * columns
            for x in range(columns - o2):
                target[here + x] = source[field, there + x + x2]
            for x in range(columns - o2, columns):
                target[here + x + across] = source[field, there + (x + x2) % columns]


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
def total(tile: Array, margin: int, size: int) -> Any:
    """The sum of a tile."""
    start, found = np.uintp(margin), tile.dtype.type(0)
    for j in range(np.uintp(size)):
        found += tile[j + start]
    return found
