"""Arrays are lent to a function: their owners are not counted there.

Numba counts who owns an array at every slice of it and at every call with one, by instructions that other processors
have to agree to. In short loops over tiles that takes a third of the time. What is lent has no count to keep; whoever
lends it keeps it: only arguments of a function are lent, which live as long as its call, and nothing lent is returned.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.extending import intrinsic


def _lent(typing: Any, array: Any) -> Any:
    """The same array, which nobody owns."""

    def uncounted(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        view = context.make_array(array)(context, builder, given[0])
        view.meminfo = ir.Constant(view.meminfo.type, None)
        view.parent = ir.Constant(view.parent.type, None)
        return view._getvalue()

    return array(array), uncounted


lent: Any = intrinsic(_lent)
