"""Functions f(a, b) of two numbers, element by element: the slopes of a ↦ f(a, b₀) and a ↦ f(a, b₁), averaged.

    Δf = ½[D_a(b₀) + D_a(b₁)] Δa + ½[D_b(a₀) + D_b(a₁)] Δb

Each slope is exact along its own side of the rectangle, so the sum closes. Where both sides at once have a closed form,
that is taken instead:

    √(a² + b²)       ((a₀ + a₁) Δa + (b₀ + b₁) Δb)/(h₀ + h₁)
    log(eᵃ + eᵇ)     Δb + s (Δa − Δb), s the slope of log(1 + eᵘ) at u = a − b
    a + w(b − a)     Δa + w̄ (Δb − Δa) + (b̄ − ā) Δw
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import log as ln
from typing import TypeAlias

import torch
from torch import Tensor

from ntkexp.kernel.secant.rules.base import AbstractCall, Ends, Rule, total
from ntkexp.kernel.secant.rules.bilinear import multiply
from ntkexp.kernel.secant.rules.choice import both, wide
from ntkexp.kernel.secant.rules.elementwise import (
    absolute,
    elementwise,
    exp2,
    exponential,
    log_slope,
    power,
    quotient,
    real_power,
)
from ntkexp.kernel.secant.rules.smooth import linear_pieces, slope, softplus_slope

Side: TypeAlias = Callable[[AbstractCall, Tensor, Tensor, Tensor], Tensor]
"""The slope in one argument, from its two ends and a value of the other."""


def of_two(by_left: Side, by_right: Side, call: AbstractCall) -> Tensor:
    """Side by side."""
    left, right = both(call)
    sides = ((left, right, by_left), (right, left, by_right))
    terms = [average(call, *side) * side[0].delta for side in sides if side[0].delta is not None]
    return total(terms, call.start.shape)


def average(call: AbstractCall, value: Ends, other: Ends, side: Side) -> Tensor:
    """The mean of the slopes at both ends of the other argument."""
    if other.delta is None:
        return call.slope(value, lambda z0, z1: side(call, z0, z1, other.start))
    return call.slope(value, lambda z0, z1: (side(call, z0, z1, other.start) + side(call, z0, z1, other.end)) / 2)


def angle_by_height(call: AbstractCall, y0: Tensor, y1: Tensor, x: Tensor) -> Tensor:
    """The slope of y ↦ atan2(y, x)."""
    return turn(x * (y1 - y0), x * x + y0 * y1, torch.atan2(y1, x) - torch.atan2(y0, x), y1 - y0, x)


def angle_by_width(call: AbstractCall, x0: Tensor, x1: Tensor, y: Tensor) -> Tensor:
    """The slope of x ↦ atan2(y, x)."""
    return turn(-y * (x1 - x0), x0 * x1 + y * y, torch.atan2(y, x1) - torch.atan2(y, x0), x1 - x0, -y)


def turn(cross: Tensor, dot: Tensor, change: Tensor, d: Tensor, lever: Tensor) -> Tensor:
    """The angle between two vectors from their products, which keeps its digits; across the cut it is 2π off."""
    angle = torch.atan2(cross, dot)
    return quotient(torch.where((angle - change).abs() < 1, angle, change), d, lever / dot)


def length(call: AbstractCall) -> Tensor:
    """√(a² + b²)."""
    left, right = both(call)
    size = torch.hypot(left.start, right.start) + torch.hypot(left.end, right.end)
    terms = [
        call.slope(value, lambda z0, z1: quotient(z0 + z1, size, 0.0)) * value.delta
        for value in (left, right)
        if value.delta is not None
    ]
    return total(terms, call.start.shape)


def log_sum(base: float, call: AbstractCall) -> Tensor:
    """log(eᵃ + eᵇ), or to another base."""
    left, right = both(call)
    ahead = Ends(left.start - right.start, left.end - right.end, None)
    share = call.slope(ahead, lambda u0, u1: softplus_slope(ln(base) * u0, ln(base) * u1))
    terms = [] if left.delta is None else [share * left.delta]
    terms += [] if right.delta is None else [(1 - share) * right.delta]
    return total(terms, call.start.shape)


def lerp(call: AbstractCall) -> Tensor:
    """a + w(b − a)."""
    shape, weight = call.start.shape, call.args[2]
    left, right = both(call)
    gap = Ends(right.start - left.start, right.end - left.end, gap_delta(left, right))
    moves = gap.delta is not None or (isinstance(weight, Ends) and weight.delta is not None)
    terms = [] if left.delta is None else [left.delta]
    return total(terms + ([multiply(call, weight, gap, shape)] if moves else []), shape)


def gap_delta(left: Ends, right: Ends) -> Tensor | None:
    """Δb − Δa."""
    if left.delta is None or right.delta is None:
        return right.delta if left.delta is None else -left.delta
    return right.delta - left.delta


def sized(call: AbstractCall, z0: Tensor, z1: Tensor, sign: Tensor) -> Tensor:
    """The slope of a ↦ |a|·sign b."""
    return absolute(call, z0, z1) * torch.copysign(torch.ones_like(sign), sign)


def signed(call: AbstractCall, z0: Tensor, z1: Tensor, size: Tensor) -> Tensor:
    """The slope of b ↦ |a|·sign b."""
    return quotient(torch.copysign(size, z1) - torch.copysign(size, z0), z1 - z0, 0.0)


def left_over(call: AbstractCall, z0: Tensor, z1: Tensor, other: Tensor) -> Tensor:
    """The slope of a ↦ a mod b."""
    return linear_pieces(lambda z: call.entry.op.overloadpacket(z, other), z0, z1)


def left_over_by(call: AbstractCall, z0: Tensor, z1: Tensor, other: Tensor) -> Tensor:
    """The slope of b ↦ a mod b."""
    return linear_pieces(lambda z: call.entry.op.overloadpacket(other, z), z0, z1)


def raised(call: AbstractCall) -> Tensor:
    """aᵇ."""
    if isinstance(call.args[1], Ends):
        return of_two(
            lambda call, z0, z1, p: real_power(p, z0, z1), lambda call, z0, z1, base: exponential(base, z0, z1), call
        )
    return elementwise(power, call)


def loss_of_gap(call: AbstractCall) -> Tensor:
    """ℓ(a − b), quadratic where the gap is small, each by itself or as their mean or sum."""
    left, right = (wide(call, value, call.args[0].start.shape) for value in call.args[:2])
    gap = Ends(left.start - right.start, left.end - right.end, gap_delta(right, left))
    how, kind = call.given["reduction"], call.entry.op.overloadpacket
    numbers = call.args[3:] or (1.0,) * (call.entry.name != "mse_loss")

    def each(z: Tensor) -> Tensor:
        value: Tensor = kind(z, torch.zeros_like(z), 0, *numbers)
        return value

    delta = call.slope(gap, partial(slope, each, (*numbers, *(-n for n in numbers)))) * gap.change
    return (delta, delta.mean(), delta.sum())[how]


def log_times(shift: float) -> Rule:
    """a log(c + b), which is 0 for a = 0."""

    def by_left(call: AbstractCall, z0: Tensor, z1: Tensor, other: Tensor) -> Tensor:
        return torch.log1p(other) if shift else torch.log(other)

    def by_right(call: AbstractCall, z0: Tensor, z1: Tensor, factor: Tensor) -> Tensor:
        return torch.where(factor == 0, 0.0, factor * log_slope(shift + z0, shift + z1, z1 - z0))

    return partial(of_two, by_left, by_right)


RULES: dict[str, Rule] = {
    "atan2": partial(of_two, angle_by_height, angle_by_width),
    "copysign": partial(of_two, sized, signed),
    "hypot": length,
    "ldexp": partial(
        of_two,
        lambda call, z0, z1, other: torch.exp2(other),
        lambda call, z0, z1, other: other * exp2(call, z0, z1),
    ),
    "lerp": lerp,
    **dict.fromkeys(("mse_loss", "smooth_l1_loss", "huber_loss"), loss_of_gap),
    "logaddexp": partial(log_sum, torch.e),
    "logaddexp2": partial(log_sum, 2.0),
    "pow": raised,
    **dict.fromkeys(("remainder", "fmod"), partial(of_two, left_over, left_over_by)),
    "special_xlog1py": log_times(1.0),
    "xlogy": log_times(0.0),
}
