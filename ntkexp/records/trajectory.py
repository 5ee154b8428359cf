"""trajectory.bin: rows of numbers of one length, each written once, in a file whose room is taken before the first.

Behind each row stands its seal: of the run, of its place, of its numbers. A row is looked at when it is read.

The room is taken at the start, so that a disk that is too small is found out before hours of training.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from shutil import disk_usage
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ntkexp.mistake import NoPlace
from ntkexp.records.seal import WIDTH, Damaged, seal


@dataclass(frozen=True)
class Trajectory:
    """`rows` rows of `size` numbers of a kind such as `float64`, that belong to the run `of`."""

    path: Path
    rows: int
    size: int
    kind: str
    of: str = ""

    @property
    def room(self) -> int:
        """The bytes that the file takes on the disk."""
        return self.rows * self.row_bytes

    @property
    def row_bytes(self) -> int:
        """What a row takes, its seal included."""
        return self.size * np.dtype(self.kind).itemsize + WIDTH

    def take_room(self) -> None:
        """Make the file as long as it will be; what is in it already stays."""
        there = self.path.stat().st_size if self.path.is_file() else 0
        free = disk_usage(self.path.parent).free + there
        if free < self.room:
            raise NoPlace(
                f"the trajectory takes {self.room / 1e9:.2g} GB and {self.path.parent} has {free / 1e9:.2g} GB free; "
                "lower steps or model.width, or choose another place"
            )
        with self.path.open("ab") as file:
            os.posix_fallocate(file.fileno(), 0, self.room)

    def write(self, row: int, numbers: NDArray[Any]) -> None:
        """Put a row into its place."""
        with self.path.open("r+b") as file:
            content = np.ascontiguousarray(numbers, dtype=self.kind)
            file.seek(row * self.row_bytes)
            file.write(content.data)
            file.write(self.seal(row, content.data))

    def read(self, row: int) -> NDArray[Any]:
        """A row that was written."""
        content = bytearray(self.row_bytes)
        with self.path.open("rb") as file:
            file.seek(row * self.row_bytes)
            file.readinto(content)
        numbers = memoryview(content)[:-WIDTH]
        if self.seal(row, numbers) != content[-WIDTH:]:
            raise Damaged(f"{self.path} is damaged at step {row}")
        return np.frombuffer(numbers, self.kind)

    def seal(self, row: int, numbers: memoryview) -> bytes:
        """Seal a row in its place."""
        return seal(numbers, f"{self.of} {row}")

    def secure(self) -> None:
        """Rows that were written survive a power cut."""
        with self.path.open("r+b") as file:
            os.fsync(file.fileno())
