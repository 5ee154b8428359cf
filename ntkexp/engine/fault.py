"""Faults of the machine and of permissions, in words: the same command goes on once they are put right.

status 1    the machine failed: its disk, memory, threads, or whoever reads the output
status 2    the user can name another place, or allow this one
"""

from __future__ import annotations

import errno

DENIED = {
    errno.EACCES: "permission denied",
    errno.EPERM: "permission denied",
    errno.EROFS: "the file system can only be read",
    errno.ENAMETOOLONG: "the name is too long",
    errno.ELOOP: "its links lead around in a circle",
    errno.ENOTDIR: "a file stands where a folder should be",
    errno.EISDIR: "a folder stands where a file should be",
}
FAULTS = DENIED | {
    errno.ENOSPC: "no space is left on the disk; free some, and the same command goes on",
    errno.EDQUOT: "the disk quota is used up; free some, and the same command goes on",
    errno.EFBIG: "a file may not become so large here; raise the limit (ulimit -f), and the same command goes on",
    errno.EPIPE: "whoever read the output has gone away",
    errno.EIO: "the disk cannot be read or written",
    errno.EMFILE: "too many files are open; raise the limit (ulimit -n)",
    errno.EAGAIN: "no more processes can be started; lower the number of workers, or raise the limit (ulimit -u)",
    errno.ENOMEM: "no memory is left; lower memory_gb or the number of workers",
}
SAID = {
    "can't start new thread": "no more threads can be started; lower threads, or raise the limit (ulimit -u)",
    "can't allocate memory": "no memory is left; lower memory_gb, model.width or data.train",
    "out of memory": "the device has no memory left; lower memory_gb, model.width or data.train",
}


class Unfinished(RuntimeError):
    """Workers did not finish what they were given; the message is one line, with what to try."""


def unfinished(error: BaseException) -> str | None:
    """Say that workers did not finish, if that is what an exception is."""
    return str(error) if isinstance(error, Unfinished) else None


def in_words(error: OSError) -> str:
    """Say where a fault happened, and what it was.

    >>> in_words(OSError(errno.EIO, "", "kernels.zarr"))
    'kernels.zarr: the disk cannot be read or written'
    """
    return f"{f'{error.filename}: ' if error.filename else ''}{FAULTS[error.errno or 0]}"


def exhausted(error: BaseException) -> str | None:
    """Say what the machine has no more of, if that is what an exception of Python's or of torch's says.

    >>> exhausted(RuntimeError("can't start new thread")), exhausted(RuntimeError("shapes differ"))
    ('no more threads can be started; lower threads, or raise the limit (ulimit -u)', None)
    """
    text = "can't allocate memory" if isinstance(error, MemoryError) else str(error)
    return next((words for sign, words in SAID.items() if sign in text), None)
