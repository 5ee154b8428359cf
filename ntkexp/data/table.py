"""A table of the user's, as CSV or Parquet: one column is the target, all others are features.

    ntkexp train data=table data.path=houses.csv data.target=price

Features are numbers, true or false. Where one is missing or something else, the row is refused, dropped, or filled
with the mean of its column over the training split; the target is never guessed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import torch
from pydantic import Field

from ntkexp.data.base import AbstractSource, Examples
from ntkexp.data.format import comma, parquet
from ntkexp.data.format.features import Missing, features, usable
from ntkexp.data.format.grid import Grid
from ntkexp.data.format.target import targets
from ntkexp.data.format.user_path import UserPath, existing, quoted
from ntkexp.mistake import Mistake


class Table(AbstractSource):
    """Classification or regression, as the target column has it."""

    readers: ClassVar[dict[str, Callable[[Path], Grid]]] = {".csv": comma.read, ".parquet": parquet.read}

    path: UserPath
    target: str = Field(coerce_numbers_to_str=True)  # columns may be numbered
    missing: Missing = "refuse"

    def files(self) -> tuple[Path, ...]:
        return (existing(self.path),)

    def examples(self, generator: torch.Generator) -> Examples:
        grid = self.grid()
        target, classes = targets(grid, self.target)
        values = features(grid, self.target)
        keep = usable(values, grid, self.target, self.missing)
        return Examples(values[keep], target[keep], classes, gaps=self.missing == "mean")

    def grid(self) -> Grid:
        """Read the table as text, with the target among its columns."""
        ending = existing(self.path).suffix.lower()
        if ending not in self.readers:
            raise Mistake(f"{quoted(self.path)} ends in {ending!r}; a table ends in {' or '.join(self.readers)}")
        grid = self.readers[ending](self.path)
        grid.check()
        grid.check_target(self.target)
        return grid
