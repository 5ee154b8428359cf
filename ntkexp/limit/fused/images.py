"""Kernels of images: the layout of pixels in a band, coarser levels,
and the loop over offsets.

A band holds both kernels (NNGP and tangent) of two images for one offset o. It pairs
each pixel p of the first image with pixel p + o of the second. A level contains the
operations on images of one size. A field is a function of the variance at each
pixel."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ntkexp.limit.fused.band import (
    BandGaps,
    BandShape,
    CompiledProgram,
    KernelBand,
    PairFields,
    apply_operations,
)
from ntkexp.limit.fused.functions import (
    band_total,
    clear_numbers,
    compiled,
    copy_numbers,
    lent,
)

Array = np.ndarray[Any, Any]
Three = tuple[int, int, int]
"""Values for planes, rows and columns."""
Arrays = tuple[Array, Array, Array]


class ImageGrid(NamedTuple):
    """Sizes of an image, and the largest reach of a window. `around` is True if the
    image is periodic."""

    sizes: Three
    reach: Three
    around: bool


class BandImage(NamedTuple):
    """The layout of an image's band at one offset, which pairs each pixel p with pixel
    p + `offset`. For each axis, `at` holds the index of the offset in the list of all
    offsets of that axis."""

    sizes: Three
    reach: Three
    around: bool
    offset: Three
    at: Three
    margin: int


class BandLayout(NamedTuple):
    """The fields of all left and right images at one offset, in two flat arrays with
    the pixel layout of a band. Each image has `fields` fields. The first `channels` of
    them are the inputs."""

    left: Array
    right: Array
    gaps: BandGaps
    fields: int
    channels: int
    same: bool


class BandAxis(NamedTuple):
    """One axis of a band. Neighbouring pixels are `unit` numbers apart, and pixel p is
    paired with pixel p + `offset`."""

    pixels: int
    unit: int
    offset: int
    reach: int
    around: bool


class ImageSides(NamedTuple):
    """Fields (functions of the variance) of the left and right images, [image, field,
    pixel]. The first `channels` fields are the inputs.

    If both sides are the `same` images, only pairs on
    and above the diagonal are computed."""

    left: Array
    right: Array
    channels: int
    same: bool


class LevelTransfer(NamedTuple):
    """Bands that come from the finer level, and bands that go to the coarser level.

    `source` and `target` have the axes [register, kernel, left, right, offset and
    pixel]. The registers `arriving` are filled from `source`. The registers `departing`
    are averaged into `target`: the kernel at each pixel is multiplied by `shares`, and
    added at an index of `target`. This index is a sum of three numbers, the `slots` of
    the pixel along each axis. `order` lists the pixels of a row so that consecutive
    pixels belong to different coarse pixels. Their additions are then independent."""

    arriving: Array
    source: Array
    departing: Array
    shares: Array
    slots: Arrays
    order: Array
    target: Array


# --- Pixels along an axis of a band
#
# At offset o, pixel p of the left image is paired with pixel (p + o) mod n of the right
# image. An axis has two pieces: the pixels with p + o < n, and the others. A gap as
# wide as the reach of a window follows each piece, so that windows read zeros beyond
# the edge of an image. In a periodic image, both ends of each piece also need a halo:
# copies of the neighbouring pixels beyond this end.
#
#     p₀ … p₍ₙ₋ₒ₋₁₎ gap p₍ₙ₋ₒ₎ … p₍ₙ₋₁₎ gap


@compiled
def length(pixels: int, reach: int, around: bool) -> int:
    """Return the length of a band's axis: pixels, gaps and halos."""
    return pixels + (4 * reach if around else 2 * reach)


@compiled
def place(pixel: int, pixels: int, offset: int, reach: int, around: bool) -> int:
    """Return the position of a pixel on a band's axis."""
    gap = 2 * reach if around else reach
    return (reach if around else 0) + pixel + (gap if pixel >= pixels - offset else 0)


@compiled
def padded(count: int) -> int:
    """Round up to a multiple of 32, so that vector instructions handle whole bands."""
    return (count + 31) // 32 * 32


@compiled
def lay_out_side(
    source: Array, target: Array, count: int, axis: BandAxis, start: int, pitch: int
) -> None:
    """Copy `count` lines of pixels into bands, along one axis of the image. In the
    target, lines begin `pitch` numbers apart.

    Pixel `start` comes first; the others follow in periodic order.
    """
    unit = axis.unit
    apart = axis.offset
    pixels = axis.pixels
    before = (pixels - apart) * unit
    lead = (axis.reach if axis.around else 0) * unit
    gap = (2 * axis.reach if axis.around else axis.reach) * unit
    for k in range(count):
        here = k * pitch
        there = k * pixels * unit
        second = there + (start * unit + before) % (pixels * unit)
        clear_numbers(target, here, lead)
        copy_numbers(source, there + start * unit, target, here + lead, before)
        clear_numbers(target, here + lead + before, gap)
        copy_numbers(source, second, target, here + lead + before + gap, apart * unit)
        used = lead + before + gap + apart * unit
        clear_numbers(target, here + used, pitch - used)


@compiled
def lay_out(
    sources: Arrays,
    targets: Arrays,
    counts: Three,
    parts: int,
    axis: BandAxis,
    pitch: int,
) -> None:
    """Copy images into bands along one axis (see `lay_out_side`): the left images from
    pixel 0, the right images from pixel `axis.offset`, and a mask that is 1 inside the
    image.

    `counts` are the numbers of fields in `sources`. Each
    field has `parts` lines along this axis."""
    lay_out_side(sources[0], targets[0], counts[0] * parts, axis, 0, pitch)
    lay_out_side(sources[1], targets[1], counts[1] * parts, axis, axis.offset, pitch)
    lay_out_side(sources[2], targets[2], counts[2] * parts, axis, 0, pitch)


@compiled
def origins(pixels: int, offset: int, reach: int, around: bool) -> Array:
    """For each position on a periodic axis, return the position of its original. In a
    halo, this is the pixel that the halo copies. Elsewhere,
    it is the position itself."""
    indices = np.zeros(length(pixels, reach, around), np.int64)
    before = pixels - offset
    second = pixels - offset + 3 * reach
    for slot in range(indices.shape[0]):
        pixel = slot - reach if slot < before + 2 * reach else slot - second + before
        indices[slot] = place(pixel % pixels, pixels, offset, reach, around)
    return indices


@compiled
def halos(deep: Array, down: Array, across: Array) -> Array:
    """Return the flat indices of all halo positions, and of the positions that they
    copy, as an array [2, copy].

    `deep`, `down` and `across` are the results of `origins` for the three axes.
    """
    planes = deep.shape[0]
    rows = down.shape[0]
    columns = across.shape[0]
    copies = np.zeros((2, planes * rows * columns), np.int64)
    count = 0
    for z in range(planes):
        for y in range(rows):
            for x in range(columns):
                if deep[z] != z or down[y] != y or across[x] != x:
                    copies[0, count] = (z * rows + y) * columns + x
                    copies[1, count] = (deep[z] * rows + down[y]) * columns + across[x]
                    count += 1
    return copies[:, :count].copy()


# --- Transfers between a level and a coarser one


@compiled
def row_start(image: BandImage, z: int, y: int) -> Any:
    """Return the position in a band at which row y of plane z begins."""
    rows = length(image.sizes[1], image.reach[1], image.around)
    stride = length(image.sizes[2], image.reach[2], image.around)
    deep = place(z, image.sizes[0], image.offset[0], image.reach[0], image.around)
    down = place(y, image.sizes[1], image.offset[1], image.reach[1], image.around)
    return image.margin + (deep * rows + down) * stride


@compiled
def fill_band(source: Array, start: int, target: Array, image: BandImage) -> None:
    """Fill a band with the pixels source[start:], and its gaps with zeros."""
    sizes = image.sizes
    reach = image.reach
    offset = image.offset
    around = image.around
    for j in range(np.uintp(target.shape[0])):
        target[j] = 0
    before = sizes[2] - offset[2]
    first = place(0, sizes[2], offset[2], reach[2], around)
    # An axis of n pixels at offset o has two pieces (see above `length`). The second one
    # begins with pixel n − o. Its pixel x is at position second + x.
    second = place(before, sizes[2], offset[2], reach[2], around) - before
    for z in range(sizes[0]):
        for y in range(sizes[1]):
            here = row_start(image, z, y)
            pixel = start + (z * sizes[1] + y) * sizes[2]
            one = np.uintp(here + first)
            two = np.uintp(here + second)
            other = np.uintp(pixel)
            for x in range(np.uintp(before)):
                target[one + x] = source[other + x]
            for x in range(np.uintp(before), np.uintp(sizes[2])):
                target[two + x] = source[other + x]


@compiled
def add_to_coarse(
    band: KernelBand,
    coarse: KernelBand,
    image: BandImage,
    transfer: LevelTransfer,
    departure: int,
    ways: Array,
) -> None:
    """Add the kernels at the pixels of a band to coarse bands. In the array of coarse
    bands, pixel (z, y, x) has the index slot_z + slot_y + slot_x.

    Skip pixels with a negative slot. `ways` is scratch space for the positions of a row
    in the band and in the coarse bands."""
    sizes = image.sizes
    reach = image.reach
    offset = image.offset
    around = image.around
    K = band.K
    theta = band.theta
    coarse_K = coarse.K
    coarse_theta = coarse.theta
    slots = transfer.slots
    share = transfer.shares[departure]
    at = image.at
    count = 0
    for x in transfer.order[departure]:
        if slots[2][departure, at[2], x] >= 0:
            ways[0, count] = place(x, sizes[2], offset[2], reach[2], around)
            ways[1, count] = slots[2][departure, at[2], x]
            count += 1
    for z in range(sizes[0]):
        for y in range(sizes[1]):
            here = row_start(image, z, y)
            a = slots[0][departure, at[0], z]
            b = slots[1][departure, at[1], y]
            if a >= 0 and b >= 0:
                start = np.uintp(here)
                goal = np.uintp(a + b)
                for k in range(np.uintp(count)):
                    one = start + np.uintp(ways[0, k])
                    two = goal + np.uintp(ways[1, k])
                    coarse_K[two] += share * K[one]
                    coarse_theta[two] += share * theta[one]


# --- One level: one band for each offset and pair of images
#
# For each offset, the fields of each image are copied into a band,
# one axis after the other.


@compiled
def images(
    program: CompiledProgram,
    sides: ImageSides,
    grid: ImageGrid,
    offsets: Arrays,
    transfer: LevelTransfer,
    sums: Array,
) -> None:
    """Apply a level to all pairs of images at all offsets.

    Average the registers `transfer.departing` into `transfer.target`. If there are
    none, add the sums over the pixels of register 0 to
    `sums`, [kernel, left, right]."""
    sizes = grid.sizes
    reach = grid.reach
    around = grid.around
    left = sides.left
    right = sides.right
    fields = left.shape[1]
    stride = length(sizes[2], reach[2], around)
    plane = length(sizes[1], reach[1], around) * stride
    size = padded(length(sizes[0], reach[0], around) * plane)
    margin = padded(reach[0] * plane + reach[1] * stride + reach[2])
    shape = BandShape(margin, size, stride, plane)
    counts = (left.shape[0] * fields, right.shape[0] * fields, 1)
    # Lay out columns, then rows of columns (sheets), then planes.
    mask = np.ones(sizes[0] * sizes[1] * sizes[2], left.dtype)
    pixels = (left.reshape(left.size), right.reshape(right.size), mask)
    lines = empty(counts, sizes[0] * sizes[1] * stride, left)
    bands = empty(counts, size, left)
    # with one plane, a sheet is the whole band
    is_flat = sizes[0] == 1 and reach[0] == 0
    sheets, pitch = (
        (bands, size) if is_flat else (empty(counts, sizes[0] * plane, left), plane)
    )
    work = np.zeros((2 * program.registers + 4, margin + size + margin), left.dtype)
    halo = np.zeros((2, 0), np.int64)
    for k2 in range(offsets[2].shape[0]):
        o2 = offsets[2][k2]
        columns = BandAxis(sizes[2], 1, o2, reach[2], around)
        lay_out(pixels, lines, counts, sizes[0] * sizes[1], columns, stride)
        for k1 in range(offsets[1].shape[0]):
            o1 = offsets[1][k1]
            rows = BandAxis(sizes[1], stride, o1, reach[1], around)
            lay_out(lines, sheets, counts, sizes[0], rows, pitch)
            for k0 in range(offsets[0].shape[0]):
                o0 = offsets[0][k0]
                if not is_flat:
                    planes = BandAxis(sizes[0], plane, o0, reach[0], around)
                    lay_out(sheets, bands, counts, 1, planes, size)
                if around:
                    halo = halos(
                        origins(sizes[0], o0, reach[0], around),
                        origins(sizes[1], o1, reach[1], around),
                        origins(sizes[2], o2, reach[2], around),
                    )
                gaps = BandGaps(bands[2], halo)
                layout = BandLayout(
                    bands[0], bands[1], gaps, fields, sides.channels, sides.same
                )
                image = BandImage(
                    sizes, reach, around, (o0, o1, o2), (k0, k1, k2), margin
                )
                number = (k0 * offsets[1].shape[0] + k1) * offsets[2].shape[0] + k2
                first_pixel = number * sizes[0] * sizes[1] * sizes[2]
                at_offset(
                    program, layout, work, shape, image, first_pixel, transfer, sums
                )


@compiled
def at_offset(
    program: CompiledProgram,
    layout: BandLayout,
    work: Array,
    shape: BandShape,
    image: BandImage,
    first_pixel: int,
    transfer: LevelTransfer,
    sums: Array,
) -> None:
    """Apply a level to all pairs of images at one offset.

    `first_pixel` is the index in `transfer.source` where the pixels
    of this offset begin."""
    # For the loop over pairs, take views without reference counts (see `lent`).
    layout = lent(layout)
    left = layout.left
    right = layout.right
    gaps = layout.gaps
    work = lent(work)
    sums = lent(sums)
    transfer = lent(transfer)
    source = transfer.source
    target = transfer.target
    arriving = transfer.arriving
    departing = transfer.departing
    margin = shape.margin
    size = shape.size
    fields = layout.fields
    channels = layout.channels
    same = layout.same
    o0, o1, o2 = image.offset
    no_numbers = np.zeros(0, work.dtype)
    ways = np.zeros((2, image.sizes[2]), np.int64)
    for i in range(sums.shape[1]):
        for j in range(i if same else 0, sums.shape[2]):
            first = i * fields * size
            second = j * fields * size
            # K and Θ come from the finer level, or from the inputs:
            # K = mean x x′, Θ = 0.
            for k in range(arriving.shape[0]):
                fill_band(source[k, 0, i, j], first_pixel, work[2 * arriving[k]], image)
                fill_band(
                    source[k, 1, i, j], first_pixel, work[2 * arriving[k] + 1], image
                )
            if arriving.shape[0] == 0:
                multiply_inputs(layout, first, second, work[0], shape)
                work[1, :] = 0
            # an example is paired with itself at offset 0, so every correlation is 1
            itself = same and i == j and o0 == 0 and o1 == 0 and o2 == 0
            pair_fields = PairFields(
                left,
                right,
                first + channels * size,
                second + channels * size,
                size,
                size,
                program.weights.dtype.type(2) if itself else program.equal,
                no_numbers,
            )
            apply_operations(program, work, shape, pair_fields, gaps)
            # compute averages for the next level, or the sum over pixels
            for k in range(departing.shape[0]):
                band = KernelBand(work[2 * departing[k]], work[2 * departing[k] + 1])
                coarse = KernelBand(target[k, 0, i, j], target[k, 1, i, j])
                add_to_coarse(band, coarse, image, transfer, k, ways)
            if departing.shape[0] == 0:
                sums[0, i, j] += band_total(work[0], margin, size)
                sums[1, i, j] += band_total(work[1], margin, size)


@compiled
def empty(counts: Three, size: int, like: Array) -> Arrays:
    """Return zero buffers for the fields of left images, of right images,
    and for the mask."""
    dtype = like.dtype
    return (
        np.zeros(counts[0] * size, dtype),
        np.zeros(counts[1] * size, dtype),
        np.zeros(counts[2] * size, dtype),
    )


@compiled
def multiply_inputs(
    layout: BandLayout, first: int, second: int, target: Array, shape: BandShape
) -> None:
    """Compute the mean over channels of the products x x′ of the inputs, for the left
    image whose fields begin at `first`, and the right image whose fields begin at
    `second`."""
    left = layout.left
    right = layout.right
    start = np.uintp(shape.margin)
    count = np.uintp(shape.size)
    share = target.dtype.type(1) / target.dtype.type(layout.channels)
    a = np.uintp(first)
    b = np.uintp(second)
    for j in range(count):
        target[j + start] = share * left[a + j] * right[b + j]
    for channel in range(1, layout.channels):
        a = np.uintp(first + channel * shape.size)
        b = np.uintp(second + channel * shape.size)
        for j in range(count):
            target[j + start] += share * left[a + j] * right[b + j]
