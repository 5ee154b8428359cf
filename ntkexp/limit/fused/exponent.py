"""The exponents of numbers, as their bits say: the largest there is stands for what is not finite.

Loops are compiled as if all numbers were finite, so that they cannot ask the numbers themselves.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic


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
