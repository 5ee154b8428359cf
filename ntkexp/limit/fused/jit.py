"""Compilation by numba: without the interpreter's lock, with fused multiplications and additions, kept on the disk.

Values are finite, so that comparisons need not provide for others, and nothing is divided by zero. Sums over tiles are
added in the order that suits the machine, always the same: the same input gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import numba
from numba import njit

FAST = {"contract", "nnan", "ninf", "nsz", "reassoc"}
HERE = Path(__file__).parent


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, compiled when it is first called; where nothing can be written, in every process anew."""
    try:
        with cached_in(HERE / "__pycache__" / source_digest(HERE)):
            made: Callable[..., Any] = njit(nogil=True, fastmath=FAST, error_model="numpy", cache=True)(function)
    except RuntimeError:  # numba finds no place for its cache
        made = njit(nogil=True, fastmath=FAST, error_model="numpy")(function)
    return made


@contextmanager
def cached_in(folder: Path) -> Iterator[None]:
    """Functions that are decorated meanwhile are kept there, or, where numba was told of a folder, in one inside it."""
    settings = vars(numba.config)
    before = settings["CACHE_DIR"]
    settings["CACHE_DIR"] = str(Path(before or folder.parent) / folder.name)
    try:
        yield
    finally:
        settings["CACHE_DIR"] = before


@cache
def source_digest(folder: Path) -> str:
    """The files of a folder together: a function is compiled with those that it calls, and numba looks at the date of
    its own file alone."""
    return sha256(b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))).hexdigest()[:16]
