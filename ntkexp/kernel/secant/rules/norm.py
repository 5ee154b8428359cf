"""Normalisation: y = c/√(mean c² + ε), c = x − mean x, then a gain and a bias.

Δ(mean c²) = 2 mean(c̄ Δc)        Δ(v⁻¹ᐟ²) = −(r₀r₁)²/(r₀ + r₁) Δv,  r = v⁻¹ᐟ²
"""

from __future__ import annotations

from torch import Tensor

from ntkexp.kernel.secant.rules.base import AbstractCall, Ends, NoRule, Result, Rule, total
from ntkexp.kernel.secant.rules.bilinear import multiply
from ntkexp.kernel.secant.rules.elementwise import rsqrt


def layer_norm(call: AbstractCall) -> Result:
    """Layer norm over the last axes."""
    x, shape, gain, bias, eps = call.args
    normed = normalise(call, x, tuple(range(-len(shape), 0)), eps)
    return affine(call, normed, gain, bias), None, None


def group_norm(call: AbstractCall) -> Result:
    """Group norm, over groups of channels."""
    x, gain, bias, examples, channels, _, groups, eps = call.args
    shape = x.start.shape
    normed = normalise(call, x.view(lambda v: v.reshape(examples, groups, -1)), (2,), eps)
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
        normed = normalise(call, x, (0, *range(2, x.start.dim())), eps)
        gain, bias = (None if p is None else p.view(lambda v: v.view(along)) for p in (gain, bias))
        return affine(call, normed, gain, bias), None, None
    scale = (variance.start + eps).rsqrt().view(along)
    centre = mean.start.view(along)
    delta = None if x.delta is None else call.delta(x) * scale
    normed = Ends((x.start - centre) * scale, (x.end - centre) * scale, delta, x.from_weights, x.from_inputs)
    gain, bias = (None if p is None else p.view(lambda v: v.view(along)) for p in (gain, bias))
    return affine(call, normed, gain, bias), None, None


def normalise(call: AbstractCall, x: Ends, dims: tuple[int, ...], eps: float) -> Ends:
    """c/√(mean c² + ε) at both ends, with its difference."""
    known = Ends(x.start, x.end, None if x.delta is None else call.delta(x), False, x.from_inputs)
    c = known.view(lambda v: v - v.mean(dims, keepdim=True))
    variance = squared_mean(call, c, dims, eps)
    scale = Ends(variance.start.rsqrt(), variance.end.rsqrt(), None, x.from_weights, x.from_inputs)
    delta = None
    if c.delta is not None and variance.delta is not None:
        moved = variance.delta * call.slope(variance, lambda v0, v1: rsqrt(call, v0, v1))
        delta = c.delta * call.slope(scale, lambda r0, r1: (r0 + r1) / 2) + call.mean(c) * moved
    return Ends(c.start * scale.start, c.end * scale.end, delta, False, x.from_inputs)


def squared_mean(call: AbstractCall, c: Ends, dims: tuple[int, ...], eps: float) -> Ends:
    """mean c² + ε."""
    start, end = (v.square().mean(dims, keepdim=True) + eps for v in (c.start, c.end))
    delta = None if c.delta is None else 2 * (call.mean(c) * c.delta).mean(dims, keepdim=True)
    return Ends(start, end, delta, c.from_weights, c.from_inputs)


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
