"""Functions without a closed form for their slope.

The quotient, or three Gauss nodes of the derivative where both ends lie near each other on the same analytic piece:
closer than `NEAR` times the distance to the nearest break (a kink or a singularity, which a rule has to name), where
the quotient would lose the slope's digits and the nodes lose nothing. What is linear between its breaks has the
derivative for a slope on each piece, and the quotient across them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf, pi
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ntkexp.kernel.rules.base import AbstractCall, Ends, NoRule, Rule, total
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
    """σ′ where it explains the change to rounding, so that both ends lie on one piece; else the quotient."""
    start, end, tangent, d = function(z0), function(z1), derivative(function, z0), z1 - z0
    size = start.abs() + end.abs() + z0.abs() + z1.abs()
    explained = (end - start - tangent * d).abs() <= 4 * torch.finfo(z0.dtype).eps * size
    return torch.where(explained, tangent, quotient(end - start, d, tangent))


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

    def fixed(value: Any) -> Any:
        if isinstance(value, Ends) and value.delta is not None:
            raise NoRule(f"several arguments of {call.entry.op} change")
        return value.start if isinstance(value, Ends) else value

    rest, named = tree_map(fixed, (call.args[1:], call.kwargs))

    def function(z: Tensor) -> Tensor:
        result = call.entry.op(z, *rest, **named)
        value: Tensor = result if isinstance(result, Tensor) else result[0]
        return value

    return function


def analytic(breaks: tuple[float, ...], call: AbstractCall) -> Tensor | tuple[Tensor | None, ...]:
    """D · Δz for a function that is analytic between its breaks."""
    value: Ends = call.args[0]
    delta = call.slope(value, partial(slope, function_of(call), breaks)) * call.delta(value)
    return delta if len(call.entry.results) == 1 else (delta, *[None] * (len(call.entry.results) - 1))


def celu(call: AbstractCall) -> Tensor:
    """As ELU, since torch differentiates CELU with 1/α in single precision."""
    value, alpha = call.args[0], call.args[1] if len(call.args) > 1 else call.kwargs.get("alpha", 1.0)

    def function(z: Tensor) -> Tensor:
        result: Tensor = torch.ops.aten.elu(z, alpha, 1, 1 / alpha)
        return result

    return call.slope(value, partial(slope, function, (0.0,))) * call.delta(value)


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


ANALYTIC: dict[str, tuple[float, ...]] = {
    "acos": (-1.0, 1.0),
    "acosh": (1.0,),
    "asin": (-1.0, 1.0),
    "asinh": (),
    "atan": (),
    "atanh": (-1.0, 1.0),
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
    "tan": tuple(pi / 2 + k * pi for k in range(-8, 8)),
}
PIECEWISE = """
    ceil clamp clamp_max clamp_min floor frac hardshrink hardsigmoid hardtanh nan_to_num round sgn sign
    softshrink threshold trunc
"""
RULES: dict[str, Rule] = {
    **{name: partial(analytic, breaks) for name, breaks in ANALYTIC.items()},
    **dict.fromkeys(PIECEWISE.split(), piecewise),
    "celu": celu,
    "_prelu_kernel": prelu,
}
