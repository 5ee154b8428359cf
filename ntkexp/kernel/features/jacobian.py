"""The Jacobian of a network at some inputs, a sum of blocks (see `blocks`).

There are two forms with the same methods. An *assembled* Jacobian has one block for
each parameter, which is faster for many inner products. A Jacobian that was *read use
by use* has one block for each operation that used a weight. This takes less memory if
examples read only a few rows of a large embedding table."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.kernel.features.blocks import Block, Factored, Key, Outputs, Rows, zeros
from ntkexp.shapes import Weights


@dataclass(frozen=True)
class Jacobian:
    """The Jacobian ∂f_c(x_n)/∂θ for outputs c and examples n, as a sum of blocks."""

    blocks: tuple[Block, ...]
    examples: int
    outputs: int
    # index of the first example of each block, if blocks hold different examples. None:
    # every block holds all examples
    starts: tuple[int, ...] | None = None

    @property
    def nbytes(self) -> int:
        return sum(
            value.nbytes for block in self.blocks for value in arrays(block).values()
        )

    @property
    def keys(self) -> list[Key]:
        return [block.key for block in self.blocks]

    @cached_property
    def extents(self) -> Mapping[str, int]:
        """For each parameter, the number of leading elements that include all elements
        with a gradient."""
        extents: dict[str, int] = {}
        for block in self.blocks:
            for name, size in block.extents.items():
                extents[name] = max(size, extents.get(name, 0))
        return extents

    @cached_property
    def uses(self) -> Mapping[str, list[tuple[slice, Block]]]:
        """The blocks of each parameter, each with the slice of examples
        that it holds."""
        uses: dict[str, list[tuple[slice, Block]]] = {}
        for place, block in self.blocks_with_examples():
            for name in block.names:
                uses.setdefault(name, []).append((place, block))
        return uses

    def blocks_with_examples(self) -> Iterator[tuple[slice, Block]]:
        """Yield each block with the slice of examples that it holds."""
        starts = self.starts or [0] * len(self.blocks)
        for start, block in zip(starts, self.blocks, strict=True):
            yield slice(start, start + block.gradients[0]), block

    def of(self, names: Collection[str] | None) -> Jacobian:
        """Restrict the Jacobian to the parameters `names`. If `names` is None,
        return it unchanged."""
        if names is None:
            return self
        blocks: list[Block] = []
        starts: list[int] = []
        for place, block in self.blocks_with_examples():
            for part in block.of(names):
                blocks.append(part)
                starts.append(place.start)
        return replace(
            self,
            blocks=tuple(blocks),
            starts=None if self.starts is None else tuple(starts),
        )

    def weighted(self, output_gradient: Outputs) -> Jacobian:
        """Return J(x)ᵀℓ′ (ℓ′: `output_gradient`) for every example, as a Jacobian with
        a single output."""
        blocks = tuple(
            block.weighted(output_gradient[place])
            for place, block in self.blocks_with_examples()
        )
        return replace(self, blocks=blocks, outputs=1)

    def scaled(self, factors: Mapping[str, float]) -> Jacobian:
        return replace(
            self, blocks=tuple(block.scaled(factors) for block in self.blocks)
        )

    def traced(self) -> Jacobian:
        """Concatenate the gradients of all outputs,
        so that inner products sum over outputs."""
        return replace(
            self, blocks=tuple(block.traced() for block in self.blocks), outputs=1
        )

    def applied(self, weights: Weights) -> Outputs:
        """Return J v for a vector v in the shape of the weights."""
        terms = [block.applied(weights) for block in self.blocks]
        if terms and self.starts is None:
            return sum(terms[1:], start=terms[0])
        like = terms[0] if terms else next(iter(weights.values()))
        total = like.new_zeros(self.examples, self.outputs)
        for (place, _), term in zip(self.blocks_with_examples(), terms, strict=True):
            total[place] += term
        return total

    def total(self, weights: Weights) -> Weights:
        """Return the sum over examples and outputs. If the Jacobian holds J(x)ᵀℓ′, this
        is the gradient of the loss."""
        totals: Weights = {}
        for block in self.blocks:
            for name, value in block.total(weights).items():
                totals[name] = totals[name] + value if name in totals else value
        for name in weights.keys() - totals.keys():
            totals[name] = zeros(weights[name])
        return {name: totals[name] for name in weights}

    def as_rows(self, sizes: Mapping[str, int]) -> Jacobian:
        """Return the gradients of the first `sizes[name]` elements of
        each parameter, as `Rows`."""
        blocks: list[Block] = []
        for name, size in sizes.items():
            rows = self.chunk(name, range(size)).view(self.examples, self.outputs, -1)
            blocks.append(Rows(rows, name))
        return Jacobian(tuple(blocks), self.examples, self.outputs)

    def with_rows(self, names: Set[str], weights: Weights) -> Jacobian:
        """Replace the blocks of the parameters `names`
        by `Rows` over all elements of the parameters."""
        others: list[Block] = []
        starts: list[int] = []
        sizes: dict[str, int] = {}
        for place, block in self.blocks_with_examples():
            if names.isdisjoint(block.extents):
                others.append(block)
                starts.append(place.start)
            else:
                sizes |= {name: weights[name].numel() for name in block.extents}
        rows = self.as_rows(sizes).blocks
        starts += [0] * len(rows)
        return replace(
            self,
            blocks=(*others, *rows),
            starts=None if self.starts is None else tuple(starts),
        )

    def with_sums_over_uses(self, weights: Weights, max_bytes: float) -> Jacobian:
        """Replace the factors of weights with several uses by `Rows`, if the rows of a
        weight take at most `max_bytes`.

        A product with a vector then takes one multiplication for each element. With
        factors, it takes one for each element and use."""
        names = set[str]()
        for block in self.blocks:
            if not isinstance(block, Factored) or block.inputs.shape[1] == 1:
                continue
            sizes = [weights[name].numel() for name in block.names]
            row_bytes = max(sizes) * block.numbers.element_size()
            is_small = self.examples * self.outputs * row_bytes <= max_bytes
            if is_small and all(len(self.uses[name]) == 1 for name in block.names):
                names.update(block.names)
        return self.with_rows(names, weights) if names else self

    def chunk(self, name: str, elements: range) -> Float[Tensor, "row size"]:
        """Return the gradients of some elements of a parameter, summed over uses. Each
        row of the result belongs to one example and output."""
        uses = self.uses[name]
        first = uses[0][1]
        if isinstance(first, Rows) and len(uses) == 1:
            is_complete = (
                len(first.rows) == self.examples and elements.stop <= first.size
            )
            if is_complete:
                return first.rows[:, :, elements.start : elements.stop].flatten(0, 1)
        rows = first.numbers.new_zeros(self.examples, self.outputs, len(elements))
        for place, block in uses:
            block.add_chunk(rows[place], name, elements)
        return rows.flatten(0, 1)


def arrays(block: Block) -> Mapping[str, Tensor]:
    """Return the tensors of a block. Their first axis is the axis of examples."""
    return {
        name: value for name, value in vars(block).items() if isinstance(value, Tensor)
    }


def stacked(parts: Sequence[Jacobian]) -> Jacobian:
    """Concatenate Jacobians along the axis of examples, without copying."""
    blocks: list[Block] = []
    starts: list[int] = []
    examples = 0
    for part in parts:
        blocks += part.blocks
        starts += [examples] * len(part.blocks)
        examples += part.examples
    whole = Jacobian(tuple(blocks), examples, parts[0].outputs)
    if len(parts) == 1:
        return whole
    return replace(whole, starts=tuple(starts))


@dataclass
class Assembly:
    """A preallocated Jacobian of `examples` examples. It is
    filled batch by batch, in order."""

    examples: int
    read: int = 0  # number of examples that are filled so far
    outputs: int = 0
    buffer: tuple[Block, ...] = ()

    @property
    def rows(self) -> Weights:
        """The free part of the buffers for gradients, by parameter. A reader may write
        the next batch into this part directly."""
        rows = (block for block in self.buffer if isinstance(block, Rows))
        return {block.name: block.rows[self.read :] for block in rows}

    def add(self, part: Jacobian) -> bool:
        """Copy the gradients of the next batch into the buffers. Return False if the
        block formats of this batch and of the first batch differ."""
        if not self.buffer:
            self.buffer = tuple(
                empty_block(block, self.examples) for block in part.blocks
            )
        if part.keys != self.jacobian.keys:
            return False
        for target, block in zip(self.buffer, part.blocks, strict=True):
            places = arrays(target)
            values = arrays(block)
            if shapes_per_example(places) != shapes_per_example(values):
                return False
            for key, value in values.items():
                place = places[key][self.read : self.read + len(value)]
                if place.data_ptr() != value.data_ptr():
                    place.copy_(value)
        self.read += part.examples
        self.outputs = part.outputs
        return True

    @property
    def jacobian(self) -> Jacobian:
        return Jacobian(self.buffer, self.examples, self.outputs)


def empty_block(like: Block, examples: int) -> Block:
    empty: dict[str, Any] = {}
    for name, value in arrays(like).items():
        empty[name] = value.new_empty(examples, *value.shape[1:])
    return replace(like, **empty)


def shapes_per_example(values: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    """Return the shape of each tensor, without the axis of examples."""
    return {name: value.shape[1:] for name, value in values.items()}


# Uses u of a weight with the same β can be merged into one use. For example, a mean over
# positions gives all positions the same β, and a readout at one position gives all
# other positions β = 0.
#
#     Σ_u a_u ⊗ w_u β = (Σ_u w_u a_u) ⊗ β        with w_u = 1 or 0
#
# In a kernel, such a layer then costs as much as a layer with one use. But to test the
# values of β, the CPU must wait for the GPU. So uses are merged when a single kernel is
# computed, and not at every step of a run.


def with_merged_uses(jacobian: Jacobian) -> Jacobian:
    """Merge the uses of each factored block if all nonzero β of each example are equal.
    Leave other blocks unchanged."""
    blocks = [merge_uses(b) if isinstance(b, Factored) else b for b in jacobian.blocks]
    return replace(jacobian, blocks=tuple(blocks))


def merge_uses(block: Factored) -> Factored:
    """Merge the uses of a block into one use for each example. Return the block
    unchanged if an example has two different nonzero β.

    >>> a, beta = torch.arange(6.0).view(1, 3, 2), torch.tensor([[1.0], [0.0], [1.0]]).view(1, 1, 3, 1)
    >>> one_use = merge_uses(Factored(a, beta, None, None, None))
    >>> (one_use.inputs * one_use.outputs[:, 0]).tolist()
    [[[4.0, 6.0]]]
    """
    examples, uses, _ = block.inputs.shape
    if uses < 2 or not examples:
        return block
    if use_weights(block.outputs[:1]) is None:
        return block  # this quick test rules out most blocks
    weights = use_weights(block.outputs)
    if weights is None:
        return block

    # average a and sum β, so that Σ_u β, the gradient of the bias, stays correct
    total = weights.sum(1, keepdim=True).clamp(min=1)
    inputs = torch.bmm((weights / total)[:, None], block.inputs)
    outputs = block.outputs.sum(2, keepdim=True)
    return replace(block, inputs=inputs, outputs=outputs)


def use_weights(
    outputs: Float[Tensor, "example out use features"],
) -> Float[Tensor, "example use"] | None:
    """Return the weight w_u of each use: 1 if it has the common β of its example, 0 if
    its β is zero. Return None if an example has two different nonzero β."""
    # Fast case: all uses of an example have the same β
    if torch.equal(outputs[:, :, :1].expand_as(outputs), outputs):
        return outputs.new_ones(len(outputs), outputs.shape[2])

    # Otherwise compare with the first nonzero β of each example
    has_beta = (outputs != 0).any(3).any(1)
    first = has_beta.to(torch.uint8).argmax(1)
    examples = torch.arange(len(outputs), device=first.device)
    beta = outputs[examples, :, first]
    weights = has_beta.to(outputs.dtype)
    shared = beta[:, :, None] * weights[:, None, :, None]
    if torch.equal(shared, outputs):
        return weights
    return None
