"""A Jacobian use by use: each operation that used a weight keeps what it gave to the gradient, and nothing is added up.

Features join the uses of a parameter, and multiply out those that have no factors in common: a table of tokens takes a
row as long as itself for every example. Here the same table takes what an example read of it, and where:

    (∂f/∂θ)[p] = Σ_e gradient_e · [place_e = p]

That is all that contractions of a Jacobian need, and sketches of it; inner products of examples need features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ntkexp.kernel.features.arrange import arrange
from ntkexp.kernel.features.blocks import Factored, Rows
from ntkexp.kernel.features.features import Features, zeros
from ntkexp.kernel.features.places import in_turn, with_zeros
from ntkexp.kernel.features.scatter import BY_COMPARISON, refuse_unowned, with_gain
from ntkexp.kernel.secant.rules.base import NoRule
from ntkexp.kernel.secant.uses import Element, Use, View
from ntkexp.shapes import Weights


@dataclass(frozen=True)
class Copies:
    """The gradients of copies of a parameter's elements, and the element that each is a copy of."""

    gradients: Float[Tensor, "example out copy"]
    places: Int[Tensor, "example copy"]
    name: str

    def applied(self, weights: Weights) -> Float[Tensor, "example out"]:
        """J v, for a v in the shape of the weights."""
        return torch.einsum("nce,ne->nc", self.gradients, weights[self.name].reshape(-1)[self.places])

    def weighted(self, output_gradient: Float[Tensor, "example out"]) -> Copies:
        """Σ_c ℓ′_c of the gradients, as a single output."""
        gradients = torch.einsum("nc,nce->ne", output_gradient, self.gradients)[:, None]
        return Copies(gradients, self.places, self.name)

    def total(self, weights: Weights) -> Weights:
        """The sum over examples and outputs, in the shape of the parameter."""
        found = zeros(weights[self.name])  # of numbers that may be longer than those that it was used with
        found.view(-1).index_add_(0, self.places.reshape(-1), self.gradients.sum(1).flatten().to(found.dtype))
        return {self.name: found}


Part: TypeAlias = Factored | Rows | Copies


@dataclass(frozen=True)
class UseByUse:
    """A Jacobian as the sum of what each use gives."""

    parts: Sequence[Part]
    examples: int
    outputs: int

    @property
    def nbytes(self) -> int:
        """The memory of all parts."""
        held = (value for part in self.parts for value in vars(part).values())
        return sum(value.nbytes for value in held if isinstance(value, Tensor))

    def applied(self, weights: Weights) -> Float[Tensor, "example out"]:
        """J v, for a v in the shape of the weights."""
        return torch.stack([part.applied(weights) for part in self.parts]).sum(0)

    def weighted(self, output_gradient: Float[Tensor, "example out"]) -> UseByUse:
        """The Jacobian contracted with ℓ′ on its outputs: J(x)ᵀℓ′ for every example."""
        return UseByUse([part.weighted(output_gradient) for part in self.parts], self.examples, 1)

    def add_to(self, gradient: Weights) -> Weights:
        """Add the sum over examples and outputs to the gradient of the weights, in its place."""
        for part in self.parts:
            for name, value in part.total(gradient).items():
                gradient[name].add_(value)
        return gradient


def of_features(features: Features) -> UseByUse:
    """Features as they are, each block a part."""
    return UseByUse(tuple(features.blocks.values()), features.examples, features.outputs)


def keep_uses(
    uses: Sequence[Use],
    cotangents: Sequence[Float[Tensor, "out ..."]],
    owned: Sequence[Int[Tensor, "..."]],
    examples: int,
    outputs: int,
    leaves: Weights,
) -> UseByUse:
    """The Jacobian from β at every use; `owned` says whose each element (each row, of a product) is."""
    if len(owned) < len(uses):
        raise NoRule(BY_COMPARISON)
    parts: list[Part] = []
    for use, cotangent, owner in zip(uses, cotangents, owned, strict=True):
        if isinstance(use, Element) and isinstance(use.source, View):
            parts.append(copies(use, use.source, cotangent, owner, examples))
        else:
            alone = arrange((use,), (cotangent,), (owner,), examples, outputs, leaves)
            parts.extend(alone.blocks.values())
    return UseByUse(parts, examples, outputs)


def copies(
    use: Element, source: View, cotangent: Float[Tensor, "out ..."], owner: Int[Tensor, "..."], examples: int
) -> Copies:
    """The elements of a parameter that an operation used, example by example."""
    cotangent = with_gain(use, cotangent)
    if not (reached := owner >= 0).all():
        refuse_unowned(cotangent.masked_fill(reached, 0.0))
    positions, outputs = use.positions.to(cotangent.device), len(cotangent)
    axis = axis_that_counts(owner, examples)
    if axis is not None:
        gradients, shown = add_equal(cotangent, positions, axis)
        places = places_in(source, shown).movedim(axis, 0)
        places = places.reshape(len(places), -1).expand(examples, -1)
        gradients = gradients.movedim(axis + 1, 1).reshape(outputs, examples, -1).transpose(0, 1)
        return Copies(gradients, places, source.name)
    turns = in_turn(owner.reshape(-1), examples)
    if turns is None:
        turns = torch.arange(owner.numel(), device=owner.device).view(examples, -1)
    rows = with_zeros(cotangent.flatten(1), 1)[:, turns].transpose(0, 1)
    return Copies(rows, with_zeros(places_in(source, positions).reshape(-1), 0)[turns], source.name)


def add_equal(
    cotangent: Float[Tensor, "out ..."], positions: Int[Tensor, "..."], axis: int
) -> tuple[Float[Tensor, "out ..."], Int[Tensor, "..."]]:
    """What an example gave to the same elements again and again, added up; places that all examples share, once."""
    copied = [d for d in range(positions.dim()) if positions.stride(d) == 0]
    gradients = cotangent
    for d in copied:
        positions = positions.narrow(d, 0, min(1, positions.shape[d]))
        if d != axis:
            gradients = gradients.sum(d + 1, keepdim=True)
    return gradients, positions


def axis_that_counts(owner: Int[Tensor, "..."], examples: int) -> int | None:
    """The axis along which each element belongs to the example of its number, if there is one."""
    for axis in range(owner.dim()):
        if owner.shape[axis] == examples:
            index = torch.arange(examples, device=owner.device).view(-1, *[1] * (owner.dim() - axis - 1))
            if bool(((owner == index) | (owner < 0)).all()):
                return axis
    return None


def places_in(source: View, positions: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
    """The elements of a parameter, given those of a view of it in their order.

    >>> places_in(View("w", (2, 3), (1, 2), 5), torch.tensor([0, 1, 5]))
    tensor([ 5,  7, 10])
    """
    places, left = torch.full_like(positions, source.offset), positions
    for size, stride in zip(reversed(source.shape), reversed(source.stride), strict=True):
        places = places + left % size * stride
        left = left // size
    return places
