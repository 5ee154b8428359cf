"""Softmax and its relatives, by logarithmic means.

With p the softmax at each end, L_i = (p₁ᵢ − p₀ᵢ)/(log p₁ᵢ − log p₀ᵢ) and w = L/ΣL,

    log-softmax   Δz_i − Σ_j w_j Δz_j        softmax   L_i (Δz_i − Σ_j w_j Δz_j)        logsumexp   Σ_j w_j Δz_j

exactly, since both ends sum to one. (Decomposed into exp, sum and division it breaks when logits move far.)
"""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor

from ntkexp.kernel.secant.rules.base import AbstractCall, Ends, Rule
from ntkexp.kernel.secant.rules.elementwise import log_mean, quotient
from ntkexp.kernel.secant.rules.smooth import softplus_slope


def softmax(call: AbstractCall) -> Tensor:
    value, dim = call.args[:2]
    if call.is_point:
        mean = call.slope(value, lambda *_: call.start)
    else:
        mean = call.slope(value, lambda z0, z1: log_mean(logarithms(z0, dim), logarithms(z1, dim)))
    return mean * centre(call, value, mean, dim)


def log_softmax(call: AbstractCall) -> Tensor:
    value, dim = call.args[:2]
    mean = call.slope(value, lambda z0, z1: log_mean(logarithms(z0, dim), logarithms(z1, dim)))
    return centre(call, value, mean, dim)


def logsumexp(call: AbstractCall) -> Tensor:
    value, dim = call.args[:2]
    mean = call.slope(value, lambda z0, z1: log_mean(normalise(z0, dim), normalise(z1, dim)))
    weights = mean / mean.sum(dim, keepdim=True)
    return (weights * call.delta(value)).sum(dim, keepdim=call.given["keepdim"])


def logcumsumexp(call: AbstractCall) -> Tensor:
    """yₙ = log(e^yₙ₋₁ + e^zₙ), so Δyₙ = sₙ Δyₙ₋₁ + (1 − sₙ) Δzₙ with the share sₙ of what came before."""
    value, dim = call.args
    if value.start.dim() == 0:
        return call.delta(value)
    y0, y1 = call.ends[0]
    gap = Ends(ahead(y0, value.start, dim), ahead(y1, value.end, dim), None)
    share = call.slope(gap, softplus_slope).movedim(dim, -1)
    share = torch.cat([torch.zeros_like(share[..., :1]), share[..., 1:]], -1)
    return scanned(share, (1 - share) * call.delta(value).movedim(dim, -1)).movedim(-1, dim)


def ahead(y: Tensor, z: Tensor, dim: int) -> Tensor:
    """yₙ₋₁ − zₙ; where both are −∞, nothing has a share but zₙ."""
    before = torch.cat([torch.full_like(y.narrow(dim, 0, 1), -inf), y.narrow(dim, 0, y.shape[dim] - 1)], dim)
    return torch.where(before == -inf, -inf, before - z)


def scanned(gain: Tensor, value: Tensor) -> Tensor:
    """vₙ ← vₙ + gₙ vₙ₋₁ along the last axis, in rounds of doubling distance: gains and values of n and of what lies a
    distance before it become those of both.
    """
    distance, length = 1, value.shape[-1]
    while distance < length:
        late, early = slice(distance, None), slice(None, length - distance)
        moved = value[..., late] + gain[..., late] * value[..., early]
        value = torch.cat([value[..., :distance], moved], -1)
        gain = torch.cat([gain[..., :distance], gain[..., late] * gain[..., early]], -1)
        distance *= 2
    return value


def centre(call: AbstractCall, value: Ends, mean: Tensor, dim: int) -> Tensor:
    """Δz − Σ w Δz; where a mask hides everything there are no weights."""
    delta = call.delta(value)
    weights = quotient(mean, -mean.sum(dim, keepdim=True), 0.0)  # their sign costs less here than in the sum
    return delta + (weights * delta).sum(dim, keepdim=True)


def logarithms(z: Tensor, dim: int) -> Tensor:
    """The logarithms of the shares; −∞ stays what it is, also where a mask hides everything."""
    return torch.where(z == -inf, z, z.log_softmax(dim))


def normalise(z: Tensor, dim: int | list[int]) -> Tensor:
    """z − log Σ exp z."""
    return z - torch.logsumexp(z, dim, keepdim=True)


RULES: dict[str, Rule] = {
    **dict.fromkeys(("_softmax", "_safe_softmax"), softmax),
    "_log_softmax": log_softmax,
    "logcumsumexp": logcumsumexp,
    "logsumexp": logsumexp,
}
