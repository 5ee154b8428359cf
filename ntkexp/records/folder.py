"""A run folder: one process at a time writes it, and `DONE.json`, written last, says that it is whole.

    .lock        held by the process that writes
    DONE.json    {"outcome": …, …, "sizes": {file or folder: bytes}}

A folder is `done` if every file in `sizes` has its size, else `running` if the lock is held, else `dead`: an attempt
to be resumed from its checkpoint, or redone.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import Any, Literal, TypeAlias

from ntkexp.mistake import Mistake
from ntkexp.records.atomic import PARTIAL, write_atomically
from ntkexp.records.json_file import Json, read_object, to_text
from ntkexp.records.lock import acquire, is_held

LOCK, CONFIG, DONE = ".lock", "config.json", "DONE.json"

CIRCUMSTANCES = ("device", "threads", "memory_gb", "checkpoint_seconds")
"""Keys of config.json that do not decide what is computed: runs that differ in them alone are the same run."""

State: TypeAlias = Literal["done", "running", "dead", "absent"]


class Held(Mistake):
    """Another process writes the run."""


@dataclass(frozen=True)
class RunFolder:
    """The place of one run."""

    path: Path

    @property
    def state(self) -> State:
        """What has become of the run. Inside one's own claim, ask `done`: the lock is held there."""
        if self.done:
            return "done"
        if is_held(self.path / LOCK):
            return "running"
        return "dead" if self.path.is_dir() else "absent"

    @property
    def done(self) -> bool:
        """Whether the run is finished and whole."""
        return self.defect is None

    @property
    def defect(self) -> str | None:
        """Why the run is not finished and whole, in words that follow the folder's name."""
        if not self.path.is_dir():
            return "is not a folder" if self.path.exists() else "does not exist"
        if not (self.path / DONE).is_file():
            return "is not finished: it has no DONE.json"
        try:
            sizes = read_object(self.path / DONE).get("sizes")
        except Mistake:
            sizes = None
        if not isinstance(sizes, dict):
            return "is damaged: DONE.json lists no sizes"
        wrong = [name for name, size in sizes.items() if size_of(self.path / name) != size]
        return f"is damaged: {', '.join(wrong)} not as DONE.json says" if wrong else None

    @contextmanager
    def claim(self) -> Iterator[None]:
        """Be the one process that writes this folder; it is created if need be."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            descriptor = acquire(self.path / LOCK)
        except BlockingIOError as error:
            raise Held(f"{self.path} is being written by another process; wait for it, or change the run") from error
        except OSError as error:
            raise Mistake(
                f"{self.path} cannot be written ({error.strerror}); choose another place with --out"
            ) from error
        try:
            yield
        finally:
            os.close(descriptor)

    def write(self, name: str, content: str | bytes) -> None:
        """A file, whole or not at all."""
        write_atomically(self.path / name, content)

    def write_json(self, name: str, value: Json) -> None:
        """A JSON file, whole or not at all."""
        self.write(name, to_text(value))

    def read_json(self, name: str) -> dict[str, Any]:
        """A JSON file that holds an object."""
        return read_object(self.path / name)

    def finish(self, names: Iterable[str], **facts: Json) -> None:
        """Declare the run finished: the sizes of these files and folders, and what became of it."""
        sizes = {name: size_of(self.path / name) for name in names}
        if missing := [name for name, size in sizes.items() if size is None]:
            raise FileNotFoundError(f"{self.path} cannot be finished without {', '.join(missing)}")
        self.write_json(DONE, {**facts, "sizes": sizes})

    def note_error(self, text: str) -> None:
        """Keep the reason of a failure, if there is anything else to keep and room to write it."""
        with suppress(OSError):
            if (self.path / CONFIG).is_file():
                self.write("error.txt", text)
            else:
                (self.path / LOCK).unlink()
                self.path.rmdir()

    def clear(self) -> None:
        """Remove everything but the lock; DONE.json first and config.json last: a kill in between leaves a dead run."""
        entries = {entry.name: entry for entry in self.path.iterdir() if entry.name != LOCK}
        if CONFIG not in entries and not all(name.endswith(PARTIAL) for name in entries):
            raise Mistake(f"{self.path} holds files that no run wrote; choose another place with --out")
        order = [DONE, *sorted(entries.keys() - {DONE, CONFIG}), CONFIG]
        for entry in (entries[name] for name in order if name in entries):
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()


def looks_like_a_run(path: Path) -> bool:
    """Whether this is a run folder, in whatever state."""
    return (path / CONFIG).is_file() and any((path / name).exists() for name in (LOCK, DONE))


def size_of(path: Path) -> int | None:
    """The bytes of a file, or of all files in a folder; None if there is neither."""
    try:
        found = path.stat()
    except OSError:
        return None
    if S_ISREG(found.st_mode):
        return found.st_size
    return sum(os.stat(os.path.join(place, name)).st_size for place, _, names in os.walk(path) for name in names)
