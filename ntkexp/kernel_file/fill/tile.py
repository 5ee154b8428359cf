"""Tiles of a kernel file are computed, by several threads at once where the kernel allows it, each with one thread of
linear algebra: a tile is the same whoever computes it and when.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from ntkexp.kernel_file.fill.filler import AbstractFiller, Blocks
from ntkexp.kernel_file.fill.subject import Subject
from ntkexp.records.kernel_file.tiles import Tiling

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
