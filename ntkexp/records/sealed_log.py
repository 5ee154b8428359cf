"""A file that only grows: entries, each behind its length, its seal behind it.

    length (8 bytes)   mark (8 bytes)   content   seal (32 bytes)

    mark = of the log, of the entry's place, of the length
    seal = of the log, of the entry's place, of the seal before it, of the content

An entry is whole before the next begins, so a killed process leaves at most its last one unfinished: that is none, and
is cut off when the log goes on. An entry before the last that is not as it was written is a damage, and so is a length:
without its mark, one that is too large would make all entries behind it an unfinished one.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass, field
from pathlib import Path

from ntkexp.mistake import NoPlace
from ntkexp.records.seal import WIDTH, Damaged, Sealing, seal

LENGTH = 8
HEAD = 2 * LENGTH  # a length and its mark
SMALL = 1 << 16  # bytes, which are copied sooner than written part by part


@dataclass
class SealedLog:
    """The log `of` a run, in a file; `ends` are the positions behind its entries, `seals` those of each."""

    path: Path
    of: str
    ends: list[int] = field(default_factory=list)
    seals: list[bytes] = field(default_factory=list)

    @classmethod
    def opened(cls, path: Path, of: str) -> SealedLog:
        """The log as far as it is whole, every byte looked at; one that is not there is empty."""
        log = cls(path, of)
        content = log.content()
        while (end := log.whole(content)) is not None:
            log.ends.append(end)
            log.seals.append(bytes(content[end - WIDTH : end]))
        return log

    def content(self) -> memoryview:
        """All bytes of the file, read when they are looked at; to write to them changes no file."""
        if not self.path.is_file() or not self.path.stat().st_size:
            return memoryview(b"")
        with self.path.open("rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))

    def whole(self, content: memoryview) -> int | None:
        """Where the next entry ends, if it is there as it was written."""
        begin = self.end + HEAD
        head = bytes(content[self.end : begin])
        if len(head) < HEAD:
            return None
        if head != self.head(int.from_bytes(head[:LENGTH], "little")):
            if len(bytes(content[self.end :]).rstrip(b"\0")) < HEAD:  # a power cut may leave room that was never filled
                return None
            raise Damaged(self.damaged)
        end = begin + int.from_bytes(head[:LENGTH], "little") + WIDTH
        if end > len(content):
            return None
        if self.seal(content[begin : end - WIDTH]) == content[end - WIDTH : end]:
            return end
        if end == len(content):
            return None
        raise Damaged(self.damaged)

    @property
    def damaged(self) -> str:
        """What is said of an entry that is not as it was written."""
        return f"{self.path} is damaged at entry {len(self)}: it is not as it was written; follow anew"

    @property
    def end(self) -> int:
        """Where the last whole entry ends."""
        return self.ends[-1] if self.ends else 0

    def __len__(self) -> int:
        return len(self.ends)

    def entries(self) -> list[memoryview]:
        """What every entry holds."""
        content, begins = self.content(), [0, *self.ends]
        return [content[begin + HEAD : end - WIDTH] for begin, end in zip(begins, self.ends, strict=False)]

    def append(self, *content: bytes | memoryview) -> int:
        """Write an entry, which may be given in parts; its place. A full disk leaves the log as it was."""
        size, seal = sum(map(len, content)), self.seal(*content)
        try:
            with self.path.open("ab", buffering=0) as file:
                if file.tell() < self.end:
                    raise Damaged(f"{self.path} was cut while it was being written; follow anew")
                file.truncate(self.end)  # of an entry that was left unfinished
                parts = [self.head(size), *content, seal]
                for part in [b"".join(parts)] if size <= SMALL else parts:
                    if file.write(part) != len(part):
                        raise OSError(None, "no room")
        except OSError as error:
            self.cut(len(self))
            raise NoPlace(f"{self.path} cannot grow ({error.strerror}); choose another place") from error
        self.ends.append(self.end + HEAD + size + WIDTH)
        self.seals.append(seal)
        return len(self) - 1

    def secure(self) -> None:
        """Entries that were written survive a power cut."""
        if self.path.is_file():
            with self.path.open("rb") as file:
                os.fsync(file.fileno())

    def cut(self, length: int) -> None:
        """Forget all entries but the first ones."""
        del self.ends[length:], self.seals[length:]
        if self.path.is_file():
            os.truncate(self.path, self.end)

    def head(self, size: int) -> bytes:
        """What stands before the next entry, if it has this size."""
        length = size.to_bytes(LENGTH, "little")
        return length + seal(length, f"length {len(self)} of {self.of}")[: HEAD - LENGTH]

    def seal(self, *content: memoryview | bytes) -> bytes:
        """Seal the next entry, in its place behind those before."""
        sealing = Sealing(f"{self.of} {len(self)}")
        for part in (*self.seals[-1:], *content):
            sealing.take(part)
        return sealing.digest
