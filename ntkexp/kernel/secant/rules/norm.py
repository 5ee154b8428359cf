"""Normalisation: y = c/√(mean c² + ε), c = x − mean x, then a gain and a bias.

Δ(mean c²) = 2 mean(c̄ Δc)        Δ(v⁻¹ᐟ²) = −(r₀r₁)²/(r₀ + r₁) Δv,  r = v⁻¹ᐟ²

Sums stand where means could, times a number of their own: a back-propagation then multiplies that, not what it spreads.
"""

from __future__ import annotations

from functools import partial
from math import prod

import torch
from torch import Tensor

from ntkexp.kernel.secant.rules.base import AbstractCall, Ends, NoRule, Result, Rule, total
from ntkexp.kernel.secant.rules.bilinear import multiply


def layer_norm(call: AbstractCall) -> Result:
    """Layer norm over the last axes."""
    x, shape, gain, bias, _ = call.args
    normed = normalise(call, x, tuple(range(-len(shape), 0)), *recorded(call, call.ends[1][0].shape))
    return affine(call, normed, gain, bias), None, None


def group_norm(call: AbstractCall) -> Result:
    """Group norm, over groups of channels."""
    x, gain, bias, examples, channels, _, groups, _ = call.args
    shape = x.start.shape
    moments = recorded(call, torch.Size((examples, groups, 1)))
    normed = normalise(call, x.view(lambda v: v.reshape(examples, groups, -1)), (2,), *moments)
    along = [1, channels] + [1] * (len(shape) - 2)
    gain, bias = (None if p is None else p.view(lambda v: v.reshape(along)) for p in (gain, bias))
    return affine(call, normed.view(lambda v: v.reshape(shape)), gain, bias), None, None


def batch_norm(call: AbstractCall) -> Result:
    """Batch norm is an affine map of each channel in evaluation; of weights, each channel by its own statistics as
    well.
    """
    x, gain, bias, mean, variance, training, _, eps = call.args
    along = [1, -1] + [1] * (x.start.dim() - 2)
    if training or mean is None:
        if x.from_inputs and len(x.start) > 1:  # instance norm makes one example of all, each with channels of its own
            raise NoRule("batch norm in training mode couples the examples of a batch")
        dims = (0, *range(2, x.start.dim()))
        normed = normalise(call, x, dims, *measured(x, dims, eps))
        gain, bias = (None if p is None else p.view(lambda v: v.view(along)) for p in (gain, bias))
        return affine(call, normed, gain, bias), None, None
    scale = (variance.start + eps).rsqrt().view(along)
    centre = mean.start.view(along)
    delta = None if x.delta is None else call.delta(x) * scale
    normed = Ends((x.start - centre) * scale, (x.end - centre) * scale, delta, x.from_weights, x.from_inputs)
    gain, bias = (None if p is None else p.view(lambda v: v.view(along)) for p in (gain, bias))
    return affine(call, normed, gain, bias), None, None


def recorded(call: AbstractCall, shape: torch.Size) -> tuple[Ends, Ends]:
    """Mean x and r, as the operation found them."""
    (m0, m1), (r0, r1) = [[v.reshape(shape).to(call.start.dtype) for v in ends] for ends in call.ends[1:]]
    return Ends(m0, m1, None, False, True), Ends(r0, r1, None, False, True)


def measured(x: Ends, dims: tuple[int, ...], eps: float) -> tuple[Ends, Ends]:
    """Mean x and r."""
    value = Ends(x.start, x.end, None, x.from_weights, x.from_inputs)
    scale = value.view(lambda v: (v.var(dims, correction=0, keepdim=True) + eps).rsqrt())
    return value.view(lambda v: v.mean(dims, keepdim=True)), scale


def normalise(call: AbstractCall, x: Ends, dims: tuple[int, ...], mean: Ends, scale: Ends) -> Ends:
    """c/√(mean c² + ε) at both ends, with its difference."""
    start, end = x.start - mean.start, x.end - mean.end
    c = Ends(start, end, None if x.delta is None else centred(call.delta(x), dims), x.from_weights, x.from_inputs)
    delta = None
    if c.delta is not None:
        middle = call.mean(c)
        moved = (middle * c.delta).sum(dims, keepdim=True) * call.slope(scale, partial(turned, count(start, dims)))
        delta = c.delta * call.slope(scale, halfway) + middle * moved
    return Ends(start * scale.start, end * scale.end, delta, False, x.from_inputs)


def centred(delta: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Δx − mean Δx."""
    return delta + delta.sum(dims, keepdim=True) * (-1 / count(delta, dims))


def count(value: Tensor, dims: tuple[int, ...]) -> int:
    """How many numbers lie along the axes."""
    return prod(value.shape[dim] for dim in dims)


def turned(n: int, r0: Tensor, r1: Tensor) -> Tensor:
    """What Σ c̄ Δc becomes in the change of r."""
    return (r0 * r1).square() / (r0 + r1) * (-2 / n)


def halfway(r0: Tensor, r1: Tensor) -> Tensor:
    """The mean of r."""
    return torch.lerp(r0, r1, 0.5)


def affine(call: AbstractCall, y: Ends, gain: Ends | None, bias: Ends | None) -> Tensor:
    """gain · y + bias."""
    shape = y.start.shape
    terms = [] if y.delta is None else [y.delta]
    if gain is not None and (gain.delta is not None or terms):
        terms = [multiply(call, gain, y, shape)]
    if bias is not None and bias.delta is not None:
        terms.append(call.delta(bias, shape))
    return total(terms, shape)


RULES: dict[str, Rule] = {
    "native_layer_norm": layer_norm,
    "native_group_norm": group_norm,
    "native_batch_norm": batch_norm,
}
