"""A kernel file is filled, by threads of this process or by jobs on an engine, from wherever an earlier attempt left
it; and what it will take, about, from a small part that is timed.

The file has the same bytes whatever computes its tiles, and however often it is interrupted.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from shutil import disk_usage
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from ntkexp.config.build import admit, build
from ntkexp.engine.base import (
    AbstractEngine,
    AbstractJob,
    Ended,
    Ending,
    Stepped,
    Task,
    Tell,
    Unfinished,
    run_jobs,
)
from ntkexp.kernel_file.kernel import AbstractKernel, Blocks, splits_of
from ntkexp.mistake import Mistake, NoPlace, Useless
from ntkexp.path.budget import refuse_years
from ntkexp.progress import AbstractProgress, Silent
from ntkexp.records.atomic import Damaged, acquire, make_folder, release, to_text
from ntkexp.records.kernel_file import (
    KernelMatrix,
    Layout,
    Tiling,
    create,
    lock_of_marks,
    open_matrix,
    refuse_foreign_files,
    side_for,
)
from ntkexp.records.own_files import drop_half_written
from ntkexp.run.environment import fix_circumstances
from ntkexp.text import duration

Tile: TypeAlias = tuple[int, int]
"""Its row and its column."""
Arrays: TypeAlias = Mapping[str, NDArray[Any]]


def fill(
    kernel: AbstractKernel,
    path: Path,
    engine: AbstractEngine | None = None,
    *,
    trust: tuple[str, ...] = (),
    seconds: float = 0.0,
    force: bool = False,
    progress: AbstractProgress | None = None,
) -> KernelMatrix:
    """Finish the file of a kernel, which may be new, gone on with, or found as it was.

    Its tiles are computed by `kernel.threads` threads of this process, or by the workers of an engine, which trust what
    is trusted here and need about `seconds` for a tile.
    """
    progress = progress or Silent()
    with claim(path):
        matrix = open_or_begin(path, kernel, force)
        done, left = matrix.done, matrix.missing()
        if damaged := sum(bool(done[tile]) for tile in left):
            progress.warn(f"{path} is damaged: {damaged} of its tiles are computed again")
        matrix.unmark(left)
        if not left:
            progress.found(path)
            return matrix
        tiles = len(matrix.layout.tiling.todo)
        progress.start(path.name, tiles, tiles - len(left))
        if engine is None:
            counts = fill_tiles(kernel, matrix, left)
        else:
            job = TileJob(
                str(path.absolute()),
                kernel.experiment.fields(),
                trust,
                type(kernel),
                kernel.options,
            )
            counts = fill_by_jobs(engine, job, matrix, left, seconds, progress)
        try:
            with closing(counts):
                for count in counts:
                    progress.step(tiles - len(left) + count)
        finally:
            progress.stop()
        drop_half_written(path.rglob("*"))  # what a killed process left half written
        if kernel.remark:
            progress.say(kernel.remark)
    return matrix


@contextmanager
def claim(path: Path) -> Iterator[None]:
    """Be the one process that writes this file; the lock lies beside it meanwhile."""
    if not path.name:
        raise NoPlace(
            f"{path} is a folder that is there already, and no kernel file; choose another place"
        )
    lock = path.with_name(f".{path.name}.lock")
    try:
        make_folder(path.parent)
        descriptor = acquire(lock)
    except BlockingIOError:
        raise NoPlace(
            f"{path} is being written by another process; wait for it, or choose another place"
        ) from None
    except OSError as error:
        raise NoPlace(
            f"{path} cannot be written ({error.strerror}); choose another place"
        ) from None
    try:
        yield
    finally:
        with suppress(OSError):  # held by a worker that was forgotten
            release(acquire(lock_of_marks(path)), lock_of_marks(path))
        release(descriptor, lock)


def open_or_begin(path: Path, kernel: AbstractKernel, force: bool) -> KernelMatrix:
    """Open the file of this kernel, of which another's is refused, or begin it without a tile."""
    if path.exists() and not force:
        matrix = open_matrix(path)
        if matrix.facts["identity"] != kernel.identity:
            there, here = matrix.description, kernel.description
            reasons = {
                "data_sha256": "other data",
                "kernel": "another kernel",
                "code": "other code",
                "dtype": f"dtype={there.get('dtype')}",
            }
            differing = (
                what
                for name, what in reasons.items()
                if name in here and there.get(name) != here[name]
            )
            raise Useless(
                f"{path} is of {next(differing, 'another version')}; choose another place, or compute it again"
            )
        return matrix
    if path.exists() and any(path.iterdir()):
        with suppress(Damaged):
            open_matrix(path)  # `force` is for kernel files: nothing else is removed
        refuse_foreign_files(path)
    layout = layout_of(kernel)
    tiling = layout.tiling
    pairs = tiling.train * (tiling.points - tiling.train / 2)
    what = f"data.train={tiling.train}, {tiling.points} points in all"
    refuse_years(pairs * kernel.seconds, what, kernel.experiment.device, "them, or model.depth")
    free = disk_usage(path.parent).free
    if free < layout.bytes:
        raise NoPlace(
            f"{path}: the kernel takes {layout.bytes / 1e9:.2g} GB and there are {free / 1e9:.2g} GB free; "
            "lower data.train, data.probe or data.test, or choose another place"
        )
    facts = {
        "identity": kernel.identity,
        "description": to_text(kernel.description),
        "splits": [f"{name}={len(split.inputs)}" for name, split in splits_of(kernel.data).items()],
        "classes": list(kernel.data.classes),
    }
    columns = {"target": kernel.targets, "label": kernel.labels, "index": kernel.index}
    create(path, layout, facts, {name: column.numpy() for name, column in columns.items()})
    return open_matrix(path)


def layout_of(kernel: AbstractKernel) -> Layout:
    """The arrays of a file that is not begun."""
    points, train = len(kernel.inputs), len(kernel.data.train.inputs)
    tiling = Tiling(points, train, side_for(train, kernel.seconds))
    return Layout(kernel.names, tiling, kernel.outputs, kernel.experiment.dtype)


# --- Tiles are computed in this process, by several threads at once where the kernel allows it, each with one thread of
# linear algebra: a tile has the same bytes wherever and whenever it is computed. One thread writes.


def fill_tiles(
    kernel: AbstractKernel, matrix: KernelMatrix, tiles: Sequence[Tile]
) -> Generator[int]:
    """Compute tiles and write each as it is ready, marked once it is written; how many are is given each time."""
    tiling, rest, written = matrix.layout.tiling, iter(tiles), 0
    if not kernel.concurrent:
        for count, each in enumerate(tiles, 1):
            matrix.write(*each, *compute_tile(kernel, tiling, each))
            yield count
        return
    torch.set_num_threads(1)  # with one worker too: the bytes are the same for any number of them
    with ThreadPoolExecutor(kernel.threads) as pool:
        running: dict[Future[tuple[Arrays, Arrays]], Tile] = {}
        try:
            while True:
                while len(running) < 2 * kernel.threads and (tile := next(rest, None)) is not None:
                    running[pool.submit(compute_tile, kernel, tiling, tile)] = tile
                if not running:
                    return
                ready, _ = wait(running, return_when=FIRST_COMPLETED)
                # what is computed is kept, whatever happened to others
                for future in sorted(ready, key=lambda future: future.exception() is not None):
                    matrix.write(*running.pop(future), *future.result())
                    yield (written := written + 1)
        finally:
            pool.shutdown(cancel_futures=True)


def compute_tile(kernel: AbstractKernel, tiling: Tiling, tile: Tile) -> tuple[Arrays, Arrays]:
    """Compute one tile, and the points with themselves that are written along with it."""
    row, column = tile
    points, inputs = kernel.inputs[tiling.rows(row)], kernel.inputs
    if row != column:
        own: Blocks = {}
        if tiling.owns(row, column):
            alone = [kernel.among(point[None]) for point in points]
            own = {
                name: torch.cat([block[name][:, :, 0] for block in alone]) for name in kernel.names
            }
        return to_arrays(kernel.between(points, inputs[tiling.columns(column)])), to_arrays(own)
    whole = kernel.among(points)
    train = tiling.columns(column)
    square = {name: block[:, :, : train.stop - train.start] for name, block in whole.items()}
    diagonal = {
        name: block.diagonal(dim1=0, dim2=2).movedim(-1, 0) for name, block in whole.items()
    }
    return to_arrays(square), to_arrays(diagonal)


def to_arrays(blocks: Blocks) -> Arrays:
    """Turn tensors into arrays as the file takes them."""
    return {
        name: np.ascontiguousarray(block.detach().cpu().numpy()) for name, block in blocks.items()
    }


# --- Tiles are computed by jobs: a worker opens the file, computes its tiles and writes each, sealed, as it is ready.
# Who asks for them only counts the marks in the file.
#
# Tiles that are marked already are passed over, so a job that is done again goes on where it was lost. A worker that is
# lost costs the tile it was at; what it left is given to others, for as long as that gets any further.


ENOUGH = 300.0  # seconds of a task, beside which it matters little that a worker draws data and network first
LATE, PAUSE = (
    60.0,
    0.2,
)  # seconds that a network's file system may take to show a file, and between two looks at it


@dataclass(frozen=True)
class TileJob(AbstractJob):
    """Tiles of a file that exists. Threads of linear algebra are as many as the experiment says, or one: bits do not
    depend on who computes.
    """

    file: str
    fields: dict[str, Any]
    """The experiment whose data and network are meant."""

    trust: tuple[str, ...]
    kind: type[AbstractKernel]
    options: dict[str, Any]
    """What else makes the kernel."""

    tiles: tuple[Tile, ...] = ()

    def carry_out(self, name: str, threads: int, tell: Tell) -> Ending:
        try:
            if not Path(self.file).exists():
                shared = "choose a place on a file system that all machines share"
                raise Mistake(f"a worker does not see {self.file}; {shared}")
            matrix, kernel = open_matrix(Path(self.file)), self.kernel(threads)
            if matrix.facts["identity"] != kernel.identity:
                raise Mistake(
                    f"{self.file} is of something else there: that worker has other data or another version"
                )
            left = matrix.unmarked(self.tiles)
            for count in fill_tiles(kernel, matrix, left):
                tell(Stepped(name, count, len(left)))
        except Exception as error:  # whatever it is, with a word more
            error.add_note("computed by a single worker on this machine, it says where")
            raise
        return "done" if left else "found"

    def kernel(self, threads: int) -> AbstractKernel:
        """Draw data and network here as they were drawn where the command was given."""
        experiment = build(self.fields, admit(self.trust))
        fix_circumstances(experiment, experiment.threads or 1)
        return self.kind(experiment, experiment.draw(), threads, **self.options)


def fill_by_jobs(
    engine: AbstractEngine,
    job: TileJob,
    matrix: KernelMatrix,
    tiles: Sequence[Tile],
    seconds: float,
    progress: AbstractProgress,
) -> Generator[int]:
    """Let the workers of an engine do `job`, each with tiles of its own; how many are written is given now and then."""
    engine.refuse_longer(seconds)
    digits, left = matrix.facts["identity"][:12], list(tiles)
    while left:
        lost, home, logs = "", str(Path.cwd()), str(matrix.path.parent)
        tasks = (
            Task(f"tiles-{digits}-{number}", replace(job, tiles=tuple(part)), home, logs)
            for number, part in enumerate(split_tiles(left, seconds, engine.workers))
        )
        with closing(run_jobs(engine, tasks)) as events:
            for event in events:
                match event:
                    case Ended(how="failed" | "broken"):  # others would meet it as well
                        raise Unfinished(f"{matrix.path}: {event.reason}")
                    case Ended(how="killed" | "stopped"):
                        lost = event.reason or "it was told to stop"
                        progress.warn(
                            f"{matrix.path.name}: a worker is lost: {lost}; others continue"
                        )
                yield len(tiles) - len(matrix.unmarked(tiles))
        before, left = left, unmarked_tiles(matrix, left, 0.0 if lost else LATE)
        if len(left) == len(before):
            reason = lost or "what they wrote is not to be seen here"
            raise Unfinished(
                f"{matrix.path}: no worker finished a tile: {reason}; the same command continues"
            )


def unmarked_tiles(matrix: KernelMatrix, tiles: Sequence[Tile], patience: float) -> list[Tile]:
    """Find the tiles without a mark; a missing mark counts after some seconds."""
    end = time.monotonic() + patience
    while True:
        left = matrix.unmarked(tiles)
        if not left or time.monotonic() >= end:
            return left
        time.sleep(PAUSE)


def split_tiles(tiles: Sequence[Tile], seconds: float, workers: int) -> list[Sequence[Tile]]:
    """Cut tiles into parts that take long enough, and no fewer than there are workers.

    >>> [len(part) for part in split_tiles([(k, 0) for k in range(10)], seconds=1.0, workers=3)]
    [3, 3, 4]
    >>> len(split_tiles([(k, 0) for k in range(10)], seconds=100.0, workers=3))
    4
    """
    count = min(len(tiles), max(workers, ceil(len(tiles) * seconds / ENOUGH)))
    return [tiles[k * len(tiles) // count : (k + 1) * len(tiles) // count] for k in range(count)]


# --- What is left to do of a kernel file, and what it will take about, from a small part of a tile that is timed.
#
# core seconds = pairs left · seconds of a pair


LONG = 10.0  # core seconds below which no estimate is printed
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
        """The seconds until the end, with `workers` workers of one core each."""
        return max(self.seconds / workers, self.each)

    def sentence(self, workers: int) -> str:
        """Say it in a line.

        >>> WorkLeft(1715, 1_500_000_000, 3.6e7, 24_000_000_000).sentence(100)
        '1,715 tiles, about 10,000 core hours: 4 days with 100 workers of a core each; 24 GB on the disk'
        """
        hours = self.seconds / 3600
        cores = (
            f"{float(f'{hours:.2g}'):,.0f} core hours"
            if hours >= 10
            else f"{duration(self.seconds)} of one core"
        )
        crew = f"{workers} workers of a core each" if workers > 1 else "one worker"
        ahead = f"about {cores}: {duration(self.elapsed(workers))} with {crew}"
        return f"{self.tiles:,} tiles, {ahead}; {self.bytes / 1e9:.2g} GB on the disk"


def estimate(kernel: AbstractKernel, path: Path, force: bool = False) -> WorkLeft:
    """Estimate what is left of this file: its first part is timed, unless shapes say that it is little."""
    begun = None
    if not force:
        with suppress(Mistake):  # it is not begun, or damaged
            begun = open_matrix(path)
    if begun is not None and begun.facts["identity"] != kernel.identity:
        begun = None
    layout = begun.layout if begun else layout_of(kernel)
    left = begun.unmarked(layout.tiling.todo) if begun else layout.tiling.todo
    pairs = sum(layout.tiling.pairs(*tile) for tile in left)
    each = (
        kernel.seconds
        if kernel.seconds * pairs < LONG / 10
        else max(kernel.seconds, time_pair(kernel))
    )
    return WorkLeft(len(left), pairs, pairs * each, layout.bytes)


def time_pair(kernel: AbstractKernel) -> float:
    """Time pairs of points, twice as many on each side until it takes a while; once before, to load what it needs."""
    kernel = replace(
        kernel
    )  # what is timed is not a part of the file, on which a kernel may have a remark
    train, side = kernel.inputs[: len(kernel.data.train.inputs)], 2
    while True:
        points = train[:side]
        kernel.between(points, points)
        start = time.process_time()
        to_arrays(
            kernel.between(points, points)
        )  # fetched from a device, which would not have waited
        spent = time.process_time() - start
        if spent >= TIMED or 2 * side > min(LARGEST, len(train)):
            return spent / len(points) ** 2
        side *= 2
