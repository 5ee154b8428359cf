"""Difference rules for functions of one number, element by element.

    Δσ(z) = D · Δz        D = (σ(z₁) − σ(z₀))/(z₁ − z₀), and σ′(z) if z₁ = z₀

The rule is exact by the definition of the slope D. But if d = z₁ − z₀ is tiny, the
quotient loses its digits by cancellation. So each function below computes D by a closed
form without cancellation. In the docstrings, m is the mean (z₀ + z₁)/2."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf, log as ln, pi, sqrt
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus as plain_softplus
from torch.utils._pytree import tree_map

from ntkexp.kernel.secant.call import Call, Ends, NoRule, Rule, sum_terms

Function: TypeAlias = Callable[[Tensor], Tensor]
Slope: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""The slope of a function between z₀ and z₁."""
SlopeOfCall: TypeAlias = Callable[[Call, Tensor, Tensor], Tensor]
"""A slope that also depends on the other arguments of the operation."""

# three nodes of Gauss quadrature on [−1, 1], as pairs (n_k, w_k) of a node and its
# weight. The weights sum to one.
NODES = ((-sqrt(0.6), 5 / 18), (0.0, 8 / 18), (sqrt(0.6), 5 / 18))
# Use Gauss nodes if d = |z₁ − z₀| is at most this. The error of the integral, d⁷/2e6
# times the sixth derivative of the integrand, is then less than rounding.
GAUSS_RANGE = 0.02


def quotient(above: Tensor, below: Tensor, limit: Tensor | float) -> Tensor:
    """Return above / below, or `limit` where `below` is zero."""
    return torch.where(below == 0, limit, above / below)


def inverse_sum(a: Tensor, b: Tensor) -> Tensor:
    """Return 1/(a + b), or 0 where a + b is zero. Since Δ(a²) = (a₀ + a₁) Δa, this is
    the slope of a root."""
    return quotient(torch.ones_like(a), a + b, 0.0)


def gauss(derivative: Function, z0: Tensor, z1: Tensor) -> Tensor:
    """Return the mean of σ′ between z₀ and z₁ by Gauss nodes,
    Σ_k w_k σ′(m + ½ n_k d)."""
    m = (z0 + z1) / 2
    d = z1 - z0
    mean = torch.zeros_like(m)
    for node, weight in NODES:
        mean = mean + weight * derivative(m + node / 2 * d)
    return mean


def relu(z0: Tensor, z1: Tensor) -> Tensor:
    """Return the slope (relu z₀ + relu z₁)/(|z₀| + |z₁|), and 0 if z₀ = z₁ = 0.

    |z| is computed as 2 relu(z) − z. On one side of the kink,
    the slope is 0 or 1. Across the kink, it is

        relu z₁/(z₁ + |z₀|) = (relu z₁ − relu z₀)/(z₁ − z₀).
    """
    mean = torch.lerp(torch.relu(z0), torch.relu(z1), 0.5)
    size = torch.lerp(torch.lerp(z0, z1, 0.5), mean, 2.0)
    kind = torch.finfo(size.dtype)
    # clamp at the smallest positive number, so that z₀ = z₁ = 0 gives 0/size = 0 and
    # not nan
    return mean / size.clamp_min(kind.tiny * kind.eps)


def absolute(z0: Tensor, z1: Tensor) -> Tensor:
    """Return the slope of |z|: (|z₁| − |z₀|)/d. It is exactly ±1 if z₀ and z₁ have the
    same sign."""
    return quotient(z1.abs() - z0.abs(), z1 - z0, z0.sign())


def away_from_zero(d: Tensor) -> Tensor:
    """Return max(|d|, eps). For all |d| ≤ eps, tanh(d)/d is 1 up to rounding."""
    return d.abs().clamp_min(torch.finfo(d.dtype).eps)


def tanh(z0: Tensor, z1: Tensor) -> Tensor:
    """Return the slope of t = tanh z: (1 − t₀t₁) · tanh(d)/d.

    It follows from tanh(z₁ − z₀) = (t₁ − t₀)/(1 − t₀t₁).
    """
    size = away_from_zero(z1 - z0)
    return (1 - torch.tanh(z0) * torch.tanh(z1)) * (torch.tanh(size) / size)


def sigmoid(z0: Tensor, z1: Tensor) -> Tensor:
    """Return the slope of s = sigmoid z: ½ [s₀ + s₁ − 2s₀s₁] · tanh(d/2)/(d/2).

    It follows from tanh(d/2) = (s₁ − s₀)/(s₀ + s₁ − 2s₀s₁).
    """
    s0 = torch.sigmoid(z0)
    s1 = torch.sigmoid(z1)
    size = away_from_zero(z1 - z0)
    return torch.addcmul(s0 + s1, s0, s1, value=-2) * (torch.tanh(size / 2) / size)


def erf(z0: Tensor, z1: Tensor) -> Tensor:
    """Return the slope of erf, which has no closed form. It is the quotient, or the
    mean of erf′ = 2/√π · e^(−z²) by Gauss nodes if z₀ and z₁ are close."""
    near = gauss(lambda z: 2 / sqrt(pi) * torch.exp(-z * z), z0, z1)
    d = z1 - z0
    far = quotient(torch.erf(z1) - torch.erf(z0), d, 0.0)
    return torch.where(d.abs() <= GAUSS_RANGE, near, far)


def gelu(call: Call, z0: Tensor, z1: Tensor) -> Tensor:
    """Return the slope of zΦ(z) with Φ(z) = ½(1 + erf(z/√2)). By the product rule, it is
    Φ̄ + m · D_Φ.

    For approximate="tanh", return ½(1 + mean tanh u) + ½ m · D_tanh(u) D_u, the slope
    of ½z(1 + tanh u), with u = c(z + 0.044715 z³), c = √(2/π), and D_u = c(1 + 0.044715
    (z₀² + z₀z₁ + z₁²))."""
    if call.arguments["approximate"] == "tanh":
        c = sqrt(2 / pi)
        u0, u1 = (c * (z + 0.044715 * z**3) for z in (z0, z1))
        inner = c * (1 + 0.044715 * (z0 * z0 + z0 * z1 + z1 * z1))
        mean = (2 + torch.tanh(u0) + torch.tanh(u1)) / 4
        return mean + (z0 + z1) / 4 * tanh(u0, u1) * inner
    r = sqrt(0.5)
    normal = (2 + torch.erf(z0 * r) + torch.erf(z1 * r)) / 4
    return normal + (z0 + z1) / 2 * (r / 2) * erf(z0 * r, z1 * r)


def sin(z0: Tensor, z1: Tensor) -> Tensor:
    """Return the slope of sin: cos m · sin(d/2)/(d/2)."""
    return torch.cos((z0 + z1) / 2) * torch.sinc((z1 - z0) / 2 / pi)


def cos(z0: Tensor, z1: Tensor) -> Tensor:
    """Return the slope of cos: −sin m · sin(d/2)/(d/2)."""
    return -torch.sin((z0 + z1) / 2) * torch.sinc((z1 - z0) / 2 / pi)


def log_mean(l0: Tensor, l1: Tensor) -> Tensor:
    """Return the slope of exp: (e^l₁ − e^l₀)/(l₁ − l₀) = e^max (1 − e^−|d|)/|d|, with
    max the larger of l₀ and l₁. It is the logarithmic mean of e^l₀ and e^l₁, and zero
    if both l are −∞."""
    d = torch.where(l0 == l1, 0.0, (l1 - l0).abs())
    ratio = quotient(-torch.expm1(-d), d, 1.0).nan_to_num(0.0, posinf=0.0)
    return torch.maximum(l0, l1).exp() * ratio


def rsqrt(z0: Tensor, z1: Tensor) -> Tensor:
    """Return the slope of r = 1/√z: −(r₀r₁)²/(r₀ + r₁)."""
    r0 = z0.rsqrt()
    r1 = z1.rsqrt()
    return -((r0 * r1) ** 2) / (r0 + r1)


def reciprocal(z0: Tensor, z1: Tensor) -> Tensor:
    """Return the slope of 1/z: −1/(z₀z₁)."""
    return -1 / (z0 * z1)


# Powers and logarithms, with slopes that are accurate for any distance |z₁ − z₀|.


def log_slope(z0: Tensor, z1: Tensor, d: Tensor) -> Tensor:
    """Return the slope of log: log(z₁/z₀)/d. If z₀ and z₁ are close, compute it as
    log1p(d/z₀)/d, otherwise as 2 log(√z₁/√z₀)/d, which does not overflow."""
    relative = d / z0
    near = quotient(torch.log1p(relative), relative, 1.0) / z0
    far = 2 * (z1.sqrt() / z0.sqrt()).log() / d
    return torch.where(relative.abs() <= 0.5, near, far)


def whole_power(n: int, z0: Tensor, z1: Tensor) -> Tensor:
    """Return the slope of zⁿ: Dₙ = Σ_k z₀ᵏ z₁ⁿ⁻¹⁻ᵏ.

    Compute it by doubling: D₂ₙ = (z₀ⁿ + z₁ⁿ) Dₙ and Dₙ₊₁ = z₁ⁿ + z₀ Dₙ.
    """
    if n == 1:
        return torch.ones_like(z0)
    half, odd = divmod(n, 2)
    doubled = (z0**half + z1**half) * whole_power(half, z0, z1)
    if odd:
        return z1 ** (n - 1) + z0 * doubled
    return doubled


def real_power(p: Tensor, z0: Tensor, z1: Tensor) -> Tensor:
    """Return the slope of zᵖ. For positive numbers and any p, it is
    sign(p) · max(z₀ᵖ, z₁ᵖ) · (1 − exp(−|p log(z₁/z₀)|))/|d|.

    Negative numbers have only integer powers. Their slope is the slope at |z|, up to
    its sign. If z₀ and z₁ have different signs, the quotient is accurate."""
    low = torch.minimum(z0.abs(), z1.abs())
    high = torch.maximum(z0.abs(), z1.abs())
    d = high - low
    change = -torch.expm1(-(p * d * log_slope(low, high, d)).abs())
    grown = p.sign() * torch.maximum(low**p, high**p) * change / d
    one_side = torch.where(d == 0, p * high ** (p - 1), grown)
    turned = torch.where(z0 < 0, (-torch.ones_like(z0)) ** (p - 1), 1.0)
    across = quotient(z1**p - z0**p, z1 - z0, 0.0)
    # z⁰ has the slope 0. A root (0 < p < 1) has an infinite slope at zero; use 0.
    still = (p == 0) | (high == 0) & (p < 1)
    slope = torch.where((z0 < 0) == (z1 < 0), turned * one_side, across)
    return torch.where(still, 0.0, slope)


def power(call: Call, z0: Tensor, z1: Tensor) -> Tensor:
    """Return the slope of zᵖ for a number p: `whole_power` for integers p ≥ 1,
    otherwise `real_power`."""
    p = call.args[1]
    if p == int(p) and p >= 1:
        return whole_power(int(p), z0, z1)
    return real_power(torch.full_like(z0, p), z0, z1)


def exponential(base: Tensor, z0: Tensor, z1: Tensor) -> Tensor:
    """Return the slope of z ↦ bᶻ. It is 0 for b = 0 and z > 0, and for b > 0

    log b · max(bᶻ⁰, bᶻ¹) · (1 − exp(−|d log b|))/|d log b|
    """
    rate = base.log()
    distance = ((z1 - z0) * rate).abs()
    change = quotient(-torch.expm1(-distance), distance, 1.0)
    closed = rate * torch.maximum(base**z0, base**z1) * change
    return torch.where(base > 0, closed, quotient(base**z1 - base**z0, z1 - z0, 0.0))


def exp2(z0: Tensor, z1: Tensor) -> Tensor:
    return exponential(torch.full_like(z0, 2.0), z0, z1)


def exponential_below(
    z0: Tensor, z1: Tensor, alpha: float, scale: float, rate: float
) -> Tensor:
    """Return the slope of a function that is scale·z above zero
    and scale·α(e^{rate·z} − 1) below:

        scale·[D + (1 − D) α·rate·D_exp(rate·min(z, 0))],   D = D_relu,

    since Δmin(z, 0) = (1 − D) Δz.
    """
    on = relu(z0, z1)
    below = log_mean(rate * z0.clamp(max=0), rate * z1.clamp(max=0))
    return scale * (on + (1 - on) * alpha * rate * below)


def softplus_slope(u0: Tensor, u1: Tensor) -> Tensor:
    """Return the slope of log(1 + eᵘ): L₊/(L₊ + L₋). L₊ and L₋ are the
    logarithmic means of eᵘ/(1 + eᵘ) and of 1/(1 + eᵘ) over both ends, as in softmax."""
    above, below = (
        log_mean(*(logsigmoid(sign * u) for u in (u0, u1))) for sign in (1, -1)
    )
    return above / (above + below)


def softplus(call: Call, z0: Tensor, z1: Tensor) -> Tensor:
    """Return the slope of a function that is log(1 + e^βz)/β, and z if βz exceeds a
    threshold. If only one of βz₀ and βz₁ does, return (σ₁ − σ₀)/(z₁ − z₀)."""
    beta = call.arguments["beta"]
    threshold = call.arguments["threshold"]
    beyond0, beyond1 = (beta * z > threshold for z in (z0, z1))
    jump = quotient(
        plain_softplus(z1, beta, threshold) - plain_softplus(z0, beta, threshold),
        z1 - z0,
        1.0,
    )
    inside = torch.where(beyond0 & beyond1, 1.0, softplus_slope(beta * z0, beta * z1))
    return torch.where(beyond0 == beyond1, inside, jump)


SLOPES: dict[str, Slope] = {
    "abs": absolute,
    "cos": cos,
    "erf": erf,
    "exp": log_mean,
    "exp2": exp2,
    "log": lambda z0, z1: log_slope(z0, z1, z1 - z0),
    "log10": lambda z0, z1: log_slope(z0, z1, z1 - z0) / ln(10),
    "log1p": lambda z0, z1: log_slope(1 + z0, 1 + z1, z1 - z0),
    "log2": lambda z0, z1: log_slope(z0, z1, z1 - z0) / ln(2),
    "log_sigmoid_forward": lambda z0, z1: softplus_slope(-z0, -z1),  # −log(1 + e⁻ᶻ)
    "reciprocal": reciprocal,
    "relu": relu,
    "rsqrt": rsqrt,
    "sigmoid": sigmoid,
    # s̄ + m · D_sigmoid: the product rule Δ(zs) = s̄ Δz + z̄ Δs
    "silu": lambda z0, z1: (
        (torch.sigmoid(z0) + torch.sigmoid(z1)) / 2 + (z0 + z1) / 2 * sigmoid(z0, z1)
    ),
    "sin": sin,
    # 1/(√z₀ + √z₁), and 0 if z₀ = z₁ = 0 (autograd gives infinity)
    "sqrt": lambda z0, z1: inverse_sum(z0.sqrt(), z1.sqrt()),
    "tanh": tanh,
}

SLOPES_OF_CALLS: dict[str, SlopeOfCall] = {
    # ELU of z/α, times α. In single precision, torch differentiates it with 1/α.
    "celu": lambda call, z0, z1: exponential_below(
        z0, z1, call.arguments["alpha"], 1.0, 1 / call.arguments["alpha"]
    ),
    "elu": lambda call, z0, z1: exponential_below(
        z0,
        z1,
        call.arguments["alpha"],
        call.arguments["scale"],
        call.arguments["input_scale"],
    ),
    "gelu": gelu,
    # the function is a z + (1 − a) relu(z), so the slope is a + (1 − a) D_relu
    "leaky_relu": lambda call, z0, z1: (
        call.arguments["negative_slope"]
        + (1 - call.arguments["negative_slope"]) * relu(z0, z1)
    ),
    "pow": power,
    "softplus": softplus,
}

DERIVATIVES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "abs": lambda z, v: z.sign(),
    "cos": lambda z, v: -torch.sin(z),
    "exp": lambda z, v: v,
    "reciprocal": lambda z, v: -(v * v),
    "relu": lambda z, v: v.sign(),
    "rsqrt": lambda z, v: v * v * v * -0.5,
    "sigmoid": lambda z, v: v * (1 - v),
    "silu": lambda z, v: torch.addcmul(v, torch.sigmoid(z), 1 - v),
    "sin": lambda z, v: torch.cos(z),
    "tanh": lambda z, v: 1 - v * v,
}
"""The derivative σ′(z), as a function of z and of σ(z), which is on the tape."""


def elementwise(slope: Slope, call: Call) -> Tensor:
    """Return Δσ = D · Δz. On a segment of length zero, D is σ′(z). Take it from the
    table DERIVATIVES if the table contains σ."""
    value = call.args[0]
    derivative = DERIVATIVES.get(call.entry.name)
    if call.is_point and derivative is not None:
        factor = call.slope(value, lambda z, _: derivative(z, call.start))
    else:
        factor = call.slope(value, slope)
    return factor * call.delta(value)


def elementwise_of_call(slope: SlopeOfCall, call: Call) -> Tensor:
    """Return Δσ = D · Δz for a slope D that depends on other arguments."""
    return elementwise(partial(slope, call), call)


def applied(call: Call, value: Ends, function: Function, slope: Slope) -> Ends:
    """Return σ(v) at the start and the end, with its difference D · Δv (σ:
    `function`, D: `slope`)."""
    delta = None if value.delta is None else call.slope(value, slope) * value.delta
    return Ends(
        function(value.start), function(value.end), delta, from_inputs=value.from_inputs
    )


# The functions σ below have no closed form for the slope D. A break is a kink or a
# singularity of σ. If |d| is at most `GAUSS_RANGE` times the distance to the nearest
# break, the quotient Δσ/Δz would lose digits. Then D is the mean of the derivative at
# three Gauss nodes. Otherwise D is the quotient. If σ is linear between its breaks, D
# is the derivative if no break lies between z₀ and z₁, and the quotient otherwise.


def derivative_of(function: Function, z: Tensor) -> Tensor:
    """Return σ′(z), by autograd."""
    with torch.enable_grad():
        z = z.detach().requires_grad_()
        value = function(z)
        if not value.requires_grad:
            return torch.zeros_like(z)
        (derivative,) = torch.autograd.grad(value.sum(), z, materialize_grads=True)
    return derivative


def slope_between(
    function: Function, breaks: tuple[float, ...], z0: Tensor, z1: Tensor
) -> Tensor:
    """Return the slope of a function that is analytic between its breaks (kinks and
    singularities): the mean derivative by Gauss nodes if z₀ and z₁ are close, else
    (σ(z₁) − σ(z₀))/d."""
    middle = (z0 + z1) / 2
    d = z1 - z0
    apart = torch.full_like(middle, inf)
    for point in breaks:
        apart = torch.minimum(apart, (middle - point).abs())
    derivative = partial(derivative_of, function)
    near = gauss(derivative, z0, z1)
    far = quotient(function(z1) - function(z0), d, derivative(z0))
    return torch.where(d.abs() <= GAUSS_RANGE * apart.clamp(max=1.0), near, far)


def slope_of_pieces(function: Function, z0: Tensor, z1: Tensor) -> Tensor:
    """Return the slope of a piecewise linear function. If Δσ = σ′(z₀) Δz up to
    rounding, no kink lies between z₀ and z₁, and the slope is σ′(z₀). Otherwise the
    slope is the quotient.
    """
    start = function(z0)
    end = function(z1)
    tangent = derivative_of(function, z0)
    d = z1 - z0
    size = start.abs() + end.abs() + z0.abs() + z1.abs()
    rounding = 4 * torch.finfo(z0.dtype).eps * size
    explained = (end - start - tangent * d).abs() <= rounding
    return torch.where(explained, tangent, quotient(end - start, d, tangent))


def function_of(call: Call) -> Function:
    """Return the operation as a function of its first argument.
    Raise NoRule if another argument changes."""

    def fixed(value: Any) -> Any:
        if isinstance(value, Ends) and value.delta is not None:
            raise NoRule(f"several arguments of {call.entry.op} change")
        if isinstance(value, Ends):
            return value.start
        return value

    rest, named = tree_map(fixed, (call.args[1:], call.kwargs))

    def function(z: Tensor) -> Tensor:
        result = call.entry.op(z, *rest, **named)
        value: Tensor = result if isinstance(result, Tensor) else result[0]
        return value

    return function


def analytic(breaks: tuple[float, ...] | None, call: Call) -> Tensor:
    """Return D · Δz for a function that is analytic between its breaks (kinks and
    singularities). If `breaks` is None, the function is linear between unknown breaks.

    On a segment of length zero, D is σ′.
    """
    return analytic_difference(call, call.args[0], function_of(call), breaks)


def analytic_difference(
    call: Call, value: Ends, function: Function, breaks: tuple[float, ...] | None
) -> Tensor:

    def slope(z0: Tensor, z1: Tensor) -> Tensor:
        if call.is_point:
            return derivative_of(function, z0)
        if breaks is None:
            return slope_of_pieces(function, z0, z1)
        return slope_between(function, breaks, z0, z1)

    return call.slope(value, slope) * call.delta(value)


def polygamma(call: Call) -> Tensor:
    """Return the difference of ψ⁽ⁿ⁾(z), whose arguments are n and z.
    Its poles are 0, −1, −2, …"""
    order, value = call.args
    function = partial(torch.polygamma, order)
    return analytic_difference(call, value, function, POLES_OF_GAMMA)


def logit(call: Call) -> Tensor:
    """Return Δlogit. Logit has singularities at 0 and 1,
    and kinks at the bounds of the clamp."""
    eps = call.arguments["eps"]
    return analytic((0.0, 1.0) if eps is None else (0.0, 1.0, eps, 1 - eps), call)


def nan_to_num(call: Call) -> Tensor:
    """Return the difference of nan_to_num. Values that are nan at the start
    and at the end do not change."""
    value: Ends = call.args[0]
    both = value.start.isnan() & value.end.isnan()
    slope = call.slope(value, partial(slope_of_pieces, function_of(call)))
    return torch.where(both, 0.0, slope) * torch.where(both, 0.0, call.delta(value))


def prelu(call: Call) -> Tensor:
    """Return the difference of relu(z) + a·min(z, 0) with a learned a. It is
    D Δz + ā(1 − D) Δz + Δa·mean(min(z, 0)), with the slope D of relu."""
    value, leak = call.args
    shape = call.start.shape
    terms = []
    if value.delta is not None:
        on = call.slope(value, relu)
        terms.append((on + (1 - on) * call.mean(leak)) * call.delta(value))
    if leak.delta is not None:
        terms.append(
            call.delta(leak, shape) * call.mean(value.view(lambda v: v.clamp(max=0)))
        )
    return sum_terms(terms, shape)


POLES_OF_GAMMA = tuple(float(-k) for k in range(64))
ANALYTIC: dict[str, tuple[float, ...]] = {
    **dict.fromkeys(("acos", "asin", "atanh", "erfinv"), (-1.0, 1.0)),
    **dict.fromkeys(
        ("asinh", "atan", "cosh", "erfc", "expm1", "i0", "sinc", "sinh"), ()
    ),
    **dict.fromkeys(("special_erfcx", "special_i1", "special_log_ndtr"), ()),
    **dict.fromkeys(("special_i0e", "special_i1e"), (0.0,)),
    "acosh": (1.0,),
    "hardswish": (-3.0, 3.0),
    **dict.fromkeys(("digamma", "lgamma"), POLES_OF_GAMMA),
    "mish": (20.0,),
    "special_ndtri": (0.0, 1.0),
    "tan": tuple(pi / 2 + k * pi for k in range(-8, 8)),
}
PIECEWISE = "ceil floor frac hardshrink hardsigmoid hardtanh round sgn sign softshrink threshold trunc"
ELEMENTWISE: dict[str, Rule] = {
    **{name: partial(elementwise, slope) for name, slope in SLOPES.items()},
    **{
        name: partial(elementwise_of_call, slope)
        for name, slope in SLOPES_OF_CALLS.items()
    },
    **{name: partial(analytic, breaks) for name, breaks in ANALYTIC.items()},
    **dict.fromkeys(PIECEWISE.split(), partial(analytic, None)),
    "logit": logit,
    "polygamma": polygamma,
    "nan_to_num": nan_to_num,
    "_prelu_kernel": prelu,
}
