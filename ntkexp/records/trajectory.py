"""trajectory.bin: rows of numbers of one length, each written once, in a file whose room is taken before the first.

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

from ntkexp.mistake import Mistake


@dataclass(frozen=True)
class Trajectory:
    """`rows` rows of `size` numbers of a kind such as `float64`."""

    path: Path
    rows: int
    size: int
    kind: str

    @property
    def bytes(self) -> int:
        """What the file takes on the disk."""
        return self.rows * self.row_bytes

    @property
    def row_bytes(self) -> int:
        """What a row takes."""
        return self.size * np.dtype(self.kind).itemsize

    def take_room(self) -> None:
        """Make the file as long as it will be; what is in it already stays."""
        there = self.path.stat().st_size if self.path.is_file() else 0
        free = disk_usage(self.path.parent).free + there
        if free < self.bytes:
            raise Mistake(
                f"the trajectory takes {self.bytes / 1e9:.2g} GB and {self.path.parent} has {free / 1e9:.2g} GB free; "
                "choose another place with --out, or lower steps or model.width"
            )
        with self.path.open("ab") as file:
            os.posix_fallocate(file.fileno(), 0, self.bytes)

    def write(self, row: int, numbers: NDArray[Any]) -> None:
        """Put a row into its place."""
        with self.path.open("r+b") as file:
            file.seek(row * self.row_bytes)
            file.write(np.ascontiguousarray(numbers, dtype=self.kind).data)

    def read(self, row: int) -> NDArray[Any]:
        """A row that was written."""
        return np.fromfile(self.path, self.kind, self.size, offset=row * self.row_bytes)

    def secure(self) -> None:
        """Rows that were written survive a power cut."""
        with self.path.open("r+b") as file:
            os.fsync(file.fileno())
