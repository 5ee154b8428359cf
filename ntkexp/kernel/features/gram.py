"""The kernel of two Jacobians, K = J_left J_rightᵀ, as a sum of matrix products over parameters.

Blocks of the same weight that keep their factors are multiplied as

    ⟨Σ_u a_u ⊗ β_u, Σ_v a′_v ⊗ β′_v⟩ = Σ_uv ⟨a_u, a′_v⟩⟨β_u, β′_v⟩,

which costs a product over inputs and one over features. Gradients that are multiplied out cost the
product of both numbers. For many uses it is the other way round, so operations are counted for each
weight. All other parameters are multiplied out, a chunk at a time: small ones side by side, so that
few products take them all, and large ones in pieces, so that no row is as long as all weights.

    K += R R′ᵀ        R[nc, p] = ∂f_c(x_n)/∂θ_p for the elements p of one chunk
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


def gram(left: Jacobian, right: Jacobian) -> Float[Tensor, "query out train out_"]:
    """Return K = J J′ᵀ, summed over the parameters. For a Jacobian with itself, compute half and
    mirror it.
    """
    if not left.blocks or not right.blocks:
        raise Mistake(
            "the outputs depend on no parameter that requires gradients, so the tangent kernel is "
            "zero"
        )
    plan = arrange_products(left, right)
    like = left.blocks[0].numbers
    # Many pieces, each smaller than the rounding of the sum, are added in double precision
    is_cut = any(isinstance(one, ParameterChunk) for one, _ in plan.columns)
    kind = torch.float64 if is_cut else like.dtype
    shape = (left.examples * left.outputs, right.examples * right.outputs)
    total = Total(like.new_empty(shape, dtype=kind), (left.outputs, right.outputs), left is right)

    total.add_single_uses(
        [(one, other) for one, other, way in plan.factored if way == "one product"]
    )
    for one, other, way in plan.factored:
        if way == "double sum":
            total.add(double_sum(one, other).reshape(shape))
    for chunk in groups(plan.columns):
        rows = side_by_side(left, [column[0] for column in chunk])
        rows_ = rows if left is right else side_by_side(right, [column[1] for column in chunk])
        total.add_product(rows, rows_)
    kernel = total.whole().view(left.examples, left.outputs, right.examples, right.outputs)
    for key in plan.spread:
        add_double_sums(kernel, key, left, right)
    return kernel.to(like.dtype)


def trace(left: Jacobian, right: Jacobian) -> Float[Tensor, "query 1 train 1"]:
    """Return Σ_c K[x, c, x′, c], the kernel of all outputs as one, without blocks of outputs."""
    if set(left.keys) != set(right.keys):  # the sides were read in two ways
        both = {
            name: min(left.extents[name], right.extents[name])
            for name in left.extents
            if name in right.extents
        }
        left = left.as_rows(both)
        right = right.as_rows(both)
    one = left.traced()
    return gram(one, one if right is left else right.traced())


def contributions(
    left: Jacobian, right: Jacobian, output_gradient: Float[Tensor, "train out_"]
) -> Float[Tensor, "query out train"]:
    """Return K ℓ′, from one gradient of each training example instead of one for each output."""
    return gram(left, right.weighted(output_gradient)).squeeze(3)


@dataclass(frozen=True)
class ParameterChunk:
    """Some elements of one parameter."""

    name: str
    elements: range

    @property
    def size(self) -> int:
        return len(self.elements)


Column: TypeAlias = tuple[Block | ParameterChunk, Block | ParameterChunk]
"""Gradients that are multiplied out on both sides: blocks with the same key, or the same elements.
"""

MAX_COLUMNS = 2**11  # in one product of matrices: it is not faster for more
MAX_ROWS_BYTES = 2**29  # of gradients that are multiplied out at once
PIECE_BYTES = (
    2**23
)  # of gradients in a piece of a parameter, unless it has fewer elements than the next number
PIECE_ELEMENTS = 2**11  # products of matrices are slower for fewer


@dataclass(frozen=True)
class ProductPlan:
    """The products that add up to a kernel."""

    factored: list[tuple[Factored, Factored, str]]  # blocks, and how they are multiplied
    spread: list[Key]  # of several blocks of factors on each side
    columns: list[Column]  # of gradients that are multiplied out


def arrange_products(left: Jacobian, right: Jacobian) -> ProductPlan:
    """Choose the products with the fewest operations for each parameter."""
    plan = ProductPlan([], [], [])
    finished = set[str]()  # parameters whose products are chosen
    for key, size in alone(left, right).items():
        left_blocks = [block for block in left.blocks if block.key == key]
        right_blocks = [block for block in right.blocks if block.key == key]
        one = left_blocks[0]
        other = right_blocks[0]
        single = len(left_blocks) == len(right_blocks) == 1 and one.gradients[0] == left.examples
        if isinstance(one, Factored) and isinstance(other, Factored) and size is not None:
            if size.way != "multiplied out":
                if single:
                    plan.factored.append((one, other, size.way))
                else:
                    plan.spread.append(key)
                finished |= one.extents.keys()
                continue
            # the longer side's rows, multiplied out
            rows = max(size.query * size.out, size.train * size.out_)
            row_bytes = size.inputs * size.features * one.numbers.element_size()
            single = single and rows * row_bytes <= MAX_ROWS_BYTES
        if single and not isinstance(one, Copies) and not isinstance(other, Copies):
            pieces = one.pieces()
            other_pieces = pieces if other is one else other.pieces()
            plan.columns.extend(zip(pieces, other_pieces, strict=True))
            finished |= one.extents.keys()
    for name in left.extents:
        if name in right.extents and name not in finished:
            elements = range(min(left.extents[name], right.extents[name]))
            plan.columns.extend((piece, piece) for piece in cut(left, name, elements))
    return plan


def alone(left: Jacobian, right: Jacobian) -> dict[Key, Sizes | None]:
    """Return the keys that both sides have and whose parameters are in no other block, with the
    sizes of factors.
    """
    keys_of: dict[str, set[Key]] = {}
    for block in (*left.blocks, *(() if right is left else right.blocks)):
        for name in block.extents:
            keys_of.setdefault(name, set()).add(block.key)
    both = set(left.keys) & set(right.keys)
    sizes_of: dict[Key, Sizes | None] = {}
    for block in left.blocks:
        if block.key not in both or block.key in sizes_of:
            continue
        if all(len(keys_of[name]) == 1 for name in block.extents):
            is_factored = isinstance(block, Factored)
            sizes_of[block.key] = sizes_between(left, right, block.key) if is_factored else None
    return sizes_of


def cut(side: Jacobian, name: str, elements: range) -> Iterator[ParameterChunk]:
    """Cut a parameter into pieces of complete lines that stay in the cache until they are
    multiplied.
    """
    row_bytes = side.blocks[0].numbers.element_size() * side.examples * side.outputs
    width = max((block.line for _, block in side.uses[name][:1]), default=1)
    step = max(1, max(PIECE_ELEMENTS, PIECE_BYTES // row_bytes) // width) * width
    return (
        ParameterChunk(name, range(at, min(at + step, elements.stop)))
        for at in range(elements.start, elements.stop, step)
    )


def groups(columns: Sequence[Column]) -> Iterator[list[Column]]:
    """Yield columns that are multiplied side by side, small ones first. Pieces of a parameter are
    multiplied alone.
    """
    group: list[Column] = []
    yield from ([column] for column in columns if isinstance(column[0], ParameterChunk))
    blocks = [column for column in columns if not isinstance(column[0], ParameterChunk)]
    for column in sorted(blocks, key=lambda column: column[0].size):
        if group and sum(one.size for one, _ in [*group, column]) > MAX_COLUMNS:
            yield group
            group = []
        group.append(column)
    if group:
        yield group


def side_by_side(
    side: Jacobian, columns: Sequence[Block | ParameterChunk]
) -> Float[Tensor, "row size"]:
    """Return the gradients of some columns, with a row for each output of each example."""
    rows = [
        side.chunk(column.name, column.elements)
        if isinstance(column, ParameterChunk)
        else multiplied_out(column).flatten(0, 1)
        for column in columns
    ]
    return rows[0] if len(rows) == 1 else torch.cat(rows, 1)


def multiplied_out(block: Block) -> Float[Tensor, "example out size"]:
    assert not isinstance(block, Copies)
    return block.multiplied_out()


@dataclass(frozen=True)
class Sizes:
    """The sizes of the factors of two Jacobians, and the multiplications of each way to their
    kernel.
    """

    query: int
    uses: int
    out: int
    train: int
    uses_: int
    out_: int
    inputs: int
    features: int

    @property
    def double_sum(self) -> int:
        """Multiplications of ⟨a, a′⟩, ⟨β, β′⟩ and their product, for every pair of uses."""
        pairs = self.query * self.uses * self.train * self.uses_
        return pairs * (self.inputs + self.out * self.out_ * (self.features + 1))

    @property
    def multiplied_out(self) -> int:
        """Multiplications of the gradients of both sides and their inner products."""
        left = self.query * self.out
        right = self.train * self.out_
        return (left * self.uses + right * self.uses_ + left * right) * self.inputs * self.features

    @property
    def way(self) -> str:
        if self.uses == self.uses_ == 1:
            return "one product"
        return "double sum" if self.double_sum <= self.multiplied_out else "multiplied out"

    @property
    def operations(self) -> int:
        """Multiplications of the cheaper way."""
        return self.multiplied_out if self.way == "multiplied out" else self.double_sum

    @property
    def numbers(self) -> int:
        """The size of all intermediate results of the cheaper way."""
        if self.way == "multiplied out":
            return (self.query * self.out + self.train * self.out_) * self.inputs * self.features
        return self.query * self.uses * self.train * self.uses_ * (1 + self.out * self.out_)


def sizes(left: Factored, right: Factored) -> Sizes:
    (query, uses, _) = left.inputs.shape
    (train, uses_, _) = right.inputs.shape
    out = left.outputs.shape[1]
    out_ = right.outputs.shape[1]
    return Sizes(query, uses, out, train, uses_, out_, left.rows, left.outputs.shape[3])


def sizes_between(left: Jacobian, right: Jacobian, key: Key) -> Sizes:
    """Return the sizes over all uses of the same weight, if every example has the uses of the
    first.
    """
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
        query=left.examples,
        uses=counts[0],
        train=right.examples,
        uses_=counts[1],
        out_=right.outputs,
    )


def double_sum(left: Factored, right: Factored) -> Float[Tensor, "query out train out_"]:
    """Return Σ_uv (⟨a_u, a′_v⟩ + s s′)⟨β_u, β′_v⟩."""
    inputs = torch.einsum("qui,nvi->qunv", left.inputs, right.inputs) + bias_product(left, right)
    features = torch.einsum("qcuo,ndvo->qcundv", left.outputs, right.outputs)
    return torch.einsum("qunv,qcundv->qcnd", inputs, features)


def add_double_sums(
    kernel: Float[Tensor, "query out train out_"], key: Key, left: Jacobian, right: Jacobian
) -> None:
    """Add the share of a weight with several blocks of factors, for each pair of blocks."""
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


# The kernel of a Jacobian with itself is computed from the diagonal on, strip by strip, and
# mirrored once at the end.


MIN_STRIP_ROWS = 64  # thinner strips cost more than they save
MAX_STRIPS = 12
BLOCK_NUMBERS = 2**17  # of a block of the kernel that stays in the cache


@dataclass
class Total:
    """The kernel so far. `outputs` are the rows of each example on the left and its columns on the
    right.
    """

    matrix: Float[Tensor, "row row_"]
    outputs: tuple[int, int]
    halved: bool  # whether both sides are the same Jacobian
    begun: bool = False

    @cached_property
    def strips(self) -> list[tuple[Float[Tensor, "row row_"], range, range]]:
        """Strips of the kernel that together cover every entry or its mirror image, with their rows
        and columns.
        """
        rows, columns = self.matrix.shape
        if not self.halved:
            return [(self.matrix, range(rows), range(columns))]
        out = self.outputs[0]
        step = -(-max(MIN_STRIP_ROWS, -(-rows // MAX_STRIPS)) // out) * out
        ends = [(at, min(at + step, rows)) for at in range(0, rows, step)]
        return [(self.matrix[at:end, at:], range(at, end), range(at, rows)) for at, end in ends]

    def add_product(
        self, left: Float[Tensor, "row size"], right: Float[Tensor, "row_ size"]
    ) -> None:
        """Add R R′ᵀ."""
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
        """Add Σ_l (⟨a, a′⟩ + s s′)⟨β, β′⟩ over weights l that each example uses once.

        With ten outputs the products over β are a hundred times larger than those over a, and
        adding them up one by one would wait for memory. So a block of the kernel is summed over all
        weights before the next block is started.
        """
        if not pairs:
            return
        out, out_ = self.outputs
        layers = [matrices(*pair) for pair in pairs]
        for strip, rows, columns in self.strips:
            height = len(rows)
            if out * out_ > 1:
                height = max(1, BLOCK_NUMBERS // (len(columns) * out)) * out
            room = layers[0].outputs.new_empty(min(height, len(rows)) * len(columns))
            for start in range(rows.start, rows.stop, height):
                some = range(start, min(start + height, rows.stop))
                block = narrow(strip, 0, range(some.start - rows.start, some.stop - rows.start))
                for k, layer in enumerate(layers):
                    self.add_layer(block, layer, (some, columns), room, begun=self.begun or k > 0)
        self.begun = True

    def add_layer(
        self,
        block: Float[Tensor, "row row_"],
        layer: Layer,
        place: tuple[range, range],
        room: Float[Tensor, " number"],
        *,
        begun: bool,
    ) -> None:
        """Add (⟨a, a′⟩ + s s′)⟨β, β′⟩ of one layer to a block of the kernel at these rows and
        columns.
        """
        rows, columns = place
        out, out_ = self.outputs
        # ⟨a, a′⟩ + s s′
        examples = narrow(layer.inputs, 0, range(rows.start // out, rows.stop // out))
        examples_ = narrow(layer.inputs_, 1, range(columns.start // out_, columns.stop // out_))
        inputs = torch.mm(examples, examples_)
        inputs.add_(layer.shift)
        # ⟨β, β′⟩
        features = layer.same
        if features is None:
            features = room[: len(rows) * len(columns)].view(len(rows), len(columns))
            outputs = narrow(layer.outputs, 0, rows)
            torch.mm(outputs, narrow(layer.outputs_, 1, columns), out=features)
        if out * out_ > 1:  # one ⟨a, a′⟩ for all outputs: repeated for each column, shared by rows
            block = block.view(len(rows) // out, out, len(columns))
            features = features.view(block.shape)
            repeated = inputs[:, None, :, None].expand(-1, 1, -1, out_)
            inputs = repeated.reshape(len(inputs), 1, -1)
        # K += their product
        if block.dtype != features.dtype:
            write(block, features * inputs, begun=begun)
        elif begun:
            block.addcmul_(features, inputs)
        else:
            torch.mul(features, inputs, out=block)

    def add(self, share: Float[Tensor, "row row_"]) -> None:
        write(self.matrix, share, begun=self.begun)
        self.begun = True

    def whole(self) -> Float[Tensor, "row row_"]:
        """Return the kernel, after all shares were added."""
        if not self.begun:
            self.matrix.zero_()
        for _, rows, columns in self.strips if self.halved else ():
            above = slice(rows.start, rows.stop), slice(rows.stop, columns.stop)
            self.matrix[above[::-1]] = self.matrix[above].t()
        return self.matrix


def write(place: Float[Tensor, "..."], share: Float[Tensor, "..."], *, begun: bool) -> None:
    """Add a share to a place, or write it there if it is the first."""
    place.add_(share) if begun else place.copy_(share)


@dataclass(frozen=True)
class Layer:
    """The factors of a weight that each example uses once, as matrices. Those on the right are
    transposed.
    """

    inputs: Float[Tensor, "query in_"]
    inputs_: Float[Tensor, "in_ train"]
    outputs: Float[Tensor, "query_out features"]
    outputs_: Float[Tensor, "features train_out"]
    shift: float  # the share of biases in each ⟨a, a′⟩
    same: Float[Tensor, "1 1"] | None  # ⟨β, β′⟩ if all examples share one β, as in a readout


def matrices(left: Factored, right: Factored) -> Layer:
    inputs = left.inputs[:, 0]
    outputs = left.outputs[:, :, 0].flatten(0, 1)
    inputs_ = inputs
    outputs_ = outputs
    if right is not left:
        inputs_ = right.inputs[:, 0]
        outputs_ = right.outputs[:, :, 0].flatten(0, 1)
    one = left.outputs.shape[1] == right.outputs.shape[1] == 1
    constant = one and left.outputs.stride(0) == 0 and right.outputs.stride(0) == 0
    same = outputs[:1] @ outputs_[:1].t() if constant else None
    return Layer(inputs, inputs_.t(), outputs, outputs_.t(), bias_product(left, right), same)


def narrow(value: Float[Tensor, "..."], axis: int, where: range) -> Float[Tensor, "..."]:
    """Return some rows or columns. Indexing would take twice as long."""
    return value.narrow(axis, where.start, len(where))
