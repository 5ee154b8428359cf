"""The kernel of two Jacobians, K = J_left J_rightᵀ, from their features.

For factored features ⟨Σ_u a_u ⊗ β_u, Σ_v a′_v ⊗ β′_v⟩ = Σ_uv ⟨a_u, a′_v⟩⟨β_u, β′_v⟩, which costs a product over inputs
and one over features where the multiplied-out gradients would cost their product. With many uses it is the other way
round; operations are counted, layer by layer. What is multiplied out is laid side by side.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeGuard

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.kernel.features import tiles
from ntkexp.kernel.features.blocks import Block, Factored, Rows, of_biases
from ntkexp.kernel.features.features import Features
from ntkexp.kernel.features.sheets import sheets
from ntkexp.kernel.features.total import Total
from ntkexp.mistake import Mistake


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
    shared = left.blocks.keys() & right.blocks.keys()
    pairs = [(block, right.blocks[key]) for key, block in left.blocks.items() if key in shared]
    others = [[block for key, block in side.blocks.items() if key not in shared] for side in (left, right)]
    return pairs + pair_parameters(*others)


def add_pairs(pairs: list[tuple[Block, Block]]) -> Float[Tensor, "row row_"]:
    """The shares of all pairs."""
    if not pairs:
        raise Mistake("the outputs depend on no parameter that requires gradients, so the tangent kernel is zero")
    single = [pair for pair in pairs if is_single_use(pair)]
    tiled = tiles.pays(single)
    share = tiles.single_uses(single) if tiled else None
    others = [pair for pair in pairs if not (tiled and is_single_use(pair))]
    if share is not None and not others:
        return share.flatten(2).flatten(0, 1)
    total = begun(share, pairs)
    for sheet, sheet_ in sheets([pair for pair in others if not add_factored(total, *pair)]):
        total.add_product(sheet, sheet_)
    return total.whole()


def begun(share: Float[Tensor, "probe out train out_"] | None, pairs: list[tuple[Block, Block]]) -> Total:
    """A total that holds a share, or nothing yet."""
    (probe, out), (train, out_) = (block.gradients for block in pairs[0])
    size = (probe * out, train * out_)
    matrix = pairs[0][0].numbers.new_empty(size) if share is None else share.view(size)
    halved = all(one is other for one, other in pairs)
    return Total(matrix, (out, out_), halved, begun=share is not None)


def add_factored(total: Total, left: Block, right: Block) -> bool:
    """Add the share of a pair whose factors are not multiplied out; False for any other."""
    match left, right:
        case Rows(), Rows():
            return False
        case Factored(), Factored():
            way = sizes(left, right).way
            if way == "one product":
                total.add_single_use(left, right)
            elif way == "double sum":
                total.add(double_sum(left, right).reshape(total.matrix.shape))
            return way != "multiplied out"
    raise TypeError("features of different functions have no common kernel")


def is_single_use(pair: tuple[Block, Block]) -> TypeGuard[tuple[Factored, Factored]]:
    """Whether both keep their factors, one use of the weights for each example."""
    return all(isinstance(side, Factored) and side.inputs.shape[1] == 1 for side in pair)


def pair_parameters(left: list[Block], right: list[Block]) -> list[tuple[Block, Block]]:
    """All pairs of gradients of the same parameter, where two sides were read in two ways."""
    ones, others = ([rows for block in side for rows in block.by_name()] for side in (left, right))
    pairs = [(one, other) for one in ones for other in others if one.name == other.name]
    return [(one.upto(size), other.upto(size)) for one, other in pairs for size in [min(one.size, other.size)]]


def contributions(
    left: Features, right: Features, output_gradient: Float[Tensor, "train out_"]
) -> Float[Tensor, "probe out train"]:
    """The kernel applied to ℓ′ on its right side, for which each training example needs one vector instead of C."""
    return gram(left, right.weighted(output_gradient)).squeeze(3)


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
    (probe, uses, _), (train, uses_, _) = left.inputs.shape, right.inputs.shape
    return Sizes(
        probe, uses, left.outputs.shape[1], train, uses_, right.outputs.shape[1], left.rows, left.outputs.shape[3]
    )


def double_sum(left: Factored, right: Factored) -> Float[Tensor, "probe out train out_"]:
    """Σ_uv (⟨a_u, a′_v⟩ + s s′)⟨β_u, β′_v⟩."""
    inputs = torch.einsum("qui,nvi->qunv", left.inputs, right.inputs) + of_biases(left, right)
    features = torch.einsum("qcuo,ndvo->qcundv", left.outputs, right.outputs)
    return torch.einsum("qunv,qcundv->qcnd", inputs, features)
