"""Numbers that are too many for the memory lie in a file, and are looked at a few rows at a time.

Such a tensor is used like any other: the system reads what is looked at, and writes what was changed. What `places` and
`blocks` go through is put back after each turn, so that no more than a few rows take memory at any time. The file has
no name: it is gone with the process, however that ends.

>>> [place for place in places(torch.zeros(5, 2))]  # a tensor in memory is one block
[slice(0, 5, None)]
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from shutil import disk_usage
from tempfile import NamedTemporaryFile
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ntkexp.mistake import NoPlace

AT_ONCE = 32_000_000  # bytes
LIBRARY = ctypes.CDLL(None)
DONT_NEED = 4  # of madvise: a page of a shared file is read again from there


def zeros_on_disk(folder: Path, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros in a file of this folder, which need no memory; the room on the disk is taken at once."""
    count, free = prod(shape), disk_usage(folder).free
    if free < (room := count * dtype.itemsize):
        raise NoPlace(
            f"contributions take {room / 1e9:.2g} GB and {folder} has {free / 1e9:.2g} GB free; raise memory_gb, lower "
            "data.train, data.probe or data.test, or choose another place"
        )
    with NamedTemporaryFile(dir=folder, prefix=".sums-") as file:
        os.posix_fallocate(file.fileno(), 0, room)
        return torch.from_file(file.name, shared=True, size=count, dtype=dtype).view(*shape)


def is_on_disk(numbers: Tensor) -> bool:
    """Whether a tensor, or what it is a part of, lies in a file."""
    return numbers.device.type == "cpu" and numbers.untyped_storage().filename is not None


def put_back(numbers: Tensor) -> None:
    """Let go of the memory that was taken to look at a tensor in a file, or at a part of one."""
    if is_on_disk(numbers):
        storage = numbers.untyped_storage()
        LIBRARY.madvise(ctypes.c_void_p(storage.data_ptr()), ctypes.c_size_t(storage.nbytes()), DONT_NEED)


def places(numbers: Tensor) -> Iterator[slice]:
    """Where blocks of rows lie, one after the other: all rows at once, or few at a time of those in a file."""
    count = len(numbers)
    step = max(1, AT_ONCE // max(1, numbers[:1].nbytes)) if is_on_disk(numbers) else max(1, count)
    for start in range(0, max(1, count), step):
        yield slice(start, min(start + step, count))
        put_back(numbers)


def blocks(numbers: Tensor) -> Iterator[Tensor]:
    """Look at blocks of rows, one after the other."""
    return (numbers[place] for place in places(numbers))


def summed(numbers: Tensor) -> Tensor:
    """Add up the last axis."""
    return torch.cat([block.sum(-1) for block in blocks(numbers)])


def take(numbers: Tensor, others: Tensor) -> None:
    """Copy other numbers into a tensor."""
    for place in places(numbers):
        numbers[place].copy_(others[place])


@dataclass(frozen=True)
class RowsOnDisk:
    """A tensor in a file is an array of numpy for whoever looks at a few rows."""

    numbers: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """The length along every axis."""
        return tuple(self.numbers.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The kind of its numbers."""
        return self.numbers[:0].numpy().dtype

    def __getitem__(self, rows: slice) -> NDArray[Any]:
        """Look at some rows."""
        found = self.numbers[rows].numpy().copy()
        put_back(self.numbers)
        return found
