"""Arrays that exceed the memory are kept in a file and read a few rows at a time.

Such a tensor is used like any other: the system reads what is looked at, and writes what was changed. What `row_blocks`
and `blocks` iterate over is released after each turn, so that only a few rows take memory at any time. In memory it
is cut in the same way, and what is made of it is the same wherever it lies. The file has no name: it is gone with the
process, however that ends.

>>> [rows for rows in row_blocks(torch.zeros(5, 2))]  # a small one is one block
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


def refuse_small_disk(folder: Path, room: int) -> None:
    """Refuse a folder whose disk has less room than contributions need, before the first is computed."""
    if (free := disk_usage(folder).free) < room:
        raise NoPlace(
            f"contributions, their checkpoints and results take {room / 1e9:.2g} GB of disk and {folder} has "
            f"{free / 1e9:.2g} GB free; raise memory_gb, lower data.train, data.probe or data.test, or choose another "
            "place"
        )


def zeros_on_disk(folder: Path, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros in a file of this folder, which need no memory; the room on the disk is taken at once."""
    with NamedTemporaryFile(dir=folder, prefix=".sums-") as file:
        os.posix_fallocate(file.fileno(), 0, (count := prod(shape)) * dtype.itemsize)
        return torch.from_file(file.name, shared=True, size=count, dtype=dtype).view(*shape)


def is_on_disk(numbers: Tensor) -> bool:
    """Whether a tensor, or what it is a part of, lies in a file."""
    return numbers.device.type == "cpu" and numbers.untyped_storage().filename is not None


def release_pages(numbers: Tensor) -> None:
    """Let go of the memory that was taken to look at a tensor in a file, or at a part of one."""
    if is_on_disk(numbers):
        storage = numbers.untyped_storage()
        LIBRARY.madvise(
            ctypes.c_void_p(storage.data_ptr()), ctypes.c_size_t(storage.nbytes()), DONT_NEED
        )


def row_blocks(numbers: Tensor) -> Iterator[slice]:
    """Where blocks of rows lie, one after the other."""
    count, step = len(numbers), max(1, AT_ONCE // max(1, numbers[:1].nbytes))
    for start in range(0, max(1, count), step):
        yield slice(start, min(start + step, count))
        release_pages(numbers)


def blocks(numbers: Tensor) -> Iterator[Tensor]:
    """Look at blocks of rows, one after the other."""
    return (numbers[place] for place in row_blocks(numbers))


def summed(numbers: Tensor) -> Tensor:
    """Add up the last axis."""
    return torch.cat([block.sum(-1) for block in blocks(numbers)])


@dataclass(frozen=True)
class RowsInFile:
    """Numbers that were kept in a file of their own: rows are read when they are asked for.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     np.arange(6.0).tofile(place := Path(folder) / "numbers")
    ...     RowsInFile(place, (3, 2), np.dtype(float))[1:2]
    tensor([[2., 3.]], dtype=torch.float64)
    """

    path: Path
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def __getitem__(self, rows: slice) -> Tensor:
        start, stop, _ = rows.indices(self.shape[0])
        row, bounds = prod(self.shape[1:]), (stop - start, *self.shape[1:])
        numbers = np.fromfile(
            self.path, self.dtype, (stop - start) * row, offset=start * row * self.dtype.itemsize
        )
        return torch.from_numpy(numbers.reshape(bounds))


def copy_rows(numbers: Tensor, others: Tensor | RowsInFile) -> None:
    """Copy other numbers into a tensor."""
    for place in row_blocks(numbers):
        numbers[place].copy_(others[place])
        if isinstance(others, Tensor):
            release_pages(others)


def copied_like(numbers: Tensor | RowsInFile, like: Tensor) -> Tensor:
    """Copy numbers to where another tensor lies: into a file beside its own, or onto its device.

    >>> copied_like(torch.ones(2), like=torch.zeros(3))
    tensor([1., 1.])
    """
    whole = numbers[:0]
    if is_on_disk(like):
        made = zeros_on_disk(
            Path(like.untyped_storage().filename or "").parent, numbers.shape, whole.dtype
        )
    else:
        made = whole.new_empty(tuple(numbers.shape), device=like.device)
    copy_rows(made, numbers)
    return made


@dataclass(frozen=True)
class RowsOfArray:
    """A tensor, less another if there is one, is an array of numpy for reading a few rows; either may lie in a
    file.

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
