"""Casts inside a module to lower precision than its weights have.

Some modules cast to lower precision in norms or in rotary position embeddings. A secant
through such a cast is exact only up to the rounding of the lower precision. Without the
cast, a secant is exact up to the rounding of the weights' precision, but the module then
has slightly other outputs. For a float64 module with casts to float32, the choices are:

    keep     do not change the module. In each step, the secant has an error of 1e-7 of the outputs.
    ignore   let operations whose `dtype` argument is lower use the dtype of the
             weights. This changes the outputs by 1e-7.
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
    """A mode that replaces the `dtype` argument of operations by `kind`, if `kind` is
    more precise than the argument."""

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


# The proofs of a followed loop (`foreign_loop.watch`) need trained weights with at least
# this many bits.
SHORTEST_PROVED_BITS = 32


def is_short(tensor: Tensor) -> bool:
    """Return True if a tensor has floating-point numbers of fewer than 32 bits.

    >>> is_short(torch.ones(1)), is_short(torch.ones(1, dtype=torch.float16)), is_short(torch.ones(1, dtype=torch.int8))
    (False, True, False)
    """
    return (
        tensor.is_floating_point()
        and torch.finfo(tensor.dtype).bits < SHORTEST_PROVED_BITS
    )


def without_casts(function: Function) -> Function:
    """Wrap a function so that it ignores casts to lower precision than its weights
    have."""

    def uncast(weights: Weights, inputs: Inputs) -> Tensor:
        with Uncast(next(iter(weights.values())).dtype):
            return function(weights, inputs)

    return uncast


def has_casts(tape: Tape) -> bool:
    """Return True if any value on a tape has lower precision than a weight. If not,
    `without_casts` would have recorded the same tape."""
    kinds = {value.dtype for value in tape.values if value.is_floating_point()}
    return max(torch.finfo(kind).eps for kind in kinds) > min(
        torch.finfo(tape[slot].dtype).eps for slot in tape.weights
    )


def with_casts(function: Function, casts: Casts) -> Function:
    """Return the function itself if `casts` is "keep", or the function without its
    casts if `casts` is "ignore"."""
    if not isinstance(casts, str) or casts not in ("keep", "ignore"):
        raise Mistake(f"casts={in_short(casts)}: give 'keep' or 'ignore'")
    if casts == "ignore":
        return without_casts(function)
    return function


def remark(function: Function, tape: Tape, casts: Casts) -> str | None:
    """Return a remark on the error that the choice `casts` causes. Return None if there
    is no error. `tape` was recorded with this choice."""
    weights = tape.recorded_weights
    if casts == "keep":
        kinds = {
            weight.dtype for weight in weights.values() if weight.is_floating_point()
        }
        if tape.eps == min(torch.finfo(kind).eps for kind in kinds):
            return None
        return (
            "the module casts to lower precision than its weights have, so the "
            f"error of a kernel is {tape.eps:.0e} of its size, and the error of a "
            f"secant {tape.eps:.0e} of the outputs; casts=ignore omits these casts"
        )
    with torch.no_grad(), plain_kernels():
        with_all_casts = columns(function, weights, tape.given)
    moved = float(
        (with_all_casts - tape.outputs).abs().max() / tape.outputs.abs().max()
    )
    if not moved > 100 * tape.eps:
        return None
    return (
        "the module is read without its casts to lower precision, which changes its outputs by "
        f"{moved:.0e} of their size"
    )
