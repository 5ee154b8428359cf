"""Binary cross-entropy, of logits or of probabilities: products of labels and logarithms, neither of which cancels.

of logits z           w [(1 − y) log(1 + eᶻ) + p y log(1 + e⁻ᶻ)]
of probabilities x    −w [(1 − y) log(1 − x) + y log x],  each logarithm −100 at least
"""

from __future__ import annotations

from collections.abc import Callable
from math import exp

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ntkexp.kernel.secant.rules.base import AbstractCall, Ends, Rule, total
from ntkexp.kernel.secant.rules.bilinear import multiply
from ntkexp.kernel.secant.rules.choice import wide
from ntkexp.kernel.secant.rules.elementwise import log_slope, quotient
from ntkexp.kernel.secant.rules.smooth import softplus_slope

LOWEST = -100.0  # of a logarithm, as torch has it


def of_logits(call: AbstractCall) -> Tensor:
    """Labels, weights and the weights of positive labels may change as well."""
    z = broadcast(call, call.args[0])
    if_zero = mapped(call, z, lambda v: -logsigmoid(-v), pulled(1))
    if_one = mapped(call, z, lambda v: -logsigmoid(v), pulled(-1))
    return weighted(call, if_zero, if_one, call.given["pos_weight"])


def of_probabilities(call: AbstractCall) -> Tensor:
    """A probability may be 0 or 1."""
    x = broadcast(call, call.args[0])
    rest = Ends(1 - x.start, 1 - x.end, None if x.delta is None else -x.delta, from_inputs=x.from_inputs)
    if_zero, if_one = (mapped(call, v, lambda v: -v.log().clamp(min=LOWEST), bounded_log_slope) for v in (rest, x))
    return weighted(call, if_zero, if_one, None)


def broadcast(call: AbstractCall, value: Ends) -> Ends:
    """An argument at the shape of the values."""
    return wide(call, value, call.args[0].start.shape)


def pulled(sign: int) -> Callable[[Tensor, Tensor], Tensor]:
    """The slope of log(1 + e^±z)."""
    return lambda z0, z1: sign * softplus_slope(sign * z0, sign * z1)


def bounded_log_slope(x0: Tensor, x1: Tensor) -> Tensor:
    """The slope of −max(log x, −100), which is none where both ends are below."""
    low = exp(LOWEST)
    above = (x0 > low) & (x1 > low)
    change = x1.log().clamp(min=LOWEST) - x0.log().clamp(min=LOWEST)
    return -torch.where(above, log_slope(x0, x1, x1 - x0), quotient(change, x1 - x0, 0.0))


def mapped(
    call: AbstractCall, value: Ends, function: Callable[[Tensor], Tensor], slope: Callable[[Tensor, Tensor], Tensor]
) -> Ends:
    """A function of every number, with its difference."""
    delta = None if value.delta is None else call.slope(value, slope) * value.delta
    return Ends(function(value.start), function(value.end), delta, from_inputs=value.from_inputs)


def times(call: AbstractCall, left: Ends, right: Ends) -> Ends:
    """A product, with its difference."""
    varies = left.delta is not None or right.delta is not None
    delta = multiply(call, left, right, left.start.shape) if varies else None
    return Ends(left.start * right.start, left.end * right.end, delta)


def weighted(call: AbstractCall, if_zero: Ends, if_one: Ends, positive: Ends | None) -> Tensor:
    """w [(1 − y) a + p y b], each by itself, or their mean or sum."""
    y, weight = broadcast(call, call.args[1]), call.given["weight"]
    other = Ends(1 - y.start, 1 - y.end, None if y.delta is None else -y.delta, from_inputs=y.from_inputs)
    y = y if positive is None else times(call, y, broadcast(call, positive))
    terms = [times(call, other, if_zero), times(call, y, if_one)]
    delta = total([term.delta for term in terms if term.delta is not None], y.start.shape)
    if weight is not None:
        loss = Ends(terms[0].start + terms[1].start, terms[0].end + terms[1].end, delta)
        delta = times(call, loss, broadcast(call, weight)).change
    return (delta, delta.mean(), delta.sum())[call.given["reduction"]]


RULES: dict[str, Rule] = {
    "binary_cross_entropy": of_probabilities,
    "binary_cross_entropy_with_logits": of_logits,
}
