"""Products of two things that both change: Δ(ab) = Δa·b̄ + ā·Δb, a bar being the mean over both ends."""

from __future__ import annotations

import torch
from torch import Tensor

from ntkexp.kernel.rules.base import AbstractCall, Ends, NoRule, Rule, total


def mul(call: AbstractCall) -> Tensor:
    """Elementwise, with broadcasting; either factor may be a number."""
    left, right = call.args
    shape = call.start.shape
    terms = []
    for value, other in ((left, right), (right, left)):
        if isinstance(value, Ends) and value.delta is not None:
            factor = call.mean(other) if isinstance(other, Ends) else other
            terms.append(call.delta(value, shape) * factor)
    return total(terms, shape)


def div(call: AbstractCall) -> Tensor:
    """Δ(a/b) = Δa·mean(1/b) − ā·Δb/(b₀b₁)."""
    if call.kwargs.get("rounding_mode") is not None:
        raise NoRule(f"{call.entry.op} rounds, so its differences are no multiples of its arguments'")
    above, below = call.args
    shape = call.start.shape
    if not isinstance(below, Ends) or below.delta is None:
        divisor = below.start if isinstance(below, Ends) else below
        return call.delta(above, shape) / divisor
    terms = []
    if isinstance(above, Ends) and above.delta is not None:
        terms.append(call.delta(above, shape) * call.slope(below, lambda b0, b1: (1 / b0 + 1 / b1) / 2))
    factor = call.mean(above) if isinstance(above, Ends) else above
    terms.append(call.delta(below, shape) * (factor * call.slope(below, lambda b0, b1: -1 / (b0 * b1))))
    return total(terms, shape)


def mm(call: AbstractCall) -> Tensor:
    """Two matrices."""
    left, right = call.args
    return call.product(left, right)


def mv(call: AbstractCall) -> Tensor:
    """A matrix and a vector, as a matrix of one column."""
    left, right = call.args
    return call.product(left, right.view(lambda vector: vector[:, None]))[:, 0]


def addmm(call: AbstractCall) -> Tensor:
    """shift · bias + gain · left @ right."""
    bias, left, right = call.args
    return call.product(left, right, call.kwargs.get("alpha", 1.0), bias, call.kwargs.get("beta", 1.0))


def bmm(call: AbstractCall) -> Tensor:
    """Batches of matrices, both of them made of inputs."""
    left, right = call.args
    if left.from_weights or right.from_weights:
        raise NoRule(f"{call.entry.op} multiplies a batch with a weight, which has no factors")
    terms = []
    if left.delta is not None:
        terms.append(torch.bmm(call.delta(left), call.mean(right)))
    if right.delta is not None:
        terms.append(torch.bmm(call.mean(left), call.delta(right)))
    return total(terms, call.start.shape)


RULES: dict[str, Rule] = {"mul": mul, "div": div, "mm": mm, "mv": mv, "addmm": addmm, "bmm": bmm}
