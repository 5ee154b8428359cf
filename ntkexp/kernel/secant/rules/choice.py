"""Choices: maxima, comparisons, masks. They may change between the ends of a step; what is chosen still closes.

    max(a, b) = a + relu(b − a), so Δmax = (1 − w) Δa + w Δb with w the slope of relu at b − a
    a < b carries the step's slope where it changes:  Δm = [m₁ − m₀]/[d₁ − d₀] Δd,  d = a − b
    where(m, a, b) = m a + (1 − m) b:  m̄ Δa + (1 − m̄) Δb + (ā − b̄) Δm

Of many, the largest is found by a fixed tournament of pairs. What depends on an order (sort, top-k, argmax) is taken
where the order agrees at both ends, and refused where it does not.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ntkexp.kernel.secant.rules.base import AbstractCall, Ends, NoRule, Result, Rule, total
from ntkexp.kernel.secant.rules.elementwise import quotient, relu
from ntkexp.kernel.secant.rules.fold import folded, last
from ntkexp.kernel.secant.rules.linear import joined
from ntkexp.kernel.secant.rules.smooth import piecewise


def pairwise(call: AbstractCall, left: Ends, right: Ends, sign: int, tied: float = 0.5) -> Ends:
    """The larger of two at both ends (the smaller, for sign −1); the second's share where they stay equal is given."""
    choose = torch.maximum if sign > 0 else torch.minimum
    ahead = Ends(sign * (right.start - left.start), sign * (right.end - left.end), None, False, True)
    weight = call.slope(ahead, lambda d0, d1: share(call, d0, d1, tied))
    terms = [] if left.delta is None else [(1 - weight) * left.delta]
    terms += [] if right.delta is None else [weight * right.delta]
    start, end = choose(left.start, right.start), choose(left.end, right.end)
    return Ends(start, end, total(terms, start.shape), False, True)


def share(call: AbstractCall, d0: Tensor, d1: Tensor, tied: float) -> Tensor:
    """How much of the second of two is the maximum, d ahead of the first."""
    return torch.where((d0 == 0) & (d1 == 0), tied, relu(call, d0, d1))


def maximum(call: AbstractCall) -> Result:
    """Of two tensors."""
    return of_two(call, 1)


def minimum(call: AbstractCall) -> Result:
    """Of two tensors."""
    return of_two(call, -1)


def first_of_two(sign: int, call: AbstractCall) -> Tensor:
    """As torch differentiates fmax and fmin: the first where both are equal."""
    return of_two(call, sign, tied=0.0)


def of_two(call: AbstractCall, sign: int, tied: float = 0.5) -> Tensor:
    """The larger or the smaller, with broadcasting."""
    left, right = (wide(call, value, call.start.shape) for value in call.args[:2])
    result = pairwise(call, left, right, sign, tied).delta
    assert result is not None
    return result


def clamp(call: AbstractCall) -> Tensor:
    """Between bounds that change as well: the larger of the value and the one, the smaller of that and the other."""
    if not any(isinstance(bound, Ends) for bound in call.args[1:]):
        return piecewise(call)
    shape = call.start.shape
    value = wide(call, call.args[0], shape)
    for sign, bound in zip(BOUNDS[call.entry.name], call.args[1:], strict=False):
        if bound is not None:
            value = pairwise(call, value, wide(call, bound, shape), sign, tied=0.0)
    assert value.delta is not None
    return value.delta


def wide(call: AbstractCall, value: Any, shape: torch.Size) -> Ends:
    """An argument at the shape of the result; a number is a constant."""
    if not isinstance(value, Ends):
        number = torch.full(shape, float(value), dtype=call.start.dtype, device=call.start.device)
        return Ends(number, number, None, False, False)
    delta = None if value.delta is None else call.delta(value, shape)
    return Ends(value.start.expand(shape), value.end.expand(shape), delta, False, value.from_inputs)


def largest(call: AbstractCall) -> Result:
    """max, amax."""
    return extremum(call, 1)


def smallest(call: AbstractCall) -> Result:
    """min, amin."""
    return extremum(call, -1)


def extremum(call: AbstractCall, sign: int) -> Result:
    """Along some axes, or of all elements; of two tensors, where the second argument is one."""
    value, *rest = call.args
    if rest and isinstance(rest[0], Ends):
        return of_two(call, sign)
    delta = best(call, value, rest[0] if rest else [], sign)
    return delta if len(call.entry.results) == 1 else (delta, None)


def both_extremes(call: AbstractCall) -> Result:
    """The smallest and the largest."""
    dim = call.kwargs.get("dim")
    low, high = (best(call, call.args[0], [] if dim is None else dim, sign) for sign in (-1, 1))
    return low, high


def best(call: AbstractCall, value: Ends, dims: int | list[int], sign: int) -> Tensor:
    """A tournament along some axes, or along all."""
    known = Ends(value.start, value.end, call.delta(value), False, True)
    found = folded(last(known, dims), lambda left, right: pairwise(call, left, right, sign)).delta
    assert found is not None
    return found.reshape(call.start.shape)


def ordered(call: AbstractCall) -> Result:
    """sort, topk and their like, whose second result is the order."""
    (_, _), (first, last) = call.ends
    if not torch.equal(first, last):
        raise NoRule(f"the order that {call.entry.name} finds differs between the ends of a step")
    dims = {"sort": 1, "topk": 2, "cummax": 1, "cummin": 1, "median": 1, "mode": 1, "kthvalue": 2}
    place = dims[call.entry.name]
    dim = call.args[place] if len(call.args) > place else call.kwargs.get("dim", -1)
    delta = call.delta(call.args[0])
    if first.dim() < delta.dim():
        return delta.gather(dim, first.unsqueeze(dim)).squeeze(dim), None
    return delta.gather(dim, first), None


def where(call: AbstractCall) -> Tensor:
    """One of two, by a mask."""
    mask, yes, no = call.args
    return selected(call, mask, yes, no)


def masked_fill(call: AbstractCall) -> Tensor:
    """A value where the mask is true."""
    no, mask, yes = call.args
    return selected(call, mask, yes, no)


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
        return joined(call)
    return selected(call, mask.view(lambda m: m.reshape(*m.shape, *[1] * inner)), value, target)


def combined(weight: Callable[[Tensor], Tensor], call: AbstractCall) -> Tensor:
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


def selected(call: AbstractCall, mask: Ends, yes: Any, no: Any) -> Tensor:
    """m̄ Δa + (1 − m̄) Δb + (ā − b̄) Δm."""
    shape = call.start.shape
    yes, no = wide(call, yes, shape), wide(call, no, shape)
    chosen = as_numbers(mask, shape, call.start.dtype)
    zero = call.start.new_zeros(())
    terms = [
        torch.where(part > 0, part * value.delta, zero)
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


def compared(call: AbstractCall) -> Tensor:
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


def inverted(call: AbstractCall) -> Tensor:
    """Not m = 1 − m."""
    return -call.delta(call.args[0])


BOUNDS = {"clamp": (1, -1), "clamp_min": (1,), "clamp_max": (-1,)}
RULES: dict[str, Rule] = {
    "maximum": maximum,
    "minimum": minimum,
    **dict.fromkeys(("max", "amax"), largest),
    **dict.fromkeys(("min", "amin"), smallest),
    "aminmax": both_extremes,
    **dict.fromkeys(BOUNDS, clamp),
    "fmax": partial(first_of_two, 1),
    "fmin": partial(first_of_two, -1),
    **dict.fromkeys(("sort", "topk", "cummax", "cummin", "median", "mode", "kthvalue"), ordered),
    "where": where,
    "masked_fill": masked_fill,
    "index_put": index_put,
    **dict.fromkeys(("logical_and", "bitwise_and"), partial(combined, lambda m: m)),
    **dict.fromkeys(("logical_or", "bitwise_or"), partial(combined, lambda m: 1 - m)),
    **dict.fromkeys(("logical_xor", "bitwise_xor"), partial(combined, lambda m: 1 - 2 * m)),
    **dict.fromkeys(("gt", "lt", "ge", "le", "eq", "ne"), compared),
    **dict.fromkeys(("logical_not", "bitwise_not"), inverted),
}
