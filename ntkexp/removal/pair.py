"""A number of one training beside the same number of another, and what difference rules are written in.

    Δ(xy) = x̄ Δy + ȳ Δx,        Δφ(x) = φ[x, x′] Δx

with the mean x̄ of both ends and the slope φ[x, x′] of the secant between them. Rules of this kind are exact for the
longest differences, and those of derivatives for none.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

CLOSE = 1e-9  # of numbers that differ by less than that share of themselves, a quotient tells less than a derivative


class Pair(NamedTuple):
    """The number in the first training, and in the second."""

    first: Tensor
    second: Tensor

    @property
    def mean(self) -> Tensor:
        """Half of the sum.

        >>> Pair(torch.tensor(1.0), torch.tensor(2.0)).mean
        tensor(1.5000)
        """
        return (self.first + self.second) / 2

    @property
    def change(self) -> Tensor:
        """The second less the first."""
        return self.second - self.first

    @property
    def differs(self) -> bool:
        """Whether there is any change."""
        return not torch.equal(self.first, self.second)


def slope(at: Pair, value: Pair, derivative: Tensor) -> Tensor:
    """φ[x, x′], and the derivative where both ends are the same to rounding.

    >>> x = Pair(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 2.0]))
    >>> slope(x, Pair(x.first**2, x.second**2), 2 * x.mean)
    tensor([4., 4.])
    """
    near = at.change.abs() <= CLOSE * torch.maximum(at.first.abs(), at.second.abs())
    return torch.where(near, derivative, value.change / torch.where(near, torch.ones_like(at.change), at.change))
