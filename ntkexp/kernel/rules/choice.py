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
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ntkexp.kernel.rules.base import AbstractCall, Ends, NoRule, Result, Rule, total
from ntkexp.kernel.rules.elementwise import quotient, relu
from ntkexp.kernel.rules.linear import joined


def pairwise(call: AbstractCall, left: Ends, right: Ends, sign: int) -> Ends:
    """The larger of two at both ends (the smaller, for sign −1)."""
    choose = torch.maximum if sign > 0 else torch.minimum
    ahead = Ends(sign * (right.start - left.start), sign * (right.end - left.end), None, False, True)
    weight = call.slope(ahead, lambda d0, d1: share(call, d0, d1))
    terms = [] if left.delta is None else [(1 - weight) * left.delta]
    terms += [] if right.delta is None else [weight * right.delta]
    start, end = choose(left.start, right.start), choose(left.end, right.end)
    return Ends(start, end, total(terms, start.shape), False, True)


def share(call: AbstractCall, d0: Tensor, d1: Tensor) -> Tensor:
    """How much of the second of two is the maximum, d ahead of the first; half, where they stay equal."""
    tied = (d0 == 0) & (d1 == 0)
    return torch.where(tied, 0.5, relu(call, d0, d1))


def maximum(call: AbstractCall) -> Result:
    """Of two tensors."""
    return of_two(call, 1)


def minimum(call: AbstractCall) -> Result:
    """Of two tensors."""
    return of_two(call, -1)


def of_two(call: AbstractCall, sign: int) -> Tensor:
    """The larger or the smaller, with broadcasting."""
    shape = call.start.shape
    left, right = (wide(call, value, shape) for value in call.args[:2])
    result = pairwise(call, left, right, sign).delta
    assert result is not None
    return result


def wide(call: AbstractCall, value: Any, shape: torch.Size) -> Ends:
    """An argument at the shape of the result; a number is a constant."""
    if not isinstance(value, Ends):
        number = torch.full(shape, float(value), dtype=call.start.dtype, device=call.start.device)
        return Ends(number, number, None, False, False)
    delta = None if value.delta is None else call.delta(value, shape)
    return Ends(value.start.expand(shape), value.end.expand(shape), delta, False, value.from_inputs)


def tournament(call: AbstractCall, value: Ends, sign: int) -> Ends:
    """The largest along the last axis, pair by pair."""
    while (n := value.start.shape[-1]) > 1:
        half = n // 2
        left, right = (value.view(window(start, half)) for start in (0, half))
        winners = pairwise(call, left, right, sign)
        value = winners if n % 2 == 0 else with_last(winners, value)
    return value.view(lambda v: v[..., 0])


def window(start: int, size: int) -> Callable[[Tensor], Tensor]:
    """Consecutive elements along the last axis."""
    return lambda v: v[..., start : start + size]


def with_last(winners: Ends, value: Ends) -> Ends:
    """The winners of a round, and who had no opponent."""
    assert winners.delta is not None
    assert value.delta is not None
    parts = ((winners.start, value.start), (winners.end, value.end), (winners.delta, value.delta))
    start, end, delta = (torch.cat([won, all_[..., -1:]], dim=-1) for won, all_ in parts)
    return Ends(start, end, delta, False, True)


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
    dims = rest[0] if rest else list(range(value.start.dim()))
    dims = [dims] if isinstance(dims, int) else dims or list(range(value.start.dim()))
    known = Ends(value.start, value.end, call.delta(value), False, True)
    last = known.view(lambda v: v.movedim(dims, tuple(range(-len(dims), 0))).flatten(-len(dims)))
    found = tournament(call, last, sign).delta
    assert found is not None
    delta = found.reshape(call.start.shape)
    return delta if len(call.entry.results) == 1 else (delta, None)


def max_pool(call: AbstractCall) -> Result:
    """The largest in each window: a tournament of shifted copies."""
    value, window, *rest = call.args
    stride, padding, dilation = (rest[k] if len(rest) > k else [] for k in range(3))
    ceil = bool(rest[3]) if len(rest) > 3 else False
    if ceil:
        raise NoRule("max pooling with ceil_mode")
    space = value.start.dim() - 2
    window, stride, padding, dilation = (
        spelled_out(given, default, space)
        for given, default in ((window, 1), (stride or window, 1), (padding, 0), (dilation, 1))
    )
    borders = [width for width in reversed(padding) for _ in range(2)]

    def shown(v: Tensor, fill: float) -> Tensor:
        v = torch.nn.functional.pad(v, borders, value=fill)
        views = []
        for offset in product(*map(range, window)):
            places = [
                slice(d * o, n - d * (w - 1) + d * o, s)
                for d, o, n, w, s in zip(dilation, offset, v.shape[2:], window, stride, strict=True)
            ]
            views.append(v[(slice(None), slice(None), *places)])
        return torch.stack(views, dim=-1)

    lowest = torch.finfo(value.start.dtype).min / 4  # finite, so that differences of borders are zero
    windows = Ends(shown(value.start, lowest), shown(value.end, lowest), shown(call.delta(value), 0.0), False, True)
    delta = tournament(call, windows, 1).delta
    assert delta is not None
    return delta, None


def spelled_out(given: Any, default: int, space: int) -> list[int]:
    """One number for each dimension."""
    if isinstance(given, int):
        return [given] * space
    listed = list(given) or [default]
    return listed * space if len(listed) == 1 else listed


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
    if any(accumulate) or not alone or value.start.dim() > inner:
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
        terms.append(jump * mask.delta.expand(shape))
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


RULES: dict[str, Rule] = {
    "maximum": maximum,
    "minimum": minimum,
    **dict.fromkeys(("max", "amax"), largest),
    **dict.fromkeys(("min", "amin"), smallest),
    **dict.fromkeys(("max_pool2d_with_indices", "max_pool3d_with_indices"), max_pool),
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
