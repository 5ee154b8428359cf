"""Removal of files that this package wrote.

If a folder contains any other file, an error is raised before a file is removed.
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
"""A pattern for the names of temporary files that `records.atomic` or zarr writes."""

STORED = rf"(.*/)?(zarr\.json|c(/\d+)*|{HALF_WRITTEN})"
"""A pattern for the files of a zarr store: zarr.json, chunks,
and temporary files of chunks."""


def files_in(folder: Path) -> list[str]:
    """Return the relative paths of all files and links in a folder.
    Do not follow links."""
    names = list[str]()
    for parent, folders, files in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(parent, name))]
        names += [
            os.path.relpath(os.path.join(parent, name), folder)
            for name in (*files, *links)
        ]
    return sorted(names)


def refuse_strangers(folder: Path, is_ours: Callable[[str], object]) -> None:
    """Raise if a folder contains a file for whose relative path `is_ours` is false."""
    strangers = [name for name in files_in(folder) if not is_ours(name)]
    if strangers:
        raise NoPlace(
            f"{folder} has content that no run wrote ({several(strangers)}); "
            "move it away, or choose another place"
        )


def remove_files(folder: Path, names: Iterable[str]) -> None:
    """Remove files in the given order, then their folders that are empty."""
    parents = set[Path]()
    for name in names:
        (folder / name).unlink(missing_ok=True)
        parents |= {folder / parent for parent in Path(name).parents}
    for parent in sorted(parents - {folder}, reverse=True):  # inner folders first
        with suppress(OSError):  # raised if the folder is not empty
            parent.rmdir()


def remove_empty_folders(folder: Path) -> None:
    for parent, _, _ in os.walk(folder, topdown=False):
        if Path(parent) != folder:
            with suppress(OSError):  # raised if the folder is not empty
                os.rmdir(parent)


def remove_store(path: Path, also: str = "") -> None:
    """Remove a store of arrays, if it exists. Raise if it contains other files, except
    the file whose relative path is `also`."""
    if not path.is_dir():
        return
    refuse_strangers(path, re.compile(rf"{STORED}|{re.escape(also)}").fullmatch)
    remove_files(path, files_in(path))
    remove_empty_folders(path)
    path.rmdir()


def drop_half_written(files: Iterable[Path]) -> None:
    """Remove the temporary files among `files`, which a killed process left."""
    for file in files:
        if re.fullmatch(HALF_WRITTEN, file.name):
            file.unlink(missing_ok=True)
