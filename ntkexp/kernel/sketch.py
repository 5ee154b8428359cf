"""Sketched kernels: kernels of randomly projected Jacobians, with error bars, for
Jacobians that would not fit into memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from math import log2, sqrt
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ntkexp.kernel.features.assemble import positions_in
from ntkexp.kernel.features.blocks import Block, Copies, Factored, Rows
from ntkexp.kernel.secant.uses import View
from ntkexp.stream import normal, stream

# A sketch S maps vectors in the shape of the weights to vectors of k numbers (buckets).
# It treats a parameter as a matrix: its first axis is the rows, all other axes are the
# columns. Each row and each column gets a random bucket h from 0 … k − 1 and a random
# sign σ. Element (i, j) is added to the bucket h_i + h_j mod k with the sign σ_i σ_j:
#
#     S[(i, j), r] = σ_i σ_j if h_i + h_j ≡ r mod k, else 0
#
# Two different elements differ in their row or in their column, and the signs of
# different rows or columns are independent. So E SSᵀ is the identity, and inner products
# of sketched vectors are unbiased.
#
# Literature: the count sketch (Charikar, Chen & Farach-Colton 2002), and the sketch of
# a product (Pagh 2013; Pham & Pagh 2013).


class Draw(NamedTuple):
    """Random buckets and signs of rows, of columns, or of elements."""

    bucket: Int[Tensor, "..."]
    sign: Int[Tensor, "..."]

    def at(self, place: Int[Tensor, "..."]) -> Draw:
        return Draw(self.bucket[place], self.sign[place])


@dataclass(frozen=True)
class SketchTable:
    """The buckets and signs of a parameter's rows and columns,
    for a sketch of `size` buckets."""

    rows: Draw
    columns: Draw
    size: int

    def at(self, places: Int[Tensor, "..."]) -> Draw:
        """Return the buckets and signs of elements,
        given their flat indices in the parameter."""
        width = len(self.columns.bucket)
        rows = self.rows.at(places // width)
        columns = self.columns.at(places % width)
        return Draw(
            (rows.bucket + columns.bucket) % self.size, rows.sign * columns.sign
        )

    def factors(self, view: View) -> tuple[Draw, Draw] | None:
        """Return the buckets and signs along the two axes of a view of the parameter.
        Return None unless one axis of the view runs over rows of the parameter, and the
        other over columns.

        >>> table = draw_table("w", torch.Size([4, 3]), size=8, seed=0, device=torch.device("cpu"))
        >>> whole, transposed = View("w", (4, 3), (3, 1), 0), View("w", (3, 4), (1, 3), 0)
        >>> [len(draw.bucket) for draw in table.factors(transposed)], table.factors(View("w", (2, 2), (2, 1), 0))
        ([3, 4], None)
        """
        width = len(self.columns.bucket)
        first, second = view.shape
        step, step_ = view.stride
        row, column = divmod(view.offset, width)

        def along(draws: Draw, start: int, step: int, count: int) -> Draw:
            index = torch.arange(count, device=draws.bucket.device)
            return draws.at(start + step * index)

        # the first axis of the view runs over rows, and the second over columns
        if step % width == 0 and column + (second - 1) * step_ < width:
            rows = along(self.rows, row, step // width, first)
            return rows, along(self.columns, column, step_, second)
        # the other way round
        if step_ % width == 0 and column + (first - 1) * step < width:
            columns = along(self.columns, column, step, first)
            return columns, along(self.rows, row, step_ // width, second)
        return None


def draw_table(
    name: str, shape: torch.Size, size: int, seed: int, device: torch.device
) -> SketchTable:
    """Draw the buckets and signs of a parameter. The random stream depends only on the
    seed and on the name of the parameter."""
    number_of_name = int.from_bytes(sha256(name.encode()).digest()[:8], "big")
    generator = stream("sketch", seed, number_of_name)
    rows = shape[0] if shape else 1
    sides = []
    for count in (rows, shape.numel() // max(1, rows)):
        # a single row or column has bucket 0 and sign 1
        bucket = torch.zeros(1, dtype=torch.long)
        sign = torch.ones(1, dtype=torch.long)
        if count != 1:
            bucket = torch.randint(size, (count,), generator=generator)
            sign = 2 * torch.randint(2, (count,), generator=generator) - 1
        sides.append(Draw(bucket.to(device), sign.to(device)))
    return SketchTable(sides[0], sides[1], size)


def scattered(
    values: Float[Tensor, "*batch element"], where: Draw, size: int
) -> Float[Tensor, "*batch size"]:
    """Return the count sketch of vectors, given the buckets and signs `where` of their
    elements.

    >>> scattered(torch.tensor([[1.0, 2.0, 4.0]]), Draw(torch.tensor([1, 0, 1]), torch.tensor([1, 1, -1])), 3)
    tensor([[ 2., -3.,  0.]])
    """
    return values.new_zeros(*values.shape[:-1], size).index_add(
        -1, where.bucket, values * where.sign
    )


# The sketch of a Jacobian J is J S [example, out, k]. Its inner products are unbiased:
#
#     K̂ = (J S)(J′ S)ᵀ,        E K̂ = J J′ᵀ,        ‖K̂ − K‖ ∝ 1/√k
#
# A sum of outer products need not be multiplied out. The count sketch of a ⊗ β is the
# circular convolution of the sketches of a and β, so in Fourier space
#
#     sketch(Σ_u a_u ⊗ β_u) = F⁻¹ Σ_u F(sketch a_u) ∘ F(sketch β_u).
#
# Here F is the Fourier transform. If a and β are short and the uses u are many, as in
# convolutions, it is cheaper to multiply the outer products out first. Both ways give
# the same numbers up to rounding. `operations` counts the cost of each.


MAX_FOURIER_NUMBERS = 2**22  # number of elements that are held in Fourier space at once
# cost of adding one element to a bucket, or of one element of a Fourier transform, in
# multiplications
BUCKET_COST = 8


@dataclass(frozen=True)
class Sketch:
    """A random projection of weight space to `size` dimensions,
    for parameters of these shapes."""

    size: int
    seed: int
    shapes: Mapping[str, torch.Size]
    tables: dict[str, SketchTable] = field(default_factory=dict, repr=False)

    def of(self, blocks: Iterable[Block]) -> Float[Tensor, "example out size"]:
        """Return J S, the sketch of the Jacobian J. `blocks` are the terms of J."""
        first, *rest = map(self.of_block, blocks)
        return sum(rest, start=first)

    def of_block(self, block: Block) -> Float[Tensor, "example out size"]:
        match block:
            case Factored():
                return self.of_factors(block)
            case Copies():  # add each element to its bucket
                where = self.table(block.name, block.values).at(block.places)
                buckets = where.bucket[:, None].expand_as(block.values)
                nothing = block.values.new_zeros(*block.gradients, self.size)
                signed = block.values * where.sign[:, None]
                return nothing.scatter_add(2, buckets, signed)
            case Rows():
                places = torch.arange(block.size, device=block.rows.device)
                where = self.table(block.name, block.rows).at(places)
                return scattered(block.rows, where, self.size)

    def of_factors(self, block: Factored) -> Float[Tensor, "example out size"]:
        """Return the sketch of outer products, for a weight and its bias."""
        sketches = list[Tensor]()
        if block.bias is not None:
            sketches.append(self.of_view(block.of_bias(), block.bias))
        if block.weight is not None:
            draws = self.table(block.weight.name, block.inputs).factors(block.weight)
            together, apart = operations(block.inputs, block.outputs, self.size)
            if draws is None or together <= apart:
                gradients = block.of_weight().flatten(2)
                sketches.append(self.of_view(gradients, block.weight))
            else:
                sketches.append(self.by_convolution(block, *draws))
        return sum(sketches[1:], start=sketches[0])

    def by_convolution(
        self, block: Factored, row: Draw, column: Draw
    ) -> Float[Tensor, "example out size"]:
        """Return F⁻¹ Σ_u F(sketch a_u) ∘ F(sketch β_u), for some examples at a time.
        `row` and `column` are the buckets and signs of a and β."""
        _, uses, _ = block.inputs.shape
        out = block.outputs.shape[1]
        step = max(1, MAX_FOURIER_NUMBERS // (uses * (1 + out) * self.size))
        parts = []
        for a, beta in zip(
            torch.split(block.inputs, step),
            torch.split(block.outputs, step),
            strict=True,
        ):
            one = torch.fft.rfft(scattered(a, row, self.size))
            other = torch.fft.rfft(scattered(beta, column, self.size))
            product = torch.einsum("nuf,ncuf->ncf", one, other)
            parts.append(torch.fft.irfft(product, n=self.size))
        return torch.cat(parts)

    def of_view(
        self, gradients: Float[Tensor, "example out size"], view: View
    ) -> Float[Tensor, "example out size_"]:
        """Return the sketch of gradients in the element order of a view."""
        elements = torch.arange(gradients.shape[2], device=gradients.device)
        places = positions_in(view, elements)
        where = self.table(view.name, gradients).at(places)
        return scattered(gradients, where, self.size)

    def table(self, name: str, like: Tensor) -> SketchTable:
        """Return the buckets and signs of a parameter, drawn on first use."""
        if name not in self.tables:
            self.tables[name] = draw_table(
                name, self.shapes[name], self.size, self.seed, like.device
            )
        return self.tables[name]


def operations(
    inputs: Float[Tensor, "example use in_"],
    outputs: Float[Tensor, "example out use features"],
    size: int,
) -> tuple[float, float]:
    """Return the number of arithmetic operations of two ways to sketch a sum of outer
    products.

    The first way forms the sum and adds its elements to buckets. The second way adds
    the elements of both factors of each use to buckets, and convolves the buckets by
    FFT."""
    _, uses, count = inputs.shape
    _, out, _, features = outputs.shape
    together = out * count * features * (uses + BUCKET_COST)
    fourier = (1 + out) * size * log2(size + 1)
    buckets = count + out * features + fourier
    apart = uses * BUCKET_COST * buckets + out * uses * size
    return together, apart


def sketched_gram(
    left: Float[Tensor, "query out size"], right: Float[Tensor, "train out_ size"]
) -> Float[Tensor, "query out train out_"]:
    """Return the sketched kernel K̂ = (J S)(J′ S)ᵀ from two sketched Jacobians."""
    return torch.einsum("qck,ndk->qcnd", left, right)


# The error ‖K̂ − K‖_F is estimated without computing K,
# from v random vectors V with normal entries:
#
#     E ‖(K̂ − K)V‖²_F = v ‖K̂ − K‖²_F
#
# K V = J(J′ᵀV) needs products with Jacobians only. The sum of squares is a mixture of χ²
# variables with v degrees of freedom. An error bar is too small if this sum happens to
# be far below its mean. This is most likely if the whole error lies in one direction
# (Székely & Bakirov 2003). Even then, the error bar exceeds the error in 99 of 100
# cases.


VECTORS = 8
CHI_SQUARE_QUANTILE = 1.6465  # the 1 % quantile of χ² with 8 degrees of freedom


def random_vectors(
    shape: Sequence[int], seed: int, like: Tensor
) -> Float[Tensor, "vector example out"]:
    """Draw V from a random stream that is independent of the sketch."""
    return normal(stream("sketch error", seed), VECTORS, *shape).to(like)


def error_bar(missed: Float[Tensor, "vector query out"]) -> float:
    """Return a bound of ‖K̂ − K‖_F from `missed` = (K̂ − K)V.
    It holds in 99 of 100 cases."""
    return sqrt(float(missed.double().square().sum()) / CHI_SQUARE_QUANTILE)
