"""Difference rules for elementwise functions f(a, b) of two numbers,
by averaged slopes.

    Δf = ½[D_a(b₀) + D_a(b₁)] Δa + ½[D_b(a₀) + D_b(a₁)] Δb

D_a(b) is the slope of a ↦ f(a, b) between a₀ and a₁, for fixed b. D_b(a) is the slope
of b ↦ f(a, b) between b₀ and b₁, for fixed a. The rule is exact: it averages two paths
from (a₀, b₀) to (a₁, b₁) along the sides of a rectangle, and each slope gives the exact
change along its side. A bar is the mean over start and end of the step. Some functions
have a simpler closed form of Δf:

    √(a² + b²)       ((a₀ + a₁) Δa + (b₀ + b₁) Δb)/(h₀ + h₁)
    log(eᵃ + eᵇ)     Δb + s (Δa − Δb), s the slope of log(1 + eᵘ) at u = a − b
    a + w(b − a)     Δa + w̄ (Δb − Δa) + (b̄ − ā) Δw
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import exp, log as ln
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ntkexp.kernel.secant.call import Call, Ends, Rule, sum_terms
from ntkexp.kernel.secant.rules.bilinear import multiply, product_of
from ntkexp.kernel.secant.rules.elementwise import (
    absolute,
    applied,
    elementwise_of_call,
    exp2,
    exponential,
    log_slope,
    power,
    quotient,
    real_power,
    slope_between,
    slope_of_pieces,
    softplus_slope,
)

Side: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""The slope of f in one of its arguments. It is a function of the start value and the end
value of this argument, and of the other argument.
"""


def by_averaged_slopes(by_left: Side, by_right: Side, call: Call) -> Tensor:
    """Return Δf = ½[D_a(b₀) + D_a(b₁)] Δa + ½[D_b(a₀) + D_b(a₁)] Δb."""
    left, right = call.expanded_pair()
    terms = []
    for value, other, side in ((left, right, by_left), (right, left, by_right)):
        if value.delta is not None:
            terms.append(averaged_slope(call, value, other, side) * value.delta)
    return sum_terms(terms, call.start.shape)


def averaged_slope(call: Call, value: Ends, other: Ends, side: Side) -> Tensor:
    """Return ½[D_a(b₀) + D_a(b₁)], the mean of two slopes: at the start value and at
    the end value of the other argument."""
    if other.delta is None:
        return call.slope(value, lambda z0, z1: side(z0, z1, other.start))
    return call.slope(
        value, lambda z0, z1: (side(z0, z1, other.start) + side(z0, z1, other.end)) / 2
    )


def angle_by_height(y0: Tensor, y1: Tensor, x: Tensor) -> Tensor:
    """Return the slope of atan2(y, x) in y, by the angle between
    (x, y₀) and (x, y₁)."""
    return angle_quotient(
        x * (y1 - y0),
        x * x + y0 * y1,
        torch.atan2(y1, x) - torch.atan2(y0, x),
        y1 - y0,
        x,
    )


def angle_by_width(x0: Tensor, x1: Tensor, y: Tensor) -> Tensor:
    """Return the slope of atan2(y, x) in x, by the angle between
    (x₀, y) and (x₁, y)."""
    return angle_quotient(
        -y * (x1 - x0),
        x0 * x1 + y * y,
        torch.atan2(y, x1) - torch.atan2(y, x0),
        x1 - x0,
        -y,
    )


def angle_quotient(
    cross: Tensor, dot: Tensor, change: Tensor, d: Tensor, lever: Tensor
) -> Tensor:
    """Return the angle between two vectors, divided by d. If d = 0, return its limit,
    `lever`/`dot`.

    `change` is this angle as a difference of two values of atan2, which loses digits.
    So compute the angle as the atan2 of the cross and dot products of the vectors. This
    differs from `change` by 2π if the branch cut of atan2 lies between the vectors.
    Only in this case, use `change`."""
    angle = torch.atan2(cross, dot)
    return quotient(
        torch.where((angle - change).abs() < 1, angle, change), d, lever / dot
    )


def hypotenuse(call: Call) -> Tensor:
    """Return the difference of h = √(a² + b²): ((a₀ + a₁) Δa + (b₀ + b₁) Δb)/(h₀ + h₁).

    It follows from Δ(h²) = (h₀ + h₁) Δh.
    """
    left, right = call.expanded_pair()
    size = torch.hypot(left.start, right.start) + torch.hypot(left.end, right.end)
    terms = [
        call.slope(value, lambda z0, z1: quotient(z0 + z1, size, 0.0)) * value.delta
        for value in (left, right)
        if value.delta is not None
    ]
    return sum_terms(terms, call.start.shape)


def log_sum(base: float, call: Call) -> Tensor:
    """Return the difference of log(eᵃ + eᵇ) = b + log(1 + e^(a − b)):
    s Δa + (1 − s) Δb.

    s is the slope of the softplus at a − b. With `base` 2, replace e by 2.
    """
    left, right = call.expanded_pair()
    ahead = Ends(left.start - right.start, left.end - right.end, None)
    share = call.slope(
        ahead, lambda u0, u1: softplus_slope(ln(base) * u0, ln(base) * u1)
    )
    terms = []
    if left.delta is not None:
        terms.append(share * left.delta)
    if right.delta is not None:
        terms.append((1 - share) * right.delta)
    return sum_terms(terms, call.start.shape)


def lerp(call: Call) -> Tensor:
    shape = call.start.shape
    weight = call.args[2]
    left, right = call.expanded_pair()
    gap = Ends(right.start - left.start, right.end - left.end, gap_delta(left, right))
    moves = gap.delta is not None or (
        isinstance(weight, Ends) and weight.delta is not None
    )
    terms = []
    if left.delta is not None:
        terms.append(left.delta)
    return sum_terms(
        terms + ([multiply(call, weight, gap, shape)] if moves else []), shape
    )


def gap_delta(left: Ends, right: Ends) -> Tensor | None:
    if left.delta is None or right.delta is None:
        if left.delta is None:
            return right.delta
        return -left.delta
    return right.delta - left.delta


def remainder(call: Call) -> Tensor:
    function = call.entry.op.overloadpacket
    return by_averaged_slopes(
        lambda z0, z1, b: slope_of_pieces(lambda z: function(z, b), z0, z1),
        lambda z0, z1, a: slope_of_pieces(lambda z: function(a, z), z0, z1),
        call,
    )


def variable_power(call: Call) -> Tensor:
    """Return Δ(aᵇ), by averaged slopes. If b is a Python number, use the rule for
    powers."""
    if isinstance(call.args[1], Ends):
        return by_averaged_slopes(
            lambda z0, z1, p: real_power(p, z0, z1),
            lambda z0, z1, base: exponential(base, z0, z1),
            call,
        )
    return elementwise_of_call(power, call)


def loss_of_gap(call: Call) -> Tensor:
    """Return D_ℓ (Δa − Δb) for a loss ℓ(a − b), such as the squared or the Huber loss.
    The reduction may be none, mean or sum."""
    left, right = (
        call.expanded(value, call.args[0].start.shape) for value in call.args[:2]
    )
    gap = Ends(left.start - right.start, left.end - right.end, gap_delta(right, left))
    kind = call.entry.op.overloadpacket
    numbers = call.args[3:] or (1.0,) * (call.entry.name != "mse_loss")

    def each(z: Tensor) -> Tensor:
        value: Tensor = kind(z, torch.zeros_like(z), 0, *numbers)
        return value

    # the loss has kinks where the gap is ± its parameter (beta or delta)
    kinks = (*numbers, *(-number for number in numbers))
    delta = call.slope(gap, partial(slope_between, each, kinks)) * gap.change
    return reduce_loss(delta, call.arguments["reduction"])


def reduce_loss(losses: Tensor, reduction: int) -> Tensor:
    """Apply the reduction of a loss, by its number in torch: 0 keeps all entries, 1
    averages and 2 sums them."""
    return (losses, losses.mean(), losses.sum())[reduction]


def log_times(shift: float) -> Rule:
    """Return a rule for a log(c + b) with c = `shift`, by averaged slopes.
    The product counts as zero if a = 0."""

    def slope_in_a(z0: Tensor, z1: Tensor, b: Tensor) -> Tensor:
        return torch.log1p(b) if shift else torch.log(b)

    def slope_in_b(z0: Tensor, z1: Tensor, a: Tensor) -> Tensor:
        slope = a * log_slope(shift + z0, shift + z1, z1 - z0)
        return torch.where(a == 0, 0.0, slope)

    return partial(by_averaged_slopes, slope_in_a, slope_in_b)


# The binary cross-entropy of logits or of probabilities is a sum of products of labels
# and logarithms. Each factor has a slope without cancellation.


LOWEST = -100.0  # torch's lower bound for logarithms in the cross-entropy


def cross_entropy_of_logits(call: Call) -> Tensor:
    """Return the difference of w [(1 − y) log(1 + eᶻ) + p y log(1 + e⁻ᶻ)], for a logit
    z. The labels y and the weights w and p may change in the step too."""
    z = call.expanded(call.args[0], call.args[0].start.shape)
    if_zero = applied(call, z, lambda v: -logsigmoid(-v), softplus_slope)
    if_one = applied(
        call, z, lambda v: -logsigmoid(v), lambda z0, z1: -softplus_slope(-z0, -z1)
    )
    return weighted_entropy(call, if_zero, if_one, call.arguments["pos_weight"])


def cross_entropy_of_probabilities(call: Call) -> Tensor:
    """Return the difference of −w [(1 − y) log(1 − x) + y log x]. Each logarithm is at
    least −100, since x may be 0 or 1."""
    x = call.expanded(call.args[0], call.args[0].start.shape)
    if_zero, if_one = (
        applied(call, v, lambda v: -v.log().clamp(min=LOWEST), bounded_log_slope)
        for v in (complement(x), x)
    )
    return weighted_entropy(call, if_zero, if_one, None)


def bounded_log_slope(x0: Tensor, x1: Tensor) -> Tensor:
    """Return the slope of −max(log x, −100).
    It is 0 if x₀ and x₁ are below the bound."""
    low = exp(LOWEST)
    above = (x0 > low) & (x1 > low)
    change = x1.log().clamp(min=LOWEST) - x0.log().clamp(min=LOWEST)
    return -torch.where(
        above, log_slope(x0, x1, x1 - x0), quotient(change, x1 - x0, 0.0)
    )


def complement(value: Ends) -> Ends:
    """Return 1 − v."""
    delta = None if value.delta is None else -value.delta
    return Ends(1 - value.start, 1 - value.end, delta, from_inputs=value.from_inputs)


def weighted_entropy(
    call: Call, if_zero: Ends, if_one: Ends, positive: Ends | None
) -> Tensor:
    """Return the difference of w [(1 − y) a + p y b] by the product rule, for labels y
    and the losses a (`if_zero`) and b (`if_one`) of the labels 0 and 1. w and p
    (`positive`) are weights. The reduction may be none, mean or sum."""
    shape = call.args[0].start.shape

    y = call.expanded(call.args[1], shape)
    weight = call.arguments["weight"]
    other = complement(y)
    if positive is not None:
        y = product_of(call, y, call.expanded(positive, shape))
    terms = [product_of(call, other, if_zero), product_of(call, y, if_one)]
    delta = sum_terms(
        [term.delta for term in terms if term.delta is not None], y.start.shape
    )
    if weight is not None:
        loss = Ends(terms[0].start + terms[1].start, terms[0].end + terms[1].end, delta)
        delta = product_of(call, loss, call.expanded(weight, shape)).change
    return reduce_loss(delta, call.arguments["reduction"])


# Slopes of copysign(a, b) = |a| sign b: from z₀ to z₁ in a at fixed b, and in b at
# fixed a.


def copysign_by_size(z0: Tensor, z1: Tensor, sign: Tensor) -> Tensor:
    return absolute(z0, z1) * torch.copysign(torch.ones_like(sign), sign)


def copysign_by_sign(z0: Tensor, z1: Tensor, size: Tensor) -> Tensor:
    change = torch.copysign(size, z1) - torch.copysign(size, z0)
    return quotient(change, z1 - z0, 0.0)


BINARY: dict[str, Rule] = {
    "atan2": partial(by_averaged_slopes, angle_by_height, angle_by_width),
    "binary_cross_entropy": cross_entropy_of_probabilities,
    "binary_cross_entropy_with_logits": cross_entropy_of_logits,
    "copysign": partial(by_averaged_slopes, copysign_by_size, copysign_by_sign),
    "hypot": hypotenuse,
    "ldexp": partial(
        by_averaged_slopes,
        lambda z0, z1, b: torch.exp2(b),
        lambda z0, z1, a: a * exp2(z0, z1),
    ),
    "lerp": lerp,
    **dict.fromkeys(("mse_loss", "smooth_l1_loss", "huber_loss"), loss_of_gap),
    "logaddexp": partial(log_sum, torch.e),
    "logaddexp2": partial(log_sum, 2.0),
    "pow": variable_power,
    **dict.fromkeys(("remainder", "fmod"), remainder),
    "special_xlog1py": log_times(1.0),
    "xlogy": log_times(0.0),
}
