"""Features: the Jacobian of a network at some inputs, block by block of its parameters, in factors or row by row.

Uses that share their β are one use: positions before a mean over them, or the one position that is read.

    Σ_u a_u ⊗ w_u β = (Σ_u w_u a_u) ⊗ β        with w_u one or nothing

so a layer whose result is only summed up, or looked at in one place, costs a kernel what a layer of one use does.
Whether they do is read from the numbers, for which a device is waited: a kernel by itself can afford that, a step not.

>>> from ntkexp.kernel.features.blocks import Factored
>>> a, beta = torch.arange(6.0).view(1, 3, 2), torch.tensor([[1.0], [0.0], [1.0]]).view(1, 1, 3, 1)
>>> found = gathered(Factored(a, beta, None, None, None))
>>> (found.inputs * found.outputs[:, 0]).tolist()
[[[4.0, 6.0]]]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.kernel.secant.uses import Source, View
from ntkexp.shapes import Weights

# --- The Jacobian of some parameters at some inputs, in factors or row by row.
#
# For a product z = a W the gradient of output c of example n is Σ_u a_nu ⊗ β_ncu, a sum over the uses u that
# belong to the example (one for a plain layer, one a position for a convolution). It is not multiplied out where
# the factors do.


Key: TypeAlias = tuple[Source | str | None, Source | None]


@dataclass(frozen=True)
class Factored:
    """Σ_u inputs ⊗ outputs for the weight, and `shift` Σ_u outputs for the bias, if there is one."""

    inputs: Float[Tensor, "example use in_"]
    outputs: Float[Tensor, "example out use features"]
    weight: View | None
    bias: View | None
    shift: float | None

    @property
    def biases(self) -> int:
        """How many rows a bias adds to those of the weight."""
        return 0 if self.shift is None else 1

    @property
    def rows(self) -> int:
        """Inputs, and one for the bias."""
        return self.biases + self.inputs.shape[2]

    @property
    def shifted(self) -> Float[Tensor, "example use in_"]:
        """The inputs behind a column of `shift`, with which the bias is one more row of the weight."""
        if self.shift is None:
            return self.inputs
        return torch.cat([torch.full_like(self.inputs[..., :1], self.shift), self.inputs], dim=2)

    def dense(self) -> Float[Tensor, "example out in_ features"]:
        """The gradients, multiplied out: first that of the bias."""
        if self.shift is None:
            return self.of_weight()
        return torch.cat([self.of_bias()[:, :, None], self.of_weight()], dim=2)

    def of_weight(self) -> Float[Tensor, "example out in_ features"]:
        """The gradients of the weight, multiplied out."""
        if self.inputs.shape[1] == 1:
            return self.inputs[:, :, :, None] * self.outputs
        return self.multiplied_out().view(*self.gradients, self.outputs.shape[3], -1).mT

    def of_bias(self) -> Float[Tensor, "example out features"]:
        """The gradients of the bias."""
        total = self.outputs[:, :, 0] if self.outputs.shape[2] == 1 else self.outputs.sum(2)
        return total if self.shift in (None, 1) else self.shift * total

    def multiplied_out(self) -> Float[Tensor, "example out size"]:
        """The weight’s gradients, feature by feature: one product of matrices for each example gives all outputs."""
        left = self.outputs[:, 0].mT if self.outputs.shape[1] == 1 else self.outputs.mT.flatten(1, 2)
        return (left @ self.inputs).view(*self.gradients, -1)

    def pieces(self) -> list[Factored | Rows]:
        """The gradients of the weight and those of the bias, each by itself."""
        if self.shift is None:
            return [self]
        name = "" if self.bias is None else self.bias.name
        return [replace(self, bias=None, shift=None), Rows(self.of_bias(), name)]

    @property
    def gradients(self) -> torch.Size:
        """Examples and outputs of which there are gradients."""
        return self.outputs.shape[:2]

    @property
    def size(self) -> int:
        """How many numbers a gradient has."""
        return self.rows * self.outputs.shape[3]

    @property
    def numbers(self) -> Tensor:
        """Some of them, for their kind and place."""
        return self.outputs

    def only(self, examples: slice) -> Factored:
        """Some of the examples."""
        return replace(self, inputs=self.inputs[examples], outputs=self.outputs[examples])

    def applied(self, weights: Weights) -> Float[Tensor, "example out"]:
        """J v, for a v in the shape of the weights."""
        terms = []  # each by itself: a weight beside its bias would have to be copied
        if self.bias is not None and self.shift is not None:
            row = self.shift * self.bias.of(weights[self.bias.name].contiguous()).reshape(-1)
            terms.append(row.expand(*self.inputs.shape[:2], -1))
        if self.weight is not None:
            terms.append(self.inputs @ self.weight.of(weights[self.weight.name].contiguous()))
        return torch.einsum("nuo,ncuo->nc", sum(terms[1:], start=terms[0]), self.outputs)

    def scaled(self, factors: Mapping[str, float]) -> Factored:
        """Each parameter's gradients times its factor."""
        inputs = self.inputs if self.weight is None else self.inputs * factors[self.weight.name]
        shift = self.shift if self.shift is None or self.bias is None else self.shift * factors[self.bias.name]
        return replace(self, inputs=inputs, shift=shift)

    def weighted(self, output_gradient: Float[Tensor, "example out"]) -> Factored:
        """Σ_c ℓ′_c of the gradients, as a single output."""
        return replace(self, outputs=torch.einsum("nc,ncuo->nuo", output_gradient, self.outputs)[:, None])

    def traced(self) -> Factored:
        """All outputs as one, whose inner products are the sums over outputs."""
        return replace(self, outputs=self.outputs.permute(0, 2, 1, 3).flatten(2)[:, None])

    def by_name(self) -> list[Rows]:
        """The gradients of each parameter by itself, multiplied out, up to the last element that is used."""
        return apart(self.dense(), self.weight, self.bias, self.biases)

    def total(self, weights: Weights) -> Weights:
        """The sum over examples and outputs, in the shapes of the parameters."""
        outputs = self.outputs[:, 0] if self.outputs.shape[1] == 1 else self.outputs.sum(1)
        found = {}
        if self.weight is not None:
            found[self.weight.name] = room = self.weight.room(weights[self.weight.name])
            if self.inputs.shape[1] < outputs.shape[2]:
                torch.mm(self.inputs.flatten(0, 1).t(), outputs.flatten(0, 1), out=self.weight.of(room))
            else:  # fewer numbers than in the inputs, which would have to be copied
                torch.sum(self.inputs.mT @ outputs, 0, out=self.weight.of(room))
        if self.bias is not None and self.shift is not None:
            name = self.bias.name
            room = found.setdefault(name, weights[name].new_zeros(weights[name].shape))
            self.bias.of(room).add_(outputs.sum((0, 1)), alpha=self.shift)
        return found


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

    def pieces(self) -> list[Factored | Rows]:
        """The gradients, which are those of one parameter."""
        return [self]

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

    def total(self, weights: Weights) -> Weights:
        """The sum over examples and outputs, in the shape of the parameter."""
        return {self.name: self.rows.sum((0, 1)).view(weights[self.name].shape).to(weights[self.name].dtype)}


Block: TypeAlias = Factored | Rows


def of_biases(left: Factored, right: Factored) -> float:
    """What biases add to every ⟨a, a′⟩: they are weights of an input that is always `shift`."""
    return 0.0 if left.shift is None or right.shift is None else left.shift * right.shift


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


# --- Features: the Jacobian of a network at some inputs, block by block of its parameters.


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


# --- Features of examples that were read a few at a time, as those of all.


def joined(parts: Iterable[Callable[[Weights], Features]], examples: int) -> Features | None:
    """All parts in their order, each copied to its place when it comes; None where they have no common form.

    A part is told where the rows of each parameter belong from its first example on, and may write them there itself.
    """
    room: dict[Key, Block] = {}
    at = outputs = 0
    for read in parts:
        part = read({block.name: block.rows[at:] for block in room.values() if isinstance(block, Rows)})
        room = room or {key: widened(block, examples) for key, block in part.blocks.items()}
        if part.blocks.keys() != room.keys():
            return None
        if not all(put(room[key], block, at) for key, block in part.blocks.items()):
            return None
        at, outputs = at + part.examples, part.outputs
    return Features(room, examples, outputs)


def widened(block: Block, examples: int) -> Block:
    """Room for so many examples."""
    room: dict[str, Any] = {name: value.new_empty(examples, *value.shape[1:]) for name, value in arrays(block).items()}
    return replace(block, **room)


def put(room: Block, block: Block, at: int) -> bool:
    """Copy some examples to their place, from this one on; False where they do not fit."""
    places, given = arrays(room), arrays(block)
    if places.keys() != given.keys() or any(places[name].shape[1:] != given[name].shape[1:] for name in given):
        return False
    for name, value in given.items():
        place = places[name][at : at + len(value)]
        if place.data_ptr() != value.data_ptr():
            place.copy_(value)
    return True


def arrays(block: Block) -> Mapping[str, Tensor]:
    """The fields of a block that are tensors: all have an example for each element of their first axis."""
    return {name: value for name, value in vars(block).items() if isinstance(value, Tensor)}


def in_few_uses(features: Features) -> Features:
    """The same features, with as few uses as they can have."""
    blocks = features.blocks.items()
    return replace(
        features, blocks={key: gathered(block) if isinstance(block, Factored) else block for key, block in blocks}
    )


def gathered(block: Factored) -> Factored:
    """The same gradients from one use of each example, where all of an example's uses have one β or none."""
    examples, uses, _ = block.inputs.shape
    if uses < 2 or not examples or share(block.outputs[:1]) is None:  # as most show by their first example
        return block
    weights = share(block.outputs)
    if weights is None:
        return block
    total = weights.sum(1, keepdim=True).clamp(min=1)  # in the outputs, so that a bias has its share as well
    inputs = torch.bmm((weights / total)[:, None], block.inputs)
    return replace(block, inputs=inputs, outputs=block.outputs.sum(2, keepdim=True))


def share(outputs: Float[Tensor, "example out use features"]) -> Float[Tensor, "example use"] | None:
    """One for each use that has the β of its example, nothing for one that has none; None if one has another."""
    if torch.equal(outputs[:, :, :1].expand_as(outputs), outputs):  # which is soon seen
        return outputs.new_ones(len(outputs), outputs.shape[2])
    uses = (outputs != 0).any(3).any(1)
    first = uses.to(torch.uint8).argmax(1)  # each example's first use with any β
    alike = outputs[torch.arange(len(outputs), device=first.device), :, first]
    weights = uses.to(outputs.dtype)
    return weights if torch.equal(alike[:, :, None] * weights[:, None, :, None], outputs) else None
