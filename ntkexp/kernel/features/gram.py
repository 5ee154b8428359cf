"""The kernel of two Jacobians, K = J_left J_rightᵀ, as a sum over parameters.

If both Jacobians hold the gradients of a weight in factored form (see `blocks`), the
inner product of two gradients is a double sum over the uses u and v of the weight:

    ⟨Σ_u a_u ⊗ β_u, Σ_v a′_v ⊗ β′_v⟩ = Σ_uv ⟨a_u, a′_v⟩⟨β_u, β′_v⟩

Here a are the inputs of a layer and β the gradients at its outputs. For each pair of
uses, this takes about inputs + features multiplications. The other way is to multiply
the gradients out first. This takes inputs · features multiplications for each pair of
examples, which is cheaper if there are many uses. `Sizes` counts the multiplications of
both ways for each weight.

The gradients of all other parameters are multiplied out, chunk by chunk. Small
parameters are concatenated, so that a few matrix products suffice. Large parameters are
cut, so that memory never holds a complete gradient.

    K += R R′ᵀ        R[nc, p] = ∂f_c(x_n)/∂θ_p for the elements p of one chunk
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import ceil
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.kernel.features.blocks import Block, Copies, Factored, Key, bias_product
from ntkexp.kernel.features.jacobian import Jacobian
from ntkexp.mistake import NO_DEPENDENCE, Mistake


def gram(left: Jacobian, right: Jacobian) -> Float[Tensor, "query out train out_"]:
    """Return K = J J′ᵀ, summed over the parameters. If `left` and `right` are the same
    object, compute half of K and mirror it."""
    if not left.blocks or not right.blocks:
        raise Mistake(NO_DEPENDENCE)
    plan = arrange_products(left, right)
    like = left.blocks[0].numbers
    # if a parameter is cut into chunks, add the many products in double precision
    is_cut = any(isinstance(one, ParameterChunk) for one, _ in plan.columns)
    kind = torch.float64 if is_cut else like.dtype
    shape = (left.examples * left.outputs, right.examples * right.outputs)
    matrix = like.new_empty(shape, dtype=kind)
    total = Total(matrix, (left.outputs, right.outputs), is_symmetric=left is right)

    # Σ_l (⟨a, a′⟩ + s s′)⟨β, β′⟩, a sum over layers l. s s′ is the term of the biases.
    total.add_single_uses(plan.single_uses)
    for one, other in plan.several_uses:
        total.add(double_sum(one, other).reshape(shape))

    # R R′ᵀ
    for columns in groups(plan.columns):
        rows = side_by_side(left, [one for one, _ in columns])
        rows_ = rows
        if left is not right:
            rows_ = side_by_side(right, [other for _, other in columns])
        total.add_product(rows, rows_)
    kernel = total.mirrored().view(
        left.examples, left.outputs, right.examples, right.outputs
    )

    for key in plan.several_blocks:
        add_double_sums(kernel, key, left, right)
    return kernel.to(like.dtype)


def trace(left: Jacobian, right: Jacobian) -> Float[Tensor, "query 1 train 1"]:
    """Return Σ_c K[x, c, x′, c], without computing the blocks [out, out_] of K."""
    # a parameter may have different block formats on the left and right
    if set(left.keys) != set(right.keys):
        both = shared_extents(left, right)
        left = left.as_rows(both)
        right = right.as_rows(both)
    traced = left.traced()
    if right is left:
        return gram(traced, traced)
    return gram(traced, right.traced())


def shared_extents(left: Jacobian, right: Jacobian) -> dict[str, int]:
    """Return, for each parameter of both Jacobians,
    the number of leading elements that both contain."""
    extents = {}
    for name, size in left.extents.items():
        if name in right.extents:
            extents[name] = min(size, right.extents[name])
    return extents


def contributions(
    left: Jacobian, right: Jacobian, output_gradient: Float[Tensor, "train out_"]
) -> Float[Tensor, "query out train"]:
    """Return K ℓ′, where ℓ′ is the `output_gradient` of the loss. First contract the
    outputs of each training example with ℓ′, so that the example has one gradient
    instead of one for each output."""
    return gram(left, right.weighted(output_gradient)).squeeze(3)


@dataclass(frozen=True)
class ParameterChunk:
    """A range of elements of one parameter."""

    name: str
    elements: range

    @property
    def size(self) -> int:
        return len(self.elements)

    @property
    def place(self) -> slice:
        return slice(self.elements.start, self.elements.stop)


Column: TypeAlias = tuple[Block | ParameterChunk, Block | ParameterChunk]
"""The gradients of one term of K += R R′ᵀ, in the left and the right Jacobian: two
blocks with the same key, or two chunks."""

MAX_COLUMNS = 2**11  # columns of one matrix product; more do not make it faster
MAX_ROWS_BYTES = 2**29  # bytes of gradients that are multiplied out at once
PIECE_BYTES = 2**23  # bytes of the gradients of one chunk of a parameter
# smallest number of elements in a chunk; matrix products are slower for fewer
PIECE_ELEMENTS = 2**11


@dataclass(frozen=True)
class ProductPlan:
    """The products that add up to a kernel."""

    # weights with one use for each example: ⟨a, a′⟩⟨β, β′⟩
    single_uses: list[tuple[Factored, Factored]]
    # weights with several uses: double sums over uses
    several_uses: list[tuple[Factored, Factored]]
    # keys of weights that have several factored blocks in one of the Jacobians
    several_blocks: list[Key]
    columns: list[Column]  # gradients that are multiplied out


def arrange_products(left: Jacobian, right: Jacobian) -> ProductPlan:
    """Choose the cheapest kind of product for each parameter."""
    plan = ProductPlan([], [], [], [])
    finished = set[str]()  # parameters that have a product
    for key, size in exclusive_keys(left, right).items():
        left_blocks = [block for block in left.blocks if block.key == key]
        right_blocks = [block for block in right.blocks if block.key == key]
        one = left_blocks[0]
        other = right_blocks[0]
        single = (
            len(left_blocks) == len(right_blocks) == 1
            and one.gradients[0] == left.examples
        )
        if size is not None and size.method != "multiplied out":
            assert isinstance(one, Factored)
            assert isinstance(other, Factored)
            if not single:
                plan.several_blocks.append(key)
            elif size.method == "one product":
                plan.single_uses.append((one, other))
            else:
                plan.several_uses.append((one, other))
            finished |= one.extents.keys()
            continue
        element_bytes = one.numbers.element_size()
        fits = size is None or size.row_numbers * element_bytes <= MAX_ROWS_BYTES
        if isinstance(one, Copies) or isinstance(other, Copies):
            continue
        if single and fits:
            pieces = one.pieces()
            pieces_ = pieces if other is one else other.pieces()
            plan.columns.extend(zip(pieces, pieces_, strict=True))
            finished |= one.extents.keys()

    # All other parameters are multiplied out, chunk by chunk
    for name, extent in shared_extents(left, right).items():
        if name not in finished:
            chunks = cut_parameter(left, name, range(extent))
            plan.columns.extend((chunk, chunk) for chunk in chunks)
    return plan


def exclusive_keys(left: Jacobian, right: Jacobian) -> dict[Key, Sizes | None]:
    """Return the keys of blocks that occur in both Jacobians, and whose parameters
    occur under no other key. The values are the sizes of factored blocks, or None for
    other blocks."""
    keys_of: dict[str, set[Key]] = {}
    for side in (left, right):
        for name, uses in side.uses.items():
            keys_of.setdefault(name, set()).update(block.key for _, block in uses)
    both = set(left.keys) & set(right.keys)
    sizes_of: dict[Key, Sizes | None] = {}
    for block in left.blocks:
        key = block.key
        if key not in both or key in sizes_of:
            continue
        if any(len(keys_of[name]) > 1 for name in block.names):
            continue
        sizes_of[key] = None
        if isinstance(block, Factored):
            sizes_of[key] = sizes_between(left, right, key)
    return sizes_of


def cut_parameter(
    side: Jacobian, name: str, elements: range
) -> Iterator[ParameterChunk]:
    """Cut a parameter into chunks of complete lines (`Factored.line`). The chunks are
    so small that their gradients stay in the cache until they are multiplied."""
    column_bytes = side.blocks[0].numbers.element_size() * side.examples * side.outputs
    line = side.uses[name][0][1].line
    lines = max(PIECE_ELEMENTS, PIECE_BYTES // column_bytes) // line
    step = max(1, lines) * line
    for start in range(elements.start, elements.stop, step):
        yield ParameterChunk(name, range(start, min(start + step, elements.stop)))


def groups(columns: Sequence[Column]) -> Iterator[list[Column]]:
    """Yield groups of columns. One matrix product handles one group. First, each
    chunk of a parameter forms its own group. Then blocks form groups, the smallest
    blocks first."""
    blocks: list[Column] = []
    for column in columns:
        if isinstance(column[0], ParameterChunk):
            yield [column]
        else:
            blocks.append(column)
    group: list[Column] = []
    size = 0
    for column in sorted(blocks, key=lambda column: column[0].size):
        size += column[0].size
        if group and size > MAX_COLUMNS:
            yield group
            group = []
            size = column[0].size
        group.append(column)
    if group:
        yield group


def side_by_side(
    side: Jacobian, columns: Sequence[Block | ParameterChunk]
) -> Float[Tensor, "row size"]:
    """Concatenate the gradients of some columns,
    with one row for each example and output."""
    rows = []
    for column in columns:
        if isinstance(column, ParameterChunk):
            rows.append(side.chunk(column.name, column.elements))
        else:
            assert not isinstance(column, Copies)
            rows.append(column.multiplied_out().flatten(0, 1))
    if len(rows) == 1:
        return rows[0]
    return torch.cat(rows, 1)


@dataclass(frozen=True)
class Sizes:
    """The sizes of the factors of one weight in two Jacobians, and the cost of the
    weight's term of the kernel, as a number of multiplications.

    The term can be computed as a double sum over uses, or from multiplied-out
    gradients. With one use, the double sum is a single product. Names of sizes of the
    right Jacobian are `train`, or end in an underscore."""

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
        """Multiplications of ⟨a, a′⟩, ⟨β, β′⟩ and their product,
        for every pair of uses."""
        pairs = self.query * self.uses * self.train * self.uses_
        return pairs * (self.inputs + self.out * self.out_ * (self.features + 1))

    @property
    def multiplied_out(self) -> int:
        """Multiplications to form the gradients of both Jacobians,
        and for their inner products."""
        left = self.query * self.out
        right = self.train * self.out_
        products = left * self.uses + right * self.uses_ + left * right
        return products * self.inputs * self.features

    @property
    def row_numbers(self) -> int:
        """The number of elements of the larger Jacobian, multiplied out."""
        rows = max(self.query * self.out, self.train * self.out_)
        return rows * self.inputs * self.features

    @property
    def method(self) -> str:
        if self.uses == self.uses_ == 1:
            return "one product"
        if self.double_sum <= self.multiplied_out:
            return "double sum"
        return "multiplied out"

    @property
    def operations(self) -> int:
        """The multiplications that the cheaper way takes."""
        if self.method == "multiplied out":
            return self.multiplied_out
        return self.double_sum

    @property
    def numbers(self) -> int:
        """The number of elements of all intermediate results of the cheaper way."""
        if self.method == "multiplied out":
            rows = self.query * self.out + self.train * self.out_
            return rows * self.inputs * self.features
        pairs = self.query * self.uses * self.train * self.uses_
        return pairs * (1 + self.out * self.out_)


def sizes(left: Factored, right: Factored) -> Sizes:
    query, out, uses, features = left.outputs.shape
    train, out_, uses_, _ = right.outputs.shape
    return Sizes(query, uses, out, train, uses_, out_, left.rows, features)


def sizes_between(left: Jacobian, right: Jacobian, key: Key) -> Sizes:
    """Return the sizes of one weight's factors in two Jacobians. Assume that every
    example uses the weight as often as the first example does."""

    def uses_of_first(side: Jacobian) -> int:
        blocks = [block for place, block in blocks_of(side, key) if place.start == 0]
        return sum(block.inputs.shape[1] for block in blocks)

    _, block = blocks_of(left, key)[0]
    return replace(
        sizes(block, block),
        query=left.examples,
        uses=uses_of_first(left),
        train=right.examples,
        uses_=uses_of_first(right),
        out_=right.outputs,
    )


def blocks_of(side: Jacobian, key: Key) -> list[tuple[slice, Factored]]:
    """Return the factored blocks with this key,
    each with the slice of examples that it holds."""
    blocks = []
    for place, block in side.blocks_with_examples():
        if block.key == key and isinstance(block, Factored):
            blocks.append((place, block))
    return blocks


def double_sum(
    left: Factored, right: Factored
) -> Float[Tensor, "query out train out_"]:
    """Return Σ_uv (⟨a_u, a′_v⟩ + s s′)⟨β_u, β′_v⟩, the kernel of a weight and its bias.

    s s′ is the term of the bias (`bias_product`)."""
    inputs = torch.einsum("qui,nvi->qunv", left.inputs, right.inputs) + bias_product(
        left, right
    )
    features = torch.einsum("qcuo,ndvo->qcundv", left.outputs, right.outputs)
    return torch.einsum("qunv,qcundv->qcnd", inputs, features)


def add_double_sums(
    kernel: Float[Tensor, "query out train out_"],
    key: Key,
    left: Jacobian,
    right: Jacobian,
) -> None:
    """Add the kernel of a weight with several factored blocks, pair by pair."""
    pairs = product(blocks_of(left, key), blocks_of(right, key))
    for (rows, one), (columns, other) in pairs:
        if right is left and columns.start < rows.start:
            continue
        share = double_sum(one, other)
        kernel[rows, :, columns] += share
        if right is left and columns.start > rows.start:
            kernel[columns, :, rows] += share.permute(2, 3, 0, 1)


# The kernel of a Jacobian with itself is symmetric. Only its upper half is computed, in
# strips of rows that start at the diagonal. At the end, it is mirrored.


# smallest number of rows in a strip; thinner strips cost more than they save
MIN_STRIP_ROWS = 64
MAX_STRIPS = 12
# number of elements of a block of the kernel that stays in the cache
BLOCK_NUMBERS = 2**17


@dataclass
class Total:
    """A running sum of the kernel. `outputs` holds the number of outputs per left
    example and per right example."""

    matrix: Float[Tensor, "row row_"]
    outputs: tuple[int, int]
    is_symmetric: bool  # True if left and right are the same Jacobian
    has_terms: bool = False

    @cached_property
    def strips(self) -> list[tuple[Float[Tensor, "row row_"], range, range]]:
        """Strips of the matrix, with the ranges of their rows and columns. If the matrix
        is symmetric, strips begin at the diagonal, and the rest is mirrored."""
        rows, columns = self.matrix.shape
        if not self.is_symmetric:
            return [(self.matrix, range(rows), range(columns))]
        out = self.outputs[0]
        height = max(MIN_STRIP_ROWS, ceil(rows / MAX_STRIPS))
        step = ceil(height / out) * out
        strips = []
        for start in range(0, rows, step):
            end = min(start + step, rows)
            strips.append(
                (self.matrix[start:end, start:], range(start, end), range(start, rows))
            )
        return strips

    def add_product(
        self, left: Float[Tensor, "row size"], right: Float[Tensor, "row_ size"]
    ) -> None:
        """Add R R′ᵀ. `left` is R and `right` is R′, the gradients of one group of
        columns."""
        right = right.t()
        for strip, rows, columns in self.strips:
            one = narrow(left, 0, rows)
            other = narrow(right, 1, columns)
            if left.dtype != self.matrix.dtype:
                write(strip, one @ other, has_terms=self.has_terms)
            elif self.has_terms:
                strip.addmm_(one, other)
            else:
                torch.mm(one, other, out=strip)
        self.has_terms = True

    def add_single_uses(self, pairs: Sequence[tuple[Factored, Factored]]) -> None:
        """Add Σ_l (⟨a, a′⟩ + s s′)⟨β, β′⟩ over weights l that each example uses once.

        With ten outputs, the matrix of all ⟨β, β′⟩ is a hundred times larger than the
        matrix of all ⟨a, a′⟩. Going over the whole kernel once for each weight would
        spend more time on memory than on arithmetic. So each block of the kernel is
        summed over all weights while it is in the cache."""
        if not pairs:
            return
        out, out_ = self.outputs
        layers = [matrices(*pair) for pair in pairs]
        for strip, rows, columns in self.strips:
            height = len(rows)
            if out * out_ > 1:
                height = max(1, BLOCK_NUMBERS // (len(columns) * out)) * out
            buffer = layers[0].outputs.new_empty(min(height, len(rows)) * len(columns))
            blocks = torch.split(strip, height)
            for start, block in zip(rows[::height], blocks, strict=True):
                place = range(start, start + len(block)), columns
                has_terms = self.has_terms
                for layer in layers:
                    self.add_layer(block, layer, place, buffer, has_terms=has_terms)
                    has_terms = True
        self.has_terms = True

    def add_layer(
        self,
        block: Float[Tensor, "row row_"],
        layer: Layer,
        place: tuple[range, range],
        buffer: Float[Tensor, " number"],
        *,
        has_terms: bool,
    ) -> None:
        """Add (⟨a, a′⟩ + s s′)⟨β, β′⟩ of one layer to a block of the kernel. s s′ is
        the term of the biases (`bias_product`)."""
        rows, columns = place
        out, out_ = self.outputs
        # ⟨a, a′⟩ + s s′
        examples = narrow(layer.inputs, 0, range(rows.start // out, rows.stop // out))
        examples_ = narrow(
            layer.inputs_, 1, range(columns.start // out_, columns.stop // out_)
        )
        inputs = torch.mm(examples, examples_)
        inputs.add_(layer.shift)
        # ⟨β, β′⟩
        features = layer.same
        if features is None:
            features = buffer[: len(rows) * len(columns)].view(len(rows), len(columns))
            outputs = narrow(layer.outputs, 0, rows)
            torch.mm(outputs, narrow(layer.outputs_, 1, columns), out=features)
        if out * out_ > 1:
            # all outputs share ⟨a, a′⟩: repeat it along columns, broadcast along rows
            block = block.view(len(rows) // out, out, len(columns))
            features = features.view(block.shape)
            repeated = inputs[:, None, :, None].expand(-1, 1, -1, out_)
            inputs = repeated.reshape(len(inputs), 1, -1)
        # K += (⟨a, a′⟩ + s s′)⟨β, β′⟩
        if block.dtype != features.dtype:
            write(block, features * inputs, has_terms=has_terms)
        elif has_terms:
            block.addcmul_(features, inputs)
        else:
            torch.mul(features, inputs, out=block)

    def add(self, share: Float[Tensor, "row row_"]) -> None:
        write(self.matrix, share, has_terms=self.has_terms)
        self.has_terms = True

    def mirrored(self) -> Float[Tensor, "row row_"]:
        """Return the complete kernel after all terms were added. If only the upper half
        was computed, mirror it."""
        if not self.has_terms:
            self.matrix.zero_()
        if self.is_symmetric:
            for _, rows, _ in self.strips:
                above = self.matrix[rows.start : rows.stop, rows.stop :]
                self.matrix[rows.stop :, rows.start : rows.stop] = above.t()
        return self.matrix


def write(
    place: Float[Tensor, "..."], share: Float[Tensor, "..."], *, has_terms: bool
) -> None:
    """Add a term to a block of the kernel in place.
    The first term overwrites the block."""
    if has_terms:
        place.add_(share)
    else:
        place.copy_(share)


@dataclass(frozen=True)
class Layer:
    """The factors a and β of a weight that each example uses once, as matrices. Names
    of right factors end in an underscore, and right factors are transposed."""

    inputs: Float[Tensor, "query in_"]
    inputs_: Float[Tensor, "in_ train"]
    outputs: Float[Tensor, "query_out features"]
    outputs_: Float[Tensor, "features train_out"]
    # s s′, the product of both shifts, which biases add to each ⟨a, a′⟩; 0 without
    # biases (see `bias_product`)
    shift: float
    # ⟨β, β′⟩ if all examples share one β, as in a readout
    same: Float[Tensor, "1 1"] | None


def matrices(left: Factored, right: Factored) -> Layer:
    inputs = left.inputs[:, 0]
    outputs = left.outputs[:, :, 0].flatten(0, 1)
    inputs_ = inputs
    outputs_ = outputs
    if right is not left:
        inputs_ = right.inputs[:, 0]
        outputs_ = right.outputs[:, :, 0].flatten(0, 1)
    same = None
    one_output = left.outputs.shape[1] == right.outputs.shape[1] == 1
    if one_output and left.outputs.stride(0) == 0 and right.outputs.stride(0) == 0:
        same = outputs[:1] @ outputs_[:1].t()
    shift = bias_product(left, right)
    return Layer(inputs, inputs_.t(), outputs, outputs_.t(), shift, same)


def narrow(
    value: Float[Tensor, "..."], axis: int, where: range
) -> Float[Tensor, "..."]:
    """Return some rows or columns by `narrow`, because indexing takes twice as long."""
    return value.narrow(axis, where.start, len(where))
