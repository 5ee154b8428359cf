"""Arrays on disk: zarr version 3, no compression, named dimensions, nothing that depends on the clock.

A file per chunk makes a store readable whatever happens to the process that writes it, and the same bytes each time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.storage import MemoryStore

from ntkexp.mistake import Mistake

Facts: TypeAlias = Mapping[str, float | int | str | Sequence[str] | Sequence[int]]

LARGEST_CHUNK = 32_000_000
"""The bytes that a reader takes at once, whatever it looks for."""


def create_store(path: Path | MemoryStore, facts: Facts | None = None) -> zarr.Group:
    """An empty store in place of whatever was there."""
    return zarr.create_group(path, zarr_format=3, overwrite=True, attributes=dict(facts or {}))


def open_store(path: Path, *, write: bool = False) -> zarr.Group:
    """Open a store that exists."""
    try:
        return zarr.open_group(path, mode="r+" if write else "r", zarr_format=3)
    except (OSError, ValueError, KeyError) as error:
        raise Mistake(f"{path} is missing or damaged: it is no store of arrays") from error


def get_array(store: zarr.Group, name: str) -> zarr.Array[Any]:  # the type of its metadata is zarr's business
    """Find an array of the store by its name."""
    found = store.get(name)
    if not isinstance(found, zarr.Array):
        raise Mistake(f"{store.store_path} is damaged: it holds no array '{name}'")
    return found


class ManyRows(Protocol):
    """An array, or something larger than the memory of which a few rows are looked at at a time."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its length along every axis."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The kind of its numbers."""

    def __getitem__(self, rows: slice, /) -> NDArray[Any]:
        """Look at some rows."""


def put_array(
    store: zarr.Group,
    name: str,
    array: ManyRows,
    dims: Sequence[str],
    facts: Facts,
    *,
    kind: np.dtype[Any] | None = None,
) -> None:
    """Put one array as one chunk, or a large one in chunks of rows, in place of an older one of this name."""
    step = rows_at_once(array, dtype := kind or array.dtype)
    place = store.create_array(
        name,
        shape=array.shape,
        chunks=tuple(max(1, length) for length in (step, *array.shape[1:])),
        dtype=dtype,
        compressors=None,
        dimension_names=list(dims),
        attributes=dict(facts),
        overwrite=True,
    )
    for start in range(0, array.shape[0], step):
        rows = slice(start, min(start + step, array.shape[0]))
        place[rows] = array[rows]


def put_stacked(store: zarr.Group, name: str, arrays: Sequence[ManyRows], dims: Sequence[str]) -> None:
    """Put arrays of one shape as one array of numbers in double precision, in chunks of rows of each."""
    count, *others = arrays[0].shape
    step = rows_at_once(arrays[0], np.dtype(np.float64))
    shape, chunks = (len(arrays), count, *others), (1, step, *others)
    preallocate(store, name, shape, chunks=chunks, dims=dims, fill=np.float64(0))
    place = get_array(store, name)
    for number, array in enumerate(arrays):
        for start in range(0, count, step):
            rows = slice(start, min(start + step, count))
            place[number, rows] = array[rows]


def rows_at_once(array: ManyRows, dtype: np.dtype[Any]) -> int:
    """How many rows of an array go into a chunk."""
    count, *others = array.shape
    return max(1, min(count, LARGEST_CHUNK // max(1, prod(others) * dtype.itemsize)))


def preallocate(
    store: zarr.Group,
    name: str,
    shape: Sequence[int],
    *,
    chunks: Sequence[int],
    dims: Sequence[str],
    fill: np.number[Any],
) -> None:
    """Make room for numbers of the kind of `fill`, which is read where nothing was written: no chunk is until then. An
    older array of this name is gone.
    """
    store.create_array(
        name,
        shape=tuple(shape),
        chunks=tuple(max(1, length) for length in chunks),
        dtype=fill.dtype,
        compressors=None,
        dimension_names=list(dims),
        fill_value=fill.item(),
        overwrite=True,
    )


def drop_partial(path: Path) -> None:
    """Remove what zarr had not yet moved into its place when an earlier process was killed."""
    for leftover in path.rglob("*.partial"):
        leftover.unlink()
