"""data.npz, the examples of a run, and trajectory.bin, the recorded steps of a run."""

from __future__ import annotations

import io
import os
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ntkexp.capacity import require_disk
from ntkexp.mistake import Mistake
from ntkexp.records.array_schema import read_headers
from ntkexp.records.atomic import WIDTH, Damaged, seal, write_atomically

# --- data.npz: the examples of a run. For each split s of train, query and test:
#
#     <s>_shown       the examples as reports show them: pixels, tokens, features
#     <s>_inputs      the inputs of the network
#     <s>_target      class labels or values
#     <s>_targets     [example, out], the targets of the loss
#     <s>_index       the index of each example in the data source
#     <s>_phase       the phase of each example, counted from 1, if data come in phases
#
#     classes         the names of the classes; empty for regression
#     phases          the names of the phases
#     phase_classes   [phase, class], the names of the classes in each phase, if the phases share
#                     their outputs
#     out_name        [out], the names of the values that the measure returns for each
#                     query, if the run attributes a measure instead of the outputs


OUT_NAME = "out_name"


def write_data(path: Path, arrays: Mapping[str, NDArray[np.generic]]) -> None:
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **arrays)
    write_atomically(path, buffer.getvalue())


def read_data(path: Path) -> dict[str, NDArray[np.generic]]:
    """Read all arrays of the file.

    Raise if the file is damaged, or if reading it would run code.
    """
    # check the headers first: a damaged one may describe a huge array
    read_headers(path)
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
        raise Mistake(
            f"{path} is missing or damaged: it is not a file of arrays"
        ) from error


# --- trajectory.bin: rows of equal length. Each row is written once, and is followed by
# its seal.
#
# The seal covers the identity of the run, the index of the row, and its numbers. It is
# checked when the row is read. The file has its full size from the start. So an error
# about a disk that is too small comes before training.


@dataclass(frozen=True)
class Trajectory:
    """A file with `rows` rows of `size` numbers with the dtype `kind`.
    `identity` is the run's identity."""

    path: Path
    rows: int
    size: int
    kind: str
    identity: str = ""

    @property
    def total_bytes(self) -> int:
        return self.rows * self.row_bytes

    @property
    def row_bytes(self) -> int:
        """The bytes of a row, including the digest (seal) at its end."""
        return self.size * np.dtype(self.kind).itemsize + WIDTH

    def allocate(self) -> None:
        """Extend the file to its full size. Keep the rows that it already contains."""
        existing = self.path.stat().st_size if self.path.is_file() else 0
        remedy = "lower steps or model.width"
        require_disk(
            self.path.parent, self.total_bytes - existing, "trajectories", remedy
        )
        with self.path.open("ab") as file:
            os.posix_fallocate(file.fileno(), 0, self.total_bytes)

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
        return seal(numbers, f"{self.identity} {row}")

    def secure(self) -> None:
        """Force all rows to the disk, so that they survive a power cut."""
        with self.path.open("r+b") as file:
            os.fsync(file.fileno())
