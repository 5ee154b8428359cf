"""Arrays that exceed the memory: a file stores them, and a few rows are in memory at a time.

A tensor in a memory-mapped file works like any other tensor: the operating system reads and writes
its pages. `row_blocks` and `blocks` release the pages of a block before they go on to the next, so
only a few rows occupy memory at a time. They cut tensors in memory into the same blocks, so results
do not depend on where a tensor is stored. The file has no name and vanishes when the process ends,
even if the process is killed.

>>> [rows for rows in row_blocks(torch.zeros(5, 2))]  # a small tensor is one block
[slice(0, 5, None)]
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ROW_BLOCK_BYTES = 32_000_000
C_LIBRARY = ctypes.CDLL(None)
MADV_DONTNEED = 4
"""Advice of `madvise`: drop pages; the next access reads them from the file again."""


def zeros_on_disk(folder: Path, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return zeros in a file of this folder. The call reserves the disk space at once."""
    count = prod(shape)
    with NamedTemporaryFile(dir=folder, prefix=".sums-") as file:
        os.posix_fallocate(file.fileno(), 0, count * dtype.itemsize)
        return torch.from_file(file.name, shared=True, size=count, dtype=dtype).view(*shape)


def is_on_disk(numbers: Tensor) -> bool:
    """Return whether a tensor's storage is a file."""
    return numbers.device.type == "cpu" and numbers.untyped_storage().filename is not None


def release_pages(numbers: Tensor) -> None:
    """Release the memory of a file's pages that were read through this tensor or view."""
    if is_on_disk(numbers):
        storage = numbers.untyped_storage()
        C_LIBRARY.madvise(
            ctypes.c_void_p(storage.data_ptr()), ctypes.c_size_t(storage.nbytes()), MADV_DONTNEED
        )


def row_blocks(numbers: Tensor) -> Iterator[slice]:
    """Yield the slices of consecutive blocks of rows, and release the pages of each afterwards."""
    count = len(numbers)
    row_bytes = max(1, numbers[:1].nbytes)
    step = max(1, ROW_BLOCK_BYTES // row_bytes)
    for start in range(0, max(1, count), step):
        yield slice(start, min(start + step, count))
        release_pages(numbers)


def blocks(numbers: Tensor) -> Iterator[Tensor]:
    """Yield consecutive blocks of rows."""
    return (numbers[rows] for rows in row_blocks(numbers))


def summed(numbers: Tensor) -> Tensor:
    """Sum over the last axis."""
    return torch.cat([block.sum(-1) for block in blocks(numbers)])


@dataclass(frozen=True)
class RowsInFile:
    """An array in a file. Indexing reads the requested rows.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     np.arange(6.0).tofile(file := Path(folder) / "numbers")
    ...     RowsInFile(file, (3, 2), np.dtype(float))[1:2]
    tensor([[2., 3.]], dtype=torch.float64)
    """

    path: Path
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def __getitem__(self, rows: slice) -> Tensor:
        start, stop, _ = rows.indices(self.shape[0])
        row_size = prod(self.shape[1:])
        numbers = np.fromfile(
            self.path,
            self.dtype,
            count=(stop - start) * row_size,
            offset=start * row_size * self.dtype.itemsize,
        )
        return torch.from_numpy(numbers.reshape(stop - start, *self.shape[1:]))


def copy_rows(numbers: Tensor, others: Tensor | RowsInFile) -> None:
    """Copy the rows of `others` into `numbers`, block by block."""
    for rows in row_blocks(numbers):
        numbers[rows].copy_(others[rows])
        if isinstance(others, Tensor):
            release_pages(others)


def copied_like(numbers: Tensor | RowsInFile, like: Tensor) -> Tensor:
    """Copy numbers into a new file next to the file of `like`, or onto the device of `like`.

    >>> copied_like(torch.ones(2), like=torch.zeros(3))
    tensor([1., 1.])
    """
    no_rows = numbers[:0]
    if is_on_disk(like):
        folder = Path(like.untyped_storage().filename or "").parent
        copied = zeros_on_disk(folder, numbers.shape, no_rows.dtype)
    else:
        copied = no_rows.new_empty(tuple(numbers.shape), device=like.device)
    copy_rows(copied, numbers)
    return copied


@dataclass(frozen=True)
class RowsOfArray:
    """A tensor minus the optional tensor `less`; indexing returns rows as NumPy arrays. Both may be
    files.

    >>> RowsOfArray(torch.tensor([3.0, 5.0]), less=torch.tensor([1.0, 1.0]))[1:]
    array([4.], dtype=float32)
    """

    numbers: Tensor
    less: Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.numbers.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.numbers[:0].cpu().numpy().dtype

    def __getitem__(self, rows: slice) -> NDArray[Any]:
        array = self.numbers[rows].cpu().numpy().copy()
        release_pages(self.numbers)
        if self.less is not None:
            array -= self.less[rows].cpu().numpy()
            release_pages(self.less)
        return array
