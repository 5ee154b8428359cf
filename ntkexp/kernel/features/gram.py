"""The kernel of two Jacobians, K = J_left J_rightᵀ, from their features."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TypeAlias, TypeGuard

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.kernel.features.blocks import Block, Factored, Features, Rows, of_biases
from ntkexp.mistake import Mistake

# --- Sheets: gradients multiplied out, those of small parameters side by side, so that few products take them all.


COLUMNS = 2**11  # no product of matrices is faster for more; to bring more together takes longer than it saves

Pair: TypeAlias = tuple[Block, Block]


def sheets(pairs: Sequence[Pair]) -> Iterator[tuple[Float[Tensor, "row size"], Float[Tensor, "row_ size"]]]:
    """The sheets of both sides, one object where both sides are one."""
    for group in groups([piece for pair in pairs for piece in pieces(*pair)]):
        ones, others = zip(*group, strict=True)
        sheet = side_by_side(ones)
        same = all(one is other for one, other in group)
        yield sheet, sheet if same else side_by_side(others)


def pieces(left: Block, right: Block) -> Iterator[Pair]:
    """Weights and biases as pairs of their own."""
    ones = left.pieces()
    yield from zip(ones, ones if right is left else right.pieces(), strict=True)


def groups(pairs: Sequence[Pair]) -> Iterator[list[Pair]]:
    """Pairs that have a sheet in common, small ones first."""
    group: list[Pair] = []
    for pair in sorted(pairs, key=lambda pair: pair[0].size):
        if group and sum(one.size for one, _ in [*group, pair]) > COLUMNS:
            yield group
            group = []
        group.append(pair)
    if group:
        yield group


def side_by_side(blocks: Sequence[Block]) -> Float[Tensor, "row size"]:
    """Gradients of all blocks, a row for each output of each example."""
    rows = [block.multiplied_out() for block in blocks]
    return (rows[0] if len(rows) == 1 else torch.cat(rows, 2)).flatten(0, 1)


# --- The kernel of layers that are used once per example, for many outputs, a tile that stays in the cache at a time.
#
#     K[q, c, n, d] = Σ_l ⟨a_q, a′_n⟩ ⟨β_qc, β′_nd⟩        with a sum over layers l
#
# Of ten outputs the products over β are a hundred times larger than those over a, and summing whole ones layer by
# layer waits for memory: each tile is summed over all layers before it is written. The β of a readout are the
# same for all examples, so theirs is one small product:
#
#     K[q, c, n, d] += ⟨a_q, a′_n⟩ G[c, d]                 with G = ⟨β_c, β′_d⟩


ROWS = 320  # of a tile: two tiles of float64 are 1.6 MB
WORTHWHILE = 1000  # rows of the kernel from which on whole products outgrow caches


@dataclass(frozen=True)
class Layer:
    """The products over the inputs of one layer, and the factors of those over its outputs; of a readout, G instead."""

    inputs: Float[Tensor, "probe train"]
    outputs: Float[Tensor, "probe_out features"]
    outputs_: Float[Tensor, "train_out features"]
    shared: Float[Tensor, "out out_"] | None


def pays(pairs: Sequence[tuple[Factored, Factored]]) -> bool:
    """Whether the kernel has several outputs, layers to be summed over, and is large, on a processor with caches."""
    if not pairs:
        return False
    left, right = pairs[0]
    probe, train = (side.outputs.shape[0] * side.outputs.shape[1] for side in (left, right))
    several = max(left.outputs.shape[1], right.outputs.shape[1]) > 1
    return len(pairs) > 1 and several and min(probe, train) > WORTHWHILE and left.inputs.device.type == "cpu"


def single_uses(pairs: Sequence[tuple[Factored, Factored]]) -> Float[Tensor, "probe out train out_"]:
    """The kernel of all pairs; of features with themselves, one half of it and its mirror image."""
    left, right = pairs[0]
    (probe, out), (train, out_) = left.gradients, right.gradients
    layers, same = [layer(*pair) for pair in pairs], all(one is other for one, other in pairs)
    kernel = left.outputs.new_empty(probe * out, train * out_)
    steps = max(1, ROWS // out), max(1, ROWS // out_)
    rooms = kernel.new_empty(2, steps[0] * out * steps[1] * out_)  # memory that is not asked for tile by tile
    for rows, columns in places(probe, train, steps, same):
        place, place_ = scaled(rows, out), scaled(columns, out_)
        part = tile(layers, rows, columns, (out, out_), rooms)
        if same and rows.start == columns.start:  # products of matrices need not be symmetric to the bit
            square = part[:, : len(part)]
            square.copy_(square.triu() + square.triu(1).t())
        kernel[place, place_] = part
        if same and columns.stop > rows.stop:
            behind = slice(max(place.stop, place_.start), place_.stop)
            kernel[behind, place] = part[:, behind.start - place_.start :].t()
    return kernel.view(probe, out, train, out_)


def places(probe: int, train: int, steps: tuple[int, int], same: bool) -> Iterator[tuple[slice, slice]]:
    """The examples of all tiles; of those on a diagonal whose halves are mirror images, three quarters.

    >>> list(places(4, 4, (4, 4), True))
    [(slice(0, 2, None), slice(0, 4, None)), (slice(2, 4, None), slice(2, 4, None))]
    """
    step, step_ = steps
    for at in range(0, probe, step):
        rows = slice(at, min(at + step, probe))
        if same:
            middle = (rows.start + rows.stop) // 2
            yield slice(at, middle), rows
            yield slice(middle, rows.stop), slice(middle, rows.stop)
        for at_ in range(rows.stop if same else 0, train, step_):
            yield rows, slice(at_, min(at_ + step_, train))


def layer(left: Factored, right: Factored) -> Layer:
    """The factors as matrices."""
    ones = left.outputs[:, :, 0]
    others = ones if right is left else right.outputs[:, :, 0]
    shared = ones[0] @ others[0].t() if is_shared(ones) and is_shared(others) else None
    rows = ones.flatten(0, 1)
    rows_ = rows if right is left else others.flatten(0, 1)
    inputs = torch.mm(left.inputs[:, 0], right.inputs[:, 0].t()).add_(of_biases(left, right))
    return Layer(inputs, rows, rows_, shared)


def is_shared(outputs: Float[Tensor, "example out features"]) -> bool:
    """Whether all examples have the same; most that do not already differ in the first and the last.

    >>> is_shared(torch.eye(2).expand(3, 2, 2)), is_shared(torch.arange(3.0).view(3, 1, 1))
    (True, False)
    """
    first = outputs[:1]
    return torch.equal(first, outputs[-1:]) and torch.equal(first.expand_as(outputs), outputs)


def tile(
    layers: Sequence[Layer], rows: slice, columns: slice, outs: tuple[int, int], rooms: Float[Tensor, "two size"]
) -> Float[Tensor, "row_out column_out"]:
    """The kernel of some examples with some others, of all layers, in the first of two rooms.

    Products over inputs are repeated along columns, so that what they are multiplied with is gone through row by row.
    """
    out, out_ = outs
    shape = (rows.stop - rows.start, out, (columns.stop - columns.start) * out_)
    total, products = rooms[0, : prod(shape)].view(shape), rooms[1, : prod(shape)].view(shape)
    for k, each in enumerate(layers):
        inputs = each.inputs[rows, columns, None].expand(-1, -1, out_).reshape(shape[0], 1, shape[2])
        if each.shared is None:
            factors = each.outputs[scaled(rows, out)], each.outputs_[scaled(columns, out_)].t()
            torch.mm(*factors, out=products.flatten(0, 1))
            part = products
        else:
            part = each.shared.repeat(1, columns.stop - columns.start)
        total.addcmul_(part, inputs) if k else torch.mul(part, inputs, out=total)
    return total.flatten(0, 1)


def scaled(examples: slice, outputs: int) -> slice:
    """The rows of these examples, so many of each.

    >>> scaled(slice(2, 4), 10)
    slice(20, 40, None)
    """
    return slice(examples.start * outputs, examples.stop * outputs)


# --- The total of a kernel, to which the shares of its parameters are added.
#
# Of a kernel of features with themselves only the half from the diagonal on is formed, strip by strip, and
# mirrored once, when all shares are in it.


STRIP, STRIPS = 96, 12  # rows: thinner strips are slower by more than they save
SMALL, THIN = 640, 64  # rows of a kernel that is cut into columns: products of few columns keep their rate


@dataclass
class Total:
    """The sum so far; `outputs` says how many rows belong to an example on the left, and columns on the right."""

    matrix: Float[Tensor, "row row_"]
    outputs: tuple[int, int]
    halved: bool  # both sides are one
    begun: bool = False

    @cached_property
    def strips(self) -> list[tuple[Float[Tensor, "row row_"], range, range]]:
        """Parts of whole examples to which products are added, in which every entry is, or its mirror image; and which
        rows and columns each is of.
        """
        rows, columns = self.matrix.shape
        if not self.halved:
            return [(self.matrix, range(rows), range(columns))]
        least, out = THIN if rows <= SMALL else max(STRIP, -(-rows // STRIPS)), self.outputs[0]
        step = -(-least // out) * out
        ends = [(at, min(at + step, rows)) for at in range(0, rows, step)]
        if rows > SMALL:
            places = [(range(at, end), range(at, rows)) for at, end in ends]
        else:
            places = [(range(end), range(at, end)) for at, end in ends]
        return [(part(part(self.matrix, 0, some), 1, others), some, others) for some, others in places]

    def add_product(self, left: Float[Tensor, "row size"], right: Float[Tensor, "row_ size"]) -> None:
        """R R′ᵀ."""
        right = right.t()
        for place, rows, columns in self.strips:
            factors = part(left, 0, rows), part(right, 1, columns)
            place.addmm_(*factors) if self.begun else torch.mm(*factors, out=place)
        self.begun = True

    def add_single_use(self, left: Factored, right: Factored) -> None:
        """(⟨a, a′⟩ + s s′)⟨β, β′⟩, for each pair of examples and each of their outputs."""
        shift = of_biases(left, right)
        inputs, outputs = matrices(left)
        inputs_, outputs_ = (inputs, outputs) if right is left else matrices(right)
        inputs_, outputs_ = inputs_.t(), outputs_.t()
        single = self.outputs == (1, 1)
        alike = outputs[:1] @ outputs_[:, :1] if single and is_one_row(left) and is_one_row(right) else None
        for strip, rows, columns in self.strips:
            place = strip
            features = torch.mm(part(outputs, 0, rows), part(outputs_, 1, columns)) if alike is None else alike
            if single:  # torch goes through axes of one element one by one
                products = torch.mm(part(inputs, 0, rows), part(inputs_, 1, columns)).add_(shift)
            else:
                examples, examples_ = (
                    part(inputs, 0, self.examples(rows, 0)),
                    part(inputs_, 1, self.examples(columns, 1)),
                )
                products = torch.mm(examples, examples_).add_(shift)
                shape = (len(products), self.outputs[0], products.shape[1], self.outputs[1])
                place, features, products = place.view(shape), features.view(shape), products[:, None, :, None]
            place.addcmul_(features, products) if self.begun else torch.mul(features, products, out=place)
        self.begun = True

    def examples(self, rows: range, side: int) -> range:
        """The examples that rows belong to."""
        out = self.outputs[side]
        return range(rows.start // out, rows.stop // out)

    def add(self, share: Float[Tensor, "row row_"]) -> None:
        """A share as it is."""
        self.matrix.add_(share) if self.begun else self.matrix.copy_(share)
        self.begun = True

    def whole(self) -> Float[Tensor, "row row_"]:
        """The kernel, when all shares are in it."""
        for _, rows, columns in self.strips if self.halved else ():
            if rows.start < columns.start:
                above = slice(columns.start), slice(columns.start, columns.stop)
            else:
                above = slice(rows.start, rows.stop), slice(rows.stop, columns.stop)
            self.matrix[above[::-1]] = self.matrix[above].t()
        return self.matrix


def matrices(block: Factored) -> tuple[Float[Tensor, "example in_"], Float[Tensor, "row features"]]:
    """The factors of a single use, a row of β for each example and output."""
    return block.inputs[:, 0], block.outputs[:, :, 0].flatten(0, 1)


def is_one_row(block: Factored) -> bool:
    """Whether the β of all examples are known to be one, as those of a readout are."""
    return block.outputs.stride(0) == 0


def part(value: Float[Tensor, "..."], axis: int, where: range) -> Float[Tensor, "..."]:
    """Some rows, or columns, for which an index takes twice as long."""
    return value.narrow(axis, where.start, len(where))


# --- The kernel of two Jacobians, K = J_left J_rightᵀ, from their features.
#
# For factored features ⟨Σ_u a_u ⊗ β_u, Σ_v a′_v ⊗ β′_v⟩ = Σ_uv ⟨a_u, a′_v⟩⟨β_u, β′_v⟩, which costs a product over
# inputs and one over features where the multiplied-out gradients would cost their product. With many uses it is
# the other way round; operations are counted, layer by layer. What is multiplied out is laid side by side.


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
    tiled = pays(single)
    share = single_uses(single) if tiled else None
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
