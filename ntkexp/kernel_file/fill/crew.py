"""Whoever completes a kernel file: threads of this process, or an engine (`ntkexp.kernel_file.fill.conduct`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass

from ntkexp.kernel_file.fill.filler import AbstractFiller
from ntkexp.kernel_file.fill.subject import Subject
from ntkexp.kernel_file.fill.tile import compute_tiles
from ntkexp.progress import AbstractProgress
from ntkexp.records.kernel_file.store import KernelMatrix

Tile = tuple[int, int]
"""Its row and its column."""


class AbstractCrew(ABC):
    """A crew computes tiles and writes them, each marked once it is written."""

    @abstractmethod
    def complete(self, matrix: KernelMatrix, tiles: Sequence[Tile], progress: AbstractProgress) -> Generator[int]:
        """Complete these tiles; how many of them are written is given from time to time."""


@dataclass(frozen=True)
class ThreadCrew(AbstractCrew):
    """Threads of this process, of which one writes."""

    subject: Subject
    filler: AbstractFiller
    workers: int

    def complete(self, matrix: KernelMatrix, tiles: Sequence[Tile], progress: AbstractProgress) -> Generator[int]:
        computed = compute_tiles(list(tiles), self.subject, self.filler, matrix.layout.tiling, self.workers)
        for count, each in enumerate(computed, 1):
            matrix.write(each.row, each.column, each.tile, each.own)
            yield count
