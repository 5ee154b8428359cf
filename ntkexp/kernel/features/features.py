"""Features: the Jacobian of a network at some inputs, block by block of its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from jaxtyping import Float
from torch import Tensor

from ntkexp.kernel.features.blocks import Block
from ntkexp.kernel.secant.uses import Source
from ntkexp.shapes import Weights

Key: TypeAlias = tuple[Source | str | None, Source | None]


@dataclass(frozen=True)
class Features:
    """A Jacobian, block by block. Features of the same function have the same keys."""

    blocks: Mapping[Key, Block]
    examples: int
    outputs: int

    def weighted(self, output_gradient: Float[Tensor, "example out"]) -> Features:
        """The Jacobian contracted with ℓ′ on its outputs: J(x)ᵀℓ′ for every example."""
        blocks = {key: block.weighted(output_gradient) for key, block in self.blocks.items()}
        return Features(blocks, self.examples, 1)

    def scaled(self, factors: Mapping[str, float]) -> Features:
        """The Jacobian, each parameter's part times its factor."""
        blocks = {key: block.scaled(factors) for key, block in self.blocks.items()}
        return Features(blocks, self.examples, self.outputs)

    def applied(self, weights: Weights) -> Float[Tensor, "example out"]:
        """J v, for a v in the shape of the weights."""
        first, *rest = (block.applied(weights) for block in self.blocks.values())
        return sum(rest, start=first)

    def total(self, weights: Weights) -> Weights:
        """The sum over examples and outputs, in the shape of the weights: the gradient, for weighted features."""
        found: Weights = {}
        for block in self.blocks.values():
            for name, value in block.total(weights).items():
                found[name] = found[name] + value if name in found else value
        return {name: found[name] if name in found else zeros(weight) for name, weight in weights.items()}


def nothing(weights: Weights) -> Weights:
    """Zeros in the shapes of the weights."""
    return {name: zeros(weight) for name, weight in weights.items()}


def zeros(weight: Tensor) -> Tensor:
    """Zeros in the shape of a weight, which lie in order even where that does not, as in channels-last layout.

    >>> import torch
    >>> zeros(torch.ones(2, 3).t()).stride()
    (2, 1)
    """
    return weight.new_zeros(weight.shape)
