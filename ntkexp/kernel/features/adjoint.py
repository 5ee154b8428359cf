"""The accumulated adjoint U of the sum backwards: what the steps to come make of a gradient, a dense vector per output.

It takes in Jacobians, each scaled weight by weight, U ← scale ⊙ J + carry · U, and is multiplied with others:

    ⟨U, Σ_u a_u ⊗ β_u⟩ = Σ_u a_uᵀ U β_u

either as it stands there or with the gradients multiplied out, whichever takes fewer operations.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.kernel.features.blocks import Copies, Factored, Key, Rows, split_bias, times_vector
from ntkexp.kernel.features.jacobian import Jacobian
from ntkexp.kernel.secant.uses import View
from ntkexp.shapes import Weights

CACHED = 2**18  # numbers; fresh memory for more costs more than the arithmetic does
MULTIPLIED_OUT = 2**24  # numbers of gradients that are formed at once


@dataclass(frozen=True)
class Matrix:
    """U of a weight and its bias, in the order in which products use them: the bias, then the weight."""

    total: Float[Tensor, "probe out in_ features"]
    weight: View | None
    bias: View | None
    biases: int

    def accumulate(self, block: Factored, scale: Weights, carry: float) -> None:
        """U ← scale ⊙ J + carry · U, a few probes at a time; a few columns of W where it is large, as one for each word
        is."""
        ordered, features = self.in_order(scale), self.total.shape[3]
        if self.total[0].numel() > CACHED:
            left, width = block.shifted.mT[:, None], max(1, CACHED // block.rows)
            for at in range(0, features, width):
                for probe, total in enumerate(self.total[..., at : at + width]):
                    gradients = left[probe] @ block.outputs[probe, ..., at : at + width]
                    torch.add(
                        gradients.mul_(ordered[:, at : at + width]), total, alpha=carry, out=total
                    )
            return
        for part in turns(len(self.total), self.total[0].numel()):
            some = Factored(
                block.inputs[part], block.outputs[part], block.weight, block.bias, block.shift
            )
            total = self.total[part]
            torch.add(some.dense().mul_(ordered), total, alpha=carry, out=total)

    def shrink(self, factors: Mapping[str, float]) -> None:
        for view, part in zip(
            (self.bias, self.weight), self.total.tensor_split([self.biases], dim=2), strict=True
        ):
            if view is not None:
                part.mul_(factors[view.name])

    def scaled(self, factors: Weights) -> Matrix:
        return replace(self, total=self.total * self.in_order(factors))

    def scaled_in(self, factors: Weights) -> Matrix:
        """Multiply the parameters named in `factors`, and copy the others."""
        copy = replace(self, total=self.total.clone())
        rows = copy.total.tensor_split([self.biases], dim=2)
        for view, part in zip((self.bias, self.weight), rows, strict=True):
            if view is not None and view.name in factors:
                part.mul_(view.of(factors[view.name].contiguous()).reshape(part.shape[2:]))
        return copy

    def applied(self, weights: Weights) -> Float[Tensor, "probe out"]:
        return times_vector(self.total.flatten(2), self.in_order(weights).flatten())

    def in_order(self, weights: Weights) -> Float[Tensor, "in_ features"]:
        """What `weights` holds for the weight and its bias, in the order of U."""
        rows = []
        if self.bias is not None:
            rows.append(self.bias.of(weights[self.bias.name].contiguous()).reshape(1, -1))
        if self.weight is not None:
            rows.append(self.weight.of(weights[self.weight.name].contiguous()))
        return torch.cat(rows) if rows[1:] else rows[0]

    def kernel(self, right: Factored) -> Float[Tensor, "probe out train out_"]:
        """⟨U, J(x′)⟩."""
        probe, out, _, features = self.total.shape
        (train, uses, _), outputs = right.inputs.shape, right.outputs.shape[1]
        if not left_first_is_cheaper(self.total, right):
            return self.kernel_multiplied_out(right)
        shifted, beta = right.shifted.flatten(0, 1), right.outputs.reshape(train, outputs, -1).mT
        found = self.total.new_empty(
            probe, out, train, outputs
        )  # parts that are kept would lie between those let go
        for part in turns(probe, out * train * uses * features):
            products = shifted @ self.total[part].flatten(0, 1)  # [probe·out, train·use, features]
            rows = products.view(len(products), train, uses, -1).transpose(0, 1).flatten(2)
            found[part] = (rows @ beta).transpose(0, 1).reshape(-1, out, train, outputs)
        return found

    def kernel_multiplied_out(self, right: Factored) -> Float[Tensor, "probe out train out_"]:
        """The same from ∂f/∂W of the examples, multiplied out: a few columns of W at a time where W is large, as one
        for each word is."""
        (train, _, inputs), outputs, features = (
            right.shifted.shape,
            right.outputs.shape[1],
            self.total.shape[3],
        )
        if train * outputs * right.size <= MULTIPLIED_OUT:
            return inner(self.total.flatten(2), right.dense().flatten(2))
        found = self.total.new_zeros(*self.total.shape[:2], train, outputs)
        left, width = right.shifted.mT[:, None], max(1, CACHED // (train * outputs * inputs))
        for at in range(0, features, width):
            gradients = left @ right.outputs[..., at : at + width]  # Σ_u a_u ⊗ β_u of these columns
            found += inner(self.total[..., at : at + width].flatten(2), gradients.flatten(2))
        return found

    def by_name(self) -> list[Vector]:
        """U of each parameter by itself, up to the last element that is used."""
        return [
            Vector(r.rows, r.name)
            for r in split_bias(self.total, self.weight, self.bias, self.biases)
        ]

    def of(self, names: Collection[str]) -> dict[Key, Part]:
        """U of those of its parameters that are among these, by the keys that their gradients then have."""
        has_weight = self.weight is not None and self.weight.name in names
        has_bias = self.bias is not None and self.bias.name in names
        if has_weight and (has_bias or self.bias is None):
            return {(self.weight, self.bias): self}
        found: dict[Key, Part] = {}
        if has_weight:
            found[self.weight, None] = Matrix(self.total[:, :, self.biases :], self.weight, None, 0)
        if has_bias:
            (bias,) = split_bias(self.total[:, :, : self.biases], None, self.bias, self.biases)
            found[bias.name, None] = Vector(bias.rows, bias.name)
        return found


@dataclass(frozen=True)
class Vector:
    """U of a parameter, up to the last element that is used."""

    total: Float[Tensor, "probe out size"]
    name: str

    def accumulate(self, block: Rows | Copies, scale: Weights, carry: float) -> None:
        self.total.mul_(carry)
        if isinstance(block, Rows):
            self.total[..., : block.size].addcmul_(
                block.rows, scale[self.name].reshape(-1)[: block.size]
            )
        else:  # of a table, what was read of it
            values = block.values * scale[self.name].reshape(-1)[block.places][:, None]
            self.total.scatter_add_(2, block.places[:, None].expand_as(values), values)

    def shrink(self, factors: Mapping[str, float]) -> None:
        self.total.mul_(factors[self.name])

    def scaled(self, factors: Weights) -> Vector:
        return replace(
            self, total=self.total * factors[self.name].reshape(-1)[: self.total.shape[2]]
        )

    def scaled_in(self, factors: Weights) -> Vector:
        """Multiply by the factors of this parameter."""
        return self.scaled(factors)

    def applied(self, weights: Weights) -> Float[Tensor, "probe out"]:
        return times_vector(self.total, weights[self.name].reshape(-1)[: self.total.shape[2]])

    def kernel(self, right: Rows) -> Float[Tensor, "probe out train out_"]:
        """⟨U, J(x′)⟩, where elements that one side lacks count as zero."""
        size = min(self.total.shape[2], right.size)
        return inner(self.total[..., :size], right.rows[..., :size])

    def kernel_of_copies(self, right: Copies) -> Float[Tensor, "probe out train out_"]:
        """⟨U, J(x′)⟩ = Σ_e U[place_e] gradient_e: of a table, from the elements that were read alone."""
        inside = right.places < self.total.shape[2]
        values, places = right.values * inside[:, None], right.places * inside
        each = [
            self.total[:, :, where] @ some.t() for where, some in zip(places, values, strict=True)
        ]
        return torch.stack(each, dim=2)

    def by_name(self) -> list[Vector]:
        return [self]

    def of(self, names: Collection[str]) -> dict[Key, Part]:
        return {(self.name, None): self} if self.name in names else {}


Part: TypeAlias = Matrix | Vector


@dataclass(frozen=True)
class Adjoint:
    """U, part by part, for assembled Jacobians of one function at the same inputs."""

    parts: Mapping[Key, Part]

    def accumulate(self, jacobian: Jacobian, scale: Weights, carry: float) -> None:
        """U ← scale ⊙ J + carry · U."""
        if set(jacobian.keys) != self.parts.keys():
            raise ValueError("Jacobians of different functions have no common adjoint")
        for block in jacobian.blocks:
            match self.parts[block.key], block:
                case Matrix() as matrix, Factored():
                    matrix.accumulate(block, scale, carry)
                case Vector() as vector, Rows() | Copies():
                    vector.accumulate(block, scale, carry)

    def with_rows(self, names: Collection[str], weights: Weights) -> Adjoint:
        """U with a vector for each of these parameters, and of what shares a part with them, of all of its elements."""
        touched = {
            key: part for key, part in self.parts.items() if not names_in(key).isdisjoint(names)
        }
        found: dict[Key, Part] = {
            key: part for key, part in self.parts.items() if key not in touched
        }
        for vector in (vector for part in touched.values() for vector in part.by_name()):
            key = (vector.name, None)
            if key not in found:
                size = weights[vector.name].numel()
                found[key] = Vector(
                    vector.total.new_zeros(*vector.total.shape[:2], size), vector.name
                )
            found[key].total[:, :, : vector.total.shape[2]] += vector.total
        return Adjoint(found)

    def of(self, names: Collection[str] | None) -> Adjoint:
        """U of these parameters alone, to be multiplied and not added to; itself, if none are named."""
        if names is None:
            return self
        return Adjoint(
            {key: kept for part in self.parts.values() for key, kept in part.of(names).items()}
        )

    def shrink(self, factors: Mapping[str, float]) -> None:
        """U ← factor · U, each parameter by its own."""
        for part in self.parts.values():
            part.shrink(factors)

    def scaled(self, factors: Weights) -> Adjoint:
        """Another one, factors ⊙ U."""
        return Adjoint({key: part.scaled(factors) for key, part in self.parts.items()})

    def scaled_in(self, factors: Weights) -> Adjoint:
        """Return factors ⊙ U for the parameters named in `factors`; the other parts are shared, not copied."""
        parts = dict(self.parts)
        for key, part in self.parts.items():
            if not names_in(key).isdisjoint(factors):
                parts[key] = part.scaled_in(factors)
        return Adjoint(parts)

    def add(self, other: Adjoint) -> None:
        """U ← U + U′, of the same parts."""
        for key, part in self.parts.items():
            part.total.add_(other.parts[key].total)

    def applied(self, weights: Weights) -> Float[Tensor, "probe out"]:
        """⟨U, v⟩, for a v in the shape of the weights."""
        first, *rest = (part.applied(weights) for part in self.parts.values())
        return sum(rest, start=first)

    def kernel(self, right: Jacobian) -> Float[Tensor, "probe out train out_"]:
        """⟨U, J(x′)⟩."""
        blocks, parts = dict(zip(right.keys, right.blocks, strict=True)), dict(self.parts)
        total: Tensor | None = (
            None  # added up as it comes, so that no more than three such arrays are held at once
        )

        def added(product: Tensor) -> Tensor:
            return product if total is None else total + product

        # what has another form here than there, as where torch computed a few examples in another way than many
        apart = {name for key in parts.keys() ^ blocks.keys() for name in names_in(key)}
        # in the order of the blocks: a set of keys has another one in every process, and the sum other bits
        for key in [key for key in blocks if key in parts and apart.isdisjoint(names_in(key))]:
            match parts.pop(key), blocks.pop(key):
                case Matrix() as matrix, Factored() as factored:
                    total = added(matrix.kernel(factored))
                case Vector() as vector, Rows() as rows:
                    total = added(vector.kernel(rows))
                case Vector() as vector, Copies() as copies:
                    total = added(vector.kernel_of_copies(copies))
        ones = [vector for part in parts.values() for vector in part.by_name()]
        for other in (rows for block in blocks.values() for rows in block.by_name()):
            for one in (one for one in ones if one.name == other.name):
                total = added(one.kernel(other))
        if total is None:  # no parameter is used on both sides
            like = next(iter(self.parts.values())).total
            return like.new_zeros(*like.shape[:2], right.examples, right.outputs)
        return total


def zero_adjoint(jacobian: Jacobian, weights: Weights) -> Adjoint:
    """U = 0, for Jacobians like this one of these weights."""
    parts: dict[Key, Part] = {}
    for block in jacobian.blocks:
        match block:
            case Factored():
                zeros = block.outputs.new_zeros(
                    *block.gradients, block.rows, block.outputs.shape[3]
                )
                parts[block.key] = Matrix(zeros, block.weight, block.bias, block.biases)
            case Rows() | Copies():
                size = weights[block.name].numel()
                parts[block.key] = Vector(
                    block.numbers.new_zeros(*block.gradients, size), block.name
                )
    return Adjoint(parts)


def names_in(key: Key) -> set[str]:
    """The parameters that go by a key."""
    return {each if isinstance(each, str) else each.name for each in key if each is not None}


def inner(
    left: Float[Tensor, "probe out size"], right: Float[Tensor, "train out_ size"]
) -> Float[Tensor, "probe out train out_"]:
    """All inner products, as one product of matrices."""
    return (left.flatten(0, 1) @ right.flatten(0, 1).t()).view(*left.shape[:2], *right.shape[:2])


def turns(probes: int, each: int) -> list[slice]:
    """Chunks of probes, small enough that `each` numbers of every probe stay in the cache."""
    step = max(1, CACHED // each)
    return [slice(at, at + step) for at in range(0, probes, step)]


def left_first_is_cheaper(total: Float[Tensor, "probe out in_ features"], right: Factored) -> bool:
    """Multiplications of Σ_u (a_uᵀ U) β_u, against those of multiplying out and one inner product."""
    probe, out, inputs, features = total.shape
    (train, uses, _), outputs = right.inputs.shape, right.outputs.shape[1]
    left_first = probe * out * train * uses * features * (inputs + outputs)
    multiplied_out = train * outputs * inputs * features * (uses + probe * out)
    return (
        left_first <= 2 * multiplied_out
    )  # what is multiplied out has to be written and read as well
