"""Sealed logs: append-only files with digests, so that damage is detected.
The parts of an entry:

    length (8 bytes)   mark (8 bytes)   content   seal (32 bytes)

    length   number of bytes of the content
    mark     digest of the log's name, the entry's number, and the length
    seal     digest of the log's name, the entry's number, the seal of the previous entry, and the
             content

Each entry is complete before the next one begins. So a killed process leaves at most
one unfinished entry, at the end. Readers ignore it. The next writer removes it before
appending. Any other change is an error. The mark detects a damaged length. Without the
mark, a length that is too large would make all later entries look like one unfinished
entry.

>>> from tempfile import TemporaryDirectory
>>> with TemporaryDirectory() as folder:
...     log = SealedLog.read(Path(folder) / "steps.log", "steps of a run")
...     numbers = [log.append(b"first"), log.append(b"sec", b"ond")]
...     numbers, [bytes(entry) for entry in log.entries()]
([0, 1], [b'first', b'second'])
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass, field
from pathlib import Path

from ntkexp.mistake import NoPlace
from ntkexp.records.atomic import WIDTH, Damaged, Sealing, seal

LENGTH = 8  # bytes that store the length of an entry
HEAD = 2 * LENGTH  # bytes of a length and the digest (mark) that protects it


@dataclass
class SealedLog:
    """A log in a file. The digests cover its `name`. `ends` and `seals` hold the end
    position and the seal of each entry."""

    path: Path
    name: str
    ends: list[int] = field(default_factory=list)
    seals: list[bytes] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path, name: str) -> SealedLog:
        """Read and check all complete entries. A missing file is an empty log."""
        log = cls(path, name)
        content = log.content()
        while (end := log.next_end(content)) is not None:
            log.ends.append(end)
            log.seals.append(bytes(content[end - WIDTH : end]))
        return log

    def content(self) -> memoryview:
        """Return the bytes of the file as a private memory map.

        Writing to the map does not change the file.
        """
        if not self.path.is_file() or not self.path.stat().st_size:
            return memoryview(b"")
        with self.path.open("rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))

    def next_end(self, content: memoryview) -> int | None:
        """Return the end position of the entry after the entries that were read. Return
        None if this entry is missing or unfinished. Raise if it is damaged."""
        begin = self.end + HEAD
        head = bytes(content[self.end : begin])
        size = int.from_bytes(head[:LENGTH], "little")
        end = begin + size + WIDTH
        if head == self.head(size):
            mark = content[end - WIDTH : end]
            if self.seal(content[begin : end - WIDTH]) == mark:
                return end
            is_unfinished = end >= len(content)
        else:
            # a kill may leave an incomplete head, and a power cut may leave zeros
            is_unfinished = len(bytes(content[self.end :]).rstrip(b"\0")) < HEAD
        if not is_unfinished:
            raise Damaged(
                f"{self.path} is damaged at entry {len(self)}: it is not as it was written; "
                "follow the loop again"
            )
        return None

    @property
    def end(self) -> int:
        """The position of the end of the last complete entry."""
        return self.ends[-1] if self.ends else 0

    def __len__(self) -> int:
        return len(self.ends)

    def entries(self) -> list[memoryview]:
        """Return the content of every entry."""
        content = self.content()
        begins = [0, *self.ends]
        return [
            content[begin + HEAD : end - WIDTH]
            for begin, end in zip(begins, self.ends, strict=False)
        ]

    def append(self, *content: bytes | memoryview) -> int:
        """Append one entry, whose content is given in parts. Return the number of the
        entry.

        If the disk is full, raise and leave the log unchanged.
        """
        size = sum(map(len, content))
        seal = self.seal(*content)
        try:
            with self.path.open("ab") as file:
                if file.tell() < self.end:
                    raise Damaged(
                        f"{self.path} was cut while it was being written; follow the loop again"
                    )
                file.truncate(self.end)  # removes an unfinished entry
                file.writelines([self.head(size), *content, seal])
        except OSError as error:
            self.truncate(len(self))
            raise NoPlace(
                f"{self.path} cannot grow ({error.strerror}); choose another place"
            ) from error
        self.ends.append(self.end + HEAD + size + WIDTH)
        self.seals.append(seal)
        return len(self) - 1

    def secure(self) -> None:
        """Force all entries to the disk, so that they survive a power cut."""
        if self.path.is_file():
            with self.path.open("rb") as file:
                os.fsync(file.fileno())

    def truncate(self, length: int) -> None:
        """Remove all entries after the first `length` entries."""
        del self.ends[length:], self.seals[length:]
        if self.path.is_file():
            os.truncate(self.path, self.end)

    def head(self, size: int) -> bytes:
        """Return the first bytes of the next entry: its length `size`, and the mark."""
        length = size.to_bytes(LENGTH, "little")
        return (
            length + seal(length, f"length {len(self)} of {self.name}")[: HEAD - LENGTH]
        )

    def seal(self, *content: memoryview | bytes) -> bytes:
        sealing = Sealing(f"{self.name} {len(self)}")
        for part in (*self.seals[-1:], *content):
            sealing.update(part)
        return sealing.digest
