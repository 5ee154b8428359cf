"""Standardising: mean 0 and deviation 1, measured on the training split and applied to all.

    z = (x − mean) / deviation,    deviation² = mean (x − mean)²

A feature that does not vary in training becomes 0 everywhere: what it does elsewhere could not have been learned.

>>> measured = each(torch.tensor([[1.0, 4.0], [3.0, 4.0]], dtype=torch.float64))
>>> measured(torch.tensor([[5.0, 6.0]], dtype=torch.float64)).tolist()
[[3.0, 0.0]]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.mistake import Mistake

Standardise = Literal["each", "all", "none"]


@dataclass(frozen=True)
class Scale:
    """A mean and a deviation, which broadcast over examples."""

    mean: Float[Tensor, "..."]
    deviation: Float[Tensor, "..."]

    def __call__(self, values: Float[Tensor, "example *shape"]) -> Float[Tensor, "example *shape"]:
        return torch.where(self.deviation > 0, (values - self.mean) / self.deviation, 0.0)


def each(values: Float[Tensor, "example *shape"]) -> Scale:
    """Measure the scale of every feature by itself."""
    return measure(values, (0,))


def whole(values: Float[Tensor, "example *shape"]) -> Scale:
    """Measure the scale of all features alike, so that a pixel stays brighter than another."""
    return measure(values, tuple(range(values.ndim)))


def unchanged(values: Tensor) -> Callable[[Tensor], Tensor]:
    """No scale at all."""
    return torch.clone


def measure(values: Float[Tensor, "example *shape"], axes: tuple[int, ...]) -> Scale:
    """Mean and deviation over these axes."""
    mean = values.mean(axes, keepdim=True)
    deviation = (values - mean).square().mean(axes, keepdim=True).sqrt()
    # The deviation of equal numbers need not round to zero; their extremes are equal.
    varies = values.amax(axes, keepdim=True) > values.amin(axes, keepdim=True)
    if (varies & ~((deviation > 0) & deviation.isfinite())).any():
        raise Mistake("some numbers are too large or too small for a variance in double precision; change their unit")
    return Scale(mean, torch.where(varies, deviation, 0.0))


MEASURES: dict[Standardise, Callable[[Tensor], Callable[[Tensor], Tensor]]] = {
    "each": each,
    "all": whole,
    "none": unchanged,
}
