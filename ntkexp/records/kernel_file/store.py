"""A kernel by itself: a store that is filled tile by tile, and knows what it is of.

    <kernel>        [probe, out, train, out_]   a chunk per tile; `probe` is every point, training examples first
    <kernel>_self   [probe, out, out_]          the same between each point and itself
    done            [row, column]               the seal of a tile with its mirror image, or 0 until it is written: last
    target          [probe, out]                as the squared loss compares them
    label           [probe]                     the class, or −1 in a regression
    index           [probe]                     which example of the source this is

Attributes: `identity`, what the kernel is of as 64 digits; `description`, the same as JSON; `kernels`, their names;
`splits`, the number of points in each; `classes`, their names; `seals` of all that is no tile, and their own `seal`.
Kernels of infinite width are the same for every output and have one `out`. Where targets have more outputs than the
kernel, it holds for each of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray

from ntkexp.mistake import Mistake
from ntkexp.records.atomic import write_atomically
from ntkexp.records.kernel_file.layout import DONE, MARK, SELF, DamagedKernel, Layout, check_attributes
from ntkexp.records.kernel_file.tiles import Tiling
from ntkexp.records.lock import waited_for
from ntkexp.records.seal import Sealing
from ntkexp.records.store import drop_partial, get_array, open_store


@dataclass(frozen=True)
class KernelMatrix:
    """A kernel file that exists."""

    path: Path

    @cached_property
    def store(self) -> zarr.Group:
        """The arrays of the file."""
        return open_store(self.path, write=True)

    @cached_property
    def facts(self) -> dict[str, Any]:
        """The attributes of the file."""
        facts = dict(self.store.attrs)
        if missing := {"identity", "description", "kernels", "splits", "classes", "side"} - facts.keys():
            raise Mistake(f"{self.path} is no kernel file: it lacks {', '.join(sorted(missing))}")
        return facts

    @cached_property
    def layout(self) -> Layout:
        """The shapes of the arrays."""
        kernels = tuple(map(str, self.facts["kernels"]))
        place = get_array(self.store, kernels[0])
        points, outputs, train, _ = place.shape
        return Layout(kernels, Tiling(points, train, int(self.facts["side"])), outputs, str(place.dtype))

    @property
    def description(self) -> dict[str, Any]:
        """What the kernel is of."""
        found: dict[str, Any] = json.loads(self.facts["description"])
        return found

    @property
    def splits(self) -> dict[str, slice]:
        """Where each split lies among the points."""
        sizes = [(name, int(count)) for name, _, count in (text.partition("=") for text in self.facts["splits"])]
        ends = np.cumsum([0, *(count for _, count in sizes)]).tolist()
        return {name: slice(*ends[k : k + 2]) for k, (name, count) in enumerate(sizes) if count}

    @property
    def done(self) -> NDArray[np.uint64]:
        """The marks of the tiles; a row of marks that is cut off marks none."""
        rows, columns = self.layout.tiling.shape
        found, mirrored = np.zeros((rows, columns), MARK), np.triu(np.ones((rows, columns), bool), 1)
        for row in range(rows):
            content = self.marks(row).read_bytes() if self.marks(row).is_file() else b""
            if len(content) == found[row].nbytes:
                found[row] = np.frombuffer(content, MARK)
        return np.where(mirrored, 0, found)

    def marks(self, row: int) -> Path:
        """The file of a row of marks."""
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
        return waited_for(self.path.with_name(f".{self.path.name}.marks.lock"))

    def missing(self) -> list[tuple[int, int]]:
        """The tiles that are not written, or not as they were."""
        done = self.done
        return [tile for tile in self.layout.tiling.todo if not done[tile] or done[tile] != self.seal(*tile)]

    def seal(self, row: int, column: int) -> int:
        """The mark of a tile as its files are: it is one of this kernel, in its place."""
        content, tiling = Sealing(f"{self.facts['identity']} {row} {column}"), self.layout.tiling
        for name in self.layout.kernels:
            places = [f"{name}/c/{row}/0/{column}/0"]
            places += [f"{name}/c/{column}/0/{row}/0"] if tiling.mirrored(row, column) else []
            places += [f"{name}{SELF}/c/{row}/0/0"] if tiling.owns(row, column) else []
            for file in (self.path / place for place in places):
                content.take(file.read_bytes() if file.is_file() else b"")
        return int(np.frombuffer(content.digest, MARK)[0])

    def write(self, row: int, column: int, tile: Mapping[str, NDArray[Any]], own: Mapping[str, NDArray[Any]]) -> None:
        """A tile with its mirror image, and where it lies on the diagonal the points with themselves; its mark last."""
        tiling = self.layout.tiling
        for name, block in tile.items():
            place = get_array(self.store, name)
            place[tiling.rows(row), :, tiling.columns(column), :] = block
            if tiling.mirrored(row, column):
                within = tiling.columns(row)
                mirrored = block[: within.stop - within.start].transpose(2, 3, 0, 1)
                place[tiling.rows(column), :, within, :] = mirrored
        for name, block in own.items():
            get_array(self.store, name + SELF)[tiling.rows(row)] = block
        mark = self.seal(row, column)
        with self.marking():
            done = self.done[row]
            done[column] = mark
            write_atomically(self.marks(row), done.tobytes())

    def array(self, name: str, rows: slice = slice(None)) -> NDArray[Any]:
        """Read rows of any array."""
        try:
            return np.asarray(get_array(self.store, name)[rows])
        except (ValueError, RuntimeError) as error:
            raise DamagedKernel(f"{self.path} is damaged: {name} cannot be read; compute it anew") from error

    def tidy(self) -> None:
        """Remove what a killed process left half written."""
        drop_partial(self.path)


def open_matrix(path: Path) -> KernelMatrix:
    """Open a kernel file, finished or not."""
    if not path.is_dir():
        raise Mistake(f"{path} is no kernel file: it {'is a file' if path.exists() else 'does not exist'}")
    check_attributes(path)
    matrix = KernelMatrix(path)
    _ = matrix.layout
    return matrix
