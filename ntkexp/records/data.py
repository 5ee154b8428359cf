"""data.npz, the examples of a run, and trajectory.bin, rows of numbers that are each written once."""

from __future__ import annotations

import io
import os
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from shutil import disk_usage
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ntkexp.mistake import Mistake, NoPlace
from ntkexp.records.array_schema import read_headers
from ntkexp.records.atomic import WIDTH, Damaged, seal, write_atomically

# --- data.npz: the examples of a run. For each split s of train, probe and test:
#
#     <s>_shown    as a person looks at them    <s>_inputs   as the network gets them
#     <s>_target   class labels, or values      <s>_targets  as the loss compares them, [example, out]
#     <s>_index    which examples of the source these are
#     <s>_phase    in which phase they are learned, counted from 1, where there are phases; `phases` are their names
#
# and `classes`, their names: none for regression. `phase_classes`, [phase, class], is what each phase calls them,
# where phases share the outputs. `out_name`, [out], is what outputs are called, where a measure takes their place.


OUT_NAME = "out_name"


def write_data(path: Path, arrays: Mapping[str, NDArray[np.generic]]) -> None:
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **arrays)
    write_atomically(path, buffer.getvalue())


def read_data(path: Path) -> dict[str, NDArray[np.generic]]:
    """Read all arrays of the file; one that would run code on reading is refused."""
    read_headers(
        path
    )  # before anything is read: an array may say that it is larger than the memory
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except (
        OSError,
        ValueError,
        EOFError,
        TypeError,
        KeyError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        raise Mistake(f"{path} is missing or damaged: it is not a file of arrays") from error


# --- trajectory.bin: rows of numbers of one length, each written once, in a file whose room is taken before the
# first.
#
# Behind each row stands its seal: of the run, of its place, of its numbers. A row is looked at when it is read.
#
# The room is taken at the start, so that a disk that is too small is found out before hours of training.


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
        return self.rows * self.row_bytes

    @property
    def row_bytes(self) -> int:
        """What a row takes, its seal included."""
        return self.size * np.dtype(self.kind).itemsize + WIDTH

    def allocate(self) -> None:
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
        with self.path.open("r+b") as file:
            content = np.ascontiguousarray(numbers, dtype=self.kind)
            file.seek(row * self.row_bytes)
            file.write(content.data)
            file.write(self.seal(row, content.data))

    def read(self, row: int) -> NDArray[Any]:
        content = bytearray(self.row_bytes)
        with self.path.open("rb") as file:
            file.seek(row * self.row_bytes)
            file.readinto(content)
        numbers = memoryview(content)[:-WIDTH]
        if self.seal(row, numbers) != content[-WIDTH:]:
            raise Damaged(f"{self.path} is damaged at step {row}")
        return np.frombuffer(numbers, self.kind)

    def seal(self, row: int, numbers: memoryview) -> bytes:
        return seal(numbers, f"{self.of} {row}")

    def secure(self) -> None:
        """Rows that were written survive a power cut."""
        with self.path.open("r+b") as file:
            os.fsync(file.fileno())
