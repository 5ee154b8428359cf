"""Casts inside a module to shorter numbers than its weights have.

Some modules cast in norms or rotary positions. A secant through such a cast closes only to the
rounding of the shorter numbers. Without the cast the module is another one: its outputs differ by
that rounding, and a secant closes to the rounding of its weights.

    keep     the module unchanged; float32 inside leaves an error of 1e-7 of the outputs at every step
    ignore   operations with a shorter dtype argument give the dtype of the weights; outputs move by 1e-7, once
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch._ops import OpOverload

from ntkexp.kernel.record.recorder import DispatchMode
from ntkexp.kernel.record.tape import Tape
from ntkexp.kernel.record.taping import columns, plain_kernels
from ntkexp.mistake import Mistake, in_short
from ntkexp.shapes import Function, Inputs, Weights

Casts: TypeAlias = Literal["keep", "ignore"]


class Uncast(DispatchMode):
    """Replaces shorter dtypes in the arguments of operations by `kind`."""

    def __init__(self, kind: torch.dtype) -> None:
        super().__init__()
        self.kind = kind

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        dtype = kwargs.get("dtype")
        if (
            dtype is not None
            and dtype.is_floating_point
            and torch.finfo(dtype).eps > torch.finfo(self.kind).eps
        ):
            kwargs = kwargs | {"dtype": self.kind}
        return func(*args, **kwargs)


SHORTEST_PROVED_BITS = (
    32  # bits of the shortest numbers for which rounding is small enough for proofs
)


def is_short(tensor: Tensor) -> bool:
    """Return whether the numbers are so short that nothing can be proved to their rounding.

    >>> is_short(torch.ones(1)), is_short(torch.ones(1, dtype=torch.float16)), is_short(torch.ones(1, dtype=torch.int8))
    (False, True, False)
    """
    return tensor.is_floating_point() and torch.finfo(tensor.dtype).bits < SHORTEST_PROVED_BITS


def without_casts(function: Function) -> Function:
    """Return the function computed in the dtype of its weights throughout."""

    def uncast(weights: Weights, inputs: Inputs) -> Tensor:
        with Uncast(next(iter(weights.values())).dtype):
            return function(weights, inputs)

    return uncast


def with_casts(function: Function, casts: Casts) -> Function:
    """Return the function, with or without its casts."""
    if not isinstance(casts, str) or casts not in ("keep", "ignore"):
        raise Mistake(f"casts={in_short(casts)}: give 'keep' or 'ignore'")
    if casts == "ignore":
        return without_casts(function)
    return function


def remark(function: Function, tape: Tape, casts: Casts) -> str | None:
    """Return one line on the cost of the choice, or None if it costs nothing. The tape has the
    casts as chosen.
    """
    weights = {name: tape[slot].detach() for slot, name in tape.weights.items()}
    if casts == "keep":
        kinds = {weight.dtype for weight in weights.values() if weight.is_floating_point()}
        if tape.eps == min(torch.finfo(kind).eps for kind in kinds):
            return None
        return (
            "the module casts to shorter numbers than its weights have, so a kernel is known to "
            f"{tape.eps:.0e} of its size, and a secant closes to {tape.eps:.0e} of its outputs; "
            "casts=ignore leaves these casts out"
        )
    with torch.no_grad(), plain_kernels():
        with_all_casts = columns(function, weights, tape.given)
    moved = float((with_all_casts - tape.outputs).abs().max() / tape.outputs.abs().max())
    if not moved > 100 * tape.eps:
        return None
    return (
        "the module is read without its casts to shorter numbers, which moves its outputs by "
        f"{moved:.0e} of their size"
    )
