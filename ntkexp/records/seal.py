r"""A seal tells whether bytes are those that were written, and whether they were written for this place.

    seal(content, of) = sha256(of ‖ 0 ‖ content),   `of` a file of a run, a kernel, a row: bytes that lie elsewhere
                                                    have another

It is looked at before anything is made of the bytes: no parser sees what is not as it was written.

>>> seal(b"numbers", "one run") == seal(b"numbers", "another")
False
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from math import inf
from pathlib import Path
from stat import S_ISREG
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias, cast

from ntkexp.mistake import Mistake
from ntkexp.records.atomic import being_written
from ntkexp.records.json_file import Json, as_object, read_bytes, to_text

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

NOTHING_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
BLOCK = 1 << 20  # bytes that are read at once
WIDTH = 32  # bytes of a seal by itself
SEAL = "seal"
AGAIN = "the command that wrote it writes it again"

Seals: TypeAlias = Mapping[str, tuple[int, str]]
"""By the names of files, relative to their folder: how many bytes they have, and their seal."""


class Damaged(Mistake):
    """A file is not as it was written."""


class Sealing:
    """Takes in bytes that are written, one after the other; `position` is how many there were."""

    def __init__(self, of: str = "") -> None:
        self.found, self.position = sha256(of.encode() + b"\0"), 0

    def take(self, content: ReadableBuffer) -> None:
        """Take in the next bytes."""
        self.found.update(content)
        self.position += memoryview(content).nbytes

    @property
    def digest(self) -> bytes:
        """Seal all so far."""
        return self.found.digest()

    @property
    def mark(self) -> tuple[int, str]:
        """The mark of a file as `Seals` have it."""
        return self.position, self.found.hexdigest()


def seal(content: ReadableBuffer, of: str = "") -> bytes:
    """Seal bytes at hand."""
    sealing = Sealing(of)
    sealing.take(content)
    return sealing.digest


def taken(path: Path | str, size: int, of: str = "") -> Sealing:
    """Take in the first bytes of a file."""
    sealing, left = Sealing(of), size
    with open(path, "rb", buffering=0) as file:  # the blocks are large enough
        while left > 0 and (block := file.read(min(BLOCK, left))):
            sealing.take(block)
            left -= len(block)
    return sealing


def sealed(folder: Path, names: Iterable[str]) -> Seals:
    """The seals of files that were written, those in folders among them."""
    found = (place for name in names for place in ((folder / name).rglob("*"), [folder / name]))
    files = sorted(file for place in found for file in place if file.is_file())
    return {file.relative_to(folder).as_posix(): taken(file, file.stat().st_size).mark for file in files}


def broken(folder: Path, seals: Seals, largest: float = inf) -> list[str]:
    """The files that are not as they were sealed; those that are larger than that are only measured."""
    place = str(folder)  # names are joined as text: there are many, and paths take longer than their files
    return [name for name, (size, mark) in seals.items() if not holds(os.path.join(place, name), size, mark, largest)]


def holds(path: str, size: int, mark: str, largest: float) -> bool:
    """Whether a file has the length and the seal that it should have."""
    try:
        found = os.stat(path)
        right = S_ISREG(found.st_mode) and found.st_size == size
        return right and (size > largest or taken(path, size).mark[1] == mark)
    except OSError as error:
        if error.errno not in NOTHING_THERE:
            raise
        return False


class SealedFile:
    """A file whose seal is written behind its content."""

    def __init__(self, file: BinaryIO, of: str) -> None:
        self.file, self.sealing = file, Sealing(of)

    def write(self, content: ReadableBuffer) -> int:
        """Write the next bytes."""
        self.sealing.take(content)
        return self.file.write(content)

    def flush(self) -> None:
        """Nothing is kept back."""


@contextmanager
def being_sealed(path: Path, of: str) -> Iterator[BinaryIO]:
    """A file that is there whole, with its seal at its end, or not at all; it can be written to, and nothing else."""
    with being_written(path) as file:
        content = SealedFile(file, of)
        yield cast(BinaryIO, content)
        file.write(content.sealing.digest)


def sealed_for(path: Path, of: str) -> bool:
    """Whether a file that `being_sealed` wrote is as it was."""
    size = path.stat().st_size - WIDTH
    with path.open("rb") as file:
        file.seek(max(0, size))
        return size >= 0 and taken(path, size, of).digest == file.read()


def sealed_text(value: Mapping[str, Json], of: str) -> str:
    """Write an object as JSON text, its seal on a line of its own: without that, it is the text that was sealed."""
    return to_text({**value, SEAL: seal(to_text(value).encode(), of).hex()})


def read_sealed(path: Path, of: str) -> dict[str, Any]:
    """A JSON file that holds an object and its seal, which is taken off: it was written for this place."""
    content = read_bytes(path)  # once: what is judged is what is given
    value = as_object(content, path)
    mark = value.pop(SEAL, None)
    if mark is None:
        raise Damaged(f"{path} is damaged, or of an earlier version: it has no seal; {AGAIN}")
    line = f',\n  "{SEAL}": "{mark}"\n}}\n'.encode(errors="replace")
    if not content.endswith(line) or seal(content.removesuffix(line) + b"\n}\n", of).hex() != mark:
        raise Damaged(f"{path} is damaged: it is not as it was written for this place; {AGAIN}")
    return value
