"""A function's loops take as many numbers at a time as registers hold, where the compiler would take half as many.

It does so of its own accord for processors that used to become slower by it, whatever the loop. Loops full of
multiplications and additions gain; those that wait for memory do not care.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import intrinsic


def _wide(typing: Any) -> Any:
    """Nothing is done where this stands: the function that it stands in is compiled in this way."""

    def marked(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        set.add(builder.function.attributes, '"prefer-vector-width"="512"')  # llvmlite knows attributes by name alone
        return context.get_dummy_value()

    return types.void(), marked


wide: Any = intrinsic(_wide)
