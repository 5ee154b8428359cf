"""Compute the tiles of a kernel file, by threads of this process or by jobs
on an engine.

An interrupted computation continues where it stopped. The bytes of the file do not
depend on the number of workers or on interruptions."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from math import ceil
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from ntkexp.capacity import require_disk
from ntkexp.config.build import admit, build
from ntkexp.engine.base import (
    AbstractEngine,
    AbstractJob,
    Ending,
    ReportEvent,
    Stepped,
    Task,
    Unfinished,
    reason_of_loss,
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
    open_matrix,
    refuse_foreign_files,
    side_for,
)
from ntkexp.records.own_files import drop_half_written
from ntkexp.run.environment import fix_circumstances
from ntkexp.text import duration

Tile: TypeAlias = tuple[int, int]
"""The row and column index of a tile."""
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
    """Compute the missing tiles of a kernel's file, and create the file if necessary.
    Return the finished matrix.

    Args:
        kernel: The kernel to be computed.
        path: The kernel file.
        engine: The engine whose workers compute the tiles. If None, `kernel.threads`
            threads of this process compute them.
        trust: The packages and files whose code the workers may run.
        seconds: The estimated core seconds for a tile.
        force: Overwrite an existing kernel file.
        progress: The progress display.
    """
    progress = progress or Silent()
    with locked(path):
        matrix = open_or_begin(path, kernel, force)
        remaining = matrix.missing()
        damaged = len(remaining) - len(matrix.unmarked(remaining))
        if damaged:
            progress.warn(
                f"{path} is damaged: {damaged} of its tiles are computed again"
            )
        for tile in remaining:
            matrix.marker(*tile).unlink(missing_ok=True)
        if not remaining:
            progress.found(path)
            return matrix
        tiles = len(matrix.layout.tiling.todo)
        progress.start(path.name, tiles, tiles - len(remaining), "tile")
        if engine is None:
            counts = fill_tiles(kernel, matrix, remaining)
        else:
            job = tile_job(kernel, path, trust)
            counts = fill_by_jobs(engine, job, matrix, remaining, seconds, progress)
        try:
            with closing(counts):
                for count in counts:
                    progress.step(tiles - len(remaining) + count)
        finally:
            progress.stop()
        # processes that were killed may have left temporary files
        drop_half_written(path.rglob("*"))
        if kernel.remark:
            progress.say(kernel.remark)
    return matrix


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a kernel file inside the block.
    Raise if another process holds the lock."""
    if not path.name:
        raise NoPlace(
            f"{path} is an existing folder, not a kernel file; choose another place"
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
        release(descriptor, lock)


def open_or_begin(path: Path, kernel: AbstractKernel, force: bool) -> KernelMatrix:
    """Open the file of this kernel, or create it without tiles.

    Without `force`, raise if the file belongs to a different kernel. Also raise if the
    computation would take years, or if the file does not fit on the disk."""
    if path.exists() and not force:
        matrix = open_matrix(path)
        if matrix.facts["identity"] != kernel.identity:
            raise Useless(
                f"{path} is of {first_difference(matrix, kernel)}; choose another place, or "
                "compute it again"
            )
        return matrix
    if path.exists() and any(path.iterdir()):
        with suppress(Damaged):
            # raise unless the folder is a kernel file, so that `force` never deletes
            # anything else
            open_matrix(path)
        refuse_foreign_files(path)
    layout = layout_of(kernel)
    refuse_too_large(kernel, layout, path.parent)
    facts = {
        "identity": kernel.identity,
        "description": to_text(kernel.description),
        "splits": [
            f"{name}={len(split.inputs)}"
            for name, split in splits_of(kernel.data).items()
        ],
        "classes": list(kernel.data.classes),
    }
    columns = {"target": kernel.targets, "label": kernel.labels, "index": kernel.index}
    create(
        path, layout, facts, {name: column.numpy() for name, column in columns.items()}
    )
    return open_matrix(path)


def refuse_too_large(kernel: AbstractKernel, layout: Layout, folder: Path) -> None:
    """Raise if the computation would take years, or if the file does not fit on the
    disk."""
    tiling = layout.tiling
    pairs = tiling.train * (tiling.points - tiling.train / 2)
    sizes = f"data.train={tiling.train}, {tiling.points} points in all"
    device = kernel.experiment.device
    refuse_years(pairs * kernel.seconds_per_pair, sizes, device, "them, or model.depth")
    remedy = "lower data.train, data.query or data.test"
    require_disk(folder, layout.bytes, "tiles of this kernel", remedy)


def first_difference(matrix: KernelMatrix, kernel: AbstractKernel) -> str:
    """Describe the first difference between the kernel in a file and this kernel."""
    of_file = matrix.description
    description = kernel.description
    differences = {
        "data_sha256": "other data",
        "kernel": "another kernel",
        "code": "other code",
        "dtype": f"dtype={of_file.get('dtype')}",
    }
    for name, difference in differences.items():
        if name in description and of_file.get(name) != description[name]:
            return difference
    return "another version"


def layout_of(kernel: AbstractKernel) -> Layout:
    """Return the names and shapes of the arrays of a new file."""
    points = len(kernel.inputs)
    train = len(kernel.data.train.inputs)
    tiling = Tiling(points, train, side_for(train, kernel.seconds_per_pair))
    return Layout(kernel.names, tiling, kernel.outputs, kernel.experiment.dtype)


# --- Computation in this process
#
# If the kernel is concurrent, several threads compute tiles. Linear algebra inside
# these threads is single-threaded, so that the bytes of a tile do not depend on the
# number of threads. The main thread writes the tiles.


def fill_tiles(
    kernel: AbstractKernel, matrix: KernelMatrix, tiles: Sequence[Tile]
) -> Generator[int]:
    """Compute tiles. Write and mark each tile when it is ready,
    and yield the number written."""
    tiling = matrix.layout.tiling
    if not kernel.concurrent:
        for count, tile in enumerate(tiles, 1):
            matrix.write(*tile, *compute_tile(kernel, tiling, tile))
            yield count
        return
    waiting = iter(tiles)
    written = 0
    # one thread of linear algebra, even if `kernel.threads` is 1, so that bytes are equal
    torch.set_num_threads(1)
    with ThreadPoolExecutor(kernel.threads) as pool:
        running: dict[Future[tuple[Arrays, Arrays]], Tile] = {}
        try:
            while True:
                for tile in islice(waiting, 2 * kernel.threads - len(running)):
                    running[pool.submit(compute_tile, kernel, tiling, tile)] = tile
                if not running:
                    return
                ready, _ = wait(running, return_when=FIRST_COMPLETED)
                # write finished tiles before a failed tile raises its error
                for future in sorted(
                    ready, key=lambda future: future.exception() is not None
                ):
                    matrix.write(*running.pop(future), *future.result())
                    written += 1
                    yield written
        finally:
            pool.shutdown(cancel_futures=True)


def compute_tile(
    kernel: AbstractKernel, tiling: Tiling, tile: Tile
) -> tuple[Arrays, Arrays]:
    """Return the blocks of one tile, and the kernels K(x, x) of points x with
    themselves. A file stores K(x, x) in separate arrays.

    One tile in each row of tiles computes K(x, x) for the points of its rows. For other
    tiles, the second result is empty."""
    row, column = tile
    points = kernel.inputs[tiling.rows(row)]
    train = tiling.columns(column)
    if row == column:
        blocks = kernel.blocks(points)
        columns = train.stop - train.start
        square = {name: block[:, :, :columns] for name, block in blocks.items()}
        diagonal = {
            name: block.diagonal(dim1=0, dim2=2).movedim(-1, 0)
            for name, block in blocks.items()
        }
        return to_arrays(square), to_arrays(diagonal)
    own_blocks: Blocks = {}
    if tiling.holds_diagonal(row, column):
        single_blocks = [kernel.blocks(point[None]) for point in points]
        own_blocks = {
            name: torch.cat([block[name][:, :, 0] for block in single_blocks])
            for name in kernel.names
        }
    cross = kernel.blocks(points, kernel.inputs[train])
    return to_arrays(cross), to_arrays(own_blocks)


def to_arrays(blocks: Blocks) -> Arrays:
    """Convert tensors to contiguous arrays."""
    return {
        name: np.ascontiguousarray(block.detach().cpu().numpy())
        for name, block in blocks.items()
    }


# --- Computation by jobs
#
# Each worker gets a list of tiles. It writes every computed tile to the file, and marks
# the tile as finished. The command that submitted the jobs counts these marks. If a
# worker is lost, only its current tile is lost: the next round of jobs computes all
# tiles without a mark. The command gives up if a round of jobs finishes no tile.


TASK_SECONDS = 300.0
"""The intended duration of a job, in seconds. At its start, a job draws the data and the
network, which takes much less time."""
MAX_FILE_DELAY_SECONDS = 60.0
"""A new file on a network file system must become visible within this time."""
POLL_SECONDS = 0.2


@dataclass(frozen=True)
class TileJob(AbstractJob):
    """A job that computes some tiles of an existing file.

    The number of threads of linear algebra comes from the experiment, so that results
    are identical to the last bit on every worker."""

    advice = (
        "compute the file with a single worker on this machine to see where it fails"
    )

    file: str
    fields: dict[str, Any]
    """The fields of the experiment."""

    trust: tuple[str, ...]
    kind: type[AbstractKernel]
    options: dict[str, Any]
    """The fields of the kernel's class that are not in `AbstractKernel`."""

    tiles: tuple[Tile, ...] = ()

    def carry_out(self, name: str, threads: int, report_event: ReportEvent) -> Ending:
        if not Path(self.file).exists():
            raise Mistake(
                f"a worker does not see {self.file}; choose a place on a file system that all "
                "machines share"
            )
        matrix = open_matrix(Path(self.file))
        kernel = self.kernel(threads)
        if matrix.facts["identity"] != kernel.identity:
            raise Mistake(
                f"{self.file} holds another kernel than this worker computes: the worker has "
                "other data or another version"
            )
        remaining = matrix.unmarked(self.tiles)
        for count in fill_tiles(kernel, matrix, remaining):
            report_event(Stepped(name, count, len(remaining)))
        return "done" if remaining else "found"

    def kernel(self, threads: int) -> AbstractKernel:
        experiment = build(self.fields, admit(self.trust))
        fix_circumstances(experiment, experiment.threads or 1)
        return self.kind(experiment, experiment.draw(), threads, **self.options)


def tile_job(kernel: AbstractKernel, path: Path, trust: tuple[str, ...]) -> TileJob:
    """Return a job without tiles for the file of a kernel."""
    fields = kernel.experiment.fields()
    return TileJob(str(path.absolute()), fields, trust, type(kernel), kernel.options)


def fill_by_jobs(
    engine: AbstractEngine,
    job: TileJob,
    matrix: KernelMatrix,
    tiles: Sequence[Tile],
    seconds: float,
    progress: AbstractProgress,
) -> Generator[int]:
    """Submit copies of `job` for parts of the tiles,
    and yield the number of finished tiles.

    Raise if the time limit of the engine is shorter than `seconds` per tile, or if no
    worker makes progress."""
    engine.refuse_longer(seconds)
    identity = matrix.facts["identity"][:12]
    remaining = list(tiles)
    while remaining:
        lost = ""
        logs = str(matrix.path.parent)
        tasks = (
            Task(f"tiles-{identity}-{number}", replace(job, tiles=tuple(part)), logs)
            for number, part in enumerate(
                split_tiles(remaining, seconds, engine.workers)
            )
        )
        with closing(run_jobs(engine, tasks)) as events:
            for event in events:
                if reason := reason_of_loss(event, matrix.path):
                    lost = reason
                    progress.warn(
                        f"{matrix.path.name}: a worker is lost: {lost}; others continue"
                    )
                yield len(tiles) - len(matrix.unmarked(tiles))
        count_before = len(remaining)
        remaining = unmarked_tiles(
            matrix, remaining, 0.0 if lost else MAX_FILE_DELAY_SECONDS
        )
        if len(remaining) == count_before:
            reason = lost or "the files that they wrote are not visible here"
            raise Unfinished(
                f"{matrix.path}: no worker finished a tile: {reason}; the same command continues"
            )


def unmarked_tiles(
    matrix: KernelMatrix, tiles: Sequence[Tile], timeout: float
) -> list[Tile]:
    """Return the tiles that are not yet marked as finished in the kernel file.

    Wait up to `timeout` seconds until all are marked.
    """
    end = time.monotonic() + timeout
    while True:
        remaining = matrix.unmarked(tiles)
        if not remaining or time.monotonic() >= end:
            return remaining
        time.sleep(POLL_SECONDS)


def split_tiles(
    tiles: Sequence[Tile], seconds: float, workers: int
) -> list[Sequence[Tile]]:
    """Split tiles into parts that take at most about TASK_SECONDS. If there are enough
    tiles, return at least one part per worker.

    >>> [len(part) for part in split_tiles([(k, 0) for k in range(10)], seconds=1.0, workers=3)]
    [3, 3, 4]
    >>> len(split_tiles([(k, 0) for k in range(10)], seconds=100.0, workers=3))
    4
    """
    count = min(len(tiles), max(workers, ceil(len(tiles) * seconds / TASK_SECONDS)))
    bounds = [k * len(tiles) // count for k in range(count + 1)]
    return [tiles[start:end] for start, end in pairwise(bounds)]


# --- Estimates. The remaining work in core seconds is the number of remaining pairs of
# points, times the seconds per pair, which are measured on a few points.


LITTLE_WORK_SECONDS = 10.0
"""If there is less work than this many core seconds, start no other processes."""
MIN_TIMED_SECONDS = 0.5
"""Increase the number of measured points until the measurement takes this long."""
MAX_TIMED_POINTS = 32
"""The maximum number of measured points. All pairs of them are timed."""


@dataclass(frozen=True)
class RemainingWork:
    """The remaining work for a kernel file: tiles, pairs of points, core seconds, and
    the file's size in bytes."""

    tiles: int
    pairs: int
    seconds: float
    bytes: int

    @property
    def seconds_per_tile(self) -> float:
        return self.seconds / max(1, self.tiles)

    def elapsed(self, workers: int) -> float:
        """Return the remaining wall-clock seconds,
        with this many workers of one core each."""
        return max(self.seconds / workers, self.seconds_per_tile)

    def sentence(self, workers: int) -> str:
        r"""Describe the remaining work in one line.

        >>> sentence = RemainingWork(1715, 1_500_000_000, 3.6e7, 24_000_000_000).sentence(100)
        >>> print(sentence.replace(": ", ":\n"))
        1,715 tiles, about 10,000 core hours:
        4 days with 100 workers of a core each; 24 GB on the disk
        """
        hours = self.seconds / 3600
        cores = f"{duration(self.seconds)} of one core"
        if hours >= 10:
            cores = f"{float(f'{hours:.2g}'):,.0f} core hours"
        workers_text = (
            f"{workers} workers of a core each" if workers > 1 else "one worker"
        )
        time_left = (
            f"about {cores}: {duration(self.elapsed(workers))} with {workers_text}"
        )
        return (
            f"{self.tiles:,} tiles, {time_left}; {self.bytes / 1e9:.2g} GB on the disk"
        )


def estimate(kernel: AbstractKernel, path: Path, force: bool = False) -> RemainingWork:
    """Estimate the remaining work of a kernel file.

    If the shapes suggest more than a second of work, measure the time for some points.
    """
    existing = None
    if not force:
        with suppress(Mistake):  # ignore a file that does not exist or is damaged
            existing = open_matrix(path)
    if existing is not None and existing.facts["identity"] != kernel.identity:
        existing = None
    layout = existing.layout if existing else layout_of(kernel)
    remaining = (
        existing.unmarked(layout.tiling.todo) if existing else layout.tiling.todo
    )
    pairs = sum(layout.tiling.pairs(*tile) for tile in remaining)
    seconds_per_pair = kernel.seconds_per_pair
    if seconds_per_pair * pairs >= LITTLE_WORK_SECONDS / 10:
        seconds_per_pair = max(seconds_per_pair, time_pair(kernel))
    return RemainingWork(len(remaining), pairs, pairs * seconds_per_pair, layout.bytes)


def time_pair(kernel: AbstractKernel) -> float:
    """Return the measured core seconds per pair of points.

    Double the number of points until the measurement takes at least
    `MIN_TIMED_SECONDS`.
    """
    kernel = replace(kernel)  # a copy, so that the original records no error bars
    train = kernel.inputs[: len(kernel.data.train.inputs)]
    count = 2
    while True:
        points = train[:count]
        kernel.blocks(points, points)  # warm up: the first call loads libraries
        start = time.process_time()
        to_arrays(kernel.blocks(points, points))  # conversion to NumPy waits for a GPU
        elapsed = time.process_time() - start
        if elapsed >= MIN_TIMED_SECONDS or 2 * count > min(
            MAX_TIMED_POINTS, len(train)
        ):
            return elapsed / len(points) ** 2
        count *= 2
