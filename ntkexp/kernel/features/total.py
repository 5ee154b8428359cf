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


@dataclass
class Total:
    """The sum so far; `outputs` says how many rows belong to an example on the left, and columns on the right."""

    matrix: Float[Tensor, "row row_"]
    outputs: tuple[int, int]
    halved: bool  # both sides are one
    begun: bool = False

    @cached_property
    def strips(self) -> list[tuple[slice, slice]]:
        """Places of whole examples to which products are added, in which every entry is, or its mirror image."""
        if not self.halved:
            return [(slice(None), slice(None))]
        least, out = max(STRIP, -(-len(self.matrix) // STRIPS)), self.outputs[0]
        step = -(-least // out) * out
        return [(slice(at, at + step), slice(at, None)) for at in range(0, len(self.matrix), step)]

    def add_product(self, left: Float[Tensor, "row size"], right: Float[Tensor, "row_ size"]) -> None:
        """R R′ᵀ."""
        for rows, columns in self.strips:
            place, factors = self.matrix[rows, columns], (left[rows], right[columns].t())
            place.addmm_(*factors) if self.begun else torch.mm(*factors, out=place)
        self.begun = True

    def add_single_use(self, left: Factored, right: Factored) -> None:
        """(⟨a, a′⟩ + s s′)⟨β, β′⟩, for each pair of examples and each of their outputs."""
        shift = of_biases(left, right)
        inputs, outputs = matrices(left)
        inputs_, outputs_ = (inputs, outputs) if right is left else matrices(right)
        inputs_, outputs_ = inputs_.t(), outputs_.t()
        for rows, columns in self.strips:
            place, features = self.matrix[rows, columns], torch.mm(outputs[rows], outputs_[:, columns])
            if self.outputs == (1, 1):  # torch goes through axes of one element one by one
                products = torch.mm(inputs[rows], inputs_[:, columns]).add_(shift)
            else:
                products = torch.mm(inputs[self.examples(rows, 0)], inputs_[:, self.examples(columns, 1)]).add_(shift)
                shape = (len(products), self.outputs[0], products.shape[1], self.outputs[1])
                place, features, products = place.view(shape), features.view(shape), products[:, None, :, None]
            place.addcmul_(features, products) if self.begun else torch.mul(features, products, out=place)
        self.begun = True

    def examples(self, rows: slice, side: int) -> slice:
        """The examples that rows belong to."""
        out = self.outputs[side]
        return slice(*(None if end is None else -(-end // out) for end in (rows.start, rows.stop)))

    def add(self, share: Float[Tensor, "row row_"]) -> None:
        """A share as it is."""
        self.matrix.add_(share) if self.begun else self.matrix.copy_(share)
        self.begun = True

    def whole(self) -> Float[Tensor, "row row_"]:
        """The kernel, when all shares are in it."""
        for rows, _ in self.strips if self.halved else ():
            self.matrix[rows.stop :, rows] = self.matrix[rows, rows.stop :].t()
        return self.matrix


def matrices(block: Factored) -> tuple[Float[Tensor, "example in_"], Float[Tensor, "row features"]]:
    """The factors of a single use, a row of β for each example and output."""
    return block.inputs[:, 0], block.outputs[:, :, 0].flatten(0, 1)
