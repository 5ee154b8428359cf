"""Products of numbers that both change: Δ(ab) = Δa·b̄ + ā·Δb, a bar being the mean over both ends."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ntkexp.kernel.secant.rules.base import AbstractCall, Ends, NoRule, Rule, total
from ntkexp.kernel.secant.rules.elementwise import sigmoid
from ntkexp.kernel.secant.rules.fold import fold, last


def mul(call: AbstractCall) -> Tensor:
    """Elementwise, with broadcasting; either factor may be a number."""
    left, right = call.args
    return multiply(call, left, right, call.start.shape)


def multiply(call: AbstractCall, left: Ends | float, right: Ends | float, shape: torch.Size) -> Tensor:
    """The difference of a product of two values, or of a value and a number."""
    terms = []
    for value, other in ((left, right), (right, left)):
        if isinstance(value, Ends) and value.delta is not None:
            factor = call.mean(other) if isinstance(other, Ends) else other
            terms.append(call.delta(value, shape, factor))
    return total(terms, shape)


def add_scaled(of_two: Callable[..., Tensor], call: AbstractCall) -> Tensor:
    """Δ(x + c·g(a, b)), given the difference of g."""
    added, left, right = call.args
    shape = call.start.shape
    terms = [] if added.delta is None else [call.delta(added, shape)]
    if left.delta is not None or right.delta is not None:
        terms.append(call.given["value"] * of_two(call, left, right, shape))
    return total(terms, shape)


def prod(call: AbstractCall) -> Tensor:
    """The product of all elements, or along an axis: pair by pair, so that zeros among them do no harm."""
    value, *dims = call.args
    known = Ends(value.start, value.end, call.delta(value))
    return fold(last(known, dims[0] if dims else []), partial(pair, call)).change.reshape(call.start.shape)


def pair(call: AbstractCall, left: Ends, right: Ends) -> Ends:
    """A product of two, and its difference."""
    delta = multiply(call, left, right, left.start.shape)
    return Ends(left.start * right.start, left.end * right.end, delta)


def glu(call: AbstractCall) -> Tensor:
    """One half, times the sigmoid of the other."""
    value, dim = call.args[0], call.given["dim"]
    known = Ends(value.start, value.end, call.delta(value))
    left, right = (known.view(lambda v, k=k: v.chunk(2, dim)[k]) for k in (0, 1))  # type: ignore[misc]
    moved = call.slope(right, partial(sigmoid, call)) * right.change
    gate = Ends(right.start.sigmoid(), right.end.sigmoid(), moved)
    return multiply(call, left, gate, call.start.shape)


def cross(call: AbstractCall) -> Tensor:
    """The product of two vectors of space that is orthogonal to both."""
    left, right = call.args
    op, how = call.entry.op, call.kwargs
    terms = [] if left.delta is None else [op(call.delta(left, call.start.shape), call.mean(right), **how)]
    terms += [] if right.delta is None else [op(call.mean(left), call.delta(right, call.start.shape), **how)]
    return total(terms, call.start.shape)


def div(call: AbstractCall) -> Tensor:
    """Elementwise, with broadcasting; either may be a number."""
    if call.given.get("rounding_mode") is not None:
        raise NoRule(f"{call.entry.op} rounds, so its differences are no multiples of its arguments'")
    above, below = call.args
    return divide(call, above, below, call.start.shape)


def divide(call: AbstractCall, above: Ends | float, below: Ends | float, shape: torch.Size) -> Tensor:
    """Δ(a/b) = Δa·mean(1/b) − ā·Δb/(b₀b₁)."""
    if not isinstance(below, Ends) or below.delta is None:
        divisor = call.mean(below) if isinstance(below, Ends) else below
        assert isinstance(above, Ends)
        return call.delta(above, shape) / divisor
    terms = []
    if isinstance(above, Ends) and above.delta is not None:
        terms.append(call.delta(above, shape) * call.slope(below, lambda b0, b1: (1 / b0 + 1 / b1) / 2))
    factor = call.mean(above) if isinstance(above, Ends) else above
    terms.append(call.delta(below, shape) * (factor * call.slope(below, lambda b0, b1: -1 / (b0 * b1))))
    return total(terms, shape)


RULES: dict[str, Rule] = {
    "mul": mul,
    "addcmul": partial(add_scaled, multiply),
    "div": div,
    "addcdiv": partial(add_scaled, divide),
    "prod": prod,
    "glu": glu,
    "linalg_cross": cross,
}
