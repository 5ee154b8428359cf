"""Lengths: of vectors in the sense of some order, of what is left of a mean, and of weights that are brought to one.

Δ√(Σx²) = 2 Σ x̄Δx / (l₀ + l₁), with l the lengths at both ends
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import isinf, prod

import torch
from torch import Tensor

from ntkexp.kernel.secant.rules.base import AbstractCall, Ends, NoRule, Result, Rule, total
from ntkexp.kernel.secant.rules.bilinear import divide, multiply
from ntkexp.kernel.secant.rules.choice import pairwise
from ntkexp.kernel.secant.rules.elementwise import absolute, quotient
from ntkexp.kernel.secant.rules.fold import fold, last
from ntkexp.kernel.secant.rules.power import real_power


def variance(call: AbstractCall) -> Result:
    """Σ (x − mean x)² / (n − correction), with the mean if it is asked for."""
    value, dims = call.args[0], axes_of(call)
    keep, correction = call.given["keepdim"], call.given["correction"]
    count = prod(value.start.shape[d] for d in dims) - (1 if correction is None else correction)
    deviation, delta = value.view(lambda v: v - v.mean(dims, keepdim=True)), call.delta(value)
    spread = 2 * (call.mean(deviation) * delta).sum(dims, keepdim=keep) / count
    return (spread, delta.mean(dims, keepdim=keep)) if len(call.entry.results) > 1 else spread


def weight_norm(call: AbstractCall) -> Result:
    """w = v · g/‖v‖, the length along all axes but one; the lengths come with it."""
    direction, gain = call.args[:2]
    axes = range(direction.start.dim())
    dims = [d for d in axes if d != axes[call.given["dim"]]]
    length = lengths(call, direction, dims)
    scale = Ends(gain.start / length.start, gain.end / length.end, None)
    if gain.delta is not None or length.delta is not None:
        scale = replace(scale, delta=divide(call, gain, length, scale.start.shape))
    return multiply(call, direction, scale, call.start.shape), length.delta


def lengths(call: AbstractCall, value: Ends, dims: list[int]) -> Ends:
    """√Σx², whose difference is 2 Σ x̄Δx over the sum of both lengths."""
    start, end = (v.square().sum(dims, keepdim=True) for v in (value.start, value.end))
    length = Ends(start.sqrt(), end.sqrt(), None)
    if value.delta is None:
        return length
    inside = 2 * (call.mean(value) * call.delta(value)).sum(dims, keepdim=True)
    scale = call.slope(length, lambda l0, l1: quotient(torch.ones_like(l0), l0 + l1, 0.0))
    return replace(length, delta=inside * scale)


def vector_norm(call: AbstractCall) -> Tensor:
    """The length of a vector, in the sense of some order."""
    value, order = call.args[0], call.given.get("ord", call.given.get("p"))
    known = Ends(value.start, value.end, call.delta(value))
    return norm_difference(call, known, axes_of(call), 2.0 if order is None else float(order))


def axes_of(call: AbstractCall) -> list[int]:
    """The axes along which the operation goes; all, if none are given."""
    dims = call.given.get("dim")
    return list(range(call.args[0].start.dim())) if dims is None else dims


def norm_difference(call: AbstractCall, value: Ends, dims: list[int], order: float) -> Tensor:
    """The difference of (Σ|x|ᵖ)^{1/p}, or of the largest or smallest |x|."""
    if order == 2:
        delta = lengths(call, value, dims).delta
    elif order == 0:
        raise NoRule("the 0-norm counts numbers")
    else:
        size = map_numbers(call, value, partial(absolute, call), torch.abs)
        delta = extreme(call, size, dims, order) if isinf(order) else root(call, size, dims, order)
    assert delta is not None
    return delta.reshape(call.start.shape)


def extreme(call: AbstractCall, size: Ends, dims: list[int], order: float) -> Tensor | None:
    """The norm that is the largest or the smallest."""
    return fold(last(size, dims), lambda left, right: pairwise(call, left, right, 1 if order > 0 else -1)).delta


def root(call: AbstractCall, size: Ends, dims: list[int], order: float) -> Tensor | None:
    """The norm (Σxᵖ)^{1/p}."""
    powers = map_numbers(call, size, partial(power_slope, order), lambda x: x**order)
    summed = powers.view(lambda v: v.sum(dims, keepdim=True))
    return map_numbers(call, summed, partial(power_slope, 1 / order), lambda x: x ** (1 / order)).delta


def power_slope(p: float, z0: Tensor, z1: Tensor) -> Tensor:
    """The slope of zᵖ."""
    return real_power(torch.full_like(z0, p), z0, z1)


def map_numbers(
    call: AbstractCall, value: Ends, slope: Callable[[Tensor, Tensor], Tensor], function: Callable[[Tensor], Tensor]
) -> Ends:
    """A function of every number, and its difference."""
    return Ends(function(value.start), function(value.end), call.slope(value, slope) * value.change)


def distances(call: AbstractCall) -> Tensor:
    """The distances between the rows of two matrices."""
    left, right, order, *_ = call.args
    shape = torch.Size([*call.start.shape, left.start.shape[-1]])
    rows, columns = left.view(lambda v: v[..., :, None, :]), right.view(lambda v: v[..., None, :, :])
    terms = [] if left.delta is None else [call.delta(rows, shape)]
    terms += [] if right.delta is None else [-call.delta(columns, shape)]
    gap = Ends(rows.start - columns.start, rows.end - columns.end, total(terms, shape))
    return norm_difference(call, gap, [-1], float(order))


def deviation(call: AbstractCall) -> Result:
    """The root of the variance, and the mean if it is asked for."""
    found = variance(call)
    delta, *means = (found,) if isinstance(found, Tensor) else found
    start, end = call.ends[0]
    slope = call.slope(Ends(start, end, None), lambda s0, s1: quotient(torch.ones_like(s0), s0 + s1, 0.0))
    assert delta is not None
    return (slope * delta, *means) if means else slope * delta


RULES: dict[str, Rule] = {
    "_weight_norm_interface": weight_norm,
    **dict.fromkeys(("var", "var_mean"), variance),
    **dict.fromkeys(("std", "std_mean"), deviation),
    "_cdist_forward": distances,
    **dict.fromkeys(("linalg_vector_norm", "norm"), vector_norm),
}
