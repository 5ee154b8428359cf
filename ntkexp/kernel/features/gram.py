"""The kernel of two Jacobians, K = J_left J_rightᵀ: one loop over gradient blocks, parameter chunks and strips of K.

Blocks of the same weights that keep their factors are multiplied as

    ⟨Σ_u a_u ⊗ β_u, Σ_v a′_v ⊗ β′_v⟩ = Σ_uv ⟨a_u, a′_v⟩⟨β_u, β′_v⟩,

which costs a product over inputs and one over features where the multiplied-out gradients would cost their product.
With many uses it is the other way round; operations are counted, weight by weight. All other parameters are multiplied
out, a chunk at a time: small ones side by side, so that few products take them all, and large ones in pieces, so that
no row is ever as long as the weights.

    K += R R′ᵀ        R[nc, p] = ∂f_c(x_n)/∂θ_p for the p of one chunk
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.kernel.features.blocks import Block, Copies, Factored, Key, bias_product
from ntkexp.kernel.features.jacobian import Jacobian
from ntkexp.mistake import Mistake


def gram(left: Jacobian, right: Jacobian) -> Float[Tensor, "probe out train out_"]:
    """K = J J′ᵀ, summed over the parameters. Of a Jacobian with itself half is formed, and mirrored."""
    if not left.blocks or not right.blocks:
        raise Mistake(
            "the outputs depend on no parameter that requires gradients, so the tangent kernel is zero"
        )
    plan = arrange_products(left, right)
    like = left.blocks[0].numbers
    # What is added up in many pieces, each of them less than the sum is rounded by, is added in double precision
    is_cut = any(isinstance(one, ParameterChunk) for one, _ in plan.chunks)
    kind = torch.float64 if is_cut else like.dtype
    shape = (left.examples * left.outputs, right.examples * right.outputs)
    total = Total(like.new_empty(shape, dtype=kind), (left.outputs, right.outputs), left is right)

    total.add_single_uses(
        [(one, other) for one, other, way in plan.factored if way == "one product"]
    )
    for one, other, way in plan.factored:
        if way == "double sum":
            total.add(double_sum(one, other).reshape(shape))
    for chunk in groups(plan.chunks):
        rows = side_by_side(left, [column[0] for column in chunk])
        rows_ = rows if left is right else side_by_side(right, [column[1] for column in chunk])
        total.add_product(rows, rows_)
    kernel = total.whole().view(left.examples, left.outputs, right.examples, right.outputs)
    for key in plan.spread:
        add_double_sums(kernel, key, left, right)
    return kernel.to(like.dtype)


def trace(left: Jacobian, right: Jacobian) -> Float[Tensor, "probe 1 train 1"]:
    """Σ_c K[x, c, x′, c]: the kernel of all outputs taken as one, never multiplied out into blocks of outputs."""
    if set(left.keys) != set(right.keys):  # both sides were read in two ways
        both = {
            name: min(left.extents[name], right.extents[name])
            for name in left.extents
            if name in right.extents
        }
        left, right = left.as_rows(both), right.as_rows(both)
    one = left.traced()
    return gram(one, one if right is left else right.traced())


def contributions(
    left: Jacobian, right: Jacobian, output_gradient: Float[Tensor, "train out_"]
) -> Float[Tensor, "probe out train"]:
    """The kernel applied to ℓ′ on its right side, for which each training example needs one vector instead of C."""
    return gram(left, right.weighted(output_gradient)).squeeze(3)


# --- Which products make the kernel: pairs of factors, or chunks of parameters.


@dataclass(frozen=True)
class ParameterChunk:
    """Some elements of one parameter, in its order."""

    name: str
    elements: range

    @property
    def size(self) -> int:
        return len(self.elements)


Column: TypeAlias = tuple[Block | ParameterChunk, Block | ParameterChunk]
"""What is multiplied out on either side: whole blocks of one key, in an order of their own, or the same elements."""

COLUMNS = (
    2**11
)  # no product of matrices is faster for more; to bring more together takes longer than it saves
WHOLE = 2**29  # bytes of rows that are multiplied out at once
PIECE_BYTES = (
    2**23
)  # of gradients in a piece of a parameter, unless it has fewer than the next number of elements
PIECE_ELEMENTS = 2**11  # products of matrices are slower for fewer


@dataclass(frozen=True)
class ProductPlan:
    factored: Sequence[tuple[Factored, Factored, str]]  # whole blocks, and their way
    spread: Sequence[Key]  # of which each side has several blocks of factors
    chunks: Sequence[Column]


def arrange_products(left: Jacobian, right: Jacobian) -> ProductPlan:
    """How each parameter is multiplied: by the fewest operations."""
    factored, spread, chunks = list[tuple[Factored, Factored, str]](), list[Key](), list[Column]()
    sizes_of_keys, done = alone(left, right), set[str]()
    for key, size in sizes_of_keys.items():
        ones, others = (
            [block for block in side.blocks if block.key == key] for side in (left, right)
        )
        one, other = ones[0], others[0]
        whole = len(ones) == len(others) == 1 and one.gradients[0] == left.examples
        if isinstance(one, Factored) and isinstance(other, Factored) and size is not None:
            if size.way != "multiplied out":
                if whole:
                    factored.append((one, other, size.way))
                else:
                    spread.append(key)
                done |= one.extents.keys()
                continue
            longer = max(
                size.probe * size.out, size.train * size.out_
            )  # its side's rows, multiplied out
            whole = (
                whole and longer * size.inputs * size.features * one.numbers.element_size() <= WHOLE
            )
        if whole and not isinstance(one, Copies) and not isinstance(other, Copies):
            pieces = one.pieces()
            chunks += zip(pieces, pieces if other is one else other.pieces(), strict=True)
            done |= one.extents.keys()
    for name in left.extents:
        if name in right.extents and name not in done:
            elements = range(min(left.extents[name], right.extents[name]))
            chunks += ((piece, piece) for piece in cut(left, name, elements))
    return ProductPlan(factored, spread, chunks)


def alone(left: Jacobian, right: Jacobian) -> dict[Key, Sizes | None]:
    """The keys that both sides have and whose parameters meet inputs in no other way, and how large factors are."""
    ways: dict[str, set[Key]] = {}
    for block in (*left.blocks, *(() if right is left else right.blocks)):
        for name in block.extents:
            ways.setdefault(name, set()).add(block.key)
    both = set(left.keys) & set(right.keys)
    found: dict[Key, Sizes | None] = {}
    for block in left.blocks:
        if (
            block.key in both
            and block.key not in found
            and all(len(ways[name]) == 1 for name in block.extents)
        ):
            found[block.key] = (
                sizes_between(left, right, block.key) if isinstance(block, Factored) else None
            )
    return found


def cut(side: Jacobian, name: str, elements: range) -> Iterator[ParameterChunk]:
    """A parameter in pieces of whole lines of it, that stay in caches until they are multiplied."""
    row_bytes = side.blocks[0].numbers.element_size() * side.examples * side.outputs
    width = max((block.line for _, block in side.uses[name][:1]), default=1)
    step = max(1, max(PIECE_ELEMENTS, PIECE_BYTES // row_bytes) // width) * width
    return (
        ParameterChunk(name, range(at, min(at + step, elements.stop)))
        for at in range(elements.start, elements.stop, step)
    )


def groups(columns: Sequence[Column]) -> Iterator[list[Column]]:
    """Those that are multiplied side by side, small ones first; pieces of a parameter are multiplied alone."""
    group: list[Column] = []
    yield from ([column] for column in columns if isinstance(column[0], ParameterChunk))
    whole = [column for column in columns if not isinstance(column[0], ParameterChunk)]
    for column in sorted(whole, key=lambda column: column[0].size):
        if group and sum(one.size for one, _ in [*group, column]) > COLUMNS:
            yield group
            group = []
        group.append(column)
    if group:
        yield group


def side_by_side(
    side: Jacobian, columns: Sequence[Block | ParameterChunk]
) -> Float[Tensor, "row size"]:
    """The gradients of some elements, a row for each output of each example."""
    rows = [
        side.chunk(each.name, each.elements)
        if isinstance(each, ParameterChunk)
        else multiplied_out(each).flatten(0, 1)
        for each in columns
    ]
    return rows[0] if len(rows) == 1 else torch.cat(rows, 1)


def multiplied_out(block: Block) -> Float[Tensor, "example out size"]:
    assert not isinstance(block, Copies)
    return block.multiplied_out()


# --- The cost of a product of factors.


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
    (probe, uses, _), (train, uses_, _) = left.inputs.shape, right.inputs.shape
    out, out_ = left.outputs.shape[1], right.outputs.shape[1]
    return Sizes(probe, uses, out, train, uses_, out_, left.rows, left.outputs.shape[3])


def sizes_between(left: Jacobian, right: Jacobian, key: Key) -> Sizes:
    """Those of all uses of the same weights: as many of every example as of the first."""
    first = [
        [b for at, b in side.placed() if b.key == key and not at.start] for side in (left, right)
    ]
    counts = [
        sum(block.inputs.shape[1] for block in side if isinstance(block, Factored))
        for side in first
    ]
    one = next(block for block in left.blocks if block.key == key)
    assert isinstance(one, Factored)
    return replace(
        sizes(one, one),
        probe=left.examples,
        uses=counts[0],
        train=right.examples,
        uses_=counts[1],
        out_=right.outputs,
    )


# --- Products of factors.


def double_sum(left: Factored, right: Factored) -> Float[Tensor, "probe out train out_"]:
    """Σ_uv (⟨a_u, a′_v⟩ + s s′)⟨β_u, β′_v⟩."""
    inputs = torch.einsum("qui,nvi->qunv", left.inputs, right.inputs) + bias_product(left, right)
    features = torch.einsum("qcuo,ndvo->qcundv", left.outputs, right.outputs)
    return torch.einsum("qunv,qcundv->qcnd", inputs, features)


def add_double_sums(
    kernel: Float[Tensor, "probe out train out_"], key: Key, left: Jacobian, right: Jacobian
) -> None:
    """Add the share of weights whose uses keep factors of their own, for each pair of blocks."""
    ones, others = ([(at, b) for at, b in side.placed() if b.key == key] for side in (left, right))
    for (rows, one), (columns, other) in product(ones, others):
        if right is left and columns.start < rows.start:
            continue
        assert isinstance(one, Factored)
        assert isinstance(other, Factored)
        share = double_sum(one, other)
        kernel[rows, :, columns] += share
        if right is left and columns.start > rows.start:
            kernel[columns, :, rows] += share.permute(2, 3, 0, 1)


# --- The total of a kernel, to which the shares of its parameters are added.
#
# Of a Jacobian with itself only the half from the diagonal on is formed, strip by strip, and mirrored once, when all
# shares are in it.


STRIP, STRIPS = (
    64,
    12,
)  # rows of a strip at least, and strips at most: thinner ones cost more than they save
BLOCK = 2**17  # numbers of a strip that are summed over all weights while they are in the cache


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
        out = self.outputs[0]
        step = -(-max(STRIP, -(-rows // STRIPS)) // out) * out
        ends = [(at, min(at + step, rows)) for at in range(0, rows, step)]
        return [(self.matrix[at:end, at:], range(at, end), range(at, rows)) for at, end in ends]

    def add_product(
        self, left: Float[Tensor, "row size"], right: Float[Tensor, "row_ size"]
    ) -> None:
        """R R′ᵀ."""
        right = right.t()
        for strip, rows, columns in self.strips:
            factors = narrow(left, 0, rows), narrow(right, 1, columns)
            if left.dtype != self.matrix.dtype:
                write(strip, torch.mm(*factors), begun=self.begun)
            elif self.begun:
                strip.addmm_(*factors)
            else:
                torch.mm(*factors, out=strip)
        self.begun = True

    def add_single_uses(self, pairs: Sequence[tuple[Factored, Factored]]) -> None:
        """Σ_l (⟨a, a′⟩ + s s′)⟨β, β′⟩ over weights l that are used once, for pairs of examples and of their outputs.

        Of ten outputs the products over β are a hundred times larger than those over a, and to sum whole ones would
        wait for memory: a block of the kernel is summed over all weights before the next is begun.
        """
        if not pairs:
            return
        out, out_ = self.outputs
        layers = [matrices(*pair) for pair in pairs]
        for strip, rows, columns in self.strips:
            height = len(rows) if out * out_ == 1 else max(1, BLOCK // (len(columns) * out)) * out
            room = layers[0].outputs.new_empty(min(height, len(rows)) * len(columns))
            for some in (
                range(at, min(at + height, rows.stop))
                for at in range(rows.start, rows.stop, height)
            ):
                block = narrow(strip, 0, range(some.start - rows.start, some.stop - rows.start))
                block = block.view(len(some) // out, out, len(columns)) if out * out_ > 1 else block
                for k, layer in enumerate(layers):
                    examples, examples_ = (
                        range(r.start // o, r.stop // o) for r, o in ((some, out), (columns, out_))
                    )
                    inputs = torch.mm(
                        narrow(layer.inputs, 0, examples), narrow(layer.inputs_, 1, examples_)
                    )
                    inputs.add_(layer.shift)
                    if layer.same is not None:
                        features = layer.same
                    else:
                        features = room[: len(some) * len(columns)].view(len(some), len(columns))
                        torch.mm(
                            narrow(layer.outputs, 0, some),
                            narrow(layer.outputs_, 1, columns),
                            out=features,
                        )
                    if (
                        out * out_ > 1
                    ):  # a number for each column, so that blocks are gone through row by row
                        features = features.view(block.shape)
                        inputs = (
                            inputs[:, None, :, None]
                            .expand(-1, 1, -1, out_)
                            .reshape(len(inputs), 1, -1)
                        )
                    if block.dtype != features.dtype:
                        write(block, features * inputs, begun=self.begun or k > 0)
                    elif self.begun or k:
                        block.addcmul_(features, inputs)
                    else:
                        torch.mul(features, inputs, out=block)
        self.begun = True

    def add(self, share: Float[Tensor, "row row_"]) -> None:
        write(self.matrix, share, begun=self.begun)
        self.begun = True

    def whole(self) -> Float[Tensor, "row row_"]:
        """The kernel, when all shares are in it."""
        if not self.begun:
            self.matrix.zero_()
        for _, rows, columns in self.strips if self.halved else ():
            above = slice(rows.start, rows.stop), slice(rows.stop, columns.stop)
            self.matrix[above[::-1]] = self.matrix[above].t()
        return self.matrix


def write(place: Float[Tensor, "..."], share: Float[Tensor, "..."], *, begun: bool) -> None:
    """Add to what is there, or begin with it."""
    place.add_(share) if begun else place.copy_(share)


@dataclass(frozen=True)
class Layer:
    """The factors of a weight that each example uses once, as matrices; the right ones transposed."""

    inputs: Float[Tensor, "probe in_"]
    inputs_: Float[Tensor, "in_ train"]
    outputs: Float[Tensor, "probe_out features"]
    outputs_: Float[Tensor, "features train_out"]
    shift: float  # what biases add to each ⟨a, a′⟩
    same: (
        Float[Tensor, "1 1"] | None
    )  # ⟨β, β′⟩, where the one β of a readout is the same for all examples


def matrices(left: Factored, right: Factored) -> Layer:
    inputs, outputs = left.inputs[:, 0], left.outputs[:, :, 0].flatten(0, 1)
    inputs_, outputs_ = inputs, outputs
    if right is not left:
        inputs_, outputs_ = right.inputs[:, 0], right.outputs[:, :, 0].flatten(0, 1)
    one = left.outputs.shape[1] == right.outputs.shape[1] == 1
    constant = one and left.outputs.stride(0) == 0 and right.outputs.stride(0) == 0
    same = outputs[:1] @ outputs_[:1].t() if constant else None
    return Layer(inputs, inputs_.t(), outputs, outputs_.t(), bias_product(left, right), same)


def narrow(value: Float[Tensor, "..."], axis: int, where: range) -> Float[Tensor, "..."]:
    """Some rows, or columns, for which an index takes twice as long."""
    return value.narrow(axis, where.start, len(where))
