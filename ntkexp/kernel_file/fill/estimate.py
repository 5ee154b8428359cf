"""What is left to do of a kernel file, and what it will take about, from a small part of a tile that is timed.

core seconds = pairs left · seconds of a pair
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from ntkexp.kernel_file.fill.filler import AbstractFiller
from ntkexp.kernel_file.fill.subject import Subject
from ntkexp.kernel_file.fill.tile import arrays
from ntkexp.mistake import Mistake
from ntkexp.records.kernel_file.layout import Layout
from ntkexp.records.kernel_file.store import KernelMatrix, open_matrix
from ntkexp.records.kernel_file.tiles import Tiling, side_for
from ntkexp.text import duration

LONG = 10.0  # core seconds of which nobody has to be told
TIMED = 0.5  # seconds that say how long others take
LARGEST = 32  # points on each side of what is timed


@dataclass(frozen=True)
class WorkLeft:
    """Tiles with their pairs of points, the core seconds that they take, and the bytes of the whole file."""

    tiles: int
    pairs: int
    seconds: float
    bytes: int

    @property
    def each(self) -> float:
        """The core seconds of a tile."""
        return self.seconds / max(1, self.tiles)

    def elapsed(self, workers: int) -> float:
        """The seconds until the end, with so many workers of one core each."""
        return max(self.seconds / workers, self.each)

    def sentence(self, workers: int) -> str:
        """Say it in a line.

        >>> WorkLeft(1715, 1_500_000_000, 3.6e7, 24_000_000_000).sentence(100)
        '1,715 tiles, about 10,000 core hours: 4 days with 100 workers of a core each; 24 GB on the disk'
        """
        hours = self.seconds / 3600
        cores = f"{float(f'{hours:.2g}'):,.0f} core hours" if hours >= 10 else f"{duration(self.seconds)} of one core"
        crew = f"{workers} workers of a core each" if workers > 1 else "one worker"
        ahead = f"about {cores}: {duration(self.elapsed(workers))} with {crew}"
        return f"{self.tiles:,} tiles, {ahead}; {self.bytes / 1e9:.2g} GB on the disk"


def layout_of(subject: Subject, filler: AbstractFiller) -> Layout:
    """The arrays of a file that is not begun."""
    points, train = len(subject.inputs), len(subject.data.train.inputs)
    tiling = Tiling(points, train, side_for(train, filler.seconds))
    return Layout(filler.names, tiling, filler.outputs, subject.experiment.dtype)


def estimate(path: Path, subject: Subject, filler: AbstractFiller, force: bool) -> WorkLeft:
    """Estimate what is left of this file: its first part is timed, unless shapes say that it is little."""
    begun = None if force else matrix_of(path, subject)
    layout = begun.layout if begun else layout_of(subject, filler)
    left = begun.unmarked(layout.tiling.todo) if begun else layout.tiling.todo
    pairs = sum(layout.tiling.pairs(*tile) for tile in left)
    each = filler.seconds if filler.seconds * pairs < LONG / 10 else max(filler.seconds, timed(subject, filler))
    return WorkLeft(len(left), pairs, pairs * each, layout.bytes)


def matrix_of(path: Path, subject: Subject) -> KernelMatrix | None:
    """Open the file, if it was begun and is of this subject."""
    try:
        matrix = open_matrix(path)
    except Mistake:
        return None
    return matrix if matrix.facts["identity"] == subject.identity else None


def timed(subject: Subject, filler: AbstractFiller) -> float:
    """Time pairs of points, twice as many on each side until it takes a while; once before, to load what it needs."""
    train, side = subject.inputs[: len(subject.data.train.inputs)], 2
    while True:
        points = train[:side]
        filler.between(points, points)
        start = time.process_time()
        arrays(filler.between(points, points))  # fetched from a device, which would not have waited
        spent = time.process_time() - start
        if spent >= TIMED or 2 * side > min(LARGEST, len(train)):
            return spent / len(points) ** 2
        side *= 2
