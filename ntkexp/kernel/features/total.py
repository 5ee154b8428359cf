"""The total of a kernel, to which the shares of its parameters are added.

Of a kernel of features with themselves only the half from the diagonal on is formed, strip by strip, and mirrored once,
when all shares are in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.kernel.features.blocks import Factored, of_biases

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
