"""The kernel of two Jacobians, K = J_left J_rightᵀ, from their features.

For factored features ⟨Σ_u a_u ⊗ β_u, Σ_v a′_v ⊗ β′_v⟩ = Σ_uv ⟨a_u, a′_v⟩⟨β_u, β′_v⟩, which costs a product over inputs
and one over features where the multiplied-out gradients would cost their product. With many uses it is the other way
round; operations are counted, layer by layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeGuard

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.kernel.features import tiles
from ntkexp.kernel.features.features import Block, Factored, Features, Rows
from ntkexp.mistake import Mistake

STRIP, STRIPS = 128, 12  # rows: thinner strips are slower by more than they save


def gram(left: Features, right: Features) -> Float[Tensor, "probe out train out_"]:
    """The kernel between two places, summed over the parameters."""
    return add_pairs(pair_blocks(left, right)).view(left.examples, left.outputs, right.examples, right.outputs)


def trace(left: Features, right: Features) -> Float[Tensor, "probe 1 train 1"]:
    """Σ_c K[x, c, x′, c]: the kernel of all outputs taken as one, never multiplied out into blocks of outputs."""
    pairs = [as_one_output(*pair) for pair in pair_blocks(left, right)]
    return add_pairs(pairs).view(left.examples, 1, right.examples, 1)


def as_one_output(left: Block, right: Block) -> tuple[Block, Block]:
    """Both with all outputs as one."""
    one = left.traced()
    return one, one if right is left else right.traced()


def pair_blocks(left: Features, right: Features) -> list[tuple[Block, Block]]:
    """The blocks that have a share of the kernel together."""
    if left.blocks.keys() == right.blocks.keys():
        return [(block, right.blocks[key]) for key, block in left.blocks.items()]
    return multiplied_out(left, right)


def add_pairs(pairs: list[tuple[Block, Block]]) -> Float[Tensor, "probe out train out_"]:
    """The shares of all pairs."""
    single = [pair for pair in pairs if is_single_use(pair)]
    tiled = tiles.pays(single)
    total = tiles.single_uses(single) if tiled else None
    for pair in pairs:
        if not (tiled and is_single_use(pair)):
            total = add(total, *pair)
    if total is None:
        raise Mistake("the outputs depend on no parameter that requires gradients, so the tangent kernel is zero")
    return total


def is_single_use(pair: tuple[Block, Block]) -> TypeGuard[tuple[Factored, Factored]]:
    """Whether both keep their factors, one use of the weights for each example."""
    return all(isinstance(side, Factored) and side.inputs.shape[1] == 1 for side in pair)


def multiplied_out(left: Features, right: Features) -> list[tuple[Block, Block]]:
    """All pairs of gradients of the same parameter, where torch computed a few examples in another way than many."""
    ones, others = ([rows for block in side.blocks.values() for rows in block.by_name()] for side in (left, right))
    pairs = [(one, other) for one in ones for other in others if one.name == other.name]
    return [(one.upto(size), other.upto(size)) for one, other in pairs for size in [min(one.size, other.size)]]


def contributions(
    left: Features, right: Features, output_gradient: Float[Tensor, "train out_"]
) -> Float[Tensor, "probe out train"]:
    """The kernel applied to ℓ′ on its right side, for which each training example needs one vector instead of C."""
    return gram(left, right.weighted(output_gradient)).squeeze(3)


def add(total: Tensor | None, left: Factored | Rows, right: Factored | Rows) -> Tensor:
    """One block's share of the kernel, added to what there is."""
    if isinstance(left, Rows) and isinstance(right, Rows):
        share = inner(left.rows, right.rows)
    elif is_single_use(pair := (left, right)):
        return add_single_use(total, *pair)
    elif isinstance(left, Factored) and isinstance(right, Factored):
        if double_sum_is_cheaper(left, right):
            share = double_sum(left, right)
        else:
            rows = left.multiplied_out()
            share = inner(rows, rows if right is left else right.multiplied_out())
    else:
        raise TypeError("features of different functions have no common kernel")
    return share if total is None else total.add_(share)


def add_single_use(total: Tensor | None, left: Factored, right: Factored) -> Tensor:
    """⟨a, a′⟩⟨β, β′⟩, added in one pass over the kernel."""
    inputs = (left.inputs[:, 0] @ right.inputs[:, 0].t())[:, None, :, None]
    outputs = left.outputs[:, :, 0]
    features = inner(outputs, outputs if right is left else right.outputs[:, :, 0])
    return features.mul_(inputs) if total is None else total.addcmul_(features, inputs)


def inner(
    left: Float[Tensor, "probe out size"], right: Float[Tensor, "train out_ size"]
) -> Float[Tensor, "probe out train out_"]:
    """All inner products, as one product of matrices, or as half of one where both sides are the same."""
    rows = left.flatten(0, 1)
    product = with_itself(rows) if right is left else rows @ right.flatten(0, 1).t()
    return product.view(*left.shape[:2], *right.shape[:2])


def with_itself(rows: Float[Tensor, "row size"]) -> Float[Tensor, "row row_"]:
    """R Rᵀ, a strip of rows at a time from the diagonal on, and their mirror images."""
    step = max(STRIP, -(-len(rows) // STRIPS))
    product = rows.new_empty(len(rows), len(rows))
    for at in range(0, len(rows), step):
        strip = rows[at : at + step] @ rows[at:].t()
        product[at : at + step, at:] = strip
        product[at + step :, at : at + step] = strip[:, step:].t()
    return product


@dataclass(frozen=True)
class Sizes:
    """How large the factors of two Jacobians are, and how many multiplications each way to their kernel takes."""

    probe: int
    uses: int
    out: int
    train: int
    uses_: int
    out_: int
    inputs: int
    features: int

    @property
    def double_sum(self) -> int:
        """⟨a, a′⟩, ⟨β, β′⟩ and their product, for every pair of uses."""
        pairs = self.probe * self.uses * self.train * self.uses_
        return pairs * (self.inputs + self.out * self.out_ * (self.features + 1))

    @property
    def multiplied_out(self) -> int:
        """The gradients of both sides, and their inner products."""
        left, right = self.probe * self.out, self.train * self.out_
        return (left * self.uses + right * self.uses_ + left * right) * self.inputs * self.features

    @property
    def way(self) -> str:
        """The way that is taken."""
        if self.uses == self.uses_ == 1:
            return "one product"
        return "double sum" if self.double_sum <= self.multiplied_out else "multiplied out"

    @property
    def operations(self) -> int:
        """Multiplications of the way that is taken."""
        return self.multiplied_out if self.way == "multiplied out" else self.double_sum

    @property
    def numbers(self) -> int:
        """How many the way that is taken makes between the factors and the kernel."""
        if self.way == "multiplied out":
            return (self.probe * self.out + self.train * self.out_) * self.inputs * self.features
        return self.probe * self.uses * self.train * self.uses_ * (1 + self.out * self.out_)


def sizes(left: Factored, right: Factored) -> Sizes:
    """Those of two blocks."""
    (probe, uses, inputs), (train, uses_, _) = left.inputs.shape, right.inputs.shape
    return Sizes(
        probe, uses, left.outputs.shape[1], train, uses_, right.outputs.shape[1], inputs, left.outputs.shape[3]
    )


def double_sum_is_cheaper(left: Factored, right: Factored) -> bool:
    """Multiplications of the sum over pairs of uses, against those of multiplying out and one inner product."""
    return sizes(left, right).way != "multiplied out"


def double_sum(left: Factored, right: Factored) -> Float[Tensor, "probe out train out_"]:
    """Σ_uv ⟨a_u, a′_v⟩⟨β_u, β′_v⟩."""
    inputs = torch.einsum("qui,nvi->qunv", left.inputs, right.inputs)
    features = torch.einsum("qcuo,ndvo->qcundv", left.outputs, right.outputs)
    return torch.einsum("qunv,qcundv->qcnd", inputs, features)
