"""The parts of a block: sub-blocks so small that what they need fits, and so many that every thread has some."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import isqrt
from typing import TypeVar

from ntkexp.limit.fused.tables import Tables
from ntkexp.limit.fused.vectors import PIECE
from ntkexp.limit.network import Side
from ntkexp.limit.torch_engine import cuts

SubBlock = tuple[slice, slice]
Result = TypeVar("Result")
IMAGES = 32
"""Images on each side of a sub-block: so many that laying them out costs little."""


def places(left: Side, right: Side, size: int, same: bool) -> list[SubBlock]:
    """The sub-blocks; where the sides are the same, those on and above the diagonal."""
    return [
        (row, column)
        for row in cuts(len(left.x), size)
        for column in cuts(len(right.x), size)
        if not same or column.start >= row.start
    ]


def long_places(strip: slice, columns: int, same: bool, threads: int) -> list[SubBlock]:
    """The sub-blocks of a strip of vectors, so many that every thread has some; where the sides are the same, the first
    ones of their rows begin on the diagonal.
    """
    rows = strip.stop - strip.start
    few = rows if threads == 1 else max(1, rows // (2 * threads))
    return [
        (slice(row, min(row + few, strip.stop)), slice(start, min(start + PIECE, columns)))
        for row in range(strip.start, strip.stop, few)
        for start in range(row if same else 0, columns, PIECE)
    ]


def laid_out(levels: Sequence[Tables], memory_gb: float) -> int:
    """How many images on each side of a sub-block there is room for, each laid out in three steps."""
    largest = max(table.left[0].nbytes for table in levels)
    return max(1, min(IMAGES, int(memory_gb * 1e9 / (6 * largest))))


def shared(left: Side, right: Side, size: int, threads: int) -> int:
    """The sides of sub-blocks so short that every thread has some."""
    return size if threads == 1 else max(1, min(size, isqrt(len(left.x) * len(right.x) // (2 * threads))))


def in_threads(
    work: Callable[[SubBlock], Result], parts: Sequence[SubBlock], threads: int, ahead: int
) -> Iterator[Result]:
    """The results of `work` on all parts, in order, so many of them at a time. What one thread would do is done here:
    starting it may take longer than a small part.
    """
    if min(threads, len(parts)) == 1:
        yield from map(work, parts)
        return
    with ThreadPoolExecutor(threads) as pool:
        for start in range(0, len(parts), ahead):
            yield from pool.map(work, parts[start : start + ahead])
