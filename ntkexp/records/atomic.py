r"""Files that survive a kill at any moment, by a signal or by a power cut.

    file    It is written under another name, forced to the disk, and renamed. A kill before the renaming leaves the old
            file, and a `.partial` that is never read. A kill after it leaves the new file.
    lock    It is the kernel's `flock`, which ends when its process ends for any reason. The locked file stays, but no
            lock is left over, and no process can take a lock from its holder.
    seal    A digest is stored with the sealed bytes, or in a file that is written later. Bytes that were cut off,
            changed or copied from another file do not match, and are rejected before they are
            parsed.
    log     It only grows, by sealed entries (`records.sealed_log`). A kill leaves at most an unfinished last entry,
            which is cut off when the log continues.

So a run is resumed without repair: it checks which files are complete, and writes the others again.
The folder of a run is complete when the file that seals all others exists, which is written last
(`records.folder`).

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


# --- Atomic files: a reader sees the old content or the new one.


PARTIAL = ".partial"  # the suffix of a file that is being written


@contextmanager
def being_written(path: Path) -> Iterator[BinaryIO]:
    """Yield a file that gets its name at the end.

    A kill or power cut leaves the old file or the new one.
    """
    make_folder(path.parent)
    # two writers have different files
    partial = path.with_name(f".{path.name}.{os.urandom(4).hex()}{PARTIAL}")
    try:
        opening = partial.open("xb")  # overwrites no file and follows no link
    except FileNotFoundError:
        raise cannot_write(partial.parent) from None
    try:
        with opening as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # else a power cut after the renaming could leave an empty file
        partial.replace(path)
    except BaseException:  # after a full disk, the partial file would keep it full
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
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), str(folder)) from None


def cannot_write(folder: Path) -> PermissionError:
    """Return the error for a folder such as /proc, where the system reports a missing file instead
    of a permission.
    """
    return PermissionError(errno.EACCES, "Nothing can be written there", str(folder))


# --- Locks: the process that writes a folder holds an exclusive flock on a file in it.
#
# The kernel drops the lock when its last descriptor is closed, which also happens when a process is
# killed. A forked child shares the lock, which is dropped when both processes have ended. Locks are
# released only by closing, so the child cannot take the lock from its parent. On NFS, Linux turns
# flock into a lock of the server, which needs a file that is open for writing.
#
# The package filelock could replace `acquire` and `waited_for`, but not `is_held`: it detects the
# lock of another process only by taking it, which needs a writable folder and makes a simultaneous
# claim fail. Its behaviour without flock and in forked children changes with its version.


try:
    import fcntl
except ImportError as error:  # not a POSIX system
    raise Mistake(
        "run folders are locked with flock, which this system lacks; use Linux, macOS or WSL"
    ) from error

# `is_held` shares a lock for an instant, which must not make a claim fail
LOCK_ATTEMPTS = 10
LOCK_PAUSE_SECONDS = 0.01


def acquire(lock: Path) -> int:
    """Take the lock, and return its descriptor. Raise BlockingIOError if another process holds it.

    Closing the descriptor releases the lock.
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
    """Release a lock and remove its file. A process that waits for it creates a new file."""
    with suppress(OSError):
        lock.unlink()
    os.close(descriptor)


def is_at(descriptor: int, path: Path) -> bool:
    """Return whether an open file is still the file at this path."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except OSError:
        return False


@contextmanager
def waited_for(lock: Path) -> Iterator[None]:
    """Hold the lock. Wait until other processes have released it."""
    make_folder(lock.parent)
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if is_at(descriptor, lock):  # else another process removed the file
                yield
                return
        finally:
            os.close(descriptor)


def is_held(lock: Path) -> bool:
    """Return whether a process holds the lock. A missing file is not locked."""
    try:
        # without O_NONBLOCK, a pipe of this name would wait for a writer
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


# --- Seals: digests that show whether bytes are unchanged, and were written for this place.
#
#     seal(content, of) = sha256(of ‖ 0 ‖ content)
#
# `of` names the place: a file of a run, a tile of a kernel, a row. Equal bytes in another place
# have another seal.


BLOCK = 1 << 20  # bytes of one read
WIDTH = 32  # bytes of a seal
NOTHING_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)

Seals: TypeAlias = Mapping[str, tuple[int, str]]
"""The number of bytes and the seal of each file, by its path relative to a folder."""


class Damaged(Mistake):
    """A file that differs from the written one."""


class Sealing:
    """The seal of bytes that are written one after the other. `position` counts them."""

    def __init__(self, of: str = "") -> None:
        self.hash = sha256(of.encode() + b"\0")
        self.position = 0

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
    """Return the sealing of the first `size` bytes of a file."""
    sealing = Sealing(of)
    with open(path, "rb", buffering=0) as file:
        while sealing.position < size:
            block = file.read(min(BLOCK, size - sealing.position))
            if not block:
                break
            sealing.take(block)
    return sealing


def sealed(folder: Path, names: Iterable[str]) -> Seals:
    """Return the seals of files, and of all files in folders."""
    paths = (path for name in names for path in (folder / name, *(folder / name).rglob("*")))
    files = sorted(path for path in paths if path.is_file())
    return {
        file.relative_to(folder).as_posix(): sealing_of(file, file.stat().st_size).mark
        for file in files
    }


def broken(folder: Path, seals: Seals, largest: float = inf) -> list[str]:
    """Return the files that do not match their seals.

    Only the size of files larger than `largest` is checked.
    """
    wrong = []
    # paths as text, because creating `Path` objects takes longer than reading small files
    folder_name = str(folder)
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
    """A file that computes the seal of the bytes written to it."""

    def __init__(self, file: BinaryIO, of: str) -> None:
        self.file = file
        self.sealing = Sealing(of)

    def write(self, content: ReadableBuffer) -> int:
        self.sealing.take(content)
        return self.file.write(content)

    def flush(self) -> None:
        """Do nothing, because nothing is buffered."""


@contextmanager
def being_sealed(path: Path, of: str) -> Iterator[BinaryIO]:
    """Yield a file that can only be written to.

    It is stored atomically, with its seal at its end.
    """
    with being_written(path) as file:
        content = SealedFile(file, of)
        yield cast(BinaryIO, content)
        file.write(content.sealing.digest)


def sealed_for(path: Path, of: str) -> bool:
    """Return whether a file that `being_sealed` wrote is undamaged."""
    size = path.stat().st_size - WIDTH
    with path.open("rb") as file:
        file.seek(max(0, size))
        return size >= 0 and sealing_of(path, size, of).digest == file.read()


# --- JSON files: keys in the given order, two blanks of indentation, a newline at the end.
#
# JSON has no infinity and no NaN, so a number that is not finite becomes null.


Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"

MAX_JSON_BYTES = 1 << 30
MAX_JSON_DEPTH = 64  # nested objects and lists
SEAL = "seal"
RUN_AGAIN = "run the command that wrote it again"


def to_text(value: Json) -> str:
    return json.dumps(finite_json(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


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
    """Return the number of levels of nested objects and lists."""
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
    """Raise if a text holds half of a surrogate pair, which JSON can spell but UTF-8 cannot encode."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise Mistake(f"{path} holds half a character; the file is damaged") from None


def finite_json(value: Json) -> Json:
    """Return the value with null in place of infinities and NaN."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite_json(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [finite_json(item) for item in value]
    return value


def sealed_text(value: Mapping[str, Json], of: str) -> str:
    """Return an object as JSON text with its seal in the last line.

    Without this line, it is the sealed text.
    """
    return to_text({**value, SEAL: seal(to_text(value).encode(), of).hex()})


def read_sealed(path: Path, of: str) -> dict[str, Any]:
    """Read an object from a JSON file, check its seal, and remove the seal."""
    content = read_bytes(path)  # once, so that the checked bytes are the returned ones
    value = as_object(content, path)
    mark = value.pop(SEAL, None)
    if mark is None:
        raise Damaged(f"{path} is damaged, or of an earlier version: it has no seal; {RUN_AGAIN}")
    line = f',\n  "{SEAL}": "{mark}"\n}}\n'.encode(errors="replace")
    if not content.endswith(line) or seal(content.removesuffix(line) + b"\n}\n", of).hex() != mark:
        raise Damaged(f"{path} is damaged: it is not as it was written for this place; {RUN_AGAIN}")
    return value


# --- Sizes of files and folders.


def size_of(path: Path) -> int | None:
    """Return the bytes of a file, or of all files in a folder; None if neither exists."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_size if S_ISREG(status.st_mode) else size_of_folder(str(path))


def size_of_folder(path: str) -> int:
    """Return the bytes of all files in a folder. No link to a folder is followed."""
    total = 0
    with os.scandir(path) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):  # a broken link
                if entry.is_dir(follow_symlinks=False):
                    total += size_of_folder(entry.path)
                else:
                    total += entry.stat().st_size
    return total
