"""Masks: one of two by a truth value, which may change between the ends of a step; what is selected still closes.

a < b carries the step's slope where it changes:  Δm = [m₁ − m₀]/[d₁ − d₀] Δd,  d = a − b
where(m, a, b) = m a + (1 − m) b:  m̄ Δa + (1 − m̄) Δb + (ā − b̄) Δm
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ntkexp.kernel.secant.rules.base import AbstractCall, Ends, NoRule, Result, Rule, total
from ntkexp.kernel.secant.rules.choice import wide
from ntkexp.kernel.secant.rules.elementwise import quotient
from ntkexp.kernel.secant.rules.linear import join


def where(call: AbstractCall) -> Tensor:
    """One of two, by a mask."""
    mask, yes, no = call.args
    return select(call, mask, yes, no)


def masked_fill(call: AbstractCall) -> Tensor:
    """A value where the mask is true."""
    no, mask, yes = call.args
    return select(call, mask, yes, no)


def index_put(call: AbstractCall) -> Result:
    """A value where a mask is true, as in h[h < 0] = 0; elements by their numbers are written linearly."""
    target, indices, value, *accumulate = call.args
    axis, mask = next((k, index) for k, index in enumerate(indices) if index is not None)
    inner = target.start.dim() - axis - mask.start.dim()
    alone = len(indices) == axis + 1 and mask.start.dtype == torch.bool
    rows = value.delta is not None and not call.is_cut(value)  # each of an example, which the mask sends to its place
    if rows and mask.delta is not None:
        raise NoRule("a mask that changes between the ends of a step decides where rows are written")
    if any(accumulate) or not alone or value.start.dim() > inner or rows:
        return join(call)
    return select(call, mask.view(lambda m: m.reshape(*m.shape, *[1] * inner)), value, target)


def combine(weight: Callable[[Tensor], Tensor], call: AbstractCall) -> Tensor:
    """a and b = ab, a or b = 1 − (1 − a)(1 − b), a xor b = a + b − 2ab: each difference times a mean of the other."""
    shape, kind = call.start.shape, next(value.delta.dtype for value in call.args if value.delta is not None)
    if call.start.dtype != torch.bool:
        raise NoRule("bits of whole numbers change between the ends of a step")
    terms = [
        weight(call.mean(as_numbers(other, shape, kind))) * call.delta(value, shape)
        for value, other in (call.args, call.args[::-1])
        if value.delta is not None
    ]
    return total(terms, shape)


def select(call: AbstractCall, mask: Ends, yes: Any, no: Any) -> Tensor:
    """m̄ Δa + (1 − m̄) Δb + (ā − b̄) Δm."""
    shape = call.start.shape
    yes, no = wide(call, yes, shape), wide(call, no, shape)
    chosen = as_numbers(mask, shape, call.start.dtype.to_real())
    zero = call.start.new_zeros(())
    terms = [
        torch.where(part > 0, part * value.delta, zero if value.delta.dtype == zero.dtype else 0.0)
        for part, value in ((call.mean(chosen), yes), (call.mean(chosen.view(lambda m: 1 - m)), no))
        if value.delta is not None
    ]
    if mask.delta is not None:
        changed = (mask.start != mask.end).expand(shape)
        jump = torch.where(changed, (yes.start + yes.end - no.start - no.end) / 2, zero)
        if not jump.isfinite().all():
            raise NoRule("a mask changes between the ends of a step where its value is infinite")
        terms.append(jump * call.delta(mask, shape))
    return total(terms, shape)


def as_numbers(mask: Ends, shape: torch.Size, dtype: torch.dtype) -> Ends:
    """The mask as zeros and ones, for its mean: of bools, true + true is true."""
    start, end = (value.expand(shape).to(dtype) for value in (mask.start, mask.end))
    return Ends(start, end, mask.delta, mask.from_weights, mask.from_inputs)


def compare(call: AbstractCall) -> Tensor:
    """A comparison as a number that steps from 0 to 1."""
    left, right = call.args
    sides = [value for value in (left, right) if isinstance(value, Ends)]
    kind = next(value.delta.dtype for value in sides if value.delta is not None)
    d0, d1 = (difference(left, right, end) for end in ("start", "end"))
    (before, after) = call.ends[0]
    step = quotient(after.to(kind) - before.to(kind), (d1 - d0).to(kind), 0.0)
    shape = before.shape
    terms = [] if left.delta is None else [step * call.delta(left, shape)]
    if isinstance(right, Ends) and right.delta is not None:
        terms.append(-step * call.delta(right, shape))
    return total(terms, shape)


def difference(left: Ends, right: Any, end: str) -> Tensor:
    """left − right at one end."""
    other = getattr(right, end) if isinstance(right, Ends) else right
    result: Tensor = getattr(left, end) - other
    return result


def invert(call: AbstractCall) -> Tensor:
    """A choice is inverted: not m = 1 − m."""
    return -call.delta(call.args[0])


RULES: dict[str, Rule] = {
    "where": where,
    "masked_fill": masked_fill,
    "index_put": index_put,
    **dict.fromkeys(("logical_and", "bitwise_and"), partial(combine, lambda m: m)),
    **dict.fromkeys(("logical_or", "bitwise_or"), partial(combine, lambda m: 1 - m)),
    **dict.fromkeys(("logical_xor", "bitwise_xor"), partial(combine, lambda m: 1 - 2 * m)),
    **dict.fromkeys(("gt", "lt", "ge", "le", "eq", "ne"), compare),
    **dict.fromkeys(("logical_not", "bitwise_not"), invert),
}
