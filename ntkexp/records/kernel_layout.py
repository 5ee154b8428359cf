"""The arrays of a kernel file (`records.kernel_matrix`), preallocated: a chunk is written whole, or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import zarr
from numpy.typing import NDArray

from ntkexp.records.atomic import PARTIAL
from ntkexp.records.kernels import KERNEL_DIMS
from ntkexp.records.store import Facts, create_store, put_array
from ntkexp.records.tiles import Tiling

SELF = "_self"


@dataclass(frozen=True)
class Layout:
    """Of the arrays in a store."""

    kernels: tuple[str, ...]
    tiling: Tiling
    outputs: int
    dtype: str

    @property
    def bytes(self) -> int:
        """What the store takes on the disk."""
        row = self.tiling.train + 1
        return len(self.kernels) * self.tiling.points * row * self.outputs**2 * np.dtype(self.dtype).itemsize


def create(path: Path, layout: Layout, facts: Facts, arrays: Mapping[str, NDArray[np.generic]]) -> None:
    """A store without a tile, there whole or not at all, in place of whatever was there."""
    partial = path.with_name(f".{path.name}{PARTIAL}")
    shutil.rmtree(partial, ignore_errors=True)
    store = create_store(partial, {**facts, "kernels": list(layout.kernels), "side": layout.tiling.side})
    tiling, outputs = layout.tiling, layout.outputs
    for name in layout.kernels:
        whole = (tiling.points, outputs, tiling.train, outputs)
        preallocate(store, name, whole, (tiling.side, outputs, tiling.side, outputs), KERNEL_DIMS, layout.dtype)
        own, dims = (tiling.points, outputs, outputs), ("probe", "out", "out_")
        preallocate(store, name + SELF, own, (tiling.side, outputs, outputs), dims, layout.dtype)
    preallocate(store, "done", tiling.shape, (1, tiling.shape[1]), ("row", "column"), "uint8")
    for name, array in arrays.items():
        put_array(store, name, array, ("probe", "out")[: array.ndim], {})
    shutil.rmtree(path, ignore_errors=True)
    partial.replace(path)


def preallocate(
    store: zarr.Group, name: str, shape: Sequence[int], chunks: Sequence[int], dims: Sequence[str], dtype: str
) -> None:
    """Room for numbers, of which nothing is written until a chunk is."""
    kind = np.dtype(dtype)
    store.create_array(
        name,
        shape=tuple(shape),
        chunks=tuple(chunks),
        dtype=kind,
        compressors=None,
        dimension_names=list(dims),
        fill_value=float("nan") if kind.kind == "f" else 0,
    )
