"""Compilation by numba, loops over parts of arrays, and arrays that are lent without counting owners."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

# --- Compilation by numba: without the interpreter's lock, with fused multiplications and additions, kept on the
# disk.
#
# Values are finite, so that comparisons need not provide for others, and nothing is divided by zero. Sums over
# tiles are added in the order that suits the machine, always the same: the same input gives the same bits.


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


# --- Arrays are lent to a function: their owners are not counted there.
#
# Numba counts who owns an array at every slice of it and at every call with one, by instructions that other
# processors have to agree to. In short loops over tiles that takes a third of the time. What is lent has no count
# to keep; whoever lends it keeps it: only arguments of a function are lent, which live as long as its call, and
# nothing lent is returned.


def _lent(typing: Any, array: Any) -> Any:
    """The same array, which nobody owns."""

    def uncounted(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        view = context.make_array(array)(context, builder, given[0])
        view.meminfo = ir.Constant(view.meminfo.type, None)
        view.parent = ir.Constant(view.parent.type, None)
        return view._getvalue()

    return array(array), uncounted


lent: Any = intrinsic(_lent)


# --- A function's loops take as many numbers at a time as registers hold, where the compiler would take half as many.
#
# It does so of its own accord for processors that used to become slower by it, whatever the loop. Loops full of
# multiplications and additions gain; those that wait for memory do not care.


def _wide(typing: Any) -> Any:
    """Nothing is done where this stands: the function that it stands in is compiled in this way."""

    def marked(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        set.add(builder.function.attributes, '"prefer-vector-width"="512"')  # llvmlite knows attributes by name alone
        return context.get_dummy_value()

    return types.void(), marked


wide: Any = intrinsic(_wide)


# --- Loops over parts of arrays. Counters are unsigned: no index can wrap around, and processors take many at once.


Array = np.ndarray[Any, Any]


@compiled
def summed(source: Array, target: Array, margin: int, size: int, reach: int, step: int) -> None:
    """The sums Σ over the neighbours at up to `reach` steps on both sides."""
    count, start = np.uintp(size), np.uintp(margin)
    if reach == 1:
        one = np.uintp(step)
        for j in range(count):
            i = j + start
            target[i] = source[i - one] + source[i] + source[i + one]
        return
    for j in range(count):
        target[j + start] = source[j + start]
    for away in range(1, reach + 1):
        far = np.uintp(away * step)
        for j in range(count):
            i = j + start
            target[i] += source[i - far] + source[i + far]


@compiled
def copied(source: Array, target: Array, margin: int, size: int) -> None:
    """One tile is copied: target ← source."""
    start = np.uintp(margin)
    for j in range(np.uintp(size)):
        target[j + start] = source[j + start]


@compiled
def added(source: Array, target: Array, margin: int, size: int) -> None:
    """One tile is added to another: target ← target + source."""
    start = np.uintp(margin)
    for j in range(np.uintp(size)):
        target[j + start] += source[j + start]


@compiled
def cleared(target: Array, inside: Array, margin: int, size: int) -> None:
    """A tile is set to zero outside the image."""
    start = np.uintp(margin)
    for j in range(np.uintp(size)):
        target[j + start] *= inside[j]


@compiled
def wrapped(target: Array, halo: Array, margin: int) -> None:
    """Pixels of a tile are repeated where a halo, [to or from, place], says."""
    start = np.uintp(margin)
    for j in range(np.uintp(halo.shape[1])):
        target[start + halo[0, j]] = target[start + halo[1, j]]


@compiled
def moved(source: Array, start: int, target: Array, end: int, count: int) -> None:
    """A piece of an array is copied into another array."""
    a, b = np.uintp(start), np.uintp(end)
    for j in range(np.uintp(count)):
        target[b + j] = source[a + j]


@compiled
def cleaned(target: Array, start: int, count: int) -> None:
    """A piece of an array is set to zero."""
    a = np.uintp(start)
    for j in range(np.uintp(count)):
        target[a + j] = 0


@compiled
def filled(target: Array, start: int, count: int, value: Any) -> None:
    """A piece of an array is set to a value."""
    a = np.uintp(start)
    for j in range(np.uintp(count)):
        target[a + j] = value


@compiled
def total(tile: Array, margin: int, size: int) -> Any:
    """The sum of a tile."""
    start, found = np.uintp(margin), tile.dtype.type(0)
    for j in range(np.uintp(size)):
        found += tile[j + start]
    return found
