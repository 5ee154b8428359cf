"""Examples as a person looks at them: the tensor of a call that holds most of each, and its text if it is of tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ntkexp.kernel.record.inputs import tensors
from ntkexp.shapes import Inputs

Decode: TypeAlias = Callable[[Sequence[int]], str]
"""From the numbers of tokens to their text."""

MOST = 500e6  # bytes of examples that are kept once more, to be looked at
PREFERRED = ("input_ids", "pixel_values")  # what models of Hugging Face call what a person would look at


@dataclass
class Gallery:
    """Rows of the examples that were seen so far, by their names; of none, once they take too much."""

    rows: dict[str, NDArray[Any]] = field(default_factory=dict)
    room: float = MOST

    def take(self, names: Sequence[str], inputs: Inputs) -> None:
        """Take in those that are new."""
        rows = shown(inputs)
        for name, row in zip(names, rows, strict=True):
            if name not in self.rows and self.room > 0:
                self.rows[name] = row
                self.room -= row.nbytes

    def of(self, names: Sequence[str]) -> NDArray[Any]:
        """The rows of some examples; empty ones, if there was no room for all."""
        found = [self.rows[name] for name in names if name in self.rows]
        return stacked(found) if len(found) == len(names) and self.room > 0 else np.zeros((len(names), 0))


def shown(inputs: Inputs) -> NDArray[Any]:
    """What a person would look at, a row for each example.

    >>> shown({"mask": torch.ones(1, 2), "input_ids": torch.tensor([[4, 7]])})
    array([[4, 7]])
    """
    named = inputs if isinstance(inputs, Mapping) else {}
    found = next((named[key] for key in PREFERRED if isinstance(named.get(key), Tensor)), tensors(inputs)[0])
    assert isinstance(found, Tensor)
    number = found.detach().cpu()
    return np.asarray((number.double() if number.dtype == torch.bfloat16 else number).numpy())


def stacked(rows: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Rows as one array; sentences of several lengths are filled up with −1.

    >>> stacked([np.array([5, 6]), np.array([7])])
    array([[ 5,  6],
           [ 7, -1]])
    """
    if len({row.shape for row in rows}) == 1:
        return np.stack(rows)
    if any(row.ndim != 1 for row in rows):
        return np.zeros((len(rows), 0))
    longest = max(len(row) for row in rows)
    return np.stack([np.pad(row, (0, longest - len(row)), constant_values=-1) for row in rows])


def texts(rows: NDArray[Any], decode: Decode) -> NDArray[np.str_]:
    """The text of rows of tokens."""
    return np.array([decode([int(token) for token in row if token >= 0]) for row in rows], dtype=str)
