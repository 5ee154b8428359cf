"""Compilation by numba, loops over parts of arrays, and arrays that are lent without counting owners."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from hashlib import sha256
from math import factorial
from pathlib import Path
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, overload

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
            made: Callable[..., Any] = njit(
                nogil=True, fastmath=FAST, error_model="numpy", cache=True
            )(function)
    except RuntimeError:  # numba finds no place for its cache
        made = njit(nogil=True, fastmath=FAST, error_model="numpy")(function)
    return made


@contextmanager
def cached_in(folder: Path) -> Iterator[None]:
    """Functions that are decorated meanwhile are kept there, or inside numba's own folder, where it has one."""
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
    return sha256(b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))).hexdigest()[
        :16
    ]


# --- Arrays are lent to a function: their owners are not counted there.
#
# Numba counts who owns an array at every slice of it and at every call with one, by instructions that other
# processors have to agree to. In short loops over tiles that takes a third of the time. What is lent has no count
# to keep; the lender keeps it: only arguments of a function are lent, which live as long as its call, and
# nothing lent is returned.


def _lent(typing: Any, array: Any) -> Any:
    """The same array, without an owner."""

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
        set.add(
            builder.function.attributes, '"prefer-vector-width"="512"'
        )  # llvmlite knows attributes by name alone
        return context.get_dummy_value()

    return types.void(), marked


wide: Any = intrinsic(_wide)


# --- Loops over parts of arrays. Counters are unsigned: no index can wrap around, and processors take many at once.


Array = np.ndarray[Any, Any]


@compiled
def sum_window(source: Array, target: Array, margin: int, size: int, reach: int, step: int) -> None:
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
def copy_tile(source: Array, target: Array, margin: int, size: int) -> None:
    """One tile is copied: target ← source."""
    start = np.uintp(margin)
    for j in range(np.uintp(size)):
        target[j + start] = source[j + start]


@compiled
def add_tile(source: Array, target: Array, margin: int, size: int) -> None:
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
    start, found = np.uintp(margin), tile.dtype.type(0)
    for j in range(np.uintp(size)):
        found += tile[j + start]
    return found


# --- Exponentials and inverse trigonometric functions by polynomials, so that processors take many numbers at once.


# --- The exponents of numbers, as their bits say: the largest there is stands for what is not finite.
#
# Loops are compiled as if all numbers were finite, so that they cannot ask the numbers themselves.


def _exponent(typing: Any, x: Any) -> Any:
    """The exponent of a number and its bias, as an integer of as many bits."""
    fraction, kind = (23, types.int32) if x == types.float32 else (52, types.int64)

    def read(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        whole = ir.IntType(x.bitwidth)
        moved = builder.lshr(builder.bitcast(given[0], whole), ir.Constant(whole, fraction))
        return builder.and_(moved, ir.Constant(whole, 2 ** (x.bitwidth - fraction - 1) - 1))

    return kind(x), read


exponent: Any = intrinsic(_exponent)


def beyond(dtype: Any) -> int:
    """The exponent of what is not finite.

    >>> beyond(np.float32), beyond(np.float64)
    (255, 2047)
    """
    return 2 * int(np.finfo(dtype).maxexp) - 1


# --- The exponential of numbers ≤ 0 by a polynomial, so that processors take many at once.
#
# exp x = 2ⁿ exp r with n the whole number nearest to x/log 2 and |r| ≤ ½ log 2, where Taylor's series is taken:
# relative errors 4e-16 (degree 12), 1e-7 (7) in float32. What is smaller than the smallest normal number counts
# as that.


HIGH, LOW = 0.693145751953125, 1.4286068203094173e-06
"""The logarithm of 2 in two parts, of which the first times n is exact in float32 too."""
TERMS = tuple(1.0 / factorial(k) for k in range(13))
TERMS_SINGLE = tuple(np.float32(c) for c in TERMS[:8])


def _power(typing: Any, x: Any) -> Any:
    """2ⁿ of a number whose lowest bits are n and the bias: they are moved to where the exponent is."""
    fraction = 23 if x == types.float32 else 52

    def moved(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        kind = ir.IntType(x.bitwidth)
        bits = builder.shl(builder.bitcast(given[0], kind), ir.Constant(kind, fraction))
        return builder.bitcast(bits, given[0].type)

    return x(x), moved


power: Any = intrinsic(_power)


def exponential(x: Any) -> Any:
    """The exponential of x ≤ 0; of anything more it is 1."""
    raise NotImplementedError  # for numba alone


@overload(exponential, inline="always")
def _exponential(x: Any) -> Callable[[Any], Any]:
    def double(x: Any) -> Any:
        x = min(max(x, -708.0), 0.0)
        n = np.floor(x * 1.4426950408889634 + 0.5)
        r = (x - n * HIGH) - n * LOW
        p = TERMS[12]
        p = TERMS[8] + r * (TERMS[9] + r * (TERMS[10] + r * (TERMS[11] + r * p)))
        p = TERMS[4] + r * (TERMS[5] + r * (TERMS[6] + r * (TERMS[7] + r * p)))
        p = TERMS[0] + r * (TERMS[1] + r * (TERMS[2] + r * (TERMS[3] + r * p)))
        return p * power(n + (6755399441055744.0 + 1023.0))  # 1.5 · 2⁵² and the bias

    def single(x: Any) -> Any:
        x = min(max(x, np.float32(-87.0)), np.float32(0.0))
        n = np.floor(x * np.float32(1.4426950408889634) + np.float32(0.5))
        r = (x - n * np.float32(HIGH)) - n * np.float32(LOW)
        p = TERMS_SINGLE[7]
        p = TERMS_SINGLE[4] + r * (TERMS_SINGLE[5] + r * (TERMS_SINGLE[6] + r * p))
        p = TERMS_SINGLE[0] + r * (
            TERMS_SINGLE[1] + r * (TERMS_SINGLE[2] + r * (TERMS_SINGLE[3] + r * p))
        )
        return p * power(n + np.float32(12582912.0 + 127.0))  # 1.5 · 2²³ and the bias

    return single if x == types.float32 else double


# --- The arc sine without trigonometry: one polynomial and a square root.
#
#     arcsin s = w A(w²),                          w = s                 up to s = ½,
#     arcsin s = π/2 − 2 w A(w²),                  w = √((1 − s)/2)      beyond,
#
# so that it is the rest 1 − s that is taken: it may be known better than s. A is analytic far beyond [0, ¼]: a
# Chebyshev sum, computed with 60 digits and written as powers, with a relative error of 3e-17 (degree 12), 3e-10
# (6) in float32.


ARC = (
    1.0,
    0.1666666666666484,
    0.07500000000404858,
    0.044642856791215726,
    0.03038196027149515,
    0.02237173660319574,
    0.017359969965541983,
    0.013883027829435166,
    0.0121816790888421,
    0.006480855348779324,
    0.01964239671205795,
    -0.016384436448802192,
    0.032011340323281685,
)
ARC_SINGLE = tuple(
    np.float32(c)
    for c in (
        1.0000000002453038,
        0.1666665721387794,
        0.07500591501960488,
        0.044505242015329426,
        0.031884142973420244,
        0.014198827965636922,
        0.03780636152096081,
    )
)


def share(z: Any) -> Any:
    """The polynomial A(z)."""
    raise NotImplementedError  # for numba alone


@overload(share, inline="always")
def _share(z: Any) -> Callable[[Any], Any]:
    def double(z: Any) -> Any:
        p = ARC[12]
        p = ARC[8] + z * (ARC[9] + z * (ARC[10] + z * (ARC[11] + z * p)))
        p = ARC[4] + z * (ARC[5] + z * (ARC[6] + z * (ARC[7] + z * p)))
        p = ARC[0] + z * (ARC[1] + z * (ARC[2] + z * (ARC[3] + z * p)))
        return p

    def single(z: Any) -> Any:
        p = ARC_SINGLE[6]
        p = ARC_SINGLE[3] + z * (ARC_SINGLE[4] + z * (ARC_SINGLE[5] + z * p))
        p = ARC_SINGLE[0] + z * (ARC_SINGLE[1] + z * (ARC_SINGLE[2] + z * p))
        return p

    return single if z == types.float32 else double


@compiled
def arc_sine(s: Any, rest: Any, half: Any, quarter_turn: Any) -> Any:
    """The angle whose sine is s; `rest` is 1 − |s|, `half` and `quarter_turn` are ½ and π/2 in its precision."""
    short = abs(s)
    near = short <= half
    w = short if near else np.sqrt(half * rest)
    angle = w * share(w * w)
    angle = angle if near else quarter_turn - angle - angle
    return angle if s >= 0 else -angle


# --- The arc cosine without trigonometry: two polynomials and a square root.
#
# With ρ ≥ 0, t = 2ρ − 1 and v = √(1 − ρ),
#
#     ϑ = arccos ρ = v P(t),    sin ϑ − ρϑ = v³ Q(t),
#
# P and Q being analytic on [−1, 1], and everything near ρ = 1 in the square root. Chebyshev sums, computed with
# 60 digits and written as powers: relative errors 1e-15 (degree 16) and 2e-15 (14) in float64, 2e-7 (6) and
# 1.5e-7 (5) in float32.


ANGLE = (
    1.480960979386122,
    -0.0760160912346503,
    0.011029313317973908,
    -0.00214913585971806,
    0.00048205410080041987,
    -0.0001174124943522419,
    3.0187166843649764e-05,
    -8.063600679357754e-06,
    2.216039610288938e-06,
    -6.223317961744095e-07,
    1.7790703300266097e-07,
    -5.197953798050399e-08,
    1.5257551778951588e-08,
    -4.102044564899384e-09,
    1.2229492339493375e-09,
    -6.081211523283149e-10,
    1.851111751086014e-10,
)
GAP = (
    0.9685287633970561,
    -0.028167834290562233,
    0.0027982527541668524,
    -0.00041180955857242227,
    7.399821008840123e-05,
    -1.5012798407768814e-05,
    3.3048990020104247e-06,
    -7.714469791908656e-07,
    1.8821849358245438e-07,
    -4.764533654585752e-08,
    1.237226710942835e-08,
    -3.1377533187559536e-09,
    8.46942896109075e-10,
    -3.313550806822701e-10,
    9.301431034552783e-11,
)
ANGLE_SINGLE = tuple(
    np.float32(c)
    for c in (
        1.480960979386122,
        -0.07601710599077761,
        0.011029593772552826,
        -0.002141096968959455,
        0.0004798331844653625,
        -0.00013302194232519095,
        3.449462493051909e-05,
    )
)
GAP_SINGLE = tuple(
    np.float32(c)
    for c in (
        0.9685288762006966,
        -0.02816786081492517,
        0.0027962288000751142,
        -0.0004113337735933161,
        7.929601020904662e-05,
        -1.6256318673553083e-05,
    )
)


def angle(t: Any) -> Any:
    """The polynomial P(t) of the angle."""
    raise NotImplementedError  # for numba alone


def gap(t: Any) -> Any:
    """The polynomial Q(t) of the gap."""
    raise NotImplementedError  # for numba alone


@overload(angle, inline="always")
def _angle(t: Any) -> Callable[[Any], Any]:
    def double(t: Any) -> Any:
        p = ANGLE[16]
        p = ANGLE[12] + t * (ANGLE[13] + t * (ANGLE[14] + t * (ANGLE[15] + t * p)))
        p = ANGLE[8] + t * (ANGLE[9] + t * (ANGLE[10] + t * (ANGLE[11] + t * p)))
        p = ANGLE[4] + t * (ANGLE[5] + t * (ANGLE[6] + t * (ANGLE[7] + t * p)))
        p = ANGLE[0] + t * (ANGLE[1] + t * (ANGLE[2] + t * (ANGLE[3] + t * p)))
        return p

    def single(t: Any) -> Any:
        p = ANGLE_SINGLE[6]
        p = ANGLE_SINGLE[2] + t * (
            ANGLE_SINGLE[3] + t * (ANGLE_SINGLE[4] + t * (ANGLE_SINGLE[5] + t * p))
        )
        p = ANGLE_SINGLE[0] + t * (ANGLE_SINGLE[1] + t * p)
        return p

    return single if t == types.float32 else double


@overload(gap, inline="always")
def _gap(t: Any) -> Callable[[Any], Any]:
    def double(t: Any) -> Any:
        p = GAP[14]
        p = GAP[10] + t * (GAP[11] + t * (GAP[12] + t * (GAP[13] + t * p)))
        p = GAP[6] + t * (GAP[7] + t * (GAP[8] + t * (GAP[9] + t * p)))
        p = GAP[2] + t * (GAP[3] + t * (GAP[4] + t * (GAP[5] + t * p)))
        p = GAP[0] + t * (GAP[1] + t * p)
        return p

    def single(t: Any) -> Any:
        p = GAP_SINGLE[5]
        p = GAP_SINGLE[1] + t * (GAP_SINGLE[2] + t * (GAP_SINGLE[3] + t * (GAP_SINGLE[4] + t * p)))
        p = GAP_SINGLE[0] + t * p
        return p

    return single if t == types.float32 else double
