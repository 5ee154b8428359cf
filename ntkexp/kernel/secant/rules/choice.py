"""Choices: maxima, minima, bounds, orders. They may change between the ends of a step; what is chosen still closes.

    max(a, b) = a + relu(b − a), so Δmax = (1 − w) Δa + w Δb with w the slope of relu at b − a

Of many, the largest is found by a fixed tournament of pairs. What depends on an order (sort, top-k, argmax) is taken
where the order agrees at both ends, and refused where it does not.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ntkexp.kernel.secant.rules.base import AbstractCall, Ends, NoRule, Result, Rule, total
from ntkexp.kernel.secant.rules.elementwise import relu
from ntkexp.kernel.secant.rules.fold import fold, last
from ntkexp.kernel.secant.rules.smooth import piecewise


def pairwise(call: AbstractCall, left: Ends, right: Ends, sign: int, tied: float = 0.5) -> Ends:
    """The larger of two at both ends (the smaller, for sign −1); the second's share where they stay equal is given."""
    choose = torch.maximum if sign > 0 else torch.minimum
    ahead = Ends(sign * (right.start - left.start), sign * (right.end - left.end), None)
    weight = call.slope(ahead, lambda d0, d1: share(call, d0, d1, tied))
    terms = [] if left.delta is None else [(1 - weight) * left.delta]
    terms += [] if right.delta is None else [weight * right.delta]
    start, end = choose(left.start, right.start), choose(left.end, right.end)
    return Ends(start, end, total(terms, start.shape))


def share(call: AbstractCall, d0: Tensor, d1: Tensor, tied: float) -> Tensor:
    """How much of the second of two is the maximum, d ahead of the first."""
    return torch.where((d0 == 0) & (d1 == 0), tied, relu(call, d0, d1))


def of_two(call: AbstractCall, sign: int, tied: float = 0.5) -> Tensor:
    """The larger or the smaller, with broadcasting."""
    return pairwise(call, *both(call), sign, tied).change


def both(call: AbstractCall) -> tuple[Ends, Ends]:
    """The first two arguments at the shape of the result."""
    left, right = (wide(call, value, call.start.shape) for value in call.args[:2])
    return left, right


def clamp(call: AbstractCall) -> Tensor:
    """The value between bounds that change as well: the larger of it and the one, the smaller of that and the other."""
    if not any(isinstance(bound, Ends) for bound in call.args[1:]):
        return piecewise(call)
    shape = call.start.shape
    value = wide(call, call.args[0], shape)
    for sign, bound in zip(BOUNDS[call.entry.name], call.args[1:], strict=False):
        if bound is not None:
            value = pairwise(call, value, wide(call, bound, shape), sign, tied=0.0)
    return value.change


def wide(call: AbstractCall, value: Any, shape: torch.Size) -> Ends:
    """An argument at the shape of the result; a number is a constant."""
    if not isinstance(value, Ends):
        number = torch.full(shape, float(value), dtype=call.start.dtype, device=call.start.device)
        return Ends(number, number, None, from_inputs=False)
    delta = None if value.delta is None else call.delta(value, shape)
    return Ends(value.start.expand(shape), value.end.expand(shape), delta, from_inputs=value.from_inputs)


def extremum(call: AbstractCall, sign: int) -> Result:
    """The extreme along some axes, or of all elements; of two tensors, where the second argument is one."""
    if "other" in call.given:
        return of_two(call, sign)
    return best(call, call.args[0], call.given.get("dim", []), sign)


def both_extremes(call: AbstractCall) -> Result:
    """The smallest and the largest."""
    dim = call.given["dim"]
    low, high = (best(call, call.args[0], [] if dim is None else dim, sign) for sign in (-1, 1))
    return low, high


def best(call: AbstractCall, value: Ends, dims: int | list[int], sign: int) -> Tensor:
    """A tournament along some axes, or along all."""
    known = Ends(value.start, value.end, call.delta(value))
    found = fold(last(known, dims), lambda left, right: pairwise(call, left, right, sign))
    return found.change.reshape(call.start.shape)


def follow_order(call: AbstractCall) -> Result:
    """sort, topk and their like, whose second result is the order."""
    (_, _), (first, last) = call.ends
    if not torch.equal(first, last):
        raise NoRule(f"the order that {call.entry.name} finds differs between the ends of a step")
    dim, delta = call.given["dim"], call.delta(call.args[0])
    if first.dim() < delta.dim():
        return delta.gather(dim, first.unsqueeze(dim)).squeeze(dim)
    return delta.gather(dim, first)


BOUNDS = {"clamp": (1, -1), "clamp_min": (1,), "clamp_max": (-1,)}
RULES: dict[str, Rule] = {
    "maximum": partial(of_two, sign=1),
    "minimum": partial(of_two, sign=-1),
    **dict.fromkeys(("max", "amax"), partial(extremum, sign=1)),
    **dict.fromkeys(("min", "amin"), partial(extremum, sign=-1)),
    "aminmax": both_extremes,
    **dict.fromkeys(BOUNDS, clamp),
    "fmax": partial(of_two, sign=1, tied=0.0),  # as torch differentiates them where both are equal: the first
    "fmin": partial(of_two, sign=-1, tied=0.0),
    **dict.fromkeys(("sort", "topk", "cummax", "cummin", "median", "mode", "kthvalue"), follow_order),
}
