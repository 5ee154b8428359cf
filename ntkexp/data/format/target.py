"""The column that is learned: classes, or real numbers.

Texts, truth values and at most 20 different whole numbers are classes, in sorted order; other numbers are real. A
target that is missing, or of another kind than the rest, is refused: a guess at it would be learned as the truth.
"""

from __future__ import annotations

from math import isnan
from reprlib import repr as brief
from typing import TypeVar

import torch
from torch import Tensor

from ntkexp.data.format.grid import Grid
from ntkexp.data.format.number import TRUTH, missing, number
from ntkexp.mistake import Mistake

MOST = 20
Name = TypeVar("Name", str, int)


def targets(grid: Grid, target: str) -> tuple[Tensor, tuple[str, ...]]:
    """Find labels and the names of their classes, or real values and no names."""
    cells = grid.cells(target)
    for row, cell in enumerate(cells):
        if missing(cell):
            raise Mistake(f"{grid.place(row, target)}: the target is missing; remove the row, or give its target")
    values = [number(cell) for cell in cells]
    if all(cell.lower() in TRUTH for cell in cells):
        return labels([cell.lower() for cell in cells])
    if all(isnan(value) for value in values):
        return texts(cells, target)
    refuse_mixture(values, grid, target)
    if all(value.is_integer() for value in values) and len(set(values)) <= MOST:
        return labels([int(value) for value in values])
    return torch.tensor(values, dtype=torch.float64)[:, None], ()


def labels(values: list[Name]) -> tuple[Tensor, tuple[str, ...]]:
    """Number each value by its position among the different ones."""
    names = sorted(set(values))
    position = {name: k for k, name in enumerate(names)}
    return torch.tensor([position[value] for value in values]), tuple(str(name) for name in names)


def texts(cells: list[str], target: str) -> tuple[Tensor, tuple[str, ...]]:
    """Take classes by their names, of which there cannot be many."""
    different = len(set(cells))
    if different > MOST:
        raise Mistake(
            f"data.target={brief(target)} holds {different} different texts, and at most {MOST} can be classes"
        )
    return labels(cells)


def refuse_mixture(values: list[float], grid: Grid, target: str) -> None:
    """A text is the mistake among numbers, a number among texts."""
    numbers = [not isnan(value) for value in values]
    rare = 2 * sum(numbers) < len(numbers)
    if not all(numbers):
        kinds = "a number, and most others are not" if rare else "no number, and most others are"
        raise Mistake(f"{grid.place(numbers.index(rare), target)}: the target is {kinds}; correct it or remove the row")
