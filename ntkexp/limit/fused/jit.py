"""Compilation by numba: without the interpreter's lock, with fused multiplications and additions, kept on the disk.

Values are finite, so that comparisons need not provide for others, and nothing is divided by zero. Sums over tiles are
added in the order that suits the machine, always the same: the same input gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit

FAST = {"contract", "nnan", "ninf", "nsz", "reassoc"}


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, compiled when it is first called; where nothing can be written, in every process anew."""
    try:
        made: Callable[..., Any] = njit(nogil=True, fastmath=FAST, error_model="numpy", cache=True)(function)
    except RuntimeError:  # numba finds no place for its cache
        made = njit(nogil=True, fastmath=FAST, error_model="numpy")(function)
    return made
