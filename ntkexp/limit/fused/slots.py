"""Where the pixels of a tile go that departs for a coarser image, axis by axis.

Of the offset o, the pixels p and p + o belong to coarse pixels p′ and q′, or to none, and go to p′ of the tile whose
offset is q′ − p′. A slot says both, tiles being one after the other; those of three axes add up.

>>> slots(Coarse.windows(4, 2), 4, range(4), range(2), tile=10, unit=1).tolist()
[[0, 0, 1, 1], [0, 10, 1, 11], [10, 10, 11, 11], [10, 0, 11, 1]]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from ntkexp.covariance.coarse import Coarse
from ntkexp.covariance.pairs import Pairs
from ntkexp.limit.fused.levels import Level

Array = np.ndarray[Any, Any]
NOWHERE = -1


@dataclass(frozen=True)
class Departures:
    """The registers that depart, the share of a pixel in the mean that it becomes part of, and its slots."""

    registers: Array
    shares: Array
    slots: tuple[Array, ...]  # along each axis, [departure, offset, pixel], or nowhere
    order: Array  # of the pixels in a row, [departure, pixel]


def departures(level: Level, after: Pairs, dtype: Any) -> Departures:
    """What departs from a level, for these pairs of coarse pixels."""
    registers = np.array([step.register for step in level.departures], np.int64)
    shares = [1 / prod(len(one.members[0]) ** 2 for one in step.coarse) for step in level.departures]
    slots = tuple(along(level, after, axis) for axis in range(3))
    order = np.array([apart(step.coarse[2], level.sizes[2]) for step in level.departures], np.int64)
    return Departures(registers, np.array(shares, dtype), slots, order.reshape(-1, level.sizes[2]))


def apart(coarse: Coarse, pixels: int) -> list[int]:
    """All pixels: the first members of coarse pixels, then the second, and so on.

    >>> apart(Coarse.windows(4, 2), 4)
    [0, 2, 1, 3]
    """
    rank = {p: k for members in coarse.members for k, p in enumerate(members)}
    return sorted(range(pixels), key=lambda p: (rank.get(p, 0), p))


def along(level: Level, after: Pairs, axis: int) -> Array:
    """The slots of all that departs, along an axis."""
    fine, wanted = level.pairs.offsets[axis], after.offsets[axis]
    tile = prod(after.pixels) * prod(len(offsets) for offsets in after.offsets[axis + 1 :])
    unit = prod(after.pixels[axis + 1 :])
    found = np.zeros((len(level.departures), len(fine), level.sizes[axis]), np.int64)
    for k, step in enumerate(level.departures):
        found[k] = slots(step.coarse[axis], level.sizes[axis], fine, wanted, tile, unit)
    return found


def slots(coarse: Coarse, pixels: int, fine: Sequence[int], wanted: Sequence[int], tile: int, unit: int) -> Array:
    """The slots of all pixels, [offset, pixel], where a tile takes so many numbers, and a pixel of this axis a unit."""
    owner = np.full(pixels, NOWHERE)
    for number, members in enumerate(coarse.members):
        owner[list(members)] = number
    place = np.full(len(coarse.members), NOWHERE)
    place[list(wanted)] = np.arange(len(wanted))
    second = owner[(np.arange(pixels) + np.array(fine)[:, None]) % pixels]
    number = place[(second - owner) % len(place)]
    there = (owner != NOWHERE) & (second != NOWHERE) & (number != NOWHERE)
    return np.where(there, number * tile + owner * unit, NOWHERE)
