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
    "logsumexp": logsumexp,
}
