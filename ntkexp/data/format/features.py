"""The columns that are learned from: numbers, true or false. Anything else is a gap.

A column without any number is text, and no way of filling gaps makes it a feature.
"""

from __future__ import annotations

from reprlib import repr as brief
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ntkexp.data.format.grid import Grid
from ntkexp.data.format.number import number
from ntkexp.mistake import Mistake

Missing = Literal["refuse", "drop", "mean"]


def features(grid: Grid, target: str) -> Float[Tensor, "row feature"]:
    """Put all columns but the target together, with NaN for a gap."""
    names = [name for name in grid.columns if name != target]
    values = torch.tensor([[number(c) for c in grid.cells(name)] for name in names], dtype=torch.float64).t()
    empty = values.isnan().all(0)
    if empty.any():
        name = names[int(empty.nonzero()[0])]
        raise Mistake(
            f"{grid.place(0, name)}, and no other cell of {brief(name)} is a number either; remove the column, or "
            "write it as numbers or true and false"
        )
    return values.contiguous()


def usable(values: Float[Tensor, "row feature"], grid: Grid, target: str, how: Missing) -> Bool[Tensor, " row"]:
    """The rows to keep: those without a gap, or all of them if gaps are to be filled."""
    gaps = values.isnan()
    if how == "refuse" and gaps.any():
        names = [name for name in grid.columns if name != target]
        row, column = gaps.nonzero()[0].tolist()
        raise Mistake(
            f"{grid.place(row, names[column])}, which is no number; data.missing=drop leaves out the row, mean fills it"
        )
    keep = ~gaps.any(1) | (how == "mean")
    if not keep.any():
        raise Mistake(f"data.missing=drop: every row of {grid.path.name!r} lacks a number; try data.missing=mean")
    return keep
