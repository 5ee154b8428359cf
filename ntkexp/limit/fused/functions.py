"""Compilation with numba, loops over flat arrays, and fast elementary functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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

# --- Compilation: functions release the GIL, use fused multiply-add,
# and are cached on disk.
#
# Compiled code assumes finite values and nonzero divisors, and does not check them.
# `reassoc` lets the compiler reorder sums for vector registers. The order depends only
# on the machine, so that equal inputs give bitwise equal results.


FAST_MATH = {"contract", "nnan", "ninf", "nsz", "reassoc"}
FUSED_FOLDER = Path(__file__).parent


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function at its first call, and cache the result on disk
    if possible."""
    try:
        with cached_in(FUSED_FOLDER / "__pycache__" / source_digest(FUSED_FOLDER)):
            jitted: Callable[..., Any] = njit(
                nogil=True, fastmath=FAST_MATH, error_model="numpy", cache=True
            )(function)
    except RuntimeError:  # numba cannot write a cache
        jitted = njit(nogil=True, fastmath=FAST_MATH, error_model="numpy")(function)
    return jitted


@contextmanager
def cached_in(folder: Path) -> Iterator[None]:
    """Inside the context, make numba cache the compiled functions in `folder`.

    If the user has configured a cache folder for numba, use the subfolder of that
    folder with the name of `folder`."""
    settings = vars(numba.config)
    user_folder = settings["CACHE_DIR"]
    settings["CACHE_DIR"] = str(Path(user_folder or folder.parent) / folder.name)
    try:
        yield
    finally:
        settings["CACHE_DIR"] = user_folder


@cache
def source_digest(folder: Path) -> str:
    """Return a digest of all Python files of a folder.

    A compiled function contains the functions that it calls. But numba's cache only
    compares the date of the function's own file. A cache folder named after this digest
    prevents stale code."""
    contents = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    return sha256(contents).hexdigest()[:16]


# --- Arrays without reference counts
#
# Numba updates an array's reference count at every slice and every call, with atomic
# instructions. For short loops over bands, this takes a third of the time. `lent`
# returns a view that is not counted. Use it only for arguments, which outlive the call,
# and never return the view.


def borrowed(context: Any, builder: Any, kind: Any, value: Any) -> Any:
    """Return a view of an array, or of each array in a tuple. Numba does not count
    references to these views."""
    if isinstance(kind, types.Array):
        view = context.make_array(kind)(context, builder, value)
        view.meminfo = ir.Constant(view.meminfo.type, None)
        view.parent = ir.Constant(view.parent.type, None)
        return view._getvalue()
    for k, part in enumerate(getattr(kind, "types", ())):  # the parts of a tuple
        element = builder.extract_value(value, k)
        element = borrowed(context, builder, part, element)
        value = builder.insert_value(value, element, k)
    return value


def _lent(typing: Any, kind: Any) -> Any:
    def without_count(
        context: Any, builder: Any, signature: Any, arguments: Any
    ) -> Any:
        return borrowed(context, builder, kind, arguments[0])

    return kind(kind), without_count


lent: Any = intrinsic(_lent)


# --- Full vector registers
#
# On processors with registers of 512 bits, the compiler uses 256 bits by default,
# because older models ran slower with full registers. A function that calls `wide` is
# compiled with 512 bits. This accelerates loops that are limited by arithmetic, but not
# loops that are limited by memory.


def _wide(typing: Any) -> Any:
    def set_attribute(
        context: Any, builder: Any, signature: Any, arguments: Any
    ) -> Any:
        # use `set.add`, because llvmlite's `add` rejects attributes that it does not
        # know
        set.add(builder.function.attributes, '"prefer-vector-width"="512"')
        return context.get_dummy_value()

    return types.void(), set_attribute


wide: Any = intrinsic(_wide)


# --- Loops over flat arrays; unsigned counters skip numba's check for negative indices.


Array = np.ndarray[Any, Any]


@compiled
def sum_window(
    source: Array, target: Array, margin: int, size: int, reach: int, step: int
) -> None:
    """Sum over a window: set target[i] = Σ source[i + m · step] over |m| ≤ reach."""
    count = np.uintp(size)
    start = np.uintp(margin)
    if reach == 1:
        one = np.uintp(step)
        for j in range(count):
            i = j + start
            target[i] = source[i - one] + source[i] + source[i + one]
        return
    for j in range(count):
        target[j + start] = source[j + start]
    for multiple in range(1, reach + 1):
        distance = np.uintp(multiple * step)
        for j in range(count):
            i = j + start
            target[i] += source[i - distance] + source[i + distance]


@compiled
def copy_band(source: Array, target: Array, margin: int, size: int) -> None:
    start = np.uintp(margin)
    for j in range(np.uintp(size)):
        target[j + start] = source[j + start]


@compiled
def add_band(source: Array, target: Array, margin: int, size: int) -> None:
    start = np.uintp(margin)
    for j in range(np.uintp(size)):
        target[j + start] += source[j + start]


@compiled
def clear_outside(target: Array, inside: Array, margin: int, size: int) -> None:
    """Set a band to zero outside the image: multiply by `inside`, which is 0 or 1."""
    start = np.uintp(margin)
    for j in range(np.uintp(size)):
        target[j + start] *= inside[j]


@compiled
def fill_halo(target: Array, halo: Array, margin: int) -> None:
    """Fill the halo of a periodic image with copies of its pixels. `halo` lists target
    and source indices, [2, copy]."""
    start = np.uintp(margin)
    for j in range(np.uintp(halo.shape[1])):
        target[start + halo[0, j]] = target[start + halo[1, j]]


@compiled
def copy_numbers(
    source: Array, source_start: int, target: Array, target_start: int, count: int
) -> None:
    a = np.uintp(source_start)
    b = np.uintp(target_start)
    for j in range(np.uintp(count)):
        target[b + j] = source[a + j]


@compiled
def clear_numbers(target: Array, start: int, count: int) -> None:
    a = np.uintp(start)
    for j in range(np.uintp(count)):
        target[a + j] = 0


@compiled
def fill_numbers(target: Array, start: int, count: int, value: Any) -> None:
    a = np.uintp(start)
    for j in range(np.uintp(count)):
        target[a + j] = value


@compiled
def band_total(band: Array, margin: int, size: int) -> Any:
    start = np.uintp(margin)
    value = band.dtype.type(0)
    for j in range(np.uintp(size)):
        value += band[j + start]
    return value


# --- Biased exponents, read from the bits of a number. The largest exponent marks
# infinity and NaN.
#
# Compiled code assumes finite numbers, so `isfinite` would not work.


def _exponent(typing: Any, x: Any) -> Any:
    fraction_bits, kind = (23, types.int32) if x == types.float32 else (52, types.int64)

    def read(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        integer = ir.IntType(x.bitwidth)
        bits = builder.bitcast(arguments[0], integer)
        shifted = builder.lshr(bits, ir.Constant(integer, fraction_bits))
        without_sign = ir.Constant(integer, 2 ** (x.bitwidth - fraction_bits - 1) - 1)
        return builder.and_(shifted, without_sign)

    return kind(x), read


exponent: Any = intrinsic(_exponent)


def beyond(dtype: Any) -> int:
    """Return the biased exponent of infinity and NaN.

    >>> beyond(np.float32), beyond(np.float64)
    (255, 2047)
    """
    return 2 * int(np.finfo(dtype).maxexp) - 1


# --- Polynomials with constant coefficients, by Horner's scheme


def polynomial(double: Sequence[float], single: Sequence[float]) -> Any:
    """Return a compiled polynomial with coefficients for each precision, from the
    constant term on."""

    def evaluate(typing: Any, x: Any) -> Any:
        coefficients = np.array(double)
        if x == types.float32:
            coefficients = np.array(single, np.float32)
        first, *others = coefficients[::-1].tolist()

        def horner(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            (argument,) = arguments
            value = ir.Constant(argument.type, first)
            for coefficient in others:
                product = builder.fmul(argument, value)
                value = builder.fadd(ir.Constant(argument.type, coefficient), product)
            return value

        return x(x), horner

    return intrinsic(evaluate)


# --- The exponential of numbers ≤ 0, by a polynomial that vectorises
#
# exp x = 2ⁿ exp r, where n is the integer nearest to x/log 2 and |r| ≤ ½ log 2. The
# Taylor series of exp r has relative errors 4e-16 (degree 12) in float64 and 1e-7
# (degree 7) in float32. Results are at least the smallest normal number.


LOG2_HIGH = 0.693145751953125
LOG2_LOW = 1.4286068203094173e-06
"""log 2 = LOG2_HIGH + LOG2_LOW; the product n · LOG2_HIGH is exact even in float32."""
EXP = tuple(1.0 / factorial(k) for k in range(13))
exp_series = polynomial(EXP, EXP[:8])


def _power(typing: Any, x: Any) -> Any:
    """Return 2ⁿ, given a float whose lowest bits are n + bias.
    Shift these bits into the exponent."""
    fraction_bits = 23 if x == types.float32 else 52

    def shift(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        integer = ir.IntType(x.bitwidth)
        bits = builder.bitcast(arguments[0], integer)
        shifted = builder.shl(bits, ir.Constant(integer, fraction_bits))
        return builder.bitcast(shifted, arguments[0].type)

    return x(x), shift


power: Any = intrinsic(_power)


def exponential(x: Any) -> Any:
    """Return exp(min(x, 0))."""
    raise NotImplementedError  # numba uses the overload below


@overload(exponential, inline="always")
def _exponential(x: Any) -> Callable[[Any], Any]:
    def double(x: Any) -> Any:
        x = min(max(x, -708.0), 0.0)
        n = np.floor(x * 1.4426950408889634 + 0.5)
        r = (x - n * LOG2_HIGH) - n * LOG2_LOW
        # adding 1.5 · 2⁵² moves the integer n + bias into the lowest bits of the float
        return exp_series(r) * power(n + (6755399441055744.0 + 1023.0))

    def single(x: Any) -> Any:
        x = min(max(x, np.float32(-87.0)), np.float32(0.0))
        n = np.floor(x * np.float32(1.4426950408889634) + np.float32(0.5))
        r = (x - n * np.float32(LOG2_HIGH)) - n * np.float32(LOG2_LOW)
        # adding 1.5 · 2²³ moves the integer n + bias into the lowest bits of the float
        return exp_series(r) * power(n + np.float32(12582912.0 + 127.0))

    return single if x == types.float32 else double


# --- The arc sine from one polynomial and a square root
#
#     arcsin s = w A(w²),            w = s                for s ≤ ½
#     arcsin s = π/2 − 2 w A(w²),    w = √((1 − s)/2)     for s > ½
#
# Callers also pass 1 − |s|. Their value may be more accurate than a difference from s.
# A is analytic far beyond [0, ¼]. Its Chebyshev approximation was computed with 60
# digits and converted to powers. The relative error is 3e-17 (degree 12) for float64
# and 3e-10 (degree 6) for float32.


ARC_DOUBLE = (
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
ARC_SINGLE = (
    1.0000000002453038,
    0.1666665721387794,
    0.07500591501960488,
    0.044505242015329426,
    0.031884142973420244,
    0.014198827965636922,
    0.03780636152096081,
)


arc_series = polynomial(ARC_DOUBLE, ARC_SINGLE)
"""A(z) = arcsin(√z)/√z."""


@compiled
def arc_sine(s: Any, rest: Any, half: Any, quarter_turn: Any) -> Any:
    """Return arcsin s. `rest` is 1 − |s|. `half` and `quarter_turn` are ½ and π/2 in
    the dtype of s."""
    magnitude = abs(s)
    is_small = magnitude <= half
    w = magnitude if is_small else np.sqrt(half * rest)
    angle = w * arc_series(w * w)
    angle = angle if is_small else quarter_turn - angle - angle
    return angle if s >= 0 else -angle


# --- The arc cosine from two polynomials and a square root
#
# With ρ ≥ 0, t = 2ρ − 1 and v = √(1 − ρ),
#
#     ϑ = arccos ρ = v P(t),    sin ϑ − ρϑ = v³ Q(t).
#
# P and Q are analytic on [−1, 1]; the square root contains the singularity at ρ = 1.
# Their Chebyshev approximations were computed with 60 digits and converted to powers.
# The relative errors are 1e-15 (degree 16) and 2e-15 (degree 14) in float64, 2e-7
# (degree 6) and 1.5e-7 (degree 5) in float32.


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
ANGLE_SINGLE = (
    1.480960979386122,
    -0.07601710599077761,
    0.011029593772552826,
    -0.002141096968959455,
    0.0004798331844653625,
    -0.00013302194232519095,
    3.449462493051909e-05,
)
GAP_SINGLE = (
    0.9685288762006966,
    -0.02816786081492517,
    0.0027962288000751142,
    -0.0004113337735933161,
    7.929601020904662e-05,
    -1.6256318673553083e-05,
)


angle = polynomial(ANGLE, ANGLE_SINGLE)
"""P(t) = arccos(ρ)/√(1 − ρ) at t = 2ρ − 1."""
gap = polynomial(GAP, GAP_SINGLE)
"""Q(t) = (sin ϑ − ρϑ)/√(1 − ρ)³ at t = 2ρ − 1, with ϑ = arccos ρ."""
