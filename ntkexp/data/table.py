"""Tables: a file of the user's, and the small data sets that come with the package (their sources: sets/README.md).

Small data sets that come with the package; their sources stand beside them in sets/README.md.

>>> inputs, target = read_bundled("wine")
>>> inputs.shape, target.unique()
(torch.Size([178, 13]), tensor([0., 1., 2.], dtype=torch.float64))
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from ntkexp.component import Count, CountOrNone
from ntkexp.data.base import AbstractSource, Examples
from ntkexp.data.format import table
from ntkexp.data.format.table import Grid, Missing, features, targets, usable
from ntkexp.data.format.user_path import UserPath, existing, quoted
from ntkexp.mistake import Mistake

SETS = Path(__file__).resolve().parent / "sets"


def read_bundled(name: str) -> tuple[Float[Tensor, "example feature"], Float[Tensor, " example"]]:
    """Read all inputs and targets of a set by its name, in the order of its file."""
    numbers = torch.from_numpy(np.loadtxt(SETS / f"{name}.csv.gz", delimiter=","))
    return numbers[:, :-1], numbers[:, -1]


class Table(AbstractSource):
    """A table of the user's, as CSV or Parquet: one column is the target, all others are features.

    Classification or regression, as the target column has it.

        ntkexp train data=table data.path=houses.csv data.target=price

    Features are numbers, true or false. Where one is missing or something else, the row is refused, dropped, or filled
    with the mean of its column over the training split; the target is never guessed.
    """

    readers: ClassVar[dict[str, Callable[[Path], Grid]]] = {".csv": table.read_comma, ".parquet": table.read_parquet}

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


class BreastCancer(AbstractSource):
    """Breast cancer Wisconsin (diagnostic): 30 measurements of cell nuclei in 569 tumours.

    Two classes, malignant and benign.
    """

    def examples(self, generator: torch.Generator) -> Examples:
        inputs, target = read_bundled("breast_cancer")
        return Examples(inputs, target.long(), ("malignant", "benign"))


class Diabetes(AbstractSource):
    """Diabetes: ten measurements of 442 patients and how far the disease went in a year.

    Regression; the inputs are taken in their own units, because standardising is done here.
    """

    def examples(self, generator: torch.Generator) -> Examples:
        inputs, target = read_bundled("diabetes")
        return Examples(inputs, target[:, None])


class Wine(AbstractSource):
    """Wine recognition: 13 measurements of 178 wines from three cultivars.

    Three classes; the set is small, and so are its splits.
    """

    train: Count = 64
    probe: CountOrNone = 32

    def examples(self, generator: torch.Generator) -> Examples:
        inputs, target = read_bundled("wine")
        return Examples(inputs, target.long(), ("class_0", "class_1", "class_2"))
