"""Smooth functions without a closed form for their slope, and softmax with its relatives."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf, pi
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from torch.nn.functional import softplus as plain_softplus
from torch.utils._pytree import tree_map

from ntkexp.kernel.secant.call import Call, Ends, NoRule
from ntkexp.kernel.secant.rules.base import Rule, Slope, total
from ntkexp.kernel.secant.rules.elementwise import NEAR, NODES, elementwise, exp, log_mean, quotient, relu

# --- Functions without a closed form for their slope. D is the quotient Δσ/Δz, or three Gauss nodes of the derivative
# where both ends lie near each other on the same analytic piece: closer than `NEAR` times the distance to the nearest
# break (a kink or a singularity, which a rule has to name), where the quotient would lose the slope's digits and the
# nodes lose nothing. What is linear between its breaks has the derivative for a slope on each piece, and the quotient
# across them.


def slope(function: Callable[[Tensor], Tensor], breaks: tuple[float, ...], z0: Tensor, z1: Tensor) -> Tensor:
    """Σ_k w_k σ′(m + ½ n_k d) where the ends are near, else (σ(z₁) − σ(z₀))/d."""
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


def at_a_point(function: Callable[[Tensor], Tensor], z0: Tensor, z1: Tensor) -> Tensor:
    """σ′(z), where both ends are one."""
    return derivative(function, z0)


def derivative(function: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
    """σ′(z), by autograd."""
    with torch.enable_grad():
        z = z.detach().requires_grad_()
        value = function(z)
        if not value.requires_grad:
            return torch.zeros_like(z)
        (found,) = torch.autograd.grad(value.sum(), z, materialize_grads=True)
    return found


def function_of(call: Call) -> Callable[[Tensor], Tensor]:
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


def analytic(breaks: tuple[float, ...], call: Call) -> Tensor:
    """D · Δz for a function that is analytic between its breaks; σ′ · Δz on a point."""
    value: Ends = call.args[0]
    function = function_of(call)
    between = partial(at_a_point, function) if call.is_point else partial(slope, function, breaks)
    return call.slope(value, between) * call.delta(value)


def logit(call: Call) -> Tensor:
    """The logit has the breaks of the number that it clamps with."""
    eps = call.given["eps"]
    return analytic((0.0, 1.0) if eps is None else (0.0, 1.0, eps, 1 - eps), call)


def softplus_slope(u0: Tensor, u1: Tensor) -> Tensor:
    """L₊/(L₊ + L₋), the slope of log(1 + eᵘ): L₊ and L₋ are logarithmic means over both ends of the shares eᵘ/(1 + eᵘ)
    and 1/(1 + eᵘ), as in softmax.
    """
    above, below = (log_mean(*(logsigmoid(sign * u) for u in (u0, u1))) for sign in (1, -1))
    return above / (above + below)


def softplus(call: Call, z0: Tensor, z1: Tensor) -> Tensor:
    """That of log(1 + e^βz)/β, or of z where βz is beyond a threshold; the quotient across it."""
    beta, threshold = call.given["beta"], call.given["threshold"]
    beyond0, beyond1 = (beta * z > threshold for z in (z0, z1))
    jump = quotient(plain_softplus(z1, beta, threshold) - plain_softplus(z0, beta, threshold), z1 - z0, 1.0)
    inside = torch.where(beyond0 & beyond1, 1.0, softplus_slope(beta * z0, beta * z1))
    return torch.where(beyond0 == beyond1, inside, jump)


def log_sigmoid(call: Call) -> Tensor:
    """D_softplus(−z) Δz for −log(1 + e⁻ᶻ); the other result serves torch's gradient."""
    value: Ends = call.args[0]
    return call.slope(value, lambda z0, z1: softplus_slope(-z0, -z1)) * call.delta(value)


def elu(call: Call, z0: Tensor, z1: Tensor) -> Tensor:
    """That of scale·(relu(z) + α(e^{s·min(z, 0)} − 1))."""
    return exponential_below(call, z0, z1, *(call.given[name] for name in ("alpha", "scale", "input_scale")))


def celu(call: Call, z0: Tensor, z1: Tensor) -> Tensor:
    """ELU of z/α, times α; torch differentiates it with 1/α in single precision."""
    alpha = call.given["alpha"]
    return exponential_below(call, z0, z1, alpha, 1.0, 1 / alpha)


def exponential_below(call: Call, z0: Tensor, z1: Tensor, alpha: float, scale: float, rate: float) -> Tensor:
    """scale·[D + (1 − D) α·rate·D_exp(rate·min(z, 0))], D = D_relu: that of scale·z above zero and scale·α(e^{rate·z} −
    1) below, since Δmin(z, 0) = (1 − D) Δz.
    """
    on = relu(call, z0, z1)
    return scale * (on + (1 - on) * alpha * rate * exp(call, *(rate * z.clamp(max=0) for z in (z0, z1))))


def nan_to_num(call: Call) -> Tensor:
    """What is no number at both ends does not change."""
    value: Ends = call.args[0]
    both = value.start.isnan() & value.end.isnan()
    slope = call.slope(value, partial(linear_pieces, function_of(call)))
    return torch.where(both, 0.0, slope) * torch.where(both, 0.0, call.delta(value))


def piecewise(call: Call) -> Tensor:
    """D · Δz for a function that is linear between its breaks."""
    value: Ends = call.args[0]
    slope = partial(at_a_point if call.is_point else linear_pieces, function_of(call))
    return call.slope(value, slope) * call.delta(value)


def prelu(call: Call) -> Tensor:
    """D Δz + ā(1 − D) Δz + Δa·mean(min(z, 0)) for relu(z) + a·min(z, 0) with a learned a, D = D_relu."""
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
    "erfc": (),
    "erfinv": (-1.0, 1.0),
    "expm1": (),
    "hardswish": (-3.0, 3.0),
    "i0": (),
    "lgamma": tuple(float(-k) for k in range(64)),
    "mish": (20.0,),
    "sinc": (),
    "sinh": (),
    "special_erfcx": (),
    "special_i0e": (0.0,),
    "special_i1": (),
    "special_i1e": (0.0,),
    "special_log_ndtr": (),
    "special_ndtri": (0.0, 1.0),
    "tan": tuple(pi / 2 + k * pi for k in range(-8, 8)),
}
PIECEWISE = """
    ceil floor frac hardshrink hardsigmoid hardtanh round sgn sign
    softshrink threshold trunc
"""
SLOPES: dict[str, Slope] = {"celu": celu, "elu": elu, "softplus": softplus}
SMOOTH: dict[str, Rule] = {
    **{name: partial(analytic, breaks) for name, breaks in ANALYTIC.items()},
    **dict.fromkeys(PIECEWISE.split(), piecewise),
    **{name: partial(elementwise, slope) for name, slope in SLOPES.items()},
    "log_sigmoid_forward": log_sigmoid,
    "logit": logit,
    "nan_to_num": nan_to_num,
    "_prelu_kernel": prelu,
}


# --- Softmax and its relatives, by logarithmic means.
#
# With p the softmax at each end, L_i = (p₁ᵢ − p₀ᵢ)/(log p₁ᵢ − log p₀ᵢ) and w = L/ΣL,
#
#     log-softmax   Δz_i − Σ_j w_j Δz_j        softmax   L_i (Δz_i − Σ_j w_j Δz_j)        logsumexp   Σ_j w_j Δz_j
#
# It closes: Δlog p = Δz − c with one number c for all, and Σ L_i Δlog p_i = Σ Δp_i = 0, since both ends sum to one, so
# that c = Σ w_j Δz_j = Δlogsumexp. (Decomposed into exp, sum and division it breaks when logits move far.)


def softmax(call: Call) -> Tensor:
    """L_i (Δz_i − Σ_j w_j Δz_j)."""
    value, dim = call.args[:2]
    if call.is_point:
        mean = call.slope(value, lambda *_: call.start)
    else:
        mean = call.slope(value, lambda z0, z1: log_mean(logarithms(z0, dim), logarithms(z1, dim)))
    return mean * centre(call, value, mean, dim)


def log_softmax(call: Call) -> Tensor:
    """Δz_i − Σ_j w_j Δz_j."""
    value, dim = call.args[:2]
    mean = call.slope(value, lambda z0, z1: log_mean(logarithms(z0, dim), logarithms(z1, dim)))
    return centre(call, value, mean, dim)


def logsumexp(call: Call) -> Tensor:
    """Σ_j w_j Δz_j."""
    value, dim = call.args[:2]

    def log_shares(z: Tensor) -> Tensor:
        return z - torch.logsumexp(z, dim, keepdim=True)

    mean = call.slope(value, lambda z0, z1: log_mean(log_shares(z0), log_shares(z1)))
    weights = mean / mean.sum(dim, keepdim=True)
    return (weights * call.delta(value)).sum(dim, keepdim=call.given["keepdim"])


def logcumsumexp(call: Call) -> Tensor:
    """Δyₙ = sₙ Δyₙ₋₁ + (1 − sₙ) Δzₙ for yₙ = log(e^yₙ₋₁ + e^zₙ), sₙ the slope of the softplus at yₙ₋₁ − zₙ."""
    value, dim = call.args
    if value.start.dim() == 0:
        return call.delta(value)

    def ahead(y: Tensor, z: Tensor) -> Tensor:  # yₙ₋₁ − zₙ; where both are −∞, nothing has a share but zₙ
        before = torch.cat([torch.full_like(y.narrow(dim, 0, 1), -inf), y.narrow(dim, 0, y.shape[dim] - 1)], dim)
        return torch.where(before == -inf, -inf, before - z)

    y0, y1 = call.ends[0]
    gap = Ends(ahead(y0, value.start), ahead(y1, value.end), None)
    share = call.slope(gap, softplus_slope).movedim(dim, -1)
    share = torch.cat([torch.zeros_like(share[..., :1]), share[..., 1:]], -1)
    return scanned(share, (1 - share) * call.delta(value).movedim(dim, -1)).movedim(-1, dim)


def scanned(gain: Tensor, value: Tensor) -> Tensor:
    """vₙ ← vₙ + gₙ vₙ₋₁ along the last axis, in rounds of doubling distance: (g, v)ₙ ← (gₙ gₙ₋ₖ, vₙ + gₙ vₙ₋ₖ)."""
    distance, length = 1, value.shape[-1]
    while distance < length:
        late, early = slice(distance, None), slice(None, length - distance)
        moved = value[..., late] + gain[..., late] * value[..., early]
        value = torch.cat([value[..., :distance], moved], -1)
        gain = torch.cat([gain[..., :distance], gain[..., late] * gain[..., early]], -1)
        distance *= 2
    return value


def centre(call: Call, value: Ends, mean: Tensor, dim: int) -> Tensor:
    """Δz − Σ w Δz; where a mask hides everything there are no weights."""
    delta = call.delta(value)
    weights = quotient(mean, -mean.sum(dim, keepdim=True), 0.0)  # their sign costs less here than in the sum
    return delta + (weights * delta).sum(dim, keepdim=True)


def logarithms(z: Tensor, dim: int) -> Tensor:
    """The logarithms of the shares; −∞ stays what it is, also where a mask hides everything."""
    return torch.where(z == -inf, z, z.log_softmax(dim))


SOFTMAX: dict[str, Rule] = {
    **dict.fromkeys(("_softmax", "_safe_softmax"), softmax),
    "_log_softmax": log_softmax,
    "logcumsumexp": logcumsumexp,
    "logsumexp": logsumexp,
}
