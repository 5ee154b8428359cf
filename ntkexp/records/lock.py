"""One process writes a run folder: it holds an exclusive flock on the folder's `.lock`, which dies with the process."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ntkexp.mistake import Mistake
from ntkexp.records.atomic import make_folder

try:
    import fcntl
except ImportError as error:  # not a POSIX system
    raise Mistake("run folders are locked with flock, which this system lacks; use Linux, macOS or WSL") from error

ATTEMPTS, PAUSE = 10, 0.01  # `is_held` takes the lock for an instant, which must not make a claim fail


def acquire(lock: Path) -> int:
    """Hold the lock until the descriptor that is returned is closed, or raise BlockingIOError if another does."""
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    for attempt in range(ATTEMPTS):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if attempt == ATTEMPTS - 1:
                os.close(descriptor)
                raise
            time.sleep(PAUSE)
        else:
            break
    return descriptor


@contextmanager
def waited_for(lock: Path) -> Iterator[None]:
    """Hold the lock, however long it takes until others let go of it."""
    make_folder(lock.parent)
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def is_held(lock: Path) -> bool:
    """Whether someone holds the lock; a file that is not there is not held."""
    try:
        descriptor = os.open(lock, os.O_RDONLY | os.O_NONBLOCK)  # lest a pipe of that name wait for a writer
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
