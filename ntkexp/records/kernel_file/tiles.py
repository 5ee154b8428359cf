"""A square-by-square plan for a kernel between points and training examples, which are the first of the points.

Tile (i, j) holds the points of block i and the training examples of block j. Among the training examples the kernel is
symmetric, so the tiles above the diagonal are the mirror images of those below it.

>>> tiling = Tiling(points=5, train=3, side=2)
>>> tiling.todo, tiling.mirrored(1, 0), tiling.mirrored(2, 0)
([(0, 0), (1, 0), (1, 1), (2, 0), (2, 1)], True, False)
"""

from __future__ import annotations

from dataclasses import dataclass

SMALLEST, LARGEST = 32, 1024
ACROSS, MOST_ACROSS = 32, 256
LONGEST = 300.0  # seconds of a tile by the least that a pair can take: an hour, where it takes ten times as long


@dataclass(frozen=True)
class Tiling:
    """Tiles of `side` points, fewer at the ends."""

    points: int
    train: int
    side: int

    @property
    def shape(self) -> tuple[int, int]:
        """How many tiles there are along points and along training examples."""
        return -(-self.points // self.side), -(-self.train // self.side)

    @property
    def todo(self) -> list[tuple[int, int]]:
        """The tiles that have to be computed."""
        rows, columns = self.shape
        return [(i, j) for i in range(rows) for j in range(min(i + 1, columns))]

    def rows(self, block: int) -> slice:
        """The points of a block."""
        return slice(block * self.side, min((block + 1) * self.side, self.points))

    def columns(self, block: int) -> slice:
        """The training examples of a block."""
        return slice(block * self.side, min((block + 1) * self.side, self.train))

    def pairs(self, row: int, column: int) -> int:
        """How many pairs of points meet of a tile: on the diagonal each once, elsewhere also points with themselves.

        >>> Tiling(points=5, train=3, side=2).pairs(0, 0), Tiling(points=5, train=3, side=2).pairs(2, 0)
        (3, 3)
        """
        rows, columns = self.rows(row), self.columns(column)
        count: int = rows.stop - rows.start
        if row == column:
            return count * (count + 1) // 2
        across: int = columns.stop - columns.start
        return count * (across + self.owns(row, column))

    def mirrored(self, row: int, column: int) -> bool:
        """Whether the tile has a mirror image."""
        return row != column and row < self.shape[1]

    def owns(self, row: int, column: int) -> bool:
        """Whether the points of the row are met with themselves along with this tile."""
        return row == column or (column == 0 and row >= self.shape[1])


def side_for(train: int, seconds: float) -> int:
    """A power of two of which about 32 cover the training examples: a kill costs a tile, and each is a file.

    Where a pair of points takes so many `seconds` that a kill would cost hours, up to 256 of them do.

    >>> [side_for(train, 1e-9) for train in (100, 2000, 50_000)]
    [32, 32, 1024]
    >>> [side_for(50_000, seconds) for seconds in (1e-3, 2e-3, 1.0)]
    [512, 256, 256]
    """
    side = SMALLEST
    while 2 * side <= min(LARGEST, train // ACROSS):
        side *= 2
    while side**2 * seconds > LONGEST and side // 2 >= max(SMALLEST, train / MOST_ACROSS):
        side //= 2
    return side
