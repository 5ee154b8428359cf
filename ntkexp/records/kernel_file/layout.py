"""The arrays of a kernel file (`records.kernel_file.store`), preallocated: a chunk is written whole, or not at all.

Whatever is written when the file is begun is sealed in its attributes, and they are sealed themselves.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ntkexp.mistake import Mistake, Useless
from ntkexp.records.atomic import PARTIAL, write_atomically
from ntkexp.records.json_file import read_object, to_text
from ntkexp.records.kernel_file.tiles import Tiling
from ntkexp.records.kernels import KERNEL_DIMS
from ntkexp.records.seal import SEAL, Damaged, Seals, broken, seal, sealed
from ntkexp.records.store import Facts, create_store, preallocate, put_array
from ntkexp.text import several

SELF, DONE, GROUP = "_self", "done", "zarr.json"
SEALS = "seals"
MARK = "<u8"
"""How `done` marks a tile: by the beginning of its seal, which is not 0."""


class DamagedKernel(Damaged, Useless):
    """A kernel file is not as it was written."""


@dataclass(frozen=True)
class Layout:
    """The arrays of a store, by their shapes."""

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
    """Create a store without a tile, there whole or not at all, in place of whatever was there."""
    partial = path.with_name(f".{path.name}{PARTIAL}")
    for link in (partial, path):
        if link.is_symlink():
            raise Mistake(f"{link} is a link; kernel files are written where no link leads, so choose another place")
    shutil.rmtree(partial, ignore_errors=True)
    store = create_store(partial, {**facts, "kernels": list(layout.kernels), "side": layout.tiling.side})
    tiling, outputs, nothing = layout.tiling, layout.outputs, np.dtype(layout.dtype).type("nan")
    for name in layout.kernels:
        whole = (tiling.points, outputs, tiling.train, outputs)
        preallocate(
            store, name, whole, chunks=(tiling.side, outputs, tiling.side, outputs), dims=KERNEL_DIMS, fill=nothing
        )
        own, dims = (tiling.points, outputs, outputs), ("probe", "out", "out_")
        preallocate(store, name + SELF, own, chunks=(tiling.side, outputs, outputs), dims=dims, fill=nothing)
    done = np.dtype(MARK).type(0)
    preallocate(store, DONE, tiling.shape, chunks=(1, tiling.shape[1]), dims=("row", "column"), fill=done)
    for name, array in arrays.items():
        put_array(store, name, array, ("probe", "out")[: array.ndim], {})
    seal_attributes(partial)
    shutil.rmtree(path, ignore_errors=True)
    partial.replace(path)


def seal_attributes(path: Path) -> None:
    """Let the attributes of a store seal the files that are in it, and what it says of itself."""
    store = read_object(path / GROUP)
    entries = [entry.name for entry in path.iterdir() if entry.name != GROUP]
    store["attributes"][SEALS] = sealed(path, entries)
    store["attributes"][SEAL] = seal(to_text(store).encode()).hex()
    write_atomically(path / GROUP, to_text(store))


def check_attributes(path: Path) -> None:
    """Refuse a store that is none of ours, or not as it was begun."""
    if not ((path / DONE / GROUP).is_file() or any(path.glob(f"*{SELF}/{GROUP}"))):
        raise Mistake(f"{path} is no kernel file: it is no store of arrays with marks of what is done")
    seals = own_seals(path)
    if wrong := [GROUP] if seals is None else broken(path, seals):
        raise DamagedKernel(f"{path} is damaged, or of an earlier version: {several(wrong)}; compute it anew")


def own_seals(path: Path) -> Seals | None:
    """The seals of what was written when the file was begun; none, if its attributes are not as they were."""
    try:
        store = read_object(path / GROUP)
        found = store["attributes"].pop(SEAL)
        return store["attributes"][SEALS] if found == seal(to_text(store).encode()).hex() else None
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
