r"""Files that remain valid if the process is killed at any moment,
by a signal or by a power cut.

    file    A file is written under another name, forced to the disk, and renamed. After a kill
            before the renaming, the old file remains unchanged, and a `.partial` file remains that
            no reader opens. After a later kill, the new file exists.
    lock    A lock is a `flock` of the operating system on a file. It ends when its process ends;
            the file remains. No process can take a lock from its holder.
    seal    A seal is a digest that is stored at the end of the sealed bytes, or in a file that is
            written later. Bytes that were truncated, changed or copied from another file do not
            match their seal. They are rejected before they are parsed.
    log     A log only grows, by sealed entries (`records.sealed_log`). A kill leaves at most one
            unfinished entry at the end, which is removed when the log continues.

So a run is resumed without repair. The resumed run checks which files are complete, and
writes all others again. The folder of a run is complete when DONE.json exists. This
file contains the seals of the others, and is written last (`records.folder`).

>>> seal(b"numbers", "one run") == seal(b"numbers", "another")
False
>>> to_text({"loss": float("nan"), "step": 3})
'{\n  "loss": null,\n  "step": 3\n}\n'
"""

from __future__ import annotations

import errno
import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from math import inf
from pathlib import Path
from stat import S_ISREG
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias, cast

from ntkexp.mistake import Mistake, refuse_special

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


# --- Atomic files: a reader sees the complete old content or the complete new content.


PARTIAL = ".partial"  # the suffix of a file that is being written


@contextmanager
def being_written(path: Path) -> Iterator[BinaryIO]:
    """Yield a temporary file, and rename it to `path` at the end
    of the `with` block."""
    make_folder(path.parent)
    # a random name, so that concurrent writers use different files
    partial = path.with_name(f".{path.name}.{os.urandom(4).hex()}{PARTIAL}")
    try:
        opening = partial.open("xb")  # never overwrites a file or follows a link
    except FileNotFoundError:
        raise cannot_write(partial.parent) from None
    try:
        with opening as file:
            yield file
            file.flush()
            # without fsync, a power cut after the renaming could leave an empty file
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:  # also if the user interrupts or the disk is full
        partial.unlink(missing_ok=True)
        raise


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write text (UTF-8) or bytes atomically."""
    with being_written(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def make_folder(folder: Path) -> None:
    """Create a folder and its parents, unless they exist."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileNotFoundError:
        raise cannot_write(folder) from None
    except RecursionError:  # pathlib creates parents recursively
        raise OSError(
            errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), str(folder)
        ) from None


def cannot_write(folder: Path) -> PermissionError:
    """Return a PermissionError that names the folder. For folders such as /proc, the
    system's own error would report a missing file instead."""
    return PermissionError(errno.EACCES, "Nothing can be written there", str(folder))


# --- Locks: a process that writes a folder holds an exclusive flock on a file in the
# folder.
#
# The operating system releases the lock when its last descriptor is closed. This also
# happens when the process is killed. A forked child shares the lock, which is released
# when both processes have ended. This module releases locks only by closing
# descriptors, so a child cannot release the lock of its parent. On NFS, Linux turns
# flock into a lock of the server. For this lock, the file must be open for writing.
#
# The package filelock could replace `acquire` and `waited_for`, but not `is_held`. It
# detects the lock of another process only by taking the lock. Taking the lock needs a
# writable folder, and makes a concurrent `acquire` fail. The behaviour of filelock
# without flock and in forked children depends on its version.


try:
    import fcntl
except ImportError as error:  # not a POSIX system, such as Windows
    raise Mistake(
        "run folders are locked with flock, which this system lacks; use Linux, macOS or WSL"
    ) from error

# `acquire` fails while `is_held` briefly holds a shared lock, so `acquire` tries again
LOCK_ATTEMPTS = 10
LOCK_PAUSE_SECONDS = 0.01


def acquire(lock: Path) -> int:
    """Take the lock and return its descriptor. To release the lock,
    close the descriptor.

    Raise BlockingIOError if another process holds the lock.
    """
    for attempt in range(LOCK_ATTEMPTS):
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_at(descriptor, lock):
                return descriptor
        except BlockingIOError:
            if attempt == LOCK_ATTEMPTS - 1:
                os.close(descriptor)
                raise
            time.sleep(LOCK_PAUSE_SECONDS)
        os.close(descriptor)
    raise BlockingIOError(errno.EWOULDBLOCK, os.strerror(errno.EWOULDBLOCK), str(lock))


def release(descriptor: int, lock: Path) -> None:
    """Release a lock and remove its file. A process that waits
    for the lock creates a new file."""
    with suppress(OSError):
        lock.unlink()
    os.close(descriptor)


def is_at(descriptor: int, path: Path) -> bool:
    """Return True if the path still leads to this open file. Return False if the file
    was removed or replaced."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except OSError:
        return False


@contextmanager
def waited_for(lock: Path) -> Iterator[None]:
    """Hold the lock inside the `with` block.
    First wait until other processes have released it."""
    make_folder(lock.parent)
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            # if another process has removed the file, lock the new file
            if is_at(descriptor, lock):
                yield
                return
        finally:
            os.close(descriptor)


def is_held(lock: Path) -> bool:
    """Return True if a process holds the lock. A missing file is not locked."""
    try:
        # without O_NONBLOCK, opening a named pipe would wait for a writer
        descriptor = os.open(lock, os.O_RDONLY | os.O_NONBLOCK)
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


# --- Seals. A seal is a digest. It shows that bytes are unchanged, and were written for
# a given location.
#
#     seal(content, of) = sha256(of ‖ 0 ‖ content)
#
# The text `of` (`context` in the code below) identifies the location, for example a
# file of a run, a tile of a kernel or a row. Equal bytes at another location have a
# different seal.


BLOCK = 1 << 20  # bytes that are read at once
WIDTH = 32  # bytes of a digest (seal)
NOTHING_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)

Seals: TypeAlias = Mapping[str, tuple[int, str]]
"""The size in bytes and the digest (seal) of each file,
by its path relative to a folder."""


class Damaged(Mistake):
    """Raised if a file has changed since it was written."""


class Sealing:
    """The digest (seal) of a stream of bytes, which is updated block by block.

    `context` identifies the location of the bytes. `position` is the number of bytes so
    far."""

    def __init__(self, context: str = "") -> None:
        self.hash = sha256(context.encode() + b"\0")
        self.position = 0

    def update(self, content: ReadableBuffer) -> None:
        self.hash.update(content)
        self.position += memoryview(content).nbytes

    @property
    def digest(self) -> bytes:
        return self.hash.digest()

    @property
    def size_and_digest(self) -> tuple[int, str]:
        return self.position, self.hash.hexdigest()


def seal(content: ReadableBuffer, context: str = "") -> bytes:
    sealing = Sealing(context)
    sealing.update(content)
    return sealing.digest


def sealing_of(path: Path | str, size: int, context: str = "") -> Sealing:
    """Return the digest (`Sealing`) of the first `size` bytes of a file, or of all
    bytes if the file is shorter."""
    sealing = Sealing(context)
    with open(path, "rb", buffering=0) as file:
        while sealing.position < size:
            block = file.read(min(BLOCK, size - sealing.position))
            if not block:
                break
            sealing.update(block)
    return sealing


def sealed(folder: Path, names: Iterable[str]) -> Seals:
    """Return the sizes and digests (seals) of the named files,
    and of all files in the named folders."""
    paths = (
        path for name in names for path in (folder / name, *(folder / name).rglob("*"))
    )
    files = sorted(path for path in paths if path.is_file())
    return {
        file.relative_to(folder).as_posix(): sealing_of(
            file, file.stat().st_size
        ).size_and_digest
        for file in files
    }


def damaged_files(folder: Path, seals: Seals, largest: float = inf) -> list[str]:
    """Return the files whose bytes do not match their digests (seals).

    For files larger than `largest` bytes, only the size is checked.
    """
    damaged = []
    # use strings, because creating `Path` objects takes longer than reading small files
    folder_name = str(folder)
    for name, (size, digest) in seals.items():
        path = os.path.join(folder_name, name)
        try:
            status = os.stat(path)
            intact = S_ISREG(status.st_mode) and status.st_size == size
            intact = intact and (
                size > largest or sealing_of(path, size).size_and_digest[1] == digest
            )
        except OSError as error:
            if error.errno not in NOTHING_THERE:
                raise
            intact = False
        if not intact:
            damaged.append(name)
    return damaged


class SealedFile:
    """A file that computes the digest (seal) of the bytes written to it."""

    def __init__(self, file: BinaryIO, context: str) -> None:
        self.file = file
        self.sealing = Sealing(context)

    def write(self, content: ReadableBuffer) -> int:
        self.sealing.update(content)
        return self.file.write(content)

    def flush(self) -> None:
        """Do nothing, because this object has no buffer."""


@contextmanager
def being_sealed(path: Path, context: str) -> Iterator[BinaryIO]:
    """Yield a temporary write-only file. At the end of the `with` block, append the
    digest (seal) of its bytes, and rename the file to `path`."""
    with being_written(path) as file:
        content = SealedFile(file, context)
        yield cast(BinaryIO, content)
        file.write(content.sealing.digest)


def sealed_for(path: Path, context: str) -> bool:
    """Return True if the bytes of a file match the digest (seal) at its end. The file
    was written by `being_sealed`."""
    size = path.stat().st_size - WIDTH
    with path.open("rb") as file:
        file.seek(max(0, size))
        return size >= 0 and sealing_of(path, size, context).digest == file.read()


# --- JSON files: keys in the given order, an indentation of two spaces,
# and a newline at the end.
#
# JSON has no infinity and no NaN, so non-finite numbers become null.


Json: TypeAlias = (
    "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"
)

MAX_JSON_BYTES = 1 << 30
MAX_JSON_DEPTH = 64  # largest nesting depth of objects and lists
SEAL = "seal"
RUN_AGAIN = "run the command that wrote it again"


def to_text(value: Json) -> str:
    return (
        json.dumps(finite_json(value), indent=2, ensure_ascii=False, allow_nan=False)
        + "\n"
    )


def read_object(path: Path) -> dict[str, Any]:
    return as_object(read_bytes(path), path)


def read_bytes(path: Path) -> bytes:
    try:
        refuse_special(path, str(path), MAX_JSON_BYTES)
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
    brackets = content.count(b"{") + content.count(b"[")
    if brackets > MAX_JSON_DEPTH and depth_of(value) > MAX_JSON_DEPTH:
        raise Mistake(
            f"{path} holds more than {MAX_JSON_DEPTH} objects in each other; the file is damaged"
        )
    if b"\\u" in content:
        refuse_half_characters(value, path)
    return value


def depth_of(value: object) -> int:
    """Return the nesting depth of objects and lists."""
    depth = 0
    level = [value]
    while True:
        containers = [part for part in level if isinstance(part, dict | list)]
        if not containers:
            return depth
        level = []
        for part in containers:
            level += part.values() if isinstance(part, dict) else part
        depth += 1


def refuse_half_characters(value: object, path: Path) -> None:
    """Raise if a text contains half of a surrogate pair, which UTF-8 cannot encode."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise Mistake(f"{path} holds half a character; the file is damaged") from None


def finite_json(value: Json) -> Json:
    """Return the value with None instead of infinities and NaN."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite_json(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [finite_json(item) for item in value]
    return value


def sealed_text(value: Mapping[str, Json], context: str) -> str:
    """Return an object as JSON text, with a digest (seal) as the last key. The digest
    covers the JSON text without this key, and the text `context`."""
    return to_text({**value, SEAL: seal(to_text(value).encode(), context).hex()})


def read_sealed(path: Path, context: str) -> dict[str, Any]:
    """Read an object from a JSON file, and return it without its digest (seal). Raise
    if the text does not match the digest."""
    content = read_bytes(
        path
    )  # read once, so that the checked bytes are the parsed bytes
    value = as_object(content, path)
    digest = value.pop(SEAL, None)
    if digest is None:
        raise Damaged(
            f"{path} is damaged, or of an earlier version: it has no seal; {RUN_AGAIN}"
        )
    line = f',\n  "{SEAL}": "{digest}"\n}}\n'.encode(errors="replace")
    if (
        not content.endswith(line)
        or seal(content.removesuffix(line) + b"\n}\n", context).hex() != digest
    ):
        raise Damaged(
            f"{path} is damaged: it is not as it was written for this place; {RUN_AGAIN}"
        )
    return value


# --- Sizes of files and folders.


def size_of(path: Path) -> int | None:
    """Return the size in bytes of a file, or of all files in a folder. Return None if
    there is no file or folder."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_size if S_ISREG(status.st_mode) else size_of_folder(str(path))


def size_of_folder(path: str) -> int:
    """Return the size in bytes of all files in a folder.
    Do not follow links to folders."""
    total = 0
    with os.scandir(path) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):  # ignore broken links
                if entry.is_dir(follow_symlinks=False):
                    total += size_of_folder(entry.path)
                else:
                    total += entry.stat().st_size
    return total
