"""A kernel file is filled, from wherever an earlier attempt left it: tile by tile, each marked once it is written.

Tiles may be computed by several threads at once, each with one thread of linear algebra; one thread writes. A tile is
the same whoever computes it and when, and so is the file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from shutil import disk_usage
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from ntkexp.matrix.filler import AbstractFiller, Blocks
from ntkexp.matrix.subject import Subject
from ntkexp.mistake import Mistake
from ntkexp.progress import AbstractProgress
from ntkexp.records.json_file import to_text
from ntkexp.records.kernel_matrix import KernelMatrix, Layout, create, open_matrix
from ntkexp.records.lock import acquire
from ntkexp.records.tiles import Tiling, side_for

Arrays: TypeAlias = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class Filled:
    """What is written of a tile."""

    row: int
    column: int
    tile: Arrays
    own: Arrays


def fill(
    path: Path, subject: Subject, filler: AbstractFiller, workers: int, force: bool, progress: AbstractProgress
) -> KernelMatrix:
    """The finished file, new, gone on with, or found as it was."""
    with claimed(path):
        matrix = opened(path, subject, filler, force)
        tiles = matrix.layout.tiling.todo
        done = matrix.done
        left = [tile for tile in tiles if not done[tile]]
        if not left:
            progress.say(f"{path} is finished; --force computes it again")
            return matrix
        progress.start(path.name, len(tiles), len(tiles) - len(left))
        try:
            for count, each in enumerate(computed(left, subject, filler, matrix, workers), len(tiles) - len(left) + 1):
                matrix.write(each.row, each.column, each.tile, each.own)
                progress.step(count, None, None)
        finally:
            progress.stop()
        matrix.tidy()
    return matrix


@contextmanager
def claimed(path: Path) -> Iterator[None]:
    """Be the one process that writes this file; the lock lies beside it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = acquire(path.with_name(f".{path.name}.lock"))
    except BlockingIOError:
        raise Mistake(f"{path} is being written by another process; wait for it, or choose another --out") from None
    except OSError as error:
        raise Mistake(f"--out={path} cannot be written ({error.strerror}); choose another place") from None
    try:
        yield
    finally:
        os.close(descriptor)


def opened(path: Path, subject: Subject, filler: AbstractFiller, force: bool) -> KernelMatrix:
    """The file of this subject: one of another is refused."""
    if path.exists() and not force:
        matrix = open_matrix(path)
        refuse_other(matrix, subject)
        return matrix
    if path.exists() and any(path.iterdir()):
        open_matrix(path)  # --force is for kernel files: nothing else is removed
    return begun(path, subject, filler)


def begun(path: Path, subject: Subject, filler: AbstractFiller) -> KernelMatrix:
    """A file without a tile."""
    tiling = Tiling(len(subject.inputs), len(subject.data.train.inputs), side_for(len(subject.data.train.inputs)))
    layout = Layout(filler.names, tiling, filler.outputs, subject.experiment.dtype)
    free = disk_usage(path.parent).free
    if free < layout.bytes:
        raise Mistake(
            f"--out={path}: the kernel takes {layout.bytes / 1e9:.2g} GB and there are {free / 1e9:.2g} GB free; "
            "choose another place, or lower data.train, data.probe or data.test"
        )
    facts = {
        "identity": subject.identity,
        "description": to_text(subject.description),
        "splits": [f"{name}={len(split.inputs)}" for name, split in subject.splits.items()],
        "classes": list(subject.data.classes),
    }
    arrays = {"target": subject.targets, "label": subject.labels, "index": subject.index}
    return create(path, layout, facts, {name: array.numpy() for name, array in arrays.items()})


def refuse_other(matrix: KernelMatrix, subject: Subject) -> None:
    """A file knows what it is of."""
    if matrix.facts["identity"] == subject.identity:
        return
    there, here = matrix.description, subject.description
    differing = [name for name in here if there.get(name) != here[name]]
    what = {"data_sha256": "other data", "dtype": f"dtype={there.get('dtype')}", "kernel": "another kernel"}
    reason = next((what[name] for name in ("data_sha256", "kernel", "dtype") if name in differing), "another version")
    raise Mistake(f"{matrix.path} is of {reason}; choose another --out, or --force to compute it anew")


def computed(
    tiles: list[tuple[int, int]], subject: Subject, filler: AbstractFiller, matrix: KernelMatrix, workers: int
) -> Iterator[Filled]:
    """Tiles as they are ready, no more of them at once than there are workers."""
    tiling, rest = matrix.layout.tiling, iter(tiles)
    if not filler.concurrent:
        for row, column in rest:
            yield tile_of(row, column, subject, filler, tiling)
        return
    torch.set_num_threads(1)  # with one worker too: the bytes are the same for any number of them
    with ThreadPoolExecutor(workers) as crew:
        running: set[Future[Filled]] = set()
        try:
            while True:
                while len(running) < 2 * workers and (tile := next(rest, None)) is not None:
                    running.add(crew.submit(tile_of, *tile, subject, filler, tiling))
                if not running:
                    return
                ready, running = wait(running, return_when=FIRST_COMPLETED)
                for future in ready:
                    yield future.result()
        finally:
            crew.shutdown(cancel_futures=True)


def tile_of(row: int, column: int, subject: Subject, filler: AbstractFiller, tiling: Tiling) -> Filled:
    """Compute one."""
    points, inputs = subject.inputs[tiling.rows(row)], subject.inputs
    if row != column:
        own = arrays(itself(points, filler)) if column == 0 and row >= tiling.shape[1] else {}
        return Filled(row, column, arrays(filler.between(points, inputs[tiling.columns(column)])), own)
    whole = filler.among(points)
    train = tiling.columns(column)
    square = {name: block[:, :, : train.stop - train.start] for name, block in whole.items()}
    diagonal = {name: block.diagonal(dim1=0, dim2=2).movedim(-1, 0) for name, block in whole.items()}
    return Filled(row, column, arrays(square), arrays(diagonal))


def itself(points: torch.Tensor, filler: AbstractFiller) -> Blocks:
    """The kernels between each of these points and itself."""
    alone = [filler.among(point[None]) for point in points]
    return {name: torch.cat([block[name][:, :, 0] for block in alone]) for name in filler.names}


def arrays(blocks: Blocks) -> Arrays:
    """As the file takes them."""
    return {name: np.ascontiguousarray(block.detach().cpu().numpy()) for name, block in blocks.items()}
