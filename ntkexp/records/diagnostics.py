"""The store diagnostics.zarr: the arrays that diagnostics measured during a run.

    step     [snapshot]               the step, written last; −1 until then
    <name>   [snapshot, <name>_0, …]  an array of a diagnostic

A run has the store only if a diagnostic returns arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.core.buffer import Buffer
from zarr.storage import MemoryStore

from ntkexp.records.array_schema import read_store
from ntkexp.records.atomic import RUN_AGAIN, Damaged, write_atomically
from ntkexp.records.kernels import NOT_YET, create_store, get_array, open_store, preallocate
from ntkexp.records.own_files import drop_half_written

DIAGNOSTICS = "diagnostics.zarr"
SNAPSHOT = "snapshot"
STEP = "step"


def create_diagnostics(path: Path, shapes: Mapping[str, tuple[int, ...]], capacity: int) -> None:
    """Create a store for arrays of these shapes at up to `capacity` steps. Keep existing chunks."""
    if not shapes:
        return
    described: dict[str, Buffer] = {}
    store = create_store(MemoryStore(described))
    for name, shape in shapes.items():
        axes = [f"{name}_{number}" for number in range(len(shape))]
        preallocate(
            store,
            name,
            (capacity, *shape),
            chunks=(1, *shape),
            dims=(SNAPSHOT, *axes),
            fill=np.float64("nan"),
        )
    preallocate(store, STEP, (capacity,), chunks=(1,), dims=(SNAPSHOT,), fill=np.int64(NOT_YET))
    for name, content in described.items():
        write_atomically(path / name, content.to_bytes())


def write_diagnostics(
    path: Path, index: int, step: int, arrays: Mapping[str, NDArray[Any]]
) -> list[str]:
    """Write the arrays of one step. Return the names of the written chunks."""
    store = open_store(path, write=True)
    for name, values in arrays.items():
        get_array(store, name)[index] = np.asarray(values, dtype=np.float64)
    get_array(store, STEP)[index] = step
    return [f"{name}/c/{index}" for name in (*arrays, STEP)]


def finish_diagnostics(path: Path) -> None:
    """Shrink the arrays to the steps that were written."""
    if not path.exists():
        return
    store = open_store(path, write=True)
    steps = np.asarray(get_array(store, STEP)[...])
    written = int(np.count_nonzero(steps != NOT_YET))
    for name, array in store.arrays():
        assert isinstance(array, zarr.Array), name
        array.resize((written, *array.shape[1:]))
    drop_half_written(path.rglob("*"))


def refuse_odd_diagnostics(path: Path) -> None:
    """Raise if the store does not have the format that runs write."""
    arrays = read_store(path).arrays
    if STEP not in arrays:
        raise Damaged(f"{path} holds what no run writes: it has no '{STEP}'; {RUN_AGAIN}")
    for name, array in arrays.items():
        if array.shape[:1] != arrays[STEP].shape:
            raise Damaged(
                f"{path} holds what no run writes: '{name}' and '{STEP}' have other lengths; "
                f"{RUN_AGAIN}"
            )
