"""What a kernel file is of, how its tiles are computed on several threads, and what is left to do."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from ntkexp.data.base import Data, Split
from ntkexp.experiment.experiment import Experiment
from ntkexp.experiment.identity import digest, files_of
from ntkexp.kernel_file.filler import AbstractFiller, Blocks
from ntkexp.loss.base import Squared
from ntkexp.mistake import Mistake
from ntkexp.records.folder import results_version
from ntkexp.records.kernel_file import KernelMatrix, Layout, Tiling, open_matrix, side_for
from ntkexp.text import duration

# --- What a kernel file is of: the points, and the kernel between them.
#
# identity = sha256(canonical JSON of the description, the sha256 of the points' numbers among it)
#
# Two commands that would fill a file with the same numbers share it; a file is refused for any other subject.


@dataclass(frozen=True)
class Subject:
    """Points in the order train, probe, test, and `kernel`, which tells in words of JSON what is between them."""

    experiment: Experiment
    data: Data
    kernel: dict[str, Any]
    outputs: int  # of the kernel

    @property
    def splits(self) -> dict[str, Split]:
        """The splits of the data by name."""
        return {name: getattr(self.data, name) for name in ("train", "probe", "test")}

    @cached_property
    def inputs(self) -> Float[Tensor, "point *shape"]:
        """The inputs of all points."""
        whole = torch.cat([split.inputs for split in self.splits.values()])
        return whole.to(self.experiment.device, getattr(torch, self.experiment.dtype))

    @cached_property
    def targets(self) -> Float[Tensor, "point out"]:
        """What the squared loss compares, whatever the network's loss is: classes as ±1, or one-hot and centred."""
        target, classes = torch.cat([split.target for split in self.splits.values()]), len(self.data.classes)
        if self.outputs == classes == 2:  # a network with two outputs for two classes
            return torch.nn.functional.one_hot(target, classes).double() - 1 / classes
        return Squared().targets(target, classes)

    @property
    def labels(self) -> Int[Tensor, " point"]:
        """The class of each point, −1 in a regression."""
        if not self.data.classes:
            return torch.full((len(self.inputs),), -1)
        return torch.cat([split.target for split in self.splits.values()])

    @property
    def index(self) -> Int[Tensor, " point"]:
        """Which example of the source each point is."""
        return torch.cat([split.index for split in self.splits.values()])

    @cached_property
    def data_digest(self) -> str:
        """The digest of all numbers that make the points."""
        found = sha256()
        for split in self.splits.values():
            for part in (split.inputs, split.target):
                found.update(f"{list(part.shape)}".encode())
                found.update(np.ascontiguousarray(part.numpy()).tobytes())
        return found.hexdigest()

    @property
    def description(self) -> dict[str, Any]:
        """Everything that decides a number in the file; the code of networks from elsewhere, where they are."""
        code = [digest(file) for file in files_of((self.experiment.model, self.experiment.init))]
        return {
            **({"code": code} if code else {}),
            "kernel": self.kernel,
            "data": self.experiment.data.option,
            "data_sha256": self.data_digest,
            "dtype": self.experiment.dtype,
            "results_version": results_version,
        }

    @property
    def identity(self) -> str:
        """The digest of the description, 64 hexadecimal digits."""
        return sha256(json.dumps(self.description, sort_keys=True, allow_nan=False).encode()).hexdigest()


# --- Tiles of a kernel file are computed, by several threads at once where the kernel allows it, each with one thread
# of linear algebra: a tile is the same whoever computes it and when.


Arrays: TypeAlias = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class FilledTile:
    """What is written of a tile."""

    row: int
    column: int
    tile: Arrays
    own: Arrays


def compute_tiles(
    tiles: list[tuple[int, int]], subject: Subject, filler: AbstractFiller, tiling: Tiling, workers: int
) -> Iterator[FilledTile]:
    """Compute tiles and give each as it is ready, no more of them at once than there are workers."""
    rest = iter(tiles)
    if not filler.concurrent:
        for row, column in rest:
            yield tile_of(row, column, subject, filler, tiling)
        return
    torch.set_num_threads(1)  # with one worker too: the bytes are the same for any number of them
    with ThreadPoolExecutor(workers) as crew:
        running: set[Future[FilledTile]] = set()
        try:
            while True:
                while len(running) < 2 * workers and (tile := next(rest, None)) is not None:
                    running.add(crew.submit(tile_of, *tile, subject, filler, tiling))
                if not running:
                    return
                ready, running = wait(running, return_when=FIRST_COMPLETED)
                for future in sorted(ready, key=failed):  # what is computed is kept, whatever happened to others
                    yield future.result()
        finally:
            crew.shutdown(cancel_futures=True)


def failed(future: Future[FilledTile]) -> bool:
    """Whether there is no tile."""
    return future.exception() is not None


def tile_of(row: int, column: int, subject: Subject, filler: AbstractFiller, tiling: Tiling) -> FilledTile:
    """Compute one tile."""
    points, inputs = subject.inputs[tiling.rows(row)], subject.inputs
    if row != column:
        own = arrays(with_themselves(points, filler)) if tiling.owns(row, column) else {}
        return FilledTile(row, column, arrays(filler.between(points, inputs[tiling.columns(column)])), own)
    whole = filler.among(points)
    train = tiling.columns(column)
    square = {name: block[:, :, : train.stop - train.start] for name, block in whole.items()}
    diagonal = {name: block.diagonal(dim1=0, dim2=2).movedim(-1, 0) for name, block in whole.items()}
    return FilledTile(row, column, arrays(square), arrays(diagonal))


def with_themselves(points: torch.Tensor, filler: AbstractFiller) -> Blocks:
    """Compute the kernels between each of these points and itself."""
    alone = [filler.among(point[None]) for point in points]
    return {name: torch.cat([block[name][:, :, 0] for block in alone]) for name in filler.names}


def arrays(blocks: Blocks) -> Arrays:
    """Turn tensors into arrays as the file takes them."""
    return {name: np.ascontiguousarray(block.detach().cpu().numpy()) for name, block in blocks.items()}


# --- What is left to do of a kernel file, and what it will take about, from a small part of a tile that is timed.
#
# core seconds = pairs left · seconds of a pair


LONG = 10.0  # core seconds of which nobody has to be told
TIMED = 0.5  # seconds that say how long others take
LARGEST = 32  # points on each side of what is timed


@dataclass(frozen=True)
class WorkLeft:
    """Tiles with their pairs of points, the core seconds that they take, and the bytes of the whole file."""

    tiles: int
    pairs: int
    seconds: float
    bytes: int

    @property
    def each(self) -> float:
        """The core seconds of a tile."""
        return self.seconds / max(1, self.tiles)

    def elapsed(self, workers: int) -> float:
        """The seconds until the end, with so many workers of one core each."""
        return max(self.seconds / workers, self.each)

    def sentence(self, workers: int) -> str:
        """Say it in a line.

        >>> WorkLeft(1715, 1_500_000_000, 3.6e7, 24_000_000_000).sentence(100)
        '1,715 tiles, about 10,000 core hours: 4 days with 100 workers of a core each; 24 GB on the disk'
        """
        hours = self.seconds / 3600
        cores = f"{float(f'{hours:.2g}'):,.0f} core hours" if hours >= 10 else f"{duration(self.seconds)} of one core"
        crew = f"{workers} workers of a core each" if workers > 1 else "one worker"
        ahead = f"about {cores}: {duration(self.elapsed(workers))} with {crew}"
        return f"{self.tiles:,} tiles, {ahead}; {self.bytes / 1e9:.2g} GB on the disk"


def layout_of(subject: Subject, filler: AbstractFiller) -> Layout:
    """The arrays of a file that is not begun."""
    points, train = len(subject.inputs), len(subject.data.train.inputs)
    tiling = Tiling(points, train, side_for(train, filler.seconds))
    return Layout(filler.names, tiling, filler.outputs, subject.experiment.dtype)


def estimate(path: Path, subject: Subject, filler: AbstractFiller, force: bool) -> WorkLeft:
    """Estimate what is left of this file: its first part is timed, unless shapes say that it is little."""
    begun = None if force else matrix_of(path, subject)
    layout = begun.layout if begun else layout_of(subject, filler)
    left = begun.unmarked(layout.tiling.todo) if begun else layout.tiling.todo
    pairs = sum(layout.tiling.pairs(*tile) for tile in left)
    each = filler.seconds if filler.seconds * pairs < LONG / 10 else max(filler.seconds, timed(subject, filler))
    return WorkLeft(len(left), pairs, pairs * each, layout.bytes)


def matrix_of(path: Path, subject: Subject) -> KernelMatrix | None:
    """Open the file, if it was begun and is of this subject."""
    try:
        matrix = open_matrix(path)
    except Mistake:
        return None
    return matrix if matrix.facts["identity"] == subject.identity else None


def timed(subject: Subject, filler: AbstractFiller) -> float:
    """Time pairs of points, twice as many on each side until it takes a while; once before, to load what it needs."""
    train, side = subject.inputs[: len(subject.data.train.inputs)], 2
    while True:
        points = train[:side]
        filler.between(points, points)
        start = time.process_time()
        arrays(filler.between(points, points))  # fetched from a device, which would not have waited
        spent = time.process_time() - start
        if spent >= TIMED or 2 * side > min(LARGEST, len(train)):
            return spent / len(points) ** 2
        side *= 2
