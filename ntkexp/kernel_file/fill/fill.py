"""A kernel file is filled, from wherever an earlier attempt left it: tile by tile, each marked once it is written.

The file is the same whoever computes its tiles, and however often it was broken off.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from shutil import disk_usage

from ntkexp.kernel_file.fill.crew import AbstractCrew
from ntkexp.kernel_file.fill.estimate import layout_of
from ntkexp.kernel_file.fill.filler import AbstractFiller
from ntkexp.kernel_file.fill.subject import Subject
from ntkexp.mistake import NoPlace, Useless
from ntkexp.path.effort import refuse_years
from ntkexp.progress import AbstractProgress
from ntkexp.records.atomic import make_folder
from ntkexp.records.json_file import to_text
from ntkexp.records.kernel_file.layout import create
from ntkexp.records.kernel_file.store import KernelMatrix, open_matrix
from ntkexp.records.lock import acquire
from ntkexp.records.seal import Damaged


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
