"""Functions of many variances, by Chebyshev sums in their roots.

Where there are more variances than it takes nodes, a function that is costly is evaluated at nodes alone. The sum is
taken if its last terms say that it has converged and some of the variances agree; else the function itself.

>>> q = torch.linspace(0.5, 2, 1000, dtype=torch.float64)
>>> float((interpolated(lambda q: q.exp()[None], q) - q.exp()).abs().max()) < 1e-13
True
"""

from __future__ import annotations

from collections.abc import Callable
from math import pi

import torch
from jaxtyping import Float
from torch import Tensor

Function = Callable[[Float[Tensor, " node"]], Float[Tensor, "term node"]]
NODES = (48, 96)
CLOSE = 1e-14
"""The share of the largest value that the last terms of a sum may have."""
PROBES = 9


def interpolated(function: Function, q: Float[Tensor, "*q"]) -> Float[Tensor, "term *q"]:
    """The function at all variances."""
    x, low, high = q.flatten().double(), float(q.min().sqrt()), float(q.max().sqrt())
    for count in NODES if high > low else ():
        if 2 * count > len(x):
            break
        angles = (torch.arange(count, dtype=torch.float64) + 0.5) * (pi / count)
        place = torch.arange(count, dtype=torch.float64)[:, None] * angles
        values = function(((low + high) / 2 + (high - low) / 2 * angles.cos()).square())
        sums = values @ place.cos().t() * (2 / count)
        sums[:, 0] /= 2
        room = CLOSE * float(values.abs().max())
        if float(sums[:, -4:].abs().max()) <= room and agrees(function, sums, x, low, high, room):
            return summed(sums, x, low, high).view(-1, *q.shape).to(q.dtype)
    return function(x).view(-1, *q.shape).to(q.dtype)


def summed(
    sums: Float[Tensor, "term degree"], q: Float[Tensor, " q"], low: float, high: float
) -> Float[Tensor, "term q"]:
    """The Chebyshev sums between two roots."""
    angle = ((2 * q.sqrt() - (low + high)) / (high - low)).clamp(-1, 1).acos()
    return sums @ (torch.arange(sums.shape[1], dtype=torch.float64)[:, None] * angle).cos()


def agrees(function: Function, sums: Tensor, q: Tensor, low: float, high: float, room: float) -> bool:
    """Whether the sums are the function at some of the variances."""
    some = q[torch.linspace(0, len(q) - 1, PROBES).long()]
    return float((summed(sums, some, low, high) - function(some)).abs().max()) <= 2 * room
