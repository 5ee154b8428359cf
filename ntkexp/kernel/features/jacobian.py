"""The Jacobian of a network at some inputs: a list of gradient blocks.

It is assembled (each parameter in one block, for inner products of examples again and again), or kept use by use, where
each operation that used a weight keeps what it gave: no row is as long as a table of words, of which an example read a
few. Both contract, stack and multiply alike.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.kernel.features.blocks import Block, Factored, Key, Rows, zeros
from ntkexp.shapes import Weights


@dataclass(frozen=True)
class Jacobian:
    """J = Σ blocks: ∂f_c(x_n)/∂θ for the outputs c of the examples n."""

    blocks: tuple[Block, ...]
    examples: int
    outputs: int
    starts: tuple[int, ...] | None = (
        None  # the first example of each block; none where each is of all examples
    )

    @property
    def nbytes(self) -> int:
        return sum(value.nbytes for block in self.blocks for value in arrays(block).values())

    @property
    def keys(self) -> list[Key]:
        return [block.key for block in self.blocks]

    @cached_property
    def extents(self) -> Mapping[str, int]:
        """How many elements of each parameter lie up to the last one that is used."""
        found: dict[str, int] = {}
        for block in self.blocks:
            found |= {name: max(size, found.get(name, 0)) for name, size in block.extents.items()}
        return found

    @cached_property
    def uses(self) -> Mapping[str, list[tuple[slice, Block]]]:
        """The blocks of each parameter, and the examples that they are of."""
        found: dict[str, list[tuple[slice, Block]]] = {}
        for place, block in self.placed():
            for name in block.names:
                found.setdefault(name, []).append((place, block))
        return found

    def placed(self) -> Iterator[tuple[slice, Block]]:
        """Each block, and the examples that it is of."""
        starts = self.starts or [0] * len(self.blocks)
        return (
            (slice(at, at + block.gradients[0]), block)
            for at, block in zip(starts, self.blocks, strict=True)
        )

    def of(self, names: Collection[str] | None) -> Jacobian:
        """The gradients of these parameters alone, of which there may be none; itself, if none are named."""
        if names is None:
            return self
        kept = [(place.start, part) for place, block in self.placed() for part in block.of(names)]
        starts = None if self.starts is None else tuple(start for start, _ in kept)
        return replace(self, blocks=tuple(part for _, part in kept), starts=starts)

    def weighted(self, output_gradient: Float[Tensor, "example out"]) -> Jacobian:
        """The Jacobian contracted with ℓ′ on its outputs: J(x)ᵀℓ′ for every example, as one output."""
        blocks = tuple(block.weighted(output_gradient[place]) for place, block in self.placed())
        return replace(self, blocks=blocks, outputs=1)

    def scaled(self, factors: Mapping[str, float]) -> Jacobian:
        return replace(self, blocks=tuple(block.scaled(factors) for block in self.blocks))

    def traced(self) -> Jacobian:
        """All outputs as one, whose inner products are the sums over outputs."""
        return replace(self, blocks=tuple(block.traced() for block in self.blocks), outputs=1)

    def applied(self, weights: Weights) -> Float[Tensor, "example out"]:
        """J v, for a v in the shape of the weights."""
        terms = [block.applied(weights) for block in self.blocks]
        if not terms:
            return next(iter(weights.values())).new_zeros(self.examples, self.outputs)
        if self.starts is None:
            return sum(terms[1:], start=terms[0])
        total = terms[0].new_zeros(self.examples, self.outputs)
        for (place, _), term in zip(self.placed(), terms, strict=True):
            total[place] += term
        return total

    def total(self, weights: Weights) -> Weights:
        """The sum over examples and outputs, in the shape of the weights: the gradient, of a weighted Jacobian."""
        found: Weights = {}
        for block in self.blocks:
            for name, value in block.total(weights).items():
                found[name] = found[name] + value if name in found else value
        return {
            name: found[name] if name in found else zeros(weight)
            for name, weight in weights.items()
        }

    def as_rows(self, sizes: Mapping[str, int]) -> Jacobian:
        """The gradients of the first elements of some parameters, multiplied out."""
        rows = {name: self.chunk(name, range(size)) for name, size in sizes.items()}
        shape = (self.examples, self.outputs, -1)
        return Jacobian(
            tuple(Rows(r.view(shape), name) for name, r in rows.items()),
            self.examples,
            self.outputs,
        )

    def with_rows(self, names: Set[str], weights: Weights) -> Jacobian:
        """The same, in which these parameters, and what shares a block with them, have the rows of all elements."""
        kept = [block for block in self.blocks if names.isdisjoint(block.extents)]
        touched = [block for block in self.blocks if not names.isdisjoint(block.extents)]
        sizes = {name: weights[name].numel() for block in touched for name in block.extents}
        return replace(self, blocks=(*kept, *self.as_rows(sizes).blocks))

    def chunk(self, name: str, elements: range) -> Float[Tensor, "row size"]:
        """The gradients of these elements of a parameter, added up over its uses: a row for each example's outputs."""
        match self.uses[name]:
            case [(place, Rows(rows=whole))] if (
                len(whole) == self.examples and elements.stop <= whole.shape[2]
            ):
                return whole[:, :, elements.start : elements.stop].flatten(0, 1)
        numbers = self.uses[name][0][1].numbers
        rows = numbers.new_zeros(self.examples, self.outputs, len(elements))
        for place, block in self.uses[name]:
            block.add_chunk(rows[place], name, elements)
        return rows.flatten(0, 1)


def arrays(block: Block) -> Mapping[str, Tensor]:
    """The fields of a block that are tensors: all have an example for each element of their first axis."""
    return {name: value for name, value in vars(block).items() if isinstance(value, Tensor)}


def stacked(parts: Sequence[Jacobian]) -> Jacobian:
    """The Jacobian of examples that follow each other; nothing is copied."""
    ends = [sum(part.examples for part in parts[:k]) for k in range(len(parts) + 1)]
    starts = tuple(end for end, part in zip(ends, parts, strict=False) for _ in part.blocks)
    blocks = tuple(block for part in parts for block in part.blocks)
    return Jacobian(blocks, ends[-1], parts[0].outputs, starts if len(parts) > 1 else None)


# --- An assembled Jacobian that is read a few examples at a time, each part copied to its place as it comes.


@dataclass
class Assembly:
    """An empty Jacobian of `examples` examples, filled part by part in order."""

    examples: int
    read: int = 0  # examples so far
    outputs: int = 0
    room: tuple[Block, ...] = ()

    @property
    def rows(self) -> Weights:
        """Where the rows of each parameter belong from the next example on: a part may write them there itself."""
        return {
            block.name: block.rows[self.read :] for block in self.room if isinstance(block, Rows)
        }

    def add(self, part: Jacobian) -> bool:
        """Copy the next examples to their place; False where they have another form than those before."""
        if not self.room:
            for block in part.blocks:
                room: dict[str, Any] = {
                    k: v.new_empty(self.examples, *v.shape[1:]) for k, v in arrays(block).items()
                }
                self.room += (replace(block, **room),)
        if part.keys != [block.key for block in self.room]:
            return False
        for whole, block in zip(self.room, part.blocks, strict=True):
            places, given = arrays(whole), arrays(block)
            if places.keys() != given.keys() or any(
                places[key].shape[1:] != given[key].shape[1:] for key in given
            ):
                return False
            for key, value in given.items():
                place = places[key][self.read : self.read + len(value)]
                if place.data_ptr() != value.data_ptr():
                    place.copy_(value)
        self.read, self.outputs = self.read + part.examples, part.outputs
        return True

    @property
    def jacobian(self) -> Jacobian:
        return Jacobian(self.room, self.examples, self.outputs)


# --- Uses that share their β are one use: positions before a mean over them, or the one position that is read.
#
#     Σ_u a_u ⊗ w_u β = (Σ_u w_u a_u) ⊗ β        with w_u one or nothing
#
# so a layer whose result is only summed up, or looked at in one place, costs a kernel what a layer of one use does.
# Whether they do is read from the numbers, for which a device is waited: a kernel by itself can afford that, a step
# not.


def in_few_uses(jacobian: Jacobian) -> Jacobian:
    """The same Jacobian, with as few uses as it can have."""
    blocks = (
        gathered(block) if isinstance(block, Factored) else block for block in jacobian.blocks
    )
    return replace(jacobian, blocks=tuple(blocks))


def gathered(block: Factored) -> Factored:
    """The same gradients from one use of each example, where all of an example's uses have one β or none.

    >>> a, beta = torch.arange(6.0).view(1, 3, 2), torch.tensor([[1.0], [0.0], [1.0]]).view(1, 1, 3, 1)
    >>> found = gathered(Factored(a, beta, None, None, None))
    >>> (found.inputs * found.outputs[:, 0]).tolist()
    [[[4.0, 6.0]]]
    """
    examples, uses, _ = block.inputs.shape
    if (
        uses < 2 or not examples or shares(block.outputs[:1]) is None
    ):  # as most show by their first example
        return block
    weights = shares(block.outputs)
    if weights is None:
        return block
    total = weights.sum(1, keepdim=True).clamp(
        min=1
    )  # in the outputs, so that a bias has its share as well
    inputs = torch.bmm((weights / total)[:, None], block.inputs)
    return replace(block, inputs=inputs, outputs=block.outputs.sum(2, keepdim=True))


def shares(
    outputs: Float[Tensor, "example out use features"],
) -> Float[Tensor, "example use"] | None:
    """One for each use that has the β of its example, nothing for one that has none; None if one has another."""
    if torch.equal(outputs[:, :, :1].expand_as(outputs), outputs):  # which is soon seen
        return outputs.new_ones(len(outputs), outputs.shape[2])
    uses = (outputs != 0).any(3).any(1)
    first = uses.to(torch.uint8).argmax(1)  # each example's first use with any β
    alike = outputs[torch.arange(len(outputs), device=first.device), :, first]
    weights = uses.to(outputs.dtype)
    return weights if torch.equal(alike[:, :, None] * weights[:, None, :, None], outputs) else None
