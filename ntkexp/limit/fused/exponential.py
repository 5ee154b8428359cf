"""The exponential of numbers ≤ 0 by a polynomial, so that processors take many at once.

exp x = 2ⁿ exp r with n the whole number nearest to x/log 2 and |r| ≤ ½ log 2, where Taylor's series is taken: relative
errors 4e-16 (degree 12), 1e-7 (7) in float32. What is smaller than the smallest normal number counts as that.
"""

from __future__ import annotations

from collections.abc import Callable
from math import factorial
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

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
        p = TERMS_SINGLE[0] + r * (TERMS_SINGLE[1] + r * (TERMS_SINGLE[2] + r * (TERMS_SINGLE[3] + r * p)))
        return p * power(n + np.float32(12582912.0 + 127.0))  # 1.5 · 2²³ and the bias

    return single if x == types.float32 else double
