"""Kernels of images: where pixels lie in a tile, how tiles go to a coarser level, and one offset after the other."""

from __future__ import annotations

from typing import Any

import numpy as np

from ntkexp.limit.fused.functions import cleaned, compiled, lent, moved, total
from ntkexp.limit.fused.tile import apply_operations

# --- Where the pixels of an image lie in a tile, axis by axis, and what lies between them.
#
# Of the offset o, the pixel p of the first image meets (p + o) mod n of the second. Along an axis the n pixels
# come in two pieces, those before p + o goes around and those after, each followed by a gap as wide as a window
# reaches: nothing leaks from one side of an image to the other. If images go around, gaps are wide enough for the
# pixels that continue each piece at both ends, its halo:
#
#     p₀ … p₍ₙ₋ₒ₋₁₎ gap p₍ₙ₋ₒ₎ … p₍ₙ₋₁₎ gap


Array = np.ndarray[Any, Any]


@compiled
def length(pixels: int, reach: int, around: bool) -> int:
    """How long an axis of a tile is."""
    return pixels + (4 * reach if around else 2 * reach)


@compiled
def place(pixel: int, pixels: int, offset: int, reach: int, around: bool) -> int:
    """Where a pixel lies on an axis."""
    gap = 2 * reach if around else reach
    return (reach if around else 0) + pixel + (gap if pixel >= pixels - offset else 0)


@compiled
def padded(count: int) -> int:
    """The smallest multiple of what a processor handles at a time that is no less."""
    return (count + 31) // 32 * 32


@compiled
def stacked(
    source: Array,
    target: Array,
    count: int,
    pixels: int,
    unit: int,
    apart: int,
    start: int,
    reach: int,
    around: bool,
    pitch: int,
) -> None:
    """Units of numbers, those of `count` images of this many pixels, along one axis of tiles that are `pitch` apart.

    The first is that of pixel `start`, and the others follow, around the image.
    """
    before, lead = (pixels - apart) * unit, (reach if around else 0) * unit
    gap = (2 * reach if around else reach) * unit
    for k in range(count):
        here, there = k * pitch, k * pixels * unit
        second = there + (start * unit + before) % (pixels * unit)
        cleaned(target, here, lead)
        moved(source, there + start * unit, target, here + lead, before)
        cleaned(target, here + lead + before, gap)
        moved(source, second, target, here + lead + before + gap, apart * unit)
        used = lead + before + gap + apart * unit
        cleaned(target, here + used, pitch - used)


@compiled
def laid_out(
    sources: tuple[Array, Array, Array],
    targets: tuple[Array, Array, Array],
    counts: tuple[int, int, int],
    parts: int,
    pixels: int,
    unit: int,
    offset: int,
    reach: int,
    around: bool,
    pitch: int,
) -> None:
    """Images of the left from the first pixel on, of the right from the offset on, and what is inside an image, along
    one axis, for each of `counts`.
    """
    stacked(
        sources[0], targets[0], counts[0] * parts, pixels, unit, offset, 0, reach, around, pitch
    )
    stacked(
        sources[1],
        targets[1],
        counts[1] * parts,
        pixels,
        unit,
        offset,
        offset,
        reach,
        around,
        pitch,
    )
    stacked(
        sources[2], targets[2], counts[2] * parts, pixels, unit, offset, 0, reach, around, pitch
    )


@compiled
def origins(pixels: int, offset: int, reach: int, around: bool) -> Array:
    """Where on the axis that lies which each place of an image that goes around repeats."""
    indices = np.zeros(length(pixels, reach, around), np.int64)
    before, second = pixels - offset, pixels - offset + 3 * reach
    for slot in range(indices.shape[0]):
        pixel = slot - reach if slot < before + 2 * reach else slot - second + before
        indices[slot] = place(pixel % pixels, pixels, offset, reach, around)
    return indices


@compiled
def halos(deep: Array, down: Array, across: Array) -> Array:
    """The places of a tile that repeat others, and those that they repeat, from the origins along each axis."""
    planes, rows, columns = deep.shape[0], down.shape[0], across.shape[0]
    found, count = np.zeros((2, planes * rows * columns), np.int64), 0
    for z in range(planes):
        for y in range(rows):
            for x in range(columns):
                if deep[z] != z or down[y] != y or across[x] != x:
                    found[0, count] = (z * rows + y) * columns + x
                    found[1, count] = (deep[z] * rows + down[y]) * columns + across[x]
                    count += 1
    return found[:, :count].copy()


# --- Tiles go from a level to a coarser one: as sums over the pixels of coarse ones, and without the gaps of a tile.


Three = tuple[int, int, int]
Arrays = tuple[Array, Array, Array]
Image = tuple[Three, Three, Three, bool]
"""Sizes, the largest reaches of windows, an offset, and whether the image goes around."""


@compiled
def arrived(source: Array, start: int, target: Array, margin: int, image: Image) -> None:
    """A tile of this offset from the pixels that begin at `start`, with zeros between its pieces."""
    sizes, reach, offset, around = image
    for j in range(np.uintp(target.shape[0])):
        target[j] = 0
    stride, before = length(sizes[2], reach[2], around), sizes[2] - offset[2]
    first = place(0, sizes[2], offset[2], reach[2], around)
    second = (
        place(before, sizes[2], offset[2], reach[2], around) - before
    )  # of pixels that are there, if o > 0
    for z in range(sizes[0]):
        deep = place(z, sizes[0], offset[0], reach[0], around) * length(sizes[1], reach[1], around)
        for y in range(sizes[1]):
            here = margin + (deep + place(y, sizes[1], offset[1], reach[1], around)) * stride
            pixel = start + (z * sizes[1] + y) * sizes[2]
            one, two, other = np.uintp(here + first), np.uintp(here + second), np.uintp(pixel)
            for x in range(np.uintp(before)):
                target[one + x] = source[other + x]
            for x in range(np.uintp(before), np.uintp(sizes[2])):
                target[two + x] = source[other + x]


@compiled
def add_to_coarse(
    K: Array,
    theta: Array,
    margin: int,
    image: Image,
    share: Any,
    slots: Arrays,
    order: Array,
    coarsening: int,
    at: Three,
    ways: Array,
    coarse_K: Array,
    coarse_theta: Array,
) -> None:
    """Each pixel's share of tiles of this offset is added where the sum of its slots along the axes says; a pixel
    without a slot is left out.

    Along a row, pixels come in an order in which none that follow one another are of the same coarse one: what is added
    waits for nothing. `ways` is room for where each of them is, and goes.
    """
    sizes, reach, offset, around = image
    stride, count = length(sizes[2], reach[2], around), 0
    for x in order[coarsening]:
        if slots[2][coarsening, at[2], x] >= 0:
            ways[0, count] = place(x, sizes[2], offset[2], reach[2], around)
            ways[1, count] = slots[2][coarsening, at[2], x]
            count += 1
    for z in range(sizes[0]):
        deep = place(z, sizes[0], offset[0], reach[0], around) * length(sizes[1], reach[1], around)
        for y in range(sizes[1]):
            here = margin + (deep + place(y, sizes[1], offset[1], reach[1], around)) * stride
            a, b = slots[0][coarsening, at[0], z], slots[1][coarsening, at[1], y]
            if a >= 0 and b >= 0:
                start, goal = np.uintp(here), np.uintp(a + b)
                for k in range(np.uintp(count)):
                    one, two = start + np.uintp(ways[0, k]), goal + np.uintp(ways[1, k])
                    coarse_K[two] += share * K[one]
                    coarse_theta[two] += share * theta[one]


# --- Kernels of images on one level: for one offset after the other, a tile for every pair of images.
#
# What a pair needs of each image, inputs and functions of the variance at every nonlinear layer, is laid out once
# per offset, one axis after the other. Sizes, reaches, offsets and the like are given deep, down and across.


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
    coarsening_arrays: tuple[Array, Array, Arrays, Array],
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
    pixels = (
        left.reshape(left.size),
        right.reshape(right.size),
        np.ones(sizes[0] * sizes[1] * sizes[2], left.dtype),
    )
    bands = empty(counts, sizes[0] * sizes[1] * stride, left)
    tiles = empty(counts, size, left)
    flat = sizes[0] == 1 and reach[0] == 0  # rows are all there is to tiles
    sheets, pitch = (tiles, size) if flat else (empty(counts, sizes[0] * plane, left), plane)
    work, halo = (
        np.zeros((2 * registers + 4, margin + size + margin), left.dtype),
        np.zeros((2, 0), np.int64),
    )
    for k2 in range(offsets[2].shape[0]):
        o2 = offsets[2][k2]
        laid_out(
            pixels, bands, counts, sizes[0] * sizes[1], sizes[2], 1, o2, reach[2], around, stride
        )
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
                    coarsening_arrays,
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
    coarsening_arrays: tuple[Array, Array, Arrays, Array],
    target: Array,
    sums: Array,
) -> None:
    """The tiles of all pairs at one offset; `counts` are fields, channels, and the pixels that arrive of others."""
    operations, weights, equal = program
    one, two, inside, halo = lent(laid[0]), lent(laid[1]), lent(laid[2]), lent(laid[3])
    work, source, target, sums = lent(work), lent(source), lent(target), lent(sums)
    margin, size, stride, plane = extent
    fields, channels, start = counts
    registers, shares, order = (
        lent(coarsening_arrays[0]),
        lent(coarsening_arrays[1]),
        lent(coarsening_arrays[3]),
    )
    slots = (
        lent(coarsening_arrays[2][0]),
        lent(coarsening_arrays[2][1]),
        lent(coarsening_arrays[2][2]),
    )
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
            apply_operations(
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
                add_to_coarse(
                    K,
                    theta,
                    margin,
                    image,
                    share,
                    slots,
                    order,
                    k,
                    at,
                    ways,
                    target[k, 0, i, j],
                    target[k, 1, i, j],
                )
            if registers.shape[0] == 0:
                sums[0, i, j] += total(work[0], margin, size)
                sums[1, i, j] += total(work[1], margin, size)


@compiled
def empty(counts: Three, size: int, like: Array) -> Arrays:
    """Buffers for the numbers of each left image, of each right image, and inside images."""
    dtype = like.dtype
    return (
        np.zeros(counts[0] * size, dtype),
        np.zeros(counts[1] * size, dtype),
        np.zeros(counts[2] * size, dtype),
    )


@compiled
def multiplied(
    one: Array,
    two: Array,
    first: int,
    second: int,
    channels: int,
    target: Array,
    margin: int,
    size: int,
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
