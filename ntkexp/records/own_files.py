"""Removal of exactly the files that this package wrote.

Any other file in the folder stops the removal.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from ntkexp.mistake import NoPlace
from ntkexp.text import several

HALF_WRITTEN = r"(\.[^/]+\.[0-9a-f]{8}|[^/]+\.[0-9a-f]{32})\.partial"
"""The names of files that `records.atomic` or zarr is writing."""

STORED = rf"(.*/)?(zarr\.json|c(/\d+)*|{HALF_WRITTEN})"
"""The files of a store of arrays: descriptions, chunks, and chunks that are being written."""


def files_in(folder: Path) -> list[str]:
    """Return all files and links in a folder, relative to it. No link is followed."""
    names = list[str]()
    for parent, folders, files in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(parent, name))]
        names += [os.path.relpath(os.path.join(parent, name), folder) for name in (*files, *links)]
    return sorted(names)


def refuse_strangers(folder: Path, is_ours: Callable[[str], object]) -> None:
    """Raise if a file in a folder is not ours, before anything is removed."""
    strangers = [name for name in files_in(folder) if not is_ours(name)]
    if strangers:
        raise NoPlace(
            f"{folder} holds what no run wrote ({several(strangers)}); "
            "move it away, or choose another place"
        )


def remove_files(folder: Path, names: Iterable[str]) -> None:
    """Remove these files in this order, and then their folders that became empty."""
    parents = set[Path]()
    for name in names:
        (folder / name).unlink(missing_ok=True)
        parents |= {folder / parent for parent in Path(name).parents}
    for parent in sorted(parents - {folder}, reverse=True):  # the inner ones first
        with suppress(OSError):  # it is not empty
            parent.rmdir()


def remove_empty_folders(folder: Path) -> None:
    """Remove the empty folders in a folder."""
    for parent, _, _ in os.walk(folder, topdown=False):
        if Path(parent) != folder:
            with suppress(OSError):  # it is not empty
                os.rmdir(parent)


def remove_store(path: Path) -> None:
    """Remove a store of arrays, if it exists. Raise if it contains other files."""
    if not path.is_dir():
        return
    refuse_strangers(path, re.compile(STORED).fullmatch)
    remove_files(path, files_in(path))
    remove_empty_folders(path)
    path.rmdir()


def drop_half_written(files: Iterable[Path]) -> None:
    """Remove the partial files that a killed process left."""
    for file in files:
        if re.fullmatch(HALF_WRITTEN, file.name):
            file.unlink(missing_ok=True)
