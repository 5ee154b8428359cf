"""Faults of the machine, in words: they are nobody's mistake, and the same command goes on once they are put right."""

from __future__ import annotations

import errno

FAULTS = {
    errno.ENOSPC: "no space is left on the disk; free some, and the same command goes on",
    errno.EDQUOT: "the disk quota is used up; free some, and the same command goes on",
    errno.EPIPE: "whoever read the output has gone away",
    errno.EACCES: "permission denied",
    errno.EPERM: "permission denied",
    errno.EROFS: "the file system can only be read",
    errno.EIO: "the disk cannot be read or written",
}


def in_words(error: OSError) -> str:
    """Where it happened, and what.

    >>> in_words(OSError(errno.EIO, "", "kernels.zarr"))
    'kernels.zarr: the disk cannot be read or written'
    """
    return f"{f'{error.filename}: ' if error.filename else ''}{FAULTS[error.errno or 0]}"
