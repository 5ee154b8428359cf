"""The gradient of a loss from features: Σᵢ J(xᵢ)ᵀℓ′ᵢ."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.kernel.features.features import Features
from ntkexp.shapes import Weights


def total(right: list[Features], output_gradient: Float[Tensor, "train out"], weights: Weights) -> Weights:
    """Σᵢ J(xᵢ)ᵀℓ′ᵢ over all blocks of training examples."""
    parts = torch.split(output_gradient, [block.examples for block in right])
    return summed((block.weighted(part) for block, part in zip(right, parts, strict=True)), weights)


def summed(pulled: Iterable[Features], weights: Weights) -> Weights:
    """Σᵢ of what every training example has pulled back."""
    return reduce(add_gradients, (block.total(weights) for block in pulled))


def add_gradients(gradient: Weights, other: Weights) -> Weights:
    """The sum, in the place of the first: two gradients are held at a time, however many blocks there are."""
    return {name: value.add_(other[name]) for name, value in gradient.items()}


def unit(gradient: Weights) -> Weights | None:
    """The direction of a gradient, if it has one."""
    length = torch.stack([part.square().sum() for part in gradient.values()]).sum().sqrt()
    return {name: part / length for name, part in gradient.items()} if length else None
