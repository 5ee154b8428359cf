"""A file that only grows: entries, each behind its length, its seal behind it.

    length (8 bytes)   content   seal (32 bytes) of the log, of the entry's place, of the content

An entry is whole before the next begins, so a killed process leaves at most its last one unfinished: that is none, and
is cut off when the log goes on. An entry before the last that is not as it was written is a damage.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from pathlib import Path

from ntkexp.mistake import NoPlace
from ntkexp.records.seal import WIDTH, Damaged, Sealing

LENGTH = 8
SMALL = 1 << 16  # bytes, which are copied sooner than written part by part


@dataclass
class SealedLog:
    """The log `of` a run, in a file; `ends` are the positions behind its entries."""

    path: Path
    of: str
    ends: list[int]

    @classmethod
    def opened(cls, path: Path, of: str) -> SealedLog:
        """The log as far as it is whole, every byte looked at; one that is not there is empty."""
        log = cls(path, of, [])
        content = log.content()
        while (end := log.whole(content)) is not None:
            log.ends.append(end)
        return log

    def content(self) -> memoryview:
        """All bytes of the file, read when they are looked at; to write to them changes no file."""
        if not self.path.is_file() or not self.path.stat().st_size:
            return memoryview(b"")
        with self.path.open("rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))

    def whole(self, content: memoryview) -> int | None:
        """Where the next entry ends, if it is there as it was written."""
        begin = self.end + LENGTH
        end = begin + int.from_bytes(content[self.end : begin], "little") + WIDTH
        if begin > len(content) or end > len(content):
            return None
        if self.seal(len(self.ends), content[begin : end - WIDTH]) == content[end - WIDTH : end]:
            return end
        if end == len(content):  # a power cut may leave room that was never filled
            return None
        raise Damaged(f"{self.path} is damaged at entry {len(self.ends)}: it is not as it was written; follow anew")

    @property
    def end(self) -> int:
        """Where the last whole entry ends."""
        return self.ends[-1] if self.ends else 0

    def __len__(self) -> int:
        return len(self.ends)

    def entries(self) -> list[memoryview]:
        """What every entry holds."""
        content, begins = self.content(), [0, *self.ends]
        return [content[begin + LENGTH : end - WIDTH] for begin, end in zip(begins, self.ends, strict=False)]

    def append(self, *content: bytes | memoryview) -> int:
        """Write an entry, which may be given in parts; its place. A full disk leaves the log as it was."""
        size = sum(map(len, content))
        try:
            with self.path.open("ab", buffering=0) as file:
                parts = [size.to_bytes(LENGTH, "little"), *content, self.seal(len(self), *content)]
                for part in [b"".join(parts)] if size <= SMALL else parts:
                    if file.write(part) != len(part):
                        raise OSError(None, "no room")
        except OSError as error:
            self.cut(len(self))
            raise NoPlace(f"{self.path} cannot grow ({error.strerror}); choose another place") from error
        self.ends.append(self.end + LENGTH + size + WIDTH)
        return len(self) - 1

    def cut(self, length: int) -> None:
        """Forget all entries but the first ones."""
        del self.ends[length:]
        if self.path.is_file():
            os.truncate(self.path, self.end)

    def seal(self, place: int, *content: memoryview | bytes) -> bytes:
        """Seal an entry in its place."""
        sealing = Sealing(f"{self.of} {place}")
        for part in content:
            sealing.take(part)
        return sealing.digest
