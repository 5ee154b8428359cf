"""The Jacobian of some parameters at some inputs, in factors or row by row.

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

from ntkexp.kernel.secant.uses import Source, View
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
        if self.inputs.shape[1] == 1:
            return self.inputs[:, :, :, None] * self.outputs
        return self.multiplied_out().view(*self.gradients, self.outputs.shape[3], -1).mT

    def multiplied_out(self) -> Float[Tensor, "example out size"]:
        """The gradients as rows, feature by feature: one product of matrices for each example gives all outputs."""
        left = self.outputs[:, 0].mT if self.outputs.shape[1] == 1 else self.outputs.mT.flatten(1, 2)
        return (left @ self.inputs).view(*self.gradients, -1)

    @property
    def gradients(self) -> torch.Size:
        """Examples and outputs of which there are gradients."""
        return self.outputs.shape[:2]

    @property
    def size(self) -> int:
        """How many numbers a gradient has."""
        return self.inputs.shape[2] * self.outputs.shape[3]

    @property
    def numbers(self) -> Tensor:
        """Some of them, for their kind and place."""
        return self.outputs

    def only(self, examples: slice) -> Factored:
        """Some of the examples."""
        return Factored(self.inputs[examples], self.outputs[examples], self.weight, self.bias, self.biases)

    def applied(self, weights: Weights) -> Float[Tensor, "example out"]:
        """J v, for a v in the shape of the weights."""
        bias, inputs = self.inputs.tensor_split([self.biases], dim=2)
        terms = []  # each by itself: a weight beside its bias would have to be copied
        if self.bias is not None:
            terms.append(bias * self.bias.of(weights[self.bias.name].contiguous()).reshape(-1))
        if self.weight is not None:
            terms.append(inputs @ self.weight.of(weights[self.weight.name].contiguous()))
        return torch.einsum("nuo,ncuo->nc", sum(terms[1:], start=terms[0]), self.outputs)

    def scaled(self, factors: Mapping[str, float]) -> Factored:
        """Each parameter's gradients times its factor."""
        inputs = self.inputs.clone()
        if self.bias is not None:
            inputs[..., : self.biases] *= factors[self.bias.name]
        if self.weight is not None:
            inputs[..., self.biases :] *= factors[self.weight.name]
        return Factored(inputs, self.outputs, self.weight, self.bias, self.biases)

    def weighted(self, output_gradient: Float[Tensor, "example out"]) -> Factored:
        """Σ_c ℓ′_c of the gradients, as a single output."""
        outputs = torch.einsum("nc,ncuo->nuo", output_gradient, self.outputs)[:, None]
        return Factored(self.inputs, outputs, self.weight, self.bias, self.biases)

    def traced(self) -> Factored:
        """All outputs as one, whose inner products are the sums over outputs."""
        outputs = self.outputs.permute(0, 2, 1, 3).flatten(2)[:, None]
        return Factored(self.inputs, outputs, self.weight, self.bias, self.biases)

    def by_name(self) -> list[Rows]:
        """The gradients of each parameter by itself, multiplied out, up to the last element that is used."""
        return apart(self.dense(), self.weight, self.bias, self.biases)

    def add_to(self, gradient: Weights) -> None:
        """Add the sum over examples and outputs to the gradient of the weights."""
        outputs = self.outputs[:, 0] if self.outputs.shape[1] == 1 else self.outputs.sum(1)
        if self.inputs.shape[1] < outputs.shape[2]:
            self.add_rows_to(gradient, self.inputs.flatten(0, 1).t(), outputs.flatten(0, 1))
            return
        total = (self.inputs.mT @ outputs).sum(0)  # fewer numbers than in the inputs, which would have to be copied
        if self.bias is not None:
            self.bias.of(gradient[self.bias.name]).add_(total[0])
        if self.weight is not None:
            self.weight.of(gradient[self.weight.name]).add_(total[self.biases :])

    def add_rows_to(
        self, gradient: Weights, inputs: Float[Tensor, "in_ row"], outputs: Float[Tensor, "row features"]
    ) -> None:
        """Add a product of matrices where it belongs."""
        if self.bias is not None:
            self.bias.of(gradient[self.bias.name]).add_((inputs[: self.biases] @ outputs)[0])
        if self.weight is not None:
            self.weight.of(gradient[self.weight.name]).addmm_(inputs[self.biases :], outputs)


@dataclass(frozen=True)
class Rows:
    """The gradients of a parameter, multiplied out."""

    rows: Float[Tensor, "example out size"]
    name: str

    @property
    def gradients(self) -> torch.Size:
        """Examples and outputs of which there are gradients."""
        return self.rows.shape[:2]

    @property
    def numbers(self) -> Tensor:
        """Some of them, for their kind and place."""
        return self.rows

    @property
    def size(self) -> int:
        """How many elements of the parameter there are gradients of."""
        return self.rows.shape[2]

    def multiplied_out(self) -> Float[Tensor, "example out size"]:
        """The gradients, which are."""
        return self.rows

    def applied(self, weights: Weights) -> Float[Tensor, "example out"]:
        """J v, for a v in the shape of the weights."""
        return self.rows @ weights[self.name].reshape(-1)[: self.size]

    def scaled(self, factors: Mapping[str, float]) -> Rows:
        """The gradients times the parameter's factor."""
        return Rows(self.rows * factors[self.name], self.name)

    def upto(self, size: int) -> Rows:
        """The gradients of the first elements."""
        return Rows(self.rows[:, :, :size], self.name)

    def weighted(self, output_gradient: Float[Tensor, "example out"]) -> Rows:
        """Σ_c ℓ′_c of the gradients, as a single output."""
        return Rows(torch.einsum("nc,ncp->np", output_gradient, self.rows)[:, None], self.name)

    def traced(self) -> Rows:
        """All outputs as one, whose inner products are the sums over outputs."""
        return Rows(self.rows.flatten(1)[:, None], self.name)

    def by_name(self) -> list[Rows]:
        """The rows by themselves: no other weight has a part in them."""
        return [self]

    def add_to(self, gradient: Weights) -> None:
        """Add the sum over examples and outputs to the gradient of the weights."""
        gradient[self.name].view(-1).add_(self.rows.sum((0, 1)))


Block: TypeAlias = Factored | Rows


def laid_out(weight: View | None, bias: View | None, weights: Weights) -> Float[Tensor, "in_ features"]:
    """What `weights` holds for the parameters of a block, in the block's order: the bias, then the weight."""
    rows = []
    if bias is not None:
        rows.append(bias.of(weights[bias.name].contiguous()).reshape(1, -1))
    if weight is not None:
        rows.append(weight.of(weights[weight.name].contiguous()))
    return torch.cat(rows)


def apart(
    gradients: Float[Tensor, "example out in_ features"], weight: View | None, bias: View | None, biases: int
) -> list[Rows]:
    """The gradients of a weight and of its bias, each by itself, up to the last element that is used."""
    return [
        Rows(spread(part.flatten(2), view, view.extent), view.name)
        for part, view in zip(gradients.tensor_split([biases], dim=2), (bias, weight), strict=True)
        if view is not None
    ]


def spread(gradient: Float[Tensor, "example out size"], view: View, size: int) -> Float[Tensor, "example out size_"]:
    """The gradient of a view of a parameter as that of the parameter's first elements, all that it shows."""
    if view.turned().is_whole(size):
        return (
            gradient.view(*gradient.shape[:2], *view.shape).permute(0, 1, *range(1 + len(view.shape), 1, -1)).flatten(2)
        )
    positions = view.of(torch.arange(size, device=gradient.device)).reshape(-1)
    return gradient.new_zeros(*gradient.shape[:2], size).index_add(2, positions, gradient)
