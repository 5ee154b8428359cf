"""A kernel file is filled, by this process or by workers of an engine, from wherever an earlier attempt left it."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from shutil import disk_usage
from typing import Any

from ntkexp.config.build import admit, build
from ntkexp.engine.base import AbstractEngine, AbstractJob, Ended, Ending, Stepped, Task, Tell, Unfinished, run_jobs
from ntkexp.kernel_file.filler import AbstractFiller, AbstractRecipe
from ntkexp.kernel_file.tile import Subject, compute_tiles, layout_of
from ntkexp.mistake import Mistake, NoPlace, Useless
from ntkexp.path.budget import refuse_years
from ntkexp.progress import AbstractProgress, Silent
from ntkexp.records.atomic import Damaged, acquire, make_folder, to_text
from ntkexp.records.kernel_file import KernelMatrix, create, open_matrix
from ntkexp.run.environment import fix_circumstances

# --- Whoever completes a kernel file: threads of this process, or an engine (`ntkexp.kernel_file.fill`).


Tile = tuple[int, int]
"""Its row and its column."""


class AbstractCrew(ABC):
    """A crew computes tiles and writes them, each marked once it is written."""

    @abstractmethod
    def complete(self, matrix: KernelMatrix, tiles: Sequence[Tile], progress: AbstractProgress) -> Generator[int]:
        """Complete these tiles; how many of them are written is given from time to time."""


@dataclass(frozen=True)
class ThreadCrew(AbstractCrew):
    """Threads of this process, of which one writes."""

    subject: Subject
    filler: AbstractFiller
    workers: int

    def complete(self, matrix: KernelMatrix, tiles: Sequence[Tile], progress: AbstractProgress) -> Generator[int]:
        computed = compute_tiles(list(tiles), self.subject, self.filler, matrix.layout.tiling, self.workers)
        for count, each in enumerate(computed, 1):
            matrix.write(each.row, each.column, each.tile, each.own)
            yield count


# --- A kernel file is filled, from wherever an earlier attempt left it: tile by tile, each marked once it is written.
#
# The file is the same whoever computes its tiles, and however often it was broken off.


def fill(
    path: Path,
    subject: Subject,
    filler: AbstractFiller,
    crew: AbstractCrew,
    *,
    force: bool,
    progress: AbstractProgress,
) -> KernelMatrix:
    """Finish a kernel file: it may be new, gone on with, or found as it was."""
    with claim(path):
        matrix = open_or_begin(path, subject, filler, force)
        tiling, done, left = matrix.layout.tiling, matrix.done, matrix.missing()
        if damaged := sum(bool(done[tile]) for tile in left):
            progress.warn(f"{path} is damaged: {damaged} of its tiles are computed again")
        matrix.unmark(left)
        if not left:
            progress.found(path)
            return matrix
        before = len(tiling.todo) - len(left)
        progress.start(path.name, len(tiling.todo), before)
        try:
            with closing(crew.complete(matrix, left, progress)) as counts:
                for count in counts:
                    progress.step(before + count, None, None)
        finally:
            progress.stop()
        matrix.tidy()
        if filler.remark:
            progress.say(filler.remark)
    return matrix


@contextmanager
def claim(path: Path) -> Iterator[None]:
    """Be the one process that writes this file; the lock lies beside it."""
    if not path.name:
        raise NoPlace(f"{path} is a folder that is there already, and no kernel file; choose another place")
    try:
        make_folder(path.parent)
        descriptor = acquire(path.with_name(f".{path.name}.lock"))
    except BlockingIOError:
        raise NoPlace(f"{path} is being written by another process; wait for it, or choose another place") from None
    except OSError as error:
        raise NoPlace(f"{path} cannot be written ({error.strerror}); choose another place") from None
    try:
        yield
    finally:
        os.close(descriptor)


def open_or_begin(path: Path, subject: Subject, filler: AbstractFiller, force: bool) -> KernelMatrix:
    """Open the file of this subject: one of another is refused."""
    if path.exists() and not force:
        matrix = open_matrix(path)
        refuse_other(matrix, subject)
        return matrix
    if path.exists() and any(path.iterdir()):
        with suppress(Damaged):
            open_matrix(path)  # `force` is for kernel files: nothing else is removed
    return begin(path, subject, filler)


def begin(path: Path, subject: Subject, filler: AbstractFiller) -> KernelMatrix:
    """Begin a file without a tile."""
    layout = layout_of(subject, filler)
    tiling = layout.tiling
    pairs = tiling.train * (tiling.points - tiling.train / 2)
    what = f"data.train={tiling.train}, {tiling.points} points in all"
    refuse_years(pairs * filler.seconds, what, subject.experiment.device, "them, or model.depth")
    free = disk_usage(path.parent).free
    if free < layout.bytes:
        raise NoPlace(
            f"{path}: the kernel takes {layout.bytes / 1e9:.2g} GB and there are {free / 1e9:.2g} GB free; "
            "lower data.train, data.probe or data.test, or choose another place"
        )
    facts = {
        "identity": subject.identity,
        "description": to_text(subject.description),
        "splits": [f"{name}={len(split.inputs)}" for name, split in subject.splits.items()],
        "classes": list(subject.data.classes),
    }
    arrays = {"target": subject.targets, "label": subject.labels, "index": subject.index}
    create(path, layout, facts, {name: array.numpy() for name, array in arrays.items()})
    return open_matrix(path)


def refuse_other(matrix: KernelMatrix, subject: Subject) -> None:
    """Refuse a file that is of something else."""
    if matrix.facts["identity"] == subject.identity:
        return
    there, here = matrix.description, subject.description
    differing = [name for name in here if there.get(name) != here[name]]
    what = {
        "data_sha256": "other data",
        "kernel": "another kernel",
        "code": "other code",
        "dtype": f"dtype={there.get('dtype')}",
    }
    reason = next((said for name, said in what.items() if name in differing), "another version")
    raise Useless(f"{matrix.path} is of {reason}; choose another place, or compute it anew")


# --- Some tiles of a kernel file as a job: a worker opens the file, computes them and writes each, sealed, as it is
# ready.
#
# Tiles that are marked already are passed over, so a job that is done again goes on where it was lost. Threads of
# linear algebra are as many as the experiment says, or one: bits do not depend on who computes.


@dataclass(frozen=True)
class TileJob(AbstractJob):
    """Tiles of a file that exists."""

    file: str
    fields: dict[str, Any]
    """The experiment whose data and network are meant."""

    trust: tuple[str, ...]
    recipe: AbstractRecipe
    tiles: tuple[Tile, ...] = ()

    def carry_out(self, name: str, threads: int, tell: Tell) -> Ending:
        with saying_where_to_look():
            matrix, crew = self.matrix, self.crew(threads)
            if matrix.facts["identity"] != crew.subject.identity:
                raise Mistake(f"{self.file} is of something else there: that worker has other data or another version")
            left = matrix.unmarked(self.tiles)
            for count in crew.complete(matrix, left, Silent()):
                tell(Stepped(name, count, len(left)))
        return "done" if left else "found"

    @property
    def matrix(self) -> KernelMatrix:
        """The file, which was begun where the command was given."""
        if not Path(self.file).exists():
            raise Mistake(f"a worker does not see {self.file}; choose a place on a file system that all machines share")
        return open_matrix(Path(self.file))

    def crew(self, threads: int) -> ThreadCrew:
        """Draw data and network here as they were drawn where the command was given."""
        experiment = build(self.fields, admit(self.trust))
        fix_circumstances(experiment, experiment.threads or 1)
        data = experiment.draw()
        filler = self.recipe.filler(experiment, data, threads)
        return ThreadCrew(Subject(experiment, data, filler.kernel, filler.outputs), filler, threads)


@contextmanager
def saying_where_to_look() -> Iterator[None]:
    """Let an exception that nobody expected say how to see where it comes from."""
    try:
        yield
    except Exception as error:
        error.add_note("computed by a single worker on this machine, it says where")
        raise


# --- Workers of an engine complete a kernel file; who conducts them only counts the marks in it.
#
# A worker that is lost costs the tile it was at. What it left is given to others, for as long as that gets any
# further.


ENOUGH = 300.0  # seconds of a task, beside which it matters little that a worker draws data and network first
LATE, PAUSE = 60.0, 0.2  # seconds that a network's file system may take to show a file, and between two looks at it


@dataclass(frozen=True)
class EngineCrew(AbstractCrew):
    """The workers of an engine, each of which does `job` with tiles of its own."""

    engine: AbstractEngine
    job: TileJob
    seconds: float
    """What a tile takes on one core, about."""

    def complete(self, matrix: KernelMatrix, tiles: Sequence[Tile], progress: AbstractProgress) -> Generator[int]:
        self.engine.refuse_longer(self.seconds)
        left = list(tiles)
        while left:
            lost = ""
            with closing(run_jobs(self.engine, self.tasks(matrix, left))) as events:
                for event in events:
                    if isinstance(event, Ended):
                        lost = lost_by(event, matrix.path, progress) or lost
                    yield len(tiles) - len(matrix.unmarked(tiles))
            before, left = left, left_of(matrix, left, 0.0 if lost else LATE)
            if len(left) == len(before):
                reason = lost or "what they wrote is not to be seen here"
                raise Unfinished(f"{matrix.path}: no worker finished a tile: {reason}; the same command goes on")

    def tasks(self, matrix: KernelMatrix, tiles: Sequence[Tile]) -> Iterator[Task]:
        """Cut tiles into tasks, in their order."""
        for number, part in enumerate(parts(tiles, self.seconds, self.engine.workers)):
            name, home = f"tiles-{matrix.facts['identity'][:12]}-{number}", str(Path.cwd())
            yield Task(name, replace(self.job, tiles=tuple(part)), home, str(matrix.path.parent))


def left_of(matrix: KernelMatrix, tiles: Sequence[Tile], patience: float) -> list[Tile]:
    """Find the tiles without a mark; that there are some is believed after so many seconds."""
    end = time.monotonic() + patience
    while True:
        left = matrix.unmarked(tiles)
        if not left or time.monotonic() >= end:
            return left
        time.sleep(PAUSE)


def lost_by(event: Ended, path: Path, progress: AbstractProgress) -> str:
    """Say why a worker was lost; what others would meet as well is raised."""
    if event.how in {"failed", "broken"}:
        raise Unfinished(f"{path}: {event.reason}")
    if event.how not in {"killed", "stopped"}:
        return ""
    reason = event.reason or "it was asked to stop"
    progress.warn(f"{path.name}: a worker is lost: {reason}; others go on")
    return reason


def parts(tiles: Sequence[Tile], seconds: float, workers: int) -> list[Sequence[Tile]]:
    """Cut tiles into parts that take long enough, and no fewer than there are workers.

    >>> [len(part) for part in parts([(k, 0) for k in range(10)], seconds=1.0, workers=3)]
    [3, 3, 4]
    >>> len(parts([(k, 0) for k in range(10)], seconds=100.0, workers=3))
    4
    """
    count = min(len(tiles), max(workers, ceil(len(tiles) * seconds / ENOUGH)))
    return [tiles[k * len(tiles) // count : (k + 1) * len(tiles) // count] for k in range(count)]
