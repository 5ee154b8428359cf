"""Where the pixels of an image lie in a tile, axis by axis, and what lies between them.

Of the offset o, the pixel p of the first image meets (p + o) mod n of the second. Along an axis the n pixels come in
two pieces, those before p + o goes around and those after, each followed by a gap as wide as a window reaches: nothing
leaks from one side of an image to the other. If images go around, gaps are wide enough for the pixels that continue
each piece at both ends, its halo:

    p₀ … p₍ₙ₋ₒ₋₁₎ gap p₍ₙ₋ₒ₎ … p₍ₙ₋₁₎ gap
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ntkexp.limit.fused.jit import compiled
from ntkexp.limit.fused.loops import cleaned, moved

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
    """Units of numbers, those of `count` images of so many pixels, along one axis of tiles that are `pitch` apart.

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
    one axis; each of `counts` has so many parts.
    """
    stacked(sources[0], targets[0], counts[0] * parts, pixels, unit, offset, 0, reach, around, pitch)
    stacked(sources[1], targets[1], counts[1] * parts, pixels, unit, offset, offset, reach, around, pitch)
    stacked(sources[2], targets[2], counts[2] * parts, pixels, unit, offset, 0, reach, around, pitch)


@compiled
def origins(pixels: int, offset: int, reach: int, around: bool) -> Array:
    """Where on the axis that lies which each place of an image that goes around repeats."""
    found = np.zeros(length(pixels, reach, around), np.int64)
    before, second = pixels - offset, pixels - offset + 3 * reach
    for slot in range(found.shape[0]):
        pixel = slot - reach if slot < before + 2 * reach else slot - second + before
        found[slot] = place(pixel % pixels, pixels, offset, reach, around)
    return found


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
