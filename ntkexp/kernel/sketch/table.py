"""Where the elements of a parameter go in a sketch, and with which signs: the tables of a random projection.

A parameter is a matrix, its first axis against all others. Rows and columns draw a bucket h and a sign σ each, and the
element (i, j) takes both of theirs:

    S[(i, j), r] = σ_i σ_j [h_i + h_j ≡ r mod k],        E SSᵀ = 1

Two different elements differ in their row or in their column, whose sign is drawn by itself: hence no bias.

Literature: the count sketch (Charikar, Chen & Farach-Colton 2002), that of a product (Pagh 2013; Pham & Pagh 2013).
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ntkexp.kernel.secant.uses import View
from ntkexp.stream import stream


class Draw(NamedTuple):
    """The buckets and signs of rows, or of columns, or of elements."""

    bucket: Int[Tensor, "..."]
    sign: Int[Tensor, "..."]

    def at(self, place: Int[Tensor, "..."]) -> Draw:
        """Those of some."""
        return Draw(self.bucket[place], self.sign[place])

    def to(self, device: torch.device) -> Draw:
        """The same numbers on another device."""
        return Draw(self.bucket.to(device), self.sign.to(device))


@dataclass(frozen=True)
class SketchTable:
    """The draws of one parameter in a sketch of `size` numbers."""

    rows: Draw
    columns: Draw
    size: int

    def at(self, places: Int[Tensor, "..."]) -> Draw:
        """The buckets and signs of elements, by their places in the parameter."""
        rows, columns = self.rows.at(places // self.width), self.columns.at(places % self.width)
        return Draw((rows.bucket + columns.bucket) % self.size, rows.sign * columns.sign)

    def factors(self, view: View) -> tuple[Draw, Draw] | None:
        """The draws along both axes of a view, if one of them runs over rows and the other over columns.

        >>> table = draw_table("w", torch.Size([4, 3]), size=8, seed=0, device=torch.device("cpu"))
        >>> whole, transposed = View("w", (4, 3), (3, 1), 0), View("w", (3, 4), (1, 3), 0)
        >>> [len(draw.bucket) for draw in table.factors(transposed)], table.factors(View("w", (2, 2), (2, 1), 0))
        ([3, 4], None)
        """
        (first, second), (step, step_), width = view.shape, view.stride, self.width
        row, column = divmod(view.offset, width)
        if step % width == 0 and column + (second - 1) * step_ < width:
            return self.along(self.rows, row, step // width, first), self.along(self.columns, column, step_, second)
        if step_ % width == 0 and column + (first - 1) * step < width:
            return self.along(self.columns, column, step, first), self.along(self.rows, row, step_ // width, second)
        return None

    def along(self, draws: Draw, start: int, step: int, count: int) -> Draw:
        """The draws of so many rows or columns."""
        return draws.at(start + step * torch.arange(count, device=draws.bucket.device))

    @property
    def width(self) -> int:
        """The number of columns."""
        return len(self.columns.bucket)


def draw_table(name: str, shape: torch.Size, size: int, seed: int, device: torch.device) -> SketchTable:
    """The table of the parameter of this name: the same whatever else is sketched, in whatever order."""
    generator = stream("sketch", seed, int.from_bytes(sha256(name.encode()).digest()[:8], "big"))
    rows = shape[0] if shape else 1
    sides = [draw(count, size, generator).to(device) for count in (rows, shape.numel() // max(1, rows))]
    return SketchTable(sides[0], sides[1], size)


def draw(count: int, size: int, generator: torch.Generator) -> Draw:
    """Buckets and signs of so many; one alone takes the first bucket as it is."""
    if count == 1:
        return Draw(torch.zeros(1, dtype=torch.long), torch.ones(1, dtype=torch.long))
    bucket = torch.randint(size, (count,), generator=generator)
    return Draw(bucket, 2 * torch.randint(2, (count,), generator=generator) - 1)


def scattered(values: Float[Tensor, "*batch element"], where: Draw, size: int) -> Float[Tensor, "*batch size"]:
    """The count sketch of vectors whose elements have these draws.

    >>> scattered(torch.tensor([[1.0, 2.0, 4.0]]), Draw(torch.tensor([1, 0, 1]), torch.tensor([1, 1, -1])), 3)
    tensor([[ 2., -3.,  0.]])
    """
    return values.new_zeros(*values.shape[:-1], size).index_add(-1, where.bucket, values * where.sign)
