"""The Jacobian of a network at some inputs: a sum of gradient blocks.

An assembled Jacobian has each parameter in one block, for inner products that are computed again
and again. A Jacobian use by use has one block for each operation that used a weight, so that no row
is as long as a table of words. Both forms contract, stack and multiply in the same way.
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
    """J = Σ blocks: ∂f_c(x_n)/∂θ for outputs c and examples n."""

    blocks: tuple[Block, ...]
    examples: int
    outputs: int
    starts: tuple[int, ...] | None = (
        None  # the first example of each block; None: blocks hold all examples
    )

    @property
    def nbytes(self) -> int:
        return sum(value.nbytes for block in self.blocks for value in arrays(block).values())

    @property
    def keys(self) -> list[Key]:
        return [block.key for block in self.blocks]

    @cached_property
    def extents(self) -> Mapping[str, int]:
        """The number of elements of each parameter up to the last one that is used."""
        extents: dict[str, int] = {}
        for block in self.blocks:
            for name, size in block.extents.items():
                extents[name] = max(size, extents.get(name, 0))
        return extents

    @cached_property
    def uses(self) -> Mapping[str, list[tuple[slice, Block]]]:
        """The blocks of each parameter, each with its examples."""
        uses: dict[str, list[tuple[slice, Block]]] = {}
        for place, block in self.placed():
            for name in block.names:
                uses.setdefault(name, []).append((place, block))
        return uses

    def placed(self) -> Iterator[tuple[slice, Block]]:
        """Yield each block with its examples."""
        starts = self.starts or [0] * len(self.blocks)
        return (
            (slice(at, at + block.gradients[0]), block)
            for at, block in zip(starts, self.blocks, strict=True)
        )

    def of(self, names: Collection[str] | None) -> Jacobian:
        """Return the gradients of these parameters alone, or all of them if `names` is None."""
        if names is None:
            return self
        blocks: list[Block] = []
        starts: list[int] = []
        for place, block in self.placed():
            for part in block.of(names):
                blocks.append(part)
                starts.append(place.start)
        return replace(
            self, blocks=tuple(blocks), starts=None if self.starts is None else tuple(starts)
        )

    def weighted(self, output_gradient: Float[Tensor, "example out"]) -> Jacobian:
        """Return J(x)ᵀℓ′ for every example, as one output."""
        blocks = tuple(block.weighted(output_gradient[place]) for place, block in self.placed())
        return replace(self, blocks=blocks, outputs=1)

    def scaled(self, factors: Mapping[str, float]) -> Jacobian:
        return replace(self, blocks=tuple(block.scaled(factors) for block in self.blocks))

    def traced(self) -> Jacobian:
        """Return all outputs as one, whose inner products are sums over outputs."""
        return replace(self, blocks=tuple(block.traced() for block in self.blocks), outputs=1)

    def applied(self, weights: Weights) -> Float[Tensor, "example out"]:
        """Return J v for a vector v in the shape of the weights."""
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
        """Return the sum over examples and outputs. For J(x)ᵀℓ′ it is the gradient of the loss."""
        totals: Weights = {}
        for block in self.blocks:
            for name, value in block.total(weights).items():
                totals[name] = totals[name] + value if name in totals else value
        return {
            name: totals[name] if name in totals else zeros(weight)
            for name, weight in weights.items()
        }

    def as_rows(self, sizes: Mapping[str, int]) -> Jacobian:
        """Return the gradients of the first elements of some parameters, multiplied out."""
        rows = {name: self.chunk(name, range(size)) for name, size in sizes.items()}
        shape = (self.examples, self.outputs, -1)
        return Jacobian(
            tuple(Rows(r.view(shape), name) for name, r in rows.items()),
            self.examples,
            self.outputs,
        )

    def with_rows(self, names: Set[str], weights: Weights) -> Jacobian:
        """Replace the blocks of these parameters by rows of all their elements."""
        others = [block for block in self.blocks if names.isdisjoint(block.extents)]
        touched = [block for block in self.blocks if not names.isdisjoint(block.extents)]
        sizes = {name: weights[name].numel() for block in touched for name in block.extents}
        return replace(self, blocks=(*others, *self.as_rows(sizes).blocks))

    def chunk(self, name: str, elements: range) -> Float[Tensor, "row size"]:
        """Return the gradients of some elements of a parameter, summed over uses: a row for each
        output of each example.
        """
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
    """Return the tensors of a block. Their first axis is the axis of examples."""
    return {name: value for name, value in vars(block).items() if isinstance(value, Tensor)}


def stacked(parts: Sequence[Jacobian]) -> Jacobian:
    """Return the Jacobian of examples that follow each other, without copies."""
    ends = [sum(part.examples for part in parts[:k]) for k in range(len(parts) + 1)]
    starts = tuple(end for end, part in zip(ends, parts, strict=False) for _ in part.blocks)
    blocks = tuple(block for part in parts for block in part.blocks)
    return Jacobian(blocks, ends[-1], parts[0].outputs, starts if len(parts) > 1 else None)


@dataclass
class Assembly:
    """A Jacobian of `examples` examples that is filled part by part, in order."""

    examples: int
    read: int = 0  # examples so far
    outputs: int = 0
    room: tuple[Block, ...] = ()

    @property
    def rows(self) -> Weights:
        """The place for the rows of the next examples. The reader of a part may write them there
        itself.
        """
        return {
            block.name: block.rows[self.read :] for block in self.room if isinstance(block, Rows)
        }

    def add(self, part: Jacobian) -> bool:
        """Copy the gradients of the next examples to their place. Return False if their form
        differs from the first part's.
        """
        if not self.room:
            for block in part.blocks:
                room: dict[str, Any] = {
                    k: v.new_empty(self.examples, *v.shape[1:]) for k, v in arrays(block).items()
                }
                self.room += (replace(block, **room),)
        if part.keys != [block.key for block in self.room]:
            return False
        for target, block in zip(self.room, part.blocks, strict=True):
            places = arrays(target)
            values = arrays(block)
            if places.keys() != values.keys() or any(
                places[key].shape[1:] != values[key].shape[1:] for key in values
            ):
                return False
            for key, value in values.items():
                place = places[key][self.read : self.read + len(value)]
                if place.data_ptr() != value.data_ptr():
                    place.copy_(value)
        self.read = self.read + part.examples
        self.outputs = part.outputs
        return True

    @property
    def jacobian(self) -> Jacobian:
        return Jacobian(self.room, self.examples, self.outputs)


# Uses that share their β are one use: positions before a mean over positions, or the one position
# that is read.
#
#     Σ_u a_u ⊗ w_u β = (Σ_u w_u a_u) ⊗ β        with w_u = 1 or 0
#
# So a layer whose result is only summed up, or read in one place, costs a kernel as much as a layer
# with one use. The numbers show whether uses share their β. On a GPU this waits for the device,
# which a single kernel can afford, but not each step of a run.


def in_few_uses(jacobian: Jacobian) -> Jacobian:
    """Return the same Jacobian with as few uses as possible."""
    blocks = (
        gathered(block) if isinstance(block, Factored) else block for block in jacobian.blocks
    )
    return replace(jacobian, blocks=tuple(blocks))


def gathered(block: Factored) -> Factored:
    """Return a block with one use for each example, if all uses of an example have the same β or
    none.

    >>> a, beta = torch.arange(6.0).view(1, 3, 2), torch.tensor([[1.0], [0.0], [1.0]]).view(1, 1, 3, 1)
    >>> one_use = gathered(Factored(a, beta, None, None, None))
    >>> (one_use.inputs * one_use.outputs[:, 0]).tolist()
    [[[4.0, 6.0]]]
    """
    examples, uses, _ = block.inputs.shape
    if (
        uses < 2 or not examples or shares(block.outputs[:1]) is None
    ):  # the first example shows most that do not
        return block
    weights = shares(block.outputs)
    if weights is None:
        return block
    total = weights.sum(1, keepdim=True).clamp(
        min=1
    )  # the number of uses goes into the outputs, so that the bias is right as well
    inputs = torch.bmm((weights / total)[:, None], block.inputs)
    return replace(block, inputs=inputs, outputs=block.outputs.sum(2, keepdim=True))


def shares(
    outputs: Float[Tensor, "example out use features"],
) -> Float[Tensor, "example use"] | None:
    """Return 1 for each use with the β of its example and 0 for each use without β, or None if
    there is another β.
    """
    if torch.equal(outputs[:, :, :1].expand_as(outputs), outputs):  # quick to see
        return outputs.new_ones(len(outputs), outputs.shape[2])
    uses = (outputs != 0).any(3).any(1)
    first = uses.to(torch.uint8).argmax(1)  # first use with a β
    alike = outputs[torch.arange(len(outputs), device=first.device), :, first]
    weights = uses.to(outputs.dtype)
    return weights if torch.equal(alike[:, :, None] * weights[:, None, :, None], outputs) else None
