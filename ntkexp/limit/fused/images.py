"""Kernels of images on one level: for one offset after the other, a tile for every pair of images.

What a pair needs of each image, inputs and functions of the variance at every nonlinear layer, is laid out once per
offset, one axis after the other. Sizes, reaches, offsets and the like are given deep, down and across.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ntkexp.limit.fused.crossing import arrived, departed
from ntkexp.limit.fused.jit import compiled
from ntkexp.limit.fused.layout import halos, laid_out, length, origins, padded
from ntkexp.limit.fused.lent import lent
from ntkexp.limit.fused.loops import total
from ntkexp.limit.fused.tile import walked

Array = np.ndarray[Any, Any]
Three = tuple[int, int, int]
Arrays = tuple[Array, Array, Array]


@compiled
def images(
    operations: Array,
    weights: Array,
    registers: int,
    left: Array,
    right: Array,
    channels: int,
    offsets: Arrays,
    sizes: Three,
    reach: Three,
    around: bool,
    same: bool,
    equal: Any,
    arriving: Array,
    source: Array,
    departing: tuple[Array, Array, Arrays, Array],
    target: Array,
    sums: Array,
) -> None:
    """K and Θ on all tiles: what departs into target, [register, 2, left, right, offset and pixel], or, where
    nothing does, sums over pixels into sums, [2, left, right].

    A side is [image, field, pixel]. What arrives is in the source, which is as the target was of the level before. If
    both sides are the same, only pairs on and above the diagonal are computed.
    """
    fields, first_count, second_count = left.shape[1], left.shape[0], right.shape[0]
    stride = length(sizes[2], reach[2], around)
    plane = length(sizes[1], reach[1], around) * stride
    size = padded(length(sizes[0], reach[0], around) * plane)
    margin = padded(reach[0] * plane + reach[1] * stride + reach[2])
    counts = (first_count * fields, second_count * fields, 1)
    # Along each axis, first columns alone, then rows of them, then planes.
    pixels = (left.reshape(left.size), right.reshape(right.size), np.ones(sizes[0] * sizes[1] * sizes[2], left.dtype))
    bands = empty(counts, sizes[0] * sizes[1] * stride, left)
    tiles = empty(counts, size, left)
    flat = sizes[0] == 1 and reach[0] == 0  # rows are all there is to tiles
    sheets, pitch = (tiles, size) if flat else (empty(counts, sizes[0] * plane, left), plane)
    work, halo = np.zeros((2 * registers + 4, margin + size + margin), left.dtype), np.zeros((2, 0), np.int64)
    for k2 in range(offsets[2].shape[0]):
        o2 = offsets[2][k2]
        laid_out(pixels, bands, counts, sizes[0] * sizes[1], sizes[2], 1, o2, reach[2], around, stride)
        for k1 in range(offsets[1].shape[0]):
            o1 = offsets[1][k1]
            laid_out(bands, sheets, counts, sizes[0], sizes[1], stride, o1, reach[1], around, pitch)
            for k0 in range(offsets[0].shape[0]):
                o0 = offsets[0][k0]
                if not flat:
                    laid_out(sheets, tiles, counts, 1, sizes[0], plane, o0, reach[0], around, size)
                if around:
                    halo = halos(
                        origins(sizes[0], o0, reach[0], around),
                        origins(sizes[1], o1, reach[1], around),
                        origins(sizes[2], o2, reach[2], around),
                    )
                number = (k0 * offsets[1].shape[0] + k1) * offsets[2].shape[0] + k2
                at_offset(
                    (operations, weights, equal),
                    (tiles[0], tiles[1], tiles[2], halo),
                    work,
                    (margin, size, stride, plane),
                    (sizes, reach, (o0, o1, o2), around),
                    (fields, channels, number * sizes[0] * sizes[1] * sizes[2]),
                    (k0, k1, k2),
                    same,
                    arriving,
                    source,
                    departing,
                    target,
                    sums,
                )


@compiled
def at_offset(
    program: tuple[Array, Array, Any],
    laid: tuple[Array, Array, Array, Array],
    work: Array,
    extent: tuple[int, int, int, int],
    image: tuple[Three, Three, Three, bool],
    counts: Three,
    at: Three,
    same: bool,
    arriving: Array,
    source: Array,
    departing: tuple[Array, Array, Arrays, Array],
    target: Array,
    sums: Array,
) -> None:
    """The tiles of all pairs at one offset; `counts` are fields, channels, and the pixels that arrive of others."""
    operations, weights, equal = program
    one, two, inside, halo = lent(laid[0]), lent(laid[1]), lent(laid[2]), lent(laid[3])
    work, source, target, sums = lent(work), lent(source), lent(target), lent(sums)
    margin, size, stride, plane = extent
    fields, channels, start = counts
    registers, shares, order = lent(departing[0]), lent(departing[1]), lent(departing[3])
    slots = (lent(departing[2][0]), lent(departing[2][1]), lent(departing[2][2]))
    o0, o1, o2 = image[2]
    none, ways = np.zeros(0, work.dtype), np.zeros((2, image[0][2]), np.int64)
    for i in range(sums.shape[1]):
        for j in range(i if same else 0, sums.shape[2]):
            first, second = i * fields * size, j * fields * size
            for k in range(arriving.shape[0]):
                arrived(source[k, 0, i, j], start, work[2 * arriving[k]], margin, image)
                arrived(source[k, 1, i, j], start, work[2 * arriving[k] + 1], margin, image)
            if arriving.shape[0] == 0:
                multiplied(one, two, first, second, channels, work[0], margin, size)
                work[1, :] = 0
            # An example and itself, pixel by pixel: every correlation is one.
            itself = same and i == j and o0 == 0 and o1 == 0 and o2 == 0
            walked(
                operations,
                weights,
                work,
                margin,
                size,
                stride,
                plane,
                weights.dtype.type(2) if itself else equal,
                one,
                two,
                first + channels * size,
                second + channels * size,
                size,
                size,
                inside,
                halo,
                none,
            )
            for k in range(registers.shape[0]):
                K, theta, share = work[2 * registers[k]], work[2 * registers[k] + 1], shares[k]
                departed(
                    K, theta, margin, image, share, slots, order, k, at, ways, target[k, 0, i, j], target[k, 1, i, j]
                )
            if registers.shape[0] == 0:
                sums[0, i, j] += total(work[0], margin, size)
                sums[1, i, j] += total(work[1], margin, size)


@compiled
def empty(counts: Three, size: int, like: Array) -> Arrays:
    """Room for so many numbers of each image of the left and of the right, and for what is inside images."""
    dtype = like.dtype
    return np.zeros(counts[0] * size, dtype), np.zeros(counts[1] * size, dtype), np.zeros(counts[2] * size, dtype)


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
