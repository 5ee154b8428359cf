"""Arrays that may be larger than the memory. They are stored in memory-mapped files and
processed in blocks of rows.

A tensor in a memory-mapped file works like any other tensor. `row_blocks` and `blocks`
release the memory of each block before the next block, so that only a few rows occupy
memory at a time. Tensors in memory are processed in the same blocks, so results are
equal for tensors in memory and in files.

A temporary file loses its name as soon as it is mapped. The operating system deletes it
when the process ends, even if the process is killed.

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
"""Argument of `madvise` that releases pages of memory. The next access reads them from
the file again."""


def zeros_on_disk(folder: Path, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a tensor of zeros in a new temporary file in this folder. Reserve its disk
    space now, so that a full disk raises an error here and not during a later write."""
    count = prod(shape)
    with NamedTemporaryFile(dir=folder, prefix=".sums-") as file:
        os.posix_fallocate(file.fileno(), 0, count * dtype.itemsize)
        return torch.from_file(file.name, shared=True, size=count, dtype=dtype).view(
            *shape
        )


def is_on_disk(numbers: Tensor) -> bool:
    """Return True if the storage of a tensor is a file."""
    return (
        numbers.device.type == "cpu" and numbers.untyped_storage().filename is not None
    )


def release_pages(numbers: Tensor) -> None:
    """Release the memory of a tensor in a file. Do nothing for other tensors."""
    if is_on_disk(numbers):
        storage = numbers.untyped_storage()
        C_LIBRARY.madvise(
            ctypes.c_void_p(storage.data_ptr()),
            ctypes.c_size_t(storage.nbytes()),
            MADV_DONTNEED,
        )


def row_blocks(numbers: Tensor) -> Iterator[slice]:
    """Yield the slices of consecutive blocks of rows.
    Release the memory after each block."""
    count = len(numbers)
    row_bytes = max(1, numbers[:1].nbytes)
    step = max(1, ROW_BLOCK_BYTES // row_bytes)
    for start in range(0, max(1, count), step):
        yield slice(start, min(start + step, count))
        release_pages(numbers)


def blocks(numbers: Tensor) -> Iterator[Tensor]:
    """Return an iterator over consecutive blocks of rows."""
    return (numbers[rows] for rows in row_blocks(numbers))


def summed(numbers: Tensor) -> Tensor:
    """Sum over the last axis, block by block."""
    return torch.cat([block.sum(-1) for block in blocks(numbers)])


@dataclass(frozen=True)
class RowsInFile:
    """An array in a file. Indexing with a slice reads the rows as a tensor.

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
    """Copy `numbers` to a new tensor. If `like` is in a file, the new tensor is in a
    file in the same folder. Otherwise, it is on the device of `like`.

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
    """The tensor `numbers`, or the difference `numbers` − `less`, as an array that is
    read by slices of rows. Both tensors may be in files. Indexing with a slice returns
    the rows as a NumPy array.

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
