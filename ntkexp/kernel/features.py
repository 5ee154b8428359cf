"""Features: the Jacobian of a network at some inputs, in factored form.

For a product z = a W the gradient of output c of example n is Σ_u a_nu ⊗ β_ncu, a sum over the uses u that belong to
the example (one for a plain layer, one a position for a convolution). It is not multiplied out where the factors do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.kernel.uses import Source, View
from ntkexp.shapes import Weights

Key: TypeAlias = tuple[Source | str | None, Source | None]


@dataclass(frozen=True)
class Factored:
    """Σ_u inputs ⊗ outputs; the first of `inputs` belongs to the bias if `biases` is 1, the others to the weight."""

    inputs: Float[Tensor, "example use in_"]
    outputs: Float[Tensor, "example out use features"]
    weight: View | None
    bias: View | None
    biases: int

    def dense(self) -> Float[Tensor, "example out in_ features"]:
        """The gradients, multiplied out."""
        return torch.einsum("nui,ncuo->ncio", self.inputs, self.outputs)

    def weighted(self, output_gradient: Float[Tensor, "example out"]) -> Factored:
        """Σ_c ℓ′_c of the gradients, as a single output."""
        outputs = torch.einsum("nc,ncuo->nuo", output_gradient, self.outputs)[:, None]
        return Factored(self.inputs, outputs, self.weight, self.bias, self.biases)

    def by_name(self) -> list[Rows]:
        """The gradients of each parameter by itself, multiplied out, up to the last element that is used."""
        parts = self.dense().tensor_split([self.biases], dim=2)
        return [
            Rows(spread(part.flatten(2), view, view.extent), view.name)
            for part, view in zip(parts, (self.bias, self.weight), strict=True)
            if view is not None
        ]

    def add_to(self, gradient: Weights) -> None:
        """Add the sum over examples and outputs to the gradient of the weights."""
        total = self.inputs.flatten(0, 1).t() @ self.outputs.sum(1).flatten(0, 1)
        if self.bias is not None:
            self.bias.of(gradient[self.bias.name]).add_(total[0])
        if self.weight is not None:
            self.weight.of(gradient[self.weight.name]).add_(total[self.biases :])


@dataclass(frozen=True)
class Rows:
    """The gradients of a parameter, multiplied out."""

    rows: Float[Tensor, "example out size"]
    name: str

    @property
    def size(self) -> int:
        """How many elements of the parameter there are gradients of."""
        return self.rows.shape[2]

    def upto(self, size: int) -> Rows:
        """The gradients of the first elements."""
        return Rows(self.rows[:, :, :size], self.name)

    def weighted(self, output_gradient: Float[Tensor, "example out"]) -> Rows:
        """Σ_c ℓ′_c of the gradients, as a single output."""
        return Rows(torch.einsum("nc,ncp->np", output_gradient, self.rows)[:, None], self.name)

    def by_name(self) -> list[Rows]:
        """As it is."""
        return [self]

    def add_to(self, gradient: Weights) -> None:
        """Add the sum over examples and outputs to the gradient of the weights."""
        gradient[self.name].view(-1).add_(self.rows.sum((0, 1)))


Block: TypeAlias = Factored | Rows


def spread(gradient: Float[Tensor, "example out size"], view: View, size: int) -> Float[Tensor, "example out size_"]:
    """The gradient of a view of a parameter as that of the parameter's first elements, all that it shows."""
    positions = view.of(torch.arange(size, device=gradient.device)).reshape(-1)
    return gradient.new_zeros(*gradient.shape[:2], size).index_add(2, positions, gradient)


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

    def total(self, weights: Weights) -> Weights:
        """The sum over examples and outputs, in the shape of the weights: the gradient, for weighted features."""
        gradient = {
            name: torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device)
            for name, weight in weights.items()
        }
        for block in self.blocks.values():
            block.add_to(gradient)
        return gradient
