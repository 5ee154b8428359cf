"""Tiles go from a level to a coarser one: as sums over the pixels of coarse ones, and without the gaps of a tile."""

from __future__ import annotations

from typing import Any

import numpy as np

from ntkexp.limit.fused.jit import compiled
from ntkexp.limit.fused.layout import length, place

Array = np.ndarray[Any, Any]
Three = tuple[int, int, int]
Arrays = tuple[Array, Array, Array]


@compiled
def arrived(
    source: Array, start: int, target: Array, margin: int, sizes: Three, reach: Three, offset: Three, around: bool
) -> None:
    """A tile of this offset from the pixels that begin at `start`, with zeros between its pieces."""
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
    tile: Array,
    margin: int,
    sizes: Three,
    reach: Three,
    offset: Three,
    around: bool,
    share: Any,
    slots: Arrays,
    departure: int,
    at: Three,
    target: Array,
) -> None:
    """Each pixel's share of a tile of this offset is added where the sum of its slots along the axes says; a pixel
    without a slot is left out.
    """
    stride, before = length(sizes[2], reach[2], around), sizes[2] - offset[2]
    first = place(0, sizes[2], offset[2], reach[2], around)
    second = place(before, sizes[2], offset[2], reach[2], around) - before
    across = slots[2][departure, at[2]]
    for z in range(sizes[0]):
        deep = place(z, sizes[0], offset[0], reach[0], around) * length(sizes[1], reach[1], around)
        for y in range(sizes[1]):
            here = margin + (deep + place(y, sizes[1], offset[1], reach[1], around)) * stride
            a, b = slots[0][departure, at[0], z], slots[1][departure, at[1], y]
            if a >= 0 and b >= 0:
                one, two = here + first, here + second
                for x in range(before):
                    if across[x] >= 0:
                        target[a + b + across[x]] += share * tile[one + x]
                for x in range(before, sizes[2]):
                    if across[x] >= 0:
                        target[a + b + across[x]] += share * tile[two + x]
