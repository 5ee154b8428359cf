"""A kernel file: a plan of tiles, preallocated arrays, and a store that is filled tile by tile.

A square-by-square plan for a kernel between points and training examples, which are the first of the points.

Tile (i, j) holds the points of block i and the training examples of block j. Among the training examples the kernel is
symmetric, so the tiles above the diagonal are the mirror images of those below it.

>>> tiling = Tiling(points=5, train=3, side=2)
>>> tiling.todo, tiling.mirrored(1, 0), tiling.mirrored(2, 0)
([(0, 0), (1, 0), (1, 1), (2, 0), (2, 1)], True, False)
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
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
    SEAL,
    Damaged,
    Sealing,
    Seals,
    broken,
    read_object,
    seal,
    sealed,
    to_text,
    waited_for,
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
    files_in,
    refuse_strangers,
    remove_empty_folders,
    remove_files,
)
from ntkexp.text import several

SMALLEST, LARGEST = 32, 1024
ACROSS, MOST_ACROSS = 32, 256
LONGEST = 300.0  # seconds of a tile by the least that a pair can take: an hour, where it takes ten times as long


@dataclass(frozen=True)
class Tiling:
    """Tiles of `side` points, fewer at the ends."""

    points: int
    train: int
    side: int

    @property
    def shape(self) -> tuple[int, int]:
        """How many tiles there are along points and along training examples."""
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
        """How many pairs of points meet of a tile: on the diagonal each once, elsewhere also points with themselves.

        >>> Tiling(points=5, train=3, side=2).pairs(0, 0), Tiling(points=5, train=3, side=2).pairs(2, 0)
        (3, 3)
        """
        rows, columns = self.rows(row), self.columns(column)
        count: int = rows.stop - rows.start
        if row == column:
            return count * (count + 1) // 2
        across: int = columns.stop - columns.start
        return count * (across + self.owns(row, column))

    def mirrored(self, row: int, column: int) -> bool:
        return row != column and row < self.shape[1]

    def owns(self, row: int, column: int) -> bool:
        """Whether the points of the row are met with themselves along with this tile."""
        return row == column or (column == 0 and row >= self.shape[1])


def side_for(train: int, seconds: float) -> int:
    """A power of two of which about 32 cover the training examples: a kill costs a tile, and each is a file.

    Where a pair of points takes long (`seconds`), so that a kill would cost hours, up to 256 of them do.

    >>> [side_for(train, 1e-9) for train in (100, 2000, 50_000)]
    [32, 32, 1024]
    >>> [side_for(50_000, seconds) for seconds in (1e-3, 2e-3, 1.0)]
    [512, 256, 256]
    """
    side = SMALLEST
    while 2 * side <= min(LARGEST, train // ACROSS):
        side *= 2
    while side**2 * seconds > LONGEST and side // 2 >= max(SMALLEST, train / MOST_ACROSS):
        side //= 2
    return side


# --- The arrays of a kernel file (`records.kernel_file`), preallocated: a chunk is written whole, or not at all.
#
# Whatever is written when the file is begun is sealed in its attributes, and they are sealed themselves.


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
        return (
            len(self.kernels)
            * self.tiling.points
            * row
            * self.outputs**2
            * np.dtype(self.dtype).itemsize
        )


def create(
    path: Path, layout: Layout, facts: Facts, arrays: Mapping[str, NDArray[np.generic]]
) -> None:
    """Create a store without a tile, there whole or not at all, in place of whatever was there."""
    partial = path.with_name(f".{path.name}{PARTIAL}")
    for link in (partial, path):
        if link.is_symlink():
            raise Mistake(
                f"{link} is a link; kernel files are written where no link leads, so choose another place"
            )
    store = create_store(
        partial, {**facts, "kernels": list(layout.kernels), "side": layout.tiling.side}
    )
    tiling, outputs, nothing = layout.tiling, layout.outputs, np.dtype(layout.dtype).type("nan")
    for name in layout.kernels:
        whole = (tiling.points, outputs, tiling.train, outputs)
        preallocate(
            store,
            name,
            whole,
            chunks=(tiling.side, outputs, tiling.side, outputs),
            dims=KERNEL_DIMS,
            fill=nothing,
        )
        own, dims = (tiling.points, outputs, outputs), ("probe", "out", "out_")
        preallocate(
            store, name + SELF, own, chunks=(tiling.side, outputs, outputs), dims=dims, fill=nothing
        )
    done = np.dtype(MARK).type(0)
    preallocate(
        store, DONE, tiling.shape, chunks=(1, tiling.shape[1]), dims=("row", "column"), fill=done
    )
    for name, array in arrays.items():
        write_array(store, name, array, ("probe", "out")[: array.ndim], {})
    # The attributes seal the files that are in the store, and themselves.
    group = read_object(partial / GROUP)
    group["attributes"][SEALS] = sealed(
        partial, [entry.name for entry in partial.iterdir() if entry.name != GROUP]
    )
    group["attributes"][SEAL] = seal(to_text(group).encode()).hex()
    write_atomically(partial / GROUP, to_text(group))
    if path.is_dir():
        refuse_foreign_files(path)
        remove_files(path, files_in(path))
        remove_empty_folders(path)
    partial.replace(path)


WITH_EACH = ("target", "label", "index", DONE)
"""The arrays that every kernel file has beside its kernels."""


def refuse_foreign_files(path: Path) -> None:
    """Raise unless a folder is empty, or holds the arrays of a kernel file, damaged or not, and nothing else.

    A kernel file is known by its arrays: for each `kernel` a `kernel_self`, and those that every one has.
    """
    if not any(path.iterdir()):
        return
    arrays = {entry.name for entry in path.iterdir() if entry.is_dir()}
    kernels = {name.removesuffix(SELF) for name in arrays if name.endswith(SELF)}
    ours = {*WITH_EACH, *kernels, *(name + SELF for name in kernels)}
    if not kernels or not ours <= arrays:
        raise Mistake(
            f"{path} is not a kernel file: it lacks arrays that every one has; choose another place"
        )
    stored = rf"{GROUP}|{HALF_WRITTEN}|({'|'.join(map(re.escape, sorted(ours)))})/{STORED}"
    refuse_strangers(path, re.compile(stored).fullmatch)


def check_attributes(path: Path) -> None:
    """Refuse a store that is none of ours, or not as it was begun."""
    if not ((path / DONE / GROUP).is_file() or any(path.glob(f"*{SELF}/{GROUP}"))):
        raise Mistake(
            f"{path} is not a kernel file: it is not a store of arrays with marks of what is done"
        )
    seals: Seals | None = (
        None  # of what was written when the file was begun, if its attributes are as they were
    )
    with suppress(ValueError, TypeError, KeyError, AttributeError):
        store = read_object(path / GROUP)
        mark = store["attributes"].pop(SEAL)
        seals = store["attributes"][SEALS] if mark == seal(to_text(store).encode()).hex() else None
    if wrong := [GROUP] if seals is None else broken(path, seals):
        raise DamagedKernel(
            f"{path} is damaged, or of an earlier version: {several(wrong)}; compute it again"
        )


# --- A kernel by itself: a store that is filled tile by tile, and knows what it is of.
#
#     <kernel>        [probe, out, train, out_]   a chunk per tile; `probe` is every point, training examples first
#     <kernel>_self   [probe, out, out_]          the same between each point and itself
#     done            [row, column]               the seal of a tile with its mirror image, or 0 until it is written:
#                                                 last
#     target          [probe, out]                as the squared loss compares them
#     label           [probe]                     the class, or −1 in a regression
#     index           [probe]                     which example of the source this is
#
# Attributes: `identity`, what the kernel is of as 64 digits; `description`, the same as JSON; `kernels`, their
# names; `splits`, the number of points in each; `classes`, their names; `seals` of all that is no tile, and their
# own `seal`. Kernels of infinite width are the same for every output and have one `out`. Where targets have more
# outputs than the kernel, it holds for each of them.


def lock_of_marks(path: Path) -> Path:
    """Beside a kernel file: who holds it may mark tiles."""
    return path.with_name(f".{path.name}.marks.lock")


@dataclass(frozen=True)
class KernelMatrix:
    path: Path

    @cached_property
    def store(self) -> zarr.Group:
        return open_store(self.path, write=True)

    @cached_property
    def facts(self) -> dict[str, Any]:
        facts = dict(self.store.attrs)
        if (
            missing := {"identity", "description", "kernels", "splits", "classes", "side"}
            - facts.keys()
        ):
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
            kernels, Tiling(points, train, int(self.facts["side"])), outputs, str(array.dtype)
        )

    @property
    def description(self) -> dict[str, Any]:
        description: dict[str, Any] = json.loads(self.facts["description"])
        return description

    @property
    def splits(self) -> dict[str, slice]:
        """Where each split lies among the points."""
        sizes = [
            (name, int(count))
            for name, _, count in (text.partition("=") for text in self.facts["splits"])
        ]
        ends = np.cumsum([0, *(count for _, count in sizes)]).tolist()
        return {name: slice(*ends[k : k + 2]) for k, (name, count) in enumerate(sizes) if count}

    @property
    def done(self) -> NDArray[np.uint64]:
        """The marks of the tiles; a row of marks that is cut off marks none."""
        rows, columns = self.layout.tiling.shape
        marks, mirrored = (
            np.zeros((rows, columns), MARK),
            np.triu(np.ones((rows, columns), bool), 1),
        )
        for row in range(rows):
            content = self.marks(row).read_bytes() if self.marks(row).is_file() else b""
            if len(content) == marks[row].nbytes:
                marks[row] = np.frombuffer(content, MARK)
        return np.where(mirrored, 0, marks)

    def marks(self, row: int) -> Path:
        return self.path / DONE / "c" / str(row) / "0"

    def unmarked(self, tiles: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Those of some tiles that have no mark now."""
        done = self.done
        return [tile for tile in tiles if not done[tile]]

    def unmark(self, tiles: Sequence[tuple[int, int]]) -> None:
        """Let only the marks of other tiles stand."""
        with self.marking():
            done = self.done
            for tile in tiles:
                done[tile] = 0
            for row, content in enumerate(map(bytes, done)):
                if self.marks(row).is_file() and self.marks(row).read_bytes() != content:
                    write_atomically(self.marks(row), content)

    def marking(self) -> AbstractContextManager[None]:
        """Be the one who marks: other processes may mark tiles of the same row."""
        return waited_for(lock_of_marks(self.path))

    def missing(self) -> list[tuple[int, int]]:
        """The tiles that are not written, or not as they were."""
        done = self.done
        return [
            tile
            for tile in self.layout.tiling.todo
            if not done[tile] or done[tile] != self.seal(*tile)
        ]

    def seal(self, row: int, column: int) -> int:
        """The mark of a tile as its files are: it is one of this kernel, in its place."""
        content, tiling = Sealing(f"{self.facts['identity']} {row} {column}"), self.layout.tiling
        for name in self.layout.kernels:
            chunks = [f"{name}/c/{row}/0/{column}/0"]
            chunks += [f"{name}/c/{column}/0/{row}/0"] if tiling.mirrored(row, column) else []
            chunks += [f"{name}{SELF}/c/{row}/0/0"] if tiling.owns(row, column) else []
            for file in (self.path / chunk for chunk in chunks):
                content.take(file.read_bytes() if file.is_file() else b"")
        return int(np.frombuffer(content.digest, MARK)[0])

    def write(
        self,
        row: int,
        column: int,
        tile: Mapping[str, NDArray[Any]],
        own: Mapping[str, NDArray[Any]],
    ) -> None:
        """A tile with its mirror image, and where it lies on the diagonal the points with themselves; its mark last."""
        tiling = self.layout.tiling
        for name, block in tile.items():
            array = get_array(self.store, name)
            array[tiling.rows(row), :, tiling.columns(column), :] = block
            if tiling.mirrored(row, column):
                within = tiling.columns(row)
                mirrored = block[: within.stop - within.start].transpose(2, 3, 0, 1)
                array[tiling.rows(column), :, within, :] = mirrored
        for name, block in own.items():
            get_array(self.store, name + SELF)[tiling.rows(row)] = block
        mark = self.seal(row, column)
        with self.marking():
            done = self.done[row]
            done[column] = mark
            write_atomically(self.marks(row), done.tobytes())

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
    check_attributes(path)
    matrix = KernelMatrix(path)
    _ = matrix.layout
    return matrix
