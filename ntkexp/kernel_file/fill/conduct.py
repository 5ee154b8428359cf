"""Workers of an engine complete a kernel file; who conducts them only counts the marks in it.

A worker that is lost costs the tile it was at. What it left is given to others, for as long as that gets any further.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path

from ntkexp.engine.base import AbstractEngine, Ended, Task
from ntkexp.engine.fault import Unfinished
from ntkexp.kernel_file.fill.crew import AbstractCrew, Tile
from ntkexp.kernel_file.fill.tile_job import TileJob
from ntkexp.progress import AbstractProgress
from ntkexp.records.kernel_file.store import KernelMatrix

ENOUGH = 300.0  # seconds of a task, beside which it matters little that a worker draws data and network first
LATE, PAUSE = 60.0, 0.2  # seconds that a network's file system may take to show a file, and between two looks at it


@dataclass(frozen=True)
class EngineCrew(AbstractCrew):
    """The workers of an engine, each of which does `job` with tiles of its own."""

    engine: AbstractEngine
    job: TileJob
    seconds: float
    """What a tile takes on one core, about."""

    def complete(self, matrix: KernelMatrix, tiles: Sequence[Tile], progress: AbstractProgress) -> Generator[int]:
        self.engine.refuse_longer(self.seconds)
        left = list(tiles)
        while left:
            lost = ""
            with closing(self.engine.perform(self.tasks(matrix, left))) as events:
                for event in events:
                    if isinstance(event, Ended):
                        lost = lost_by(event, matrix.path, progress) or lost
                    yield len(tiles) - len(matrix.unmarked(tiles))
            before, left = left, left_of(matrix, left, 0.0 if lost else LATE)
            if len(left) == len(before):
                reason = lost or "what they wrote is not to be seen here"
                raise Unfinished(f"{matrix.path}: no worker finished a tile: {reason}; the same command goes on")

    def tasks(self, matrix: KernelMatrix, tiles: Sequence[Tile]) -> Iterator[Task]:
        """Cut tiles into tasks, in their order."""
        for number, part in enumerate(parts(tiles, self.seconds, self.engine.workers)):
            name, home = f"tiles-{matrix.facts['identity'][:12]}-{number}", str(Path.cwd())
            yield Task(name, replace(self.job, tiles=tuple(part)), home, str(matrix.path.parent))


def left_of(matrix: KernelMatrix, tiles: Sequence[Tile], patience: float) -> list[Tile]:
    """Find the tiles without a mark; that there are some is believed after so many seconds."""
    end = time.monotonic() + patience
    while True:
        left = matrix.unmarked(tiles)
        if not left or time.monotonic() >= end:
            return left
        time.sleep(PAUSE)


def lost_by(event: Ended, path: Path, progress: AbstractProgress) -> str:
    """Say why a worker was lost; what others would meet as well is raised."""
    if event.how in {"failed", "broken"}:
        raise Unfinished(f"{path}: {event.reason}")
    if event.how not in {"killed", "stopped"}:
        return ""
    reason = event.reason or "it was asked to stop"
    progress.warn(f"{path.name}: a worker is lost: {reason}; others go on")
    return reason


def parts(tiles: Sequence[Tile], seconds: float, workers: int) -> list[Sequence[Tile]]:
    """Cut tiles into parts that take long enough, and no fewer than there are workers.

    >>> [len(part) for part in parts([(k, 0) for k in range(10)], seconds=1.0, workers=3)]
    [3, 3, 4]
    >>> len(parts([(k, 0) for k in range(10)], seconds=100.0, workers=3))
    4
    """
    count = min(len(tiles), max(workers, ceil(len(tiles) * seconds / ENOUGH)))
    return [tiles[k * len(tiles) // count : (k + 1) * len(tiles) // count] for k in range(count)]
