"""Loops over parts of arrays. Counters are unsigned: no index can wrap around, and processors take many at once."""

from __future__ import annotations

from typing import Any

import numpy as np

from ntkexp.limit.fused.jit import compiled

Array = np.ndarray[Any, Any]


@compiled
def summed(source: Array, target: Array, margin: int, size: int, reach: int, step: int) -> None:
    """The sums Σ over the neighbours at up to `reach` steps on both sides."""
    count, start = np.uintp(size), np.uintp(margin)
    if reach == 1:
        one = np.uintp(step)
        for j in range(count):
            i = j + start
            target[i] = source[i - one] + source[i] + source[i + one]
        return
    for j in range(count):
        target[j + start] = source[j + start]
    for away in range(1, reach + 1):
        far = np.uintp(away * step)
        for j in range(count):
            i = j + start
            target[i] += source[i - far] + source[i + far]


@compiled
def copied(source: Array, target: Array, margin: int, size: int) -> None:
    """One tile is copied: target ← source."""
    start = np.uintp(margin)
    for j in range(np.uintp(size)):
        target[j + start] = source[j + start]


@compiled
def added(source: Array, target: Array, margin: int, size: int) -> None:
    """One tile is added to another: target ← target + source."""
    start = np.uintp(margin)
    for j in range(np.uintp(size)):
        target[j + start] += source[j + start]


@compiled
def cleared(target: Array, inside: Array, margin: int, size: int) -> None:
    """A tile is set to zero outside the image."""
    start = np.uintp(margin)
    for j in range(np.uintp(size)):
        target[j + start] *= inside[j]


@compiled
def wrapped(target: Array, halo: Array, margin: int) -> None:
    """Pixels of a tile are repeated where a halo, [to or from, place], says."""
    start = np.uintp(margin)
    for j in range(np.uintp(halo.shape[1])):
        target[start + halo[0, j]] = target[start + halo[1, j]]


@compiled
def moved(source: Array, start: int, target: Array, end: int, count: int) -> None:
    """A piece of an array is copied into another array."""
    a, b = np.uintp(start), np.uintp(end)
    for j in range(np.uintp(count)):
        target[b + j] = source[a + j]


@compiled
def cleaned(target: Array, start: int, count: int) -> None:
    """A piece of an array is set to zero."""
    a = np.uintp(start)
    for j in range(np.uintp(count)):
        target[a + j] = 0


@compiled
def filled(target: Array, start: int, count: int, value: Any) -> None:
    """A piece of an array is set to a value."""
    a = np.uintp(start)
    for j in range(np.uintp(count)):
        target[a + j] = value


@compiled
def total(tile: Array, margin: int, size: int) -> Any:
    """The sum of a tile."""
    start, found = np.uintp(margin), tile.dtype.type(0)
    for j in range(np.uintp(size)):
        found += tile[j + start]
    return found
