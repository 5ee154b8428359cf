"""Difference rules for softmax, normalisations, variances and norms.

A normalisation of n numbers x is a product y = r c, followed by a gain g and a bias:

    c = x − mean x        v = mean c² + ε        r = v⁻¹ᐟ²

Its difference follows from the product rule and the slope of v⁻¹ᐟ²:

    Δv = 2 mean(c̄ Δc)        Δr = −(r₀r₁)²/(r₀ + r₁) Δv        Δy = r̄ Δc + c̄ Δr

A bar is the mean over start and end of the step. So the map from Δx to ḡ Δy, the
difference after the gain, consists of elementwise products and two sums. Its transpose,
which maps β = ∂f/∂(result) back to x, has the same form. With
k = −(2/n) (r₀r₁)²/(r₀ + r₁):

    forward     ḡ Δy = ḡ (r̄ Δc + c̄ k ⟨c̄, Δc⟩)
    backward    r̄ ḡβ + c̄ k ⟨c̄, ḡβ⟩, minus its mean

A length l = √Σx² has Δ(l²) = (l₀ + l₁) Δl, so Δl = 2 Σ x̄Δx/(l₀ + l₁).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf, isinf, prod

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.kernel.secant.call import (
    Call,
    Ends,
    NoRule,
    Result,
    Rule,
    apply_linear,
    inner_products,
    merge_axes,
    sum_terms,
    tree_reduce,
)
from ntkexp.kernel.secant.rules.bilinear import divide, multiply
from ntkexp.kernel.secant.rules.choice import pairwise
from ntkexp.kernel.secant.rules.elementwise import (
    absolute,
    applied,
    inverse_sum,
    log_mean,
    quotient,
    real_power,
    softplus_slope,
)

# number of elements of one chunk. For larger chunks, writing to new memory takes longer
# than the arithmetic.
CACHED_ROW_NUMBERS = 2**18

# Softmax and related functions, by logarithmic means. With p the softmax at each end,
#
#     L_i = (p₁ᵢ − p₀ᵢ)/(log p₁ᵢ − log p₀ᵢ),   w = L/ΣL,
#
#     log-softmax   Δz_i − Σ_j w_j Δz_j
#     softmax       L_i (Δz_i − Σ_j w_j Δz_j)
#     logsumexp     Σ_j w_j Δz_j
#
# These are the differences of the three functions, exactly. Proof: Δlog p_i = Δz_i − c,
# where c = Δlogsumexp is the same for all i. At both ends, the p sum to one, so
# Σ L_i Δlog p_i = Σ Δp_i = 0. Therefore c = Σ w_j Δz_j. (Separate rules for exp, sum
# and division would overflow or cancel if logits change a lot.)


def mean_shares(call: Call) -> Tensor:
    """Return L_i, the logarithmic mean of the probability p_i at start and end,
    computed from log p. Masked logits (−∞) have p = 0, even if all are masked."""
    value = call.args[0]
    axis = counted_back(call)

    def logarithms(z: Tensor) -> Tensor:
        return torch.where(z == -inf, z, z.log_softmax(axis))

    def mean(z0: Tensor, z1: Tensor) -> Tensor:
        if call.is_point:
            return logarithms(z0).exp()
        return log_mean(logarithms(z0), logarithms(z1))

    return call.slope(value, lambda *ends: row_by_row(mean, axis, *ends))


def log_softmax(call: Call, mean: Tensor | None = None) -> Tensor:
    """Return the difference of the log-softmax: Δz_i − Σ_j w_j Δz_j. The weights are w
    = L/ΣL, with L of `mean_shares`, or 0 if all logits are masked."""
    delta = call.delta(call.args[0])
    axis = counted_back(call)
    if not delta.dim():  # the log-softmax of a single number is zero
        return delta * 0.0
    mean = mean_shares(call) if mean is None else mean
    # −w = −L/ΣL; changing the sign here is cheaper than in the sum
    minus = row_by_row(
        lambda m: quotient(m, -m.sum(axis, keepdim=True), 0.0), axis, mean
    )

    def linear(v: Tensor) -> Tensor:
        return v + (minus * v).sum(axis, keepdim=True)

    def transpose(w: Tensor) -> Tensor:
        return torch.addcmul(w, minus, w.sum(axis, keepdim=True))

    return apply_linear(
        delta, linear, transpose, delta.shape if call.state.pullback_only else None
    )


def counted_back(call: Call) -> int:
    """Return the axis in the operation's second argument as a negative
    number, counted from the end."""
    value, dim = call.args[:2]
    axes: int = max(value.start.dim(), 1)
    return int(dim) % axes - axes


def row_by_row(function: Callable[..., Tensor], axis: int, *arrays: Tensor) -> Tensor:
    """Apply a function to rows along an axis. If this is the last axis, and there are
    many numbers, take a few rows at a time, so that
    intermediate results stay in the cache."""
    first = arrays[0]
    if first.numel() <= CACHED_ROW_NUMBERS or axis != -1:
        return function(*arrays)
    step = max(1, CACHED_ROW_NUMBERS // first.shape[-1])
    rows = (array.reshape(-1, array.shape[-1]) for array in arrays)
    pieces = zip(*(torch.split(each, step) for each in rows), strict=True)
    # `cat`, because a recorded program would copy the whole result at each write
    return torch.cat([function(*piece) for piece in pieces]).view(first.shape)


def softmax(call: Call) -> Tensor:
    """Return the difference of the softmax: L_i (Δz_i − Σ_j w_j Δz_j), with L of
    `mean_shares` and w = L/ΣL."""
    mean = (
        call.slope(call.args[0], lambda *_: call.start)
        if call.is_point
        else mean_shares(call)
    )
    return mean * log_softmax(call, mean)


def logsumexp(call: Call) -> Tensor:
    """Return the difference of logsumexp: Σ_j w_j Δz_j. w_j is the logarithmic mean of
    the softmax before and after the step, normalised to Σ_j w_j = 1."""
    value, dim = call.args[:2]
    mean = call.slope(
        value,
        lambda *ends: log_mean(
            *(z - torch.logsumexp(z, dim, keepdim=True) for z in ends)
        ),
    )
    weights = mean / mean.sum(dim, keepdim=True)
    return (weights * call.delta(value)).sum(dim, keepdim=call.arguments["keepdim"])


def logcumsumexp(call: Call) -> Tensor:
    """Return Δyₙ = sₙ Δyₙ₋₁ + (1 − sₙ) Δzₙ for yₙ = log(e^yₙ₋₁ + e^zₙ). sₙ is the slope
    of the softplus at yₙ₋₁ − zₙ."""
    value, dim = call.args
    if value.start.dim() == 0:
        return call.delta(value)

    # yₙ₋₁ − zₙ; −∞ if yₙ₋₁ = −∞, so that the slope sₙ is 0
    def ahead(y: Tensor, z: Tensor) -> Tensor:
        nothing = torch.full_like(y.narrow(dim, 0, 1), -inf)
        before = torch.cat([nothing, y.narrow(dim, 0, y.shape[dim] - 1)], dim)
        return torch.where(before == -inf, -inf, before - z)

    y0, y1 = call.result_ends[0]
    gap = Ends(ahead(y0, value.start), ahead(y1, value.end), None)
    share = call.slope(gap, softplus_slope).movedim(dim, -1)
    gain = torch.cat([torch.zeros_like(share[..., :1]), share[..., 1:]], -1)
    sums = (1 - gain) * call.delta(value).movedim(dim, -1)
    # vₙ ← vₙ + gₙ vₙ₋₁ along the last axis, in rounds of doubling distance k:
    #     (g, v)ₙ ← (gₙ gₙ₋ₖ, vₙ + gₙ vₙ₋ₖ)
    distance = 1
    length = sums.shape[-1]
    while distance < length:
        late = slice(distance, None)
        early = slice(None, length - distance)
        moved = sums[..., late] + gain[..., late] * sums[..., early]
        sums = torch.cat([sums[..., :distance], moved], -1)
        gain = torch.cat([gain[..., :distance], gain[..., late] * gain[..., early]], -1)
        distance *= 2
    return sums.movedim(-1, dim)


SOFTMAX: dict[str, Rule] = {
    **dict.fromkeys(("_softmax", "_safe_softmax"), softmax),
    "_log_softmax": log_softmax,
    "logcumsumexp": logcumsumexp,
    "logsumexp": logsumexp,
}


def norm_of_examples(call: Call) -> Result:
    """Return the difference of a layer norm over the last axes, or of a group norm."""
    if call.entry.name == "native_layer_norm":
        x, axes, gain, bias, _ = call.args
        shape = (*call.start.shape[: -len(axes)], 1)
    else:
        x, gain, bias, examples, _, _, groups, _ = call.args
        gain, bias = (along(p, 1, x) for p in (gain, bias))
        shape = (examples, groups, 1)
    # the operation also returns mean x and r = v⁻¹ᐟ²
    mean, r = (
        Ends(
            v0.reshape(shape).to(call.start.dtype),
            v1.reshape(shape).to(call.start.dtype),
            None,
        )
        for v0, v1 in call.result_ends[1:]
    )
    return affine(call, *normalise(call, x, gain, mean, r), gain, bias)


def batch_norm(call: Call) -> Result:
    """Return the difference of a batch norm. In evaluation mode, it is an affine map of
    each channel, Δy = ḡ r Δx + … by the product rule."""
    x, gain, bias, mean, variance, training, _, eps = call.args
    if training or mean is None:
        return norm_over_batch(call)
    scale, centre = (
        v.view(-1, *[1] * (x.start.dim() - 2))
        for v in ((variance.start + eps).rsqrt(), mean.start)
    )
    gain, bias = (along(p, 1, x) for p in (gain, bias))
    delta = (
        None
        if x.delta is None
        else call.delta(x) * (scale if gain is None else scale * call.mean(gain))
    )
    normed = Ends(
        (x.start - centre) * scale,
        (x.end - centre) * scale,
        delta,
        x.from_weights,
        x.from_inputs,
    )
    return affine(call, normed, delta, gain, bias)


def norm_over_batch(call: Call) -> Tensor:
    """Return the difference of a batch norm in training mode, which normalises each
    channel by the statistics of the batch. This couples examples. So raise NoRule
    unless there is a single example, or the input depends on weights alone."""
    x, gain, bias, *_, eps = call.args
    # for an instance norm, len(x) is 1, because torch merges examples into the channels
    if x.from_inputs and len(x.start) > 1:
        raise NoRule("batch norm in training mode couples the examples of a batch")
    x = x.view(lambda v: v.transpose(0, 1))
    gain, bias = (along(p, 0, x) for p in (gain, bias))
    # mean x and r = v⁻¹ᐟ² of each channel, over examples and pixels
    rows = Ends(
        x.start.flatten(1), x.end.flatten(1), None, x.from_weights, x.from_inputs
    )
    mean = rows.view(lambda v: v.mean(1, keepdim=True))
    r = rows.view(lambda v: (v.var(1, correction=0, keepdim=True) + eps).rsqrt())
    normed, delta = normalise(call, x, gain, mean, r)
    return affine(call, normed, delta, gain, bias).transpose(0, 1)


def along(value: Ends | None, axis: int, x: Ends) -> Ends | None:
    """Reshape one number for each channel, so that it broadcasts with x.
    Channels are on `axis`."""
    rest = x.start.dim() - axis - 1
    if value is None:
        return None
    return value.view(lambda v: v.reshape(*[1] * axis, -1, *[1] * rest))


def normalise(
    call: Call, x: Ends, gain: Ends | None, mean: Ends, scale: Ends
) -> tuple[Ends, Tensor | None]:
    """Return the normalised numbers y = r c at both ends, where c are the numbers minus
    their mean and r is the scale. Also return ḡ Δy, where ḡ is the mean of the gain at
    both ends. `mean` and `scale` (r) have one element for each set of numbers that are
    normalised together."""
    shape = x.start.shape
    outer = mean.start.shape[:-1]
    start, end = (
        value.reshape(*outer, -1) - m
        for value, m in ((x.start, mean.start), (x.end, mean.end))
    )
    normed = Ends(
        (start * scale.start).view(shape),
        (end * scale.end).view(shape),
        x.delta,
        False,
        x.from_inputs,
    )
    if x.delta is None:
        return normed, None
    n = start.shape[-1]
    c = call.mean(Ends(start, end, x.delta, x.from_weights, x.from_inputs))
    r = call.slope(scale, lambda r0, r1: torch.lerp(r0, r1, 0.5))
    k = call.slope(scale, lambda r0, r1: (r0 * r1).square() / (r0 + r1) * (-2 / n))
    g = torch.ones_like(c)
    if gain is not None:
        g = call.mean(gain).expand(shape).reshape(c.shape)
    delta = call.delta(x).reshape(c.shape)
    if n == 1:  # a number minus its mean is exactly zero
        return normed, (delta * 0.0).view(shape)
    differential = NormDifferential(c, r, k, g)
    y = apply_linear(delta, differential.linear, differential.transpose)
    return normed, y.view(shape)


@dataclass(frozen=True)
class NormDifferential:
    """The map from Δx to ḡ Δy, and its transpose. The formulas are in the docstring of
    the module; its bars are omitted here."""

    c: Float[Tensor, "*set n"]
    r: Float[Tensor, "*set 1"]
    k: Float[Tensor, "*set 1"]
    g: Float[Tensor, "*set n"]

    def linear(self, v: Tensor) -> Tensor:
        centred = v - v.mean(-1, keepdim=True)
        along_c = (self.c * centred).sum(-1, keepdim=True)
        return self.g * (self.r * centred + self.c * (self.k * along_c))

    def transpose(self, w: Tensor) -> Tensor:
        c = self.c
        g = self.g
        if w.dim() == c.dim():
            scaled = g * w
            diagonal = self.r
            total = scaled.sum(-1, keepdim=True)
            along_c = (c * scaled).sum(-1, keepdim=True)
        else:  # compute the terms that are the same for all vectors only once
            scaled = w
            diagonal = g * self.r
            total, along_c = inner_products(w, torch.stack((g, g * c)))
        # minus the mean of r gβ + c k ⟨c, gβ⟩
        sums = torch.addcmul(self.r * total, self.k * c.sum(-1, keepdim=True), along_c)
        minus_mean = sums * (-1 / c.shape[-1])
        along_gradient = torch.addcmul(minus_mean, scaled, diagonal)
        return torch.addcmul(along_gradient, c, self.k * along_c)


def affine(
    call: Call, y: Ends, delta: Tensor | None, gain: Ends | None, bias: Ends | None
) -> Tensor:
    """Return the difference of g y + b: ḡ Δy + ȳ Δg + Δb, given `delta` = ḡ Δy."""
    shape = y.start.shape
    terms = []
    if delta is not None:
        terms.append(delta)
    if gain is not None and gain.delta is not None:
        terms.append(call.delta(gain, shape, call.mean(y)))
    if bias is not None and bias.delta is not None:
        terms.append(call.delta(bias, shape))
    return sum_terms(terms, shape)


def axes_of(call: Call) -> list[int]:
    """Return the axes of the operation, or all axes if none are given."""
    dims: list[int] | None = call.arguments.get("dim")
    if dims is None:
        return list(range(call.args[0].start.dim()))
    return dims


def variance(call: Call) -> tuple[Tensor, ...]:
    """Return the difference of the variance Σ c²/(n − correction), with c = x − mean x.
    The difference is 2 Σ c̄ Δx/(n − correction). For var_mean, also return the
    difference of the mean."""
    value = call.args[0]
    dims = axes_of(call)
    keep = call.arguments["keepdim"]
    correction = call.arguments["correction"]
    count = prod(value.start.shape[d] for d in dims) - (
        1 if correction is None else correction
    )
    deviation = value.view(lambda v: v - v.mean(dims, keepdim=True))
    delta = call.delta(value)
    spread = 2 * (call.mean(deviation) * delta).sum(dims, keepdim=keep) / count
    if len(call.entry.results) > 1:
        return (spread, delta.mean(dims, keepdim=keep))
    return (spread,)


def deviation(call: Call) -> Result:
    """Return the difference of the standard deviation s: Δ(s²)/(s₀ + s₁). For std_mean,
    also return the difference of the mean."""
    delta, *means = variance(call)
    start, end = call.result_ends[0]
    slope = call.slope(Ends(start, end, None), inverse_sum)
    return slope * delta, *means


def lengths(call: Call, value: Ends, dims: list[int]) -> Ends:
    """Return l = √Σx² with Δl = 2 Σ x̄Δx/(l₀ + l₁), or Δl = 0 if l₀ = l₁ = 0."""
    start, end = (v.square().sum(dims, keepdim=True) for v in (value.start, value.end))
    length = Ends(start.sqrt(), end.sqrt(), None)
    if value.delta is None:
        return length
    inside = 2 * (call.mean(value) * call.delta(value)).sum(dims, keepdim=True)
    return replace(length, delta=inside * call.slope(length, inverse_sum))


def weight_norm(call: Call) -> Result:
    """Return Δ(v · g/‖v‖) by the rules of products and quotients, and Δ‖v‖. The norm
    ‖v‖ runs over all axes but one."""
    direction, gain = call.args[:2]
    axes = range(direction.start.dim())
    length = lengths(
        call, direction, [d for d in axes if d != axes[call.arguments["dim"]]]
    )
    scale = Ends(gain.start / length.start, gain.end / length.end, None)
    if gain.delta is not None or length.delta is not None:
        scale = replace(scale, delta=divide(call, gain, length, scale.start.shape))
    return multiply(call, direction, scale, call.start.shape), length.delta


def vector_norm(call: Call) -> Tensor:
    """Return the difference of a vector norm of any order."""
    order = call.arguments.get("ord", call.arguments.get("p"))
    return norm_difference(
        call,
        call.expanded(call.args[0]),
        axes_of(call),
        2.0 if order is None else float(order),
    )


def distances(call: Call) -> Tensor:
    """Return Δ‖a − b‖ for all pairs of rows of two matrices."""
    left, right, order, *_ = call.args
    shape = torch.Size([*call.start.shape, left.start.shape[-1]])
    rows = left[..., :, None, :]
    columns = right[..., None, :, :]
    terms = []
    if left.delta is not None:
        terms.append(call.delta(rows, shape))
    if right.delta is not None:
        terms.append(-call.delta(columns, shape))
    gap = Ends(
        rows.start - columns.start, rows.end - columns.end, sum_terms(terms, shape)
    )
    return norm_difference(call, gap, [-1], float(order))


def norm_difference(call: Call, value: Ends, dims: list[int], order: float) -> Tensor:
    """Return the difference of the norm (Σ|x|ᵖ)^{1/p}, where p is `order`. It follows
    by the chain rule from the slopes of |x|, of the power and of the root. For infinite
    p, return the difference of the largest (p > 0) or smallest (p < 0) |x|."""

    def power(value: Ends, p: float) -> Ends:
        return applied(
            call,
            value,
            lambda z: z**p,
            lambda z0, z1: real_power(torch.full_like(z0, p), z0, z1),
        )

    if order == 0:
        raise NoRule("no difference rule for the 0-norm")
    if order == 2:
        return lengths(call, value, dims).change.reshape(call.start.shape)
    size = applied(call, value, torch.abs, absolute)
    if isinf(order):
        norm = tree_reduce(
            merge_axes(size, dims),
            lambda left, right: pairwise(call, left, right, 1 if order > 0 else -1),
        )
    else:
        norm = power(
            power(size, order).view(lambda v: v.sum(dims, keepdim=True)), 1 / order
        )
    return norm.change.reshape(call.start.shape)


NORM_RULES: dict[str, Rule] = {
    **dict.fromkeys(("native_layer_norm", "native_group_norm"), norm_of_examples),
    "native_batch_norm": batch_norm,
    "_weight_norm_interface": weight_norm,
    **dict.fromkeys(("var", "var_mean"), variance),
    **dict.fromkeys(("std", "std_mean"), deviation),
    "_cdist_forward": distances,
    **dict.fromkeys(("linalg_vector_norm", "norm"), vector_norm),
}
