r"""How files are written so that a kill at any moment, by a signal or by a power cut, is harmless.

    a file    is written beside its place, forced to the disk, and moved into its place. A kill before the move leaves
              what was there, and a `.partial` that is never read; a kill after it leaves the new file.
    a lock    is the kernel's `flock`, which ends with the process that holds it, however that ends. The file that is
              locked stays, and means nothing: no lock is ever left over, and none is taken from its holder.
    a seal    is a digest that lies with what it seals, or in another file that is written later. What was cut off,
              changed, or copied from elsewhere does not match it, and is refused before any parser sees it.
    a log     only grows, by sealed entries. A kill leaves at most its last entry unfinished, which is as if it had
              not been written: it is cut off when the log goes on.

So a run resumes without cleaning up: it checks which files are whole, and writes the rest again. A folder of such files
is whole when the file that seals all others is there, which is written last (`records.folder`).

>>> seal(b"numbers", "one run") == seal(b"numbers", "another")
False
>>> to_text({"loss": float("nan"), "step": 3})
'{\n  "loss": null,\n  "step": 3\n}\n'
"""

from __future__ import annotations

import errno
import json
import math
import mmap
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from math import inf
from pathlib import Path
from stat import S_ISREG
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias, cast

from ntkexp.mistake import Mistake, NoPlace, refuse_special

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


# --- A file is there whole, or not at all.


PARTIAL = ".partial"  # how the name of a file ends that is not yet in its place


@contextmanager
def being_written(path: Path) -> Iterator[BinaryIO]:
    """A file to write to, moved into its place at the end: a kill or a power cut leaves the old file or the new one."""
    make_folder(path.parent)
    partial = path.with_name(f".{path.name}.{os.urandom(4).hex()}{PARTIAL}")  # two writers have two
    try:
        opening = partial.open("xb")  # none is written over, and no link is followed
    except FileNotFoundError:
        raise cannot_write(partial.parent) from None
    try:
        with opening as file:
            yield file
            file.flush()
            os.fsync(
                file.fileno()
            )  # before the move: else a power cut could leave a file in its place that is empty
        partial.replace(path)
    except BaseException:  # a full disk: what was begun would keep it full
        partial.unlink(missing_ok=True)
        raise


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write text (UTF-8) or bytes, whole or not at all."""
    with being_written(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def make_folder(folder: Path) -> None:
    """Make a folder, and those around it, unless it is there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileNotFoundError:
        raise cannot_write(folder) from None
    except RecursionError:  # it goes up by calls
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), str(folder)) from None


def cannot_write(folder: Path) -> PermissionError:
    """Make the error of a place such as /proc, of which the system says that there is no such file, though one was to
    be made: who calls knows what to say of places where that is not allowed.
    """
    return PermissionError(errno.EACCES, "Nothing can be written there", str(folder))


# --- One process writes a folder: it holds an exclusive flock on a file in it.
#
# The kernel drops the lock when its last descriptor is closed, and closes all of a process that ends, by kill -9 too.
# A forked child shares the lock, which is then dropped when both have ended; nothing here unlocks but by closing, so
# the child cannot take the lock from its parent. On NFS, Linux makes of it a lock of the server's, for which the file
# has to be open for writing.
#
# The package filelock would replace `acquire` and `waited_for`, and not `is_held`: it cannot say whether another
# process holds a lock without taking it, for which the folder has to be writable, and during which a claim fails. What
# it does where a system lacks flock, and in forked children, changes with its version. So these forty lines stay.


try:
    import fcntl
except ImportError as error:  # not a POSIX system
    raise Mistake(
        "run folders are locked with flock, which this system lacks; use Linux, macOS or WSL"
    ) from error

ATTEMPTS, PAUSE = (
    10,
    0.01,
)  # `is_held` shares the lock for an instant, which must not make a claim fail


def acquire(lock: Path) -> int:
    """Hold the lock until the descriptor that is returned is closed, or raise BlockingIOError if another does."""
    for attempt in range(ATTEMPTS):
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_at(descriptor, lock):
                return descriptor
        except BlockingIOError:
            if attempt == ATTEMPTS - 1:
                os.close(descriptor)
                raise
            time.sleep(PAUSE)
        os.close(descriptor)
    raise BlockingIOError(errno.EWOULDBLOCK, os.strerror(errno.EWOULDBLOCK), str(lock))


def release(descriptor: int, lock: Path) -> None:
    """Let go of a lock that is held, and leave nothing of it; who was about to take it takes a new one."""
    with suppress(OSError):
        lock.unlink()
    os.close(descriptor)


def is_at(descriptor: int, path: Path) -> bool:
    """Whether an open file is the one that lies there, and was not removed meanwhile."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except OSError:
        return False


@contextmanager
def waited_for(lock: Path) -> Iterator[None]:
    """Hold the lock, however long it takes until others let go of it."""
    make_folder(lock.parent)
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if is_at(descriptor, lock):  # and was not removed meanwhile
                yield
                return
        finally:
            os.close(descriptor)


def is_held(lock: Path) -> bool:
    """Whether someone holds the lock; a file that is not there is not held."""
    try:
        descriptor = os.open(
            lock, os.O_RDONLY | os.O_NONBLOCK
        )  # lest a pipe of that name wait for a writer
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(descriptor)


# --- A seal tells whether bytes are those that were written, and whether they were written for this place.
#
#     seal(content, of) = sha256(of ‖ 0 ‖ content),   `of` a file of a run, a kernel, a row: bytes that lie elsewhere
#                                                     have another


BLOCK = 1 << 20  # bytes that are read at once
WIDTH = 32  # bytes of a seal by itself
NOTHING_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)

Seals: TypeAlias = Mapping[str, tuple[int, str]]
"""By the names of files, relative to their folder: how many bytes they have, and their seal."""


class Damaged(Mistake):
    """A file is not as it was written."""


class Sealing:
    """Takes in bytes that are written, one after the other; `position` is how many there were."""

    def __init__(self, of: str = "") -> None:
        self.hash, self.position = sha256(of.encode() + b"\0"), 0

    def take(self, content: ReadableBuffer) -> None:
        self.hash.update(content)
        self.position += memoryview(content).nbytes

    @property
    def digest(self) -> bytes:
        return self.hash.digest()

    @property
    def mark(self) -> tuple[int, str]:
        return self.position, self.hash.hexdigest()


def seal(content: ReadableBuffer, of: str = "") -> bytes:
    sealing = Sealing(of)
    sealing.take(content)
    return sealing.digest


def sealing_of(path: Path | str, size: int, of: str = "") -> Sealing:
    sealing, left = Sealing(of), size
    with open(path, "rb", buffering=0) as file:  # the blocks are large enough
        while left > 0 and (block := file.read(min(BLOCK, left))):
            sealing.take(block)
            left -= len(block)
    return sealing


def sealed(folder: Path, names: Iterable[str]) -> Seals:
    """The seals of files that were written, those in folders among them."""
    paths = (path for name in names for path in (folder / name, *(folder / name).rglob("*")))
    files = sorted(path for path in paths if path.is_file())
    return {
        file.relative_to(folder).as_posix(): sealing_of(file, file.stat().st_size).mark
        for file in files
    }


def broken(folder: Path, seals: Seals, largest: float = inf) -> list[str]:
    """The files that are not as they were sealed; those that are larger than that are only measured."""
    folder_name, wrong = (
        str(folder),
        [],
    )  # names are joined as text: there are many, and paths take longer than their files
    for name, (size, mark) in seals.items():
        path = os.path.join(folder_name, name)
        try:
            status = os.stat(path)
            right = S_ISREG(status.st_mode) and status.st_size == size
            right = right and (size > largest or sealing_of(path, size).mark[1] == mark)
        except OSError as error:
            if error.errno not in NOTHING_THERE:
                raise
            right = False
        if not right:
            wrong.append(name)
    return wrong


class SealedFile:
    def __init__(self, file: BinaryIO, of: str) -> None:
        self.file, self.sealing = file, Sealing(of)

    def write(self, content: ReadableBuffer) -> int:
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
        return size >= 0 and sealing_of(path, size, of).digest == file.read()


# --- JSON as the run folder writes it: keys in the order given, two blanks of indentation, a newline at the end.
#
# JSON has no infinity and no NaN: a number that is not finite becomes null.


Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"

LARGEST = 1 << 30  # bytes of a JSON file
DEEPEST = 64  # objects in each other
SEAL = "seal"
AGAIN = "run the command that wrote it again"


def to_text(value: Json) -> str:
    return json.dumps(finite_json(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def read_object(path: Path) -> dict[str, Any]:
    return as_object(read_bytes(path), path)


def read_bytes(path: Path) -> bytes:
    try:
        refuse_special(path, str(path), LARGEST)
        return path.read_bytes()
    except OSError as error:
        raise Mistake(f"{path} cannot be read ({error.strerror})") from error


def as_object(content: bytes, path: Path) -> dict[str, Any]:
    try:
        value = json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise Mistake(f"{path} is not JSON; the file is damaged") from error
    if not isinstance(value, dict):
        raise Mistake(
            f"{path} holds a JSON {type(value).__name__}, not an object; the file is damaged"
        )
    if content.count(b"{") + content.count(b"[") > DEEPEST and depth_of(value) > DEEPEST:
        raise Mistake(
            f"{path} holds more than {DEEPEST} objects in each other; the file is damaged"
        )
    if b"\\u" in content:
        refuse_half_characters(value, path)
    return value


def depth_of(value: object) -> int:
    """Count the levels of objects and lists in each other."""
    depth = 0
    level = [value]
    while level := [part for part in level if isinstance(part, dict | list)]:
        level = [
            item for part in level for item in (part.values() if isinstance(part, dict) else part)
        ]
        depth += 1
    return depth


def refuse_half_characters(value: object, path: Path) -> None:
    """Raise if a text holds half a character, which JSON can spell, and which nothing can write."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise Mistake(f"{path} holds half a character; the file is damaged") from None


def finite_json(value: Json) -> Json:
    """The value with null for every number that JSON cannot write."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite_json(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [finite_json(item) for item in value]
    return value


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


# --- A log: a file that only grows, by entries, each behind its length, its seal behind it.
#
#     length (8 bytes)   mark (8 bytes)   content   seal (32 bytes)
#
#     mark = of the log, of the entry's place, of the length
#     seal = of the log, of the entry's place, of the seal before it, of the content
#
# An entry is whole before the next begins, so a killed process leaves at most its last one unfinished: that is none,
# and is cut off when the log goes on. An entry before the last that is not as it was written is a damage, and so is a
# length: without its mark, one that is too large would make all entries behind it an unfinished one.


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
            if (
                len(bytes(content[self.end :]).rstrip(b"\0")) < HEAD
            ):  # a power cut may leave room that was never filled
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
        return f"{self.path} is damaged at entry {len(self)}: it is not as it was written; follow the loop again"

    @property
    def end(self) -> int:
        """Where the last whole entry ends."""
        return self.ends[-1] if self.ends else 0

    def __len__(self) -> int:
        return len(self.ends)

    def entries(self) -> list[memoryview]:
        """What every entry holds."""
        content, begins = self.content(), [0, *self.ends]
        return [
            content[begin + HEAD : end - WIDTH]
            for begin, end in zip(begins, self.ends, strict=False)
        ]

    def append(self, *content: bytes | memoryview) -> int:
        """Write an entry, which may be given in parts; its place. A full disk leaves the log as it was."""
        size, seal = sum(map(len, content)), self.seal(*content)
        try:
            with self.path.open("ab", buffering=0) as file:
                if file.tell() < self.end:
                    raise Damaged(
                        f"{self.path} was cut while it was being written; follow the loop again"
                    )
                file.truncate(self.end)  # of an entry that was left unfinished
                parts = [self.head(size), *content, seal]
                for part in [b"".join(parts)] if size <= SMALL else parts:
                    if file.write(part) != len(part):
                        raise OSError(None, "no room")
        except OSError as error:
            self.cut(len(self))
            raise NoPlace(
                f"{self.path} cannot grow ({error.strerror}); choose another place"
            ) from error
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
        sealing = Sealing(f"{self.of} {len(self)}")
        for part in (*self.seals[-1:], *content):
            sealing.take(part)
        return sealing.digest


# --- How much lies in a place: a folder counts as all the files in it.


def size_of(path: Path) -> int | None:
    """Find the bytes of a file, or of all files in a folder; None if there is neither."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_size if S_ISREG(status.st_mode) else size_of_folder(str(path))


def size_of_folder(path: str) -> int:
    """Add up the files in a folder; a link to a folder is not followed, and counts as the folder itself."""
    total = 0
    with os.scandir(path) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):  # a link to nothing
                total += (
                    size_of_folder(entry.path)
                    if entry.is_dir(follow_symlinks=False)
                    else entry.stat().st_size
                )
    return total
