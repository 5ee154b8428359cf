"""Kernel files. Each is a store of kernels between points and training examples, which
is computed tile by tile.

The first points are the training examples. Tile (i, j) is the kernel between the points
of block i and the training examples of block j. The kernel is symmetric between
training examples, so the tiles above the diagonal are transposes of the tiles below it.

>>> tiling = Tiling(points=5, train=3, side=2)
>>> tiling.todo, tiling.mirrored(1, 0), tiling.mirrored(2, 0)
([(0, 0), (1, 0), (1, 1), (2, 0), (2, 1)], True, False)
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray

from ntkexp.mistake import Mistake, Useless
from ntkexp.records.atomic import (
    PARTIAL,
    Damaged,
    Sealing,
    damaged_files,
    read_sealed,
    sealed,
    sealed_text,
    write_atomically,
)
from ntkexp.records.kernels import (
    KERNEL_DIMS,
    Facts,
    create_store,
    get_array,
    open_store,
    preallocate,
    write_array,
)
from ntkexp.records.own_files import (
    HALF_WRITTEN,
    STORED,
    refuse_strangers,
    remove_store,
)
from ntkexp.text import several

MIN_TILE_SIDE = 32  # points on one side of a tile
MAX_TILE_SIDE = 1024
TILES_ACROSS = 32  # the usual number of tiles along the training examples
MAX_TILES_ACROSS = 256
# Limit on the estimated time of one tile. The estimate may be too low by a factor of
# twelve, so that a tile takes an hour.
MAX_TILE_SECONDS = 300.0


@dataclass(frozen=True)
class Tiling:
    """A division of the kernel into tiles of `side` × `side` points. The last tiles may
    be smaller."""

    points: int
    train: int
    side: int

    @property
    def shape(self) -> tuple[int, int]:
        """The number of tiles along the points and along the training examples."""
        return -(-self.points // self.side), -(-self.train // self.side)

    @property
    def todo(self) -> list[tuple[int, int]]:
        rows, columns = self.shape
        return [(i, j) for i in range(rows) for j in range(min(i + 1, columns))]

    def rows(self, block: int) -> slice:
        return slice(block * self.side, min((block + 1) * self.side, self.points))

    def columns(self, block: int) -> slice:
        return slice(block * self.side, min((block + 1) * self.side, self.train))

    def pairs(self, row: int, column: int) -> int:
        """Return the number of distinct pairs of points in a tile,
        including its pairs (x, x).

        >>> Tiling(points=5, train=3, side=2).pairs(0, 0), Tiling(points=5, train=3, side=2).pairs(2, 0)
        (3, 3)
        """
        rows = self.rows(row)
        columns = self.columns(column)
        row_points: int = rows.stop - rows.start
        if row == column:
            return row_points * (row_points + 1) // 2
        column_points: int = columns.stop - columns.start
        return row_points * (column_points + self.holds_diagonal(row, column))

    def mirrored(self, row: int, column: int) -> bool:
        return row != column and row < self.shape[1]

    def holds_diagonal(self, row: int, column: int) -> bool:
        """Return True if the tile contains the pairs (x, x) of the points x
        of its row."""
        return row == column or (column == 0 and row >= self.shape[1])


def side_for(train: int, seconds: float) -> int:
    """Return the side of a tile, a power of two.

    `seconds` is the estimated time for one pair of points. Usually, about 32 tiles
    cover the training examples. With more tiles, there are more files. With fewer
    tiles, a kill loses more work. If such a tile would take too long, up to 256 tiles
    are used.

    >>> [side_for(train, 1e-9) for train in (100, 2000, 50_000)]
    [32, 32, 1024]
    >>> [side_for(50_000, seconds) for seconds in (1e-3, 2e-3, 1.0)]
    [512, 256, 256]
    """
    side = MIN_TILE_SIDE
    while 2 * side <= min(MAX_TILE_SIDE, train // TILES_ACROSS):
        side *= 2
    min_side = max(MIN_TILE_SIDE, train / MAX_TILES_ACROSS)
    while side**2 * seconds > MAX_TILE_SECONDS and side // 2 >= min_side:
        side //= 2
    return side


# --- The preallocated arrays of a kernel file. Their chunks are written atomically.


SELF = "_self"
DONE_ARRAY = "done"
GROUP_FILE = "zarr.json"
SEALS = f"{DONE_ARRAY}/seals.json"
"""The path of the file with the digests (seals) of all files that are written before
the first tile. It is in the folder of an array, because zarr warns about unknown files
next to the arrays."""
MARK = np.dtype("<u8")
"""The dtype of the array `done`. Its entry for a finished tile (the mark of the tile)
is the beginning of the tile's digest (seal). The entry for other tiles is 0."""


class DamagedKernel(Damaged, Useless):
    """Raised if a kernel file has changed since it was written."""


@dataclass(frozen=True)
class Layout:
    """The shapes of the arrays of a kernel file."""

    kernels: tuple[str, ...]
    tiling: Tiling
    outputs: int
    dtype: str

    @property
    def bytes(self) -> int:
        """The size of the kernels in bytes."""
        pairs = self.tiling.points * (self.tiling.train + 1)
        numbers = len(self.kernels) * pairs * self.outputs**2
        return numbers * np.dtype(self.dtype).itemsize


def create(
    path: Path, layout: Layout, facts: Facts, arrays: Mapping[str, NDArray[np.generic]]
) -> None:
    """Create a kernel file without tiles, atomically.
    Replace a kernel file at this path.

    A former kernel file gets another name before it is removed. So after a kill at any
    moment, the kernel file is complete or absent, and the next call removes the rest."""
    partial = path.with_name(f".{path.name}{PARTIAL}")
    former = path.with_name(f".{path.name}.former{PARTIAL}")
    for link in (partial, former, path):
        if link.is_symlink():
            raise Mistake(
                f"{link} is a link, and kernel files are not written through links; choose "
                "another place"
            )
    for rest in (partial, former):
        remove_store(rest, SEALS)
    store = create_store(
        partial, {**facts, "kernels": list(layout.kernels), "side": layout.tiling.side}
    )
    preallocate_kernels(store, layout)
    for name, array in arrays.items():
        # xarray refuses two lengths of one axis
        out = "out" if array.shape[1:] == (layout.outputs,) else TARGET_OUT
        write_array(store, name, array, ("query", out)[: array.ndim], {})
    write_atomically(
        partial / SEALS, sealed_text({"seals": sealed(partial, ["."])}, SEALS)
    )
    if path.is_dir():
        refuse_foreign_files(path)
        path.rename(former)
    partial.replace(path)
    remove_store(former, SEALS)


def preallocate_kernels(store: zarr.Group, layout: Layout) -> None:
    tiling = layout.tiling
    outputs = layout.outputs
    nan = np.dtype(layout.dtype).type("nan")
    for name in layout.kernels:
        preallocate(
            store,
            name,
            (tiling.points, outputs, tiling.train, outputs),
            chunks=(tiling.side, outputs, tiling.side, outputs),
            dims=KERNEL_DIMS,
            fill=nan,
        )
        preallocate(
            store,
            name + SELF,
            (tiling.points, outputs, outputs),
            chunks=(tiling.side, outputs, outputs),
            dims=("query", "out", "out_"),
            fill=nan,
        )
    preallocate(
        store,
        DONE_ARRAY,
        tiling.shape,
        # one file per tile, so that several processes can mark tiles as finished
        chunks=(1, 1),
        dims=("row", "column"),
        fill=MARK.type(0),
    )


TARGET_OUT = "target_out"
COMMON_ARRAYS = ("target", "label", "index", DONE_ARRAY)
"""The arrays of each kernel file, in addition to its kernels."""


def refuse_foreign_files(path: Path) -> None:
    """Raise unless a folder is empty or is a kernel file. The kernel file may be
    damaged.

    A kernel file has an array `NAME_self` for each kernel `NAME`,
    and the common arrays."""
    if not any(path.iterdir()):
        return
    arrays = {entry.name for entry in path.iterdir() if entry.is_dir()}
    kernels = {name.removesuffix(SELF) for name in arrays if name.endswith(SELF)}
    known_names = {*COMMON_ARRAYS, *kernels, *(name + SELF for name in kernels)}
    if not kernels or not known_names <= arrays:
        raise Mistake(
            f"{path} is not a kernel file: it lacks arrays that every kernel file has; choose "
            "another place"
        )
    array_names = "|".join(map(re.escape, sorted(known_names)))
    stored = rf"{GROUP_FILE}|{re.escape(SEALS)}|{HALF_WRITTEN}|({array_names})/{STORED}"
    refuse_strangers(path, re.compile(stored).fullmatch)


def refuse_damaged(path: Path) -> None:
    """Raise if a store is not a kernel file, or if one of its files is damaged. The
    tiles, and their entries in `done`, are not checked."""
    if not (
        (path / DONE_ARRAY / GROUP_FILE).is_file()
        or any(path.glob(f"*{SELF}/{GROUP_FILE}"))
    ):
        raise Mistake(
            f"{path} is not a kernel file: it is not a store of arrays with markers of finished tiles"
        )
    try:
        damaged = damaged_files(path, read_sealed(path / SEALS, SEALS)["seals"])
    except Mistake:
        damaged = [SEALS]
    if damaged:
        raise DamagedKernel(
            f"{path} is damaged, or of an earlier version: {several(damaged)}; compute it again"
        )


# --- A kernel file: a store that is filled tile by tile.
#
#     <kernel>        [query, out, train, out_]   the kernel, one chunk per tile
#     <kernel>_self   [query, out, out_]          the kernel of each point with itself
#     done            [row, column]               the mark of each tile, written after the tile and
#                                                 its transpose; 0 until then
#     target          [query, out]                targets of the squared loss
#     label           [query]                     the class, or −1 for regression
#     index           [query]                     the index of the example in the data source
#
# The axis `query` contains all points, training examples first. Attributes: `identity`,
# a digest of the kernel's description; `description`, as JSON; `kernels`, the names of
# the kernels; `splits`, the number of points in each split; `classes`, the names of the
# classes. done/seals.json contains the seals of all files except tiles and marks.
# Kernels of infinite width are equal for all outputs, so their axis `out` has length
# one. If targets have more outputs than the kernel, the kernel applies to each output,
# and the second axis of `target` is called `target_out`.


@dataclass(frozen=True)
class KernelMatrix:
    """An open kernel file."""

    path: Path

    @cached_property
    def store(self) -> zarr.Group:
        return open_store(self.path, write=True)

    @cached_property
    def facts(self) -> dict[str, Any]:
        facts = dict(self.store.attrs)
        required = {"identity", "description", "kernels", "splits", "classes", "side"}
        missing = required - facts.keys()
        if missing:
            raise Mistake(
                f"{self.path} is not a kernel file: it lacks {', '.join(sorted(missing))}"
            )
        return facts

    @cached_property
    def layout(self) -> Layout:
        kernels = tuple(map(str, self.facts["kernels"]))
        array = get_array(self.store, kernels[0])
        points, outputs, train, _ = array.shape
        return Layout(
            kernels,
            Tiling(points, train, int(self.facts["side"])),
            outputs,
            str(array.dtype),
        )

    @property
    def description(self) -> dict[str, Any]:
        description: dict[str, Any] = json.loads(self.facts["description"])
        return description

    @property
    def splits(self) -> dict[str, slice]:
        """The slice of each split along the points."""
        sizes = [
            (name, int(count))
            for name, _, count in (text.partition("=") for text in self.facts["splits"])
        ]
        ends = np.cumsum([0, *(count for _, count in sizes)]).tolist()
        return {
            name: slice(*ends[k : k + 2])
            for k, (name, count) in enumerate(sizes)
            if count
        }

    def marker(self, row: int, column: int) -> Path:
        """Return the path of the chunk of `done` that marks a tile as finished. The
        file exists if the tile is finished."""
        return self.path / DONE_ARRAY / "c" / str(row) / str(column)

    def unmarked(self, tiles: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return the tiles that are not marked as finished."""
        return [tile for tile in tiles if not self.marker(*tile).is_file()]

    def missing(self) -> list[tuple[int, int]]:
        """Return the tiles that are missing or damaged."""
        return [tile for tile in self.layout.tiling.todo if not self.is_whole(*tile)]

    def is_whole(self, row: int, column: int) -> bool:
        """Return True if a tile is finished and undamaged."""
        marker = self.marker(row, column)
        return marker.is_file() and marker.read_bytes() == self.seal(row, column)

    def seal(self, row: int, column: int) -> bytes:
        """Compute the entry of `done` for a tile: a digest of its files, the identity
        of the kernel, and the indices of the tile."""
        sealing = Sealing(f"{self.facts['identity']} {row} {column}")
        tiling = self.layout.tiling
        for name in self.layout.kernels:
            chunks = [f"{name}/c/{row}/0/{column}/0"]
            if tiling.mirrored(row, column):
                chunks.append(f"{name}/c/{column}/0/{row}/0")
            if tiling.holds_diagonal(row, column):
                chunks.append(f"{name}{SELF}/c/{row}/0/0")
            for chunk in chunks:
                file = self.path / chunk
                sealing.update(file.read_bytes() if file.is_file() else b"")
        return sealing.digest[: MARK.itemsize]

    def write(
        self,
        row: int,
        column: int,
        tile: Mapping[str, NDArray[Any]],
        diagonal: Mapping[str, NDArray[Any]],
    ) -> None:
        """Write a tile, its transpose, and the kernel of points with themselves
        (`diagonal`). Mark the tile as finished at the end."""
        tiling = self.layout.tiling
        for name, block in tile.items():
            array = get_array(self.store, name)
            array[tiling.rows(row), :, tiling.columns(column), :] = block
            if tiling.mirrored(row, column):
                # the points of the row that are training examples
                train = tiling.columns(row)
                mirrored = block[: train.stop - train.start].transpose(2, 3, 0, 1)
                array[tiling.rows(column), :, train, :] = mirrored
        for name, block in diagonal.items():
            get_array(self.store, name + SELF)[tiling.rows(row)] = block
        write_atomically(self.marker(row, column), self.seal(row, column))

    def array(self, name: str, rows: slice = slice(None)) -> NDArray[Any]:
        try:
            return np.asarray(get_array(self.store, name)[rows])
        except (ValueError, RuntimeError) as error:
            raise DamagedKernel(
                f"{self.path} is damaged: {name} cannot be read; compute it again"
            ) from error


def open_matrix(path: Path) -> KernelMatrix:
    if not path.is_dir():
        raise Mistake(
            f"{path} is not a kernel file: it {'is a file' if path.exists() else 'does not exist'}"
        )
    refuse_damaged(path)
    matrix = KernelMatrix(path)
    _ = matrix.layout
    return matrix
