"""Functions without a closed form for their slope.

The quotient, or three Gauss nodes of the derivative where both ends lie near each other on the same analytic piece:
closer than `NEAR` times the distance to the nearest break (a kink or a singularity, which a rule has to name), where
the quotient would lose the slope's digits and the nodes lose nothing. What is linear between its breaks needs the
quotient alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf, pi

import torch
from torch import Tensor

from ntkexp.kernel.rules.base import AbstractCall, Ends, Rule, total
from ntkexp.kernel.rules.elementwise import NEAR, NODES, quotient, relu


def slope(function: Callable[[Tensor], Tensor], breaks: tuple[float, ...], z0: Tensor, z1: Tensor) -> Tensor:
    """(σ(z₁) − σ(z₀))/(z₁ − z₀) with all the digits that the derivative gives."""
    middle, d = (z0 + z1) / 2, z1 - z0
    apart = torch.full_like(middle, inf)
    for point in breaks:
        apart = torch.minimum(apart, (middle - point).abs())
    near = d.abs() <= NEAR * apart.clamp(max=1.0)
    gauss = torch.zeros_like(middle)
    for node, weight in NODES:
        gauss = gauss + weight * derivative(function, middle + node / 2 * d)
    return torch.where(near, gauss, quotient(function(z1) - function(z0), d, derivative(function, z0)))


def linear_pieces(function: Callable[[Tensor], Tensor], z0: Tensor, z1: Tensor) -> Tensor:
    """The quotient, and σ′ where there is nothing to divide by."""
    return quotient(function(z1) - function(z0), z1 - z0, derivative(function, z0))


def derivative(function: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
    """σ′(z), by autograd."""
    with torch.enable_grad():
        z = z.detach().requires_grad_()
        value = function(z)
        if not value.requires_grad:
            return torch.zeros_like(z)
        (found,) = torch.autograd.grad(value.sum(), z, materialize_grads=True)
    return found


def function_of(call: AbstractCall) -> Callable[[Tensor], Tensor]:
    """The operation as a function of its first argument."""
    rest = [value.start if isinstance(value, Ends) else value for value in call.args[1:]]

    def function(z: Tensor) -> Tensor:
        result = call.entry.op(z, *rest, **call.kwargs)
        value: Tensor = result if isinstance(result, Tensor) else result[0]
        return value

    return function


def analytic(breaks: tuple[float, ...], call: AbstractCall) -> Tensor | tuple[Tensor | None, ...]:
    """D · Δz for a function that is analytic between its breaks."""
    value: Ends = call.args[0]
    delta = call.slope(value, partial(slope, function_of(call), breaks)) * call.delta(value)
    return delta if len(call.entry.results) == 1 else (delta, *[None] * (len(call.entry.results) - 1))


def piecewise(call: AbstractCall) -> Tensor:
    """D · Δz for a function that is linear between its breaks."""
    value: Ends = call.args[0]
    return call.slope(value, partial(linear_pieces, function_of(call))) * call.delta(value)


def prelu(call: AbstractCall) -> Tensor:
    """relu(z) + a·min(z, 0) with a learned a: D Δz + ā(1 − D) Δz + Δa·mean(min(z, 0))."""
    value, leak = call.args
    shape = call.start.shape
    terms = []
    if value.delta is not None:
        on = call.slope(value, partial(relu, call))
        terms.append((on + (1 - on) * call.mean(leak)) * call.delta(value))
    if leak.delta is not None:
        terms.append(call.delta(leak, shape) * call.mean(value.view(lambda v: v.clamp(max=0))))
    return total(terms, shape)


def of_two(call: AbstractCall) -> Tensor:
    """Any f(a, b): the slopes of a ↦ f(a, b₀) and a ↦ f(a, b₁) averaged, and likewise in b."""
    left, right = call.args[:2]
    shape = call.start.shape
    terms = []
    for place, (value, other) in enumerate(((left, right), (right, left))):
        if isinstance(value, Ends) and value.delta is not None:
            fixed = (other.start, other.end) if isinstance(other, Ends) else (other, other)
            slopes = [call.slope(wide(value, shape), partial(linear_pieces, beside(call, end, place))) for end in fixed]
            terms.append((slopes[0] + slopes[1]) / 2 * call.delta(value, shape))
    return total(terms, shape)


def beside(call: AbstractCall, fixed: Tensor | float, place: int) -> Callable[[Tensor], Tensor]:
    """The operation as a function of one of two arguments."""
    if place == 0:
        return lambda z: call.entry.op(z, fixed, **call.kwargs)
    return lambda z: call.entry.op(fixed, z, **call.kwargs)


def wide(value: Ends, shape: torch.Size) -> Ends:
    """A value at the shape of the result, for its slope."""
    return Ends(value.start.expand(shape), value.end.expand(shape), None, value.from_weights, value.from_inputs)


ANALYTIC: dict[str, tuple[float, ...]] = {
    "acos": (-1.0, 1.0),
    "acosh": (1.0,),
    "asin": (-1.0, 1.0),
    "asinh": (),
    "atan": (),
    "atanh": (-1.0, 1.0),
    "celu": (0.0,),
    "cosh": (),
    "elu": (0.0,),
    "erfc": (),
    "erfinv": (-1.0, 1.0),
    "exp2": (),
    "expm1": (),
    "hardswish": (-3.0, 3.0),
    "log10": (0.0,),
    "log1p": (-1.0,),
    "log2": (0.0,),
    "log_sigmoid_forward": (),
    "logit": (0.0, 1.0),
    "mish": (20.0,),
    "sinh": (),
    "softplus": (20.0,),
    "special_expit": (),
    "tan": tuple(pi / 2 + k * pi for k in range(-8, 8)),
}
PIECEWISE = """
    ceil clamp clamp_max clamp_min floor frac hardshrink hardsigmoid hardtanh nan_to_num relu6 round sgn sign
    softshrink threshold trunc
"""
RULES: dict[str, Rule] = {
    **{name: partial(analytic, breaks) for name, breaks in ANALYTIC.items()},
    **dict.fromkeys(PIECEWISE.split(), piecewise),
    **dict.fromkeys(("atan2", "hypot", "xlogy", "fmod", "remainder"), of_two),
    "_prelu_kernel": prelu,
}
