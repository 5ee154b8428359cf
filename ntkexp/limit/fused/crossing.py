"""Tiles go from a level to a coarser one: as sums over the pixels of coarse ones, and without the gaps of a tile."""

from __future__ import annotations

from typing import Any

import numpy as np

from ntkexp.limit.fused.jit import compiled
from ntkexp.limit.fused.layout import length, place

Array = np.ndarray[Any, Any]
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
    second = place(before, sizes[2], offset[2], reach[2], around) - before  # of pixels that are there, if o > 0
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
def departed(
    K: Array,
    theta: Array,
    margin: int,
    image: Image,
    share: Any,
    slots: Arrays,
    order: Array,
    departure: int,
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
    for x in order[departure]:
        if slots[2][departure, at[2], x] >= 0:
            ways[0, count] = place(x, sizes[2], offset[2], reach[2], around)
            ways[1, count] = slots[2][departure, at[2], x]
            count += 1
    for z in range(sizes[0]):
        deep = place(z, sizes[0], offset[0], reach[0], around) * length(sizes[1], reach[1], around)
        for y in range(sizes[1]):
            here = margin + (deep + place(y, sizes[1], offset[1], reach[1], around)) * stride
            a, b = slots[0][departure, at[0], z], slots[1][departure, at[1], y]
            if a >= 0 and b >= 0:
                start, goal = np.uintp(here), np.uintp(a + b)
                for k in range(np.uintp(count)):
                    one, two = start + np.uintp(ways[0, k]), goal + np.uintp(ways[1, k])
                    coarse_K[two] += share * K[one]
                    coarse_theta[two] += share * theta[one]
