"""Examples and queries for display in reports. Each is shown as a row of one input
tensor, or as decoded text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ntkexp.foreign_loop.call import ModelCall
from ntkexp.foreign_loop.equal_inputs import RepeatedInputs
from ntkexp.kernel.record.tape import tensors
from ntkexp.records.contributions import BY_POSITION
from ntkexp.report.examples import Example, named_example
from ntkexp.report.top_examples import top_examples_of
from ntkexp.shapes import Inputs

if TYPE_CHECKING:
    import xarray as xr

Decode: TypeAlias = Callable[[Sequence[int]], str]
"""A function from token ids to their text, such as a tokenizer's `decode`."""

# largest number of bytes of copied examples during the attribution
MAX_SHOWN_BYTES = 500e6
# If all queries and examples take more bytes than this, copy only the examples with the
# largest contributions, and their queries.
MAX_COPIED_BYTES = 50e6
# inputs of Hugging Face models, which are shown if present
PREFERRED = (
    "input_ids",
    "pixel_values",
)
FILLER = -1  # value that pads short texts to the length of the longest one


@dataclass
class Gallery:
    """One input row for each example, by the example's name. Rows are added until
    `free_bytes` is used up."""

    rows: dict[str, NDArray[Any]] = field(default_factory=dict)
    free_bytes: float = MAX_SHOWN_BYTES
    repeated: RepeatedInputs = field(default_factory=RepeatedInputs)

    def add(self, call: ModelCall) -> None:
        """Add the examples of a recorded call that are not stored yet."""
        self.repeated.add(call)
        for name, row in zip(call.names, shown(call.rows), strict=True):
            if name not in self.rows and self.free_bytes > 0:
                self.rows[name] = row
                self.free_bytes -= row.nbytes

    def of(self, names: Sequence[str]) -> NDArray[Any]:
        """Return the stored rows of some examples. Return empty rows if any is missing,
        or if `free_bytes` is used up."""
        rows = [self.rows[name] for name in names if name in self.rows]
        if len(rows) < len(names) or self.free_bytes <= 0:
            return np.zeros((len(names), 0))
        return stacked(rows)


def shown(inputs: Inputs) -> NDArray[Any]:
    """Choose the input tensor to show, with one row for each example.

    >>> shown({"mask": torch.ones(1, 2), "input_ids": torch.tensor([[4, 7]])})
    array([[4, 7]])
    """
    tensor: object = tensors(inputs)[0]
    if isinstance(inputs, Mapping):
        preferred = [
            inputs[key] for key in PREFERRED if isinstance(inputs.get(key), Tensor)
        ]
        tensor = [*preferred, tensor][0]
    assert isinstance(tensor, Tensor)
    values = tensor.detach().cpu()
    if values.dtype == torch.bfloat16:  # NumPy has no bfloat16
        values = values.double()
    return np.asarray(values.numpy())


def stacked(rows: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Stack rows. Pad 1-D rows (texts) of different lengths with −1.

    If the shapes differ and a row is not 1-D, return an array without columns.

    >>> stacked([np.array([5, 6]), np.array([7])])
    array([[ 5,  6],
           [ 7, -1]])
    """
    if len({row.shape for row in rows}) == 1:
        return np.stack(rows)
    if any(row.ndim != 1 for row in rows):
        return np.zeros((len(rows), 0))
    longest = max(len(row) for row in rows)
    return np.stack(
        [np.pad(row, (0, longest - len(row)), constant_values=FILLER) for row in rows]
    )


def texts(rows: NDArray[Any], decode: Decode) -> NDArray[np.str_]:
    """Decode each row of tokens, without its padding."""
    decoded = [decode([int(token) for token in row if token >= 0]) for row in rows]
    return np.array(decoded, dtype=str)


def token_texts(rows: NDArray[Any], decode: Decode) -> NDArray[np.str_]:
    """Decode each token separately. The text of a padding element is empty.

    >>> alphabet = lambda tokens: "".join("ab"[token] for token in tokens)
    >>> token_texts(np.array([[1, 0], [1, -1]]), alphabet).tolist()
    [['b', 'a'], ['b', '']]
    """
    text_of_token = {
        int(token): decode([int(token)]) for token in np.unique(rows) if token >= 0
    }
    return np.array(
        [[text_of_token.get(int(token), "") for token in row] for row in rows],
        dtype=str,
    )


def words_of_tokens(
    attribution: xr.Dataset, rows: NDArray[Any], decode: Decode | None
) -> NDArray[np.str_] | None:
    """Return the text of each token if there are contributions by position, and `rows`
    are tokens that `decode` decodes. Otherwise, return None."""
    are_tokens = rows.ndim == 2 and np.issubdtype(rows.dtype, np.integer)
    if decode is None or BY_POSITION not in attribution or not are_tokens:
        return None
    return token_texts(rows, decode)


@dataclass(frozen=True)
class ShownExamples:
    """The queries and examples that a notebook shows,
    by axis ("query" or "example") and index.

    Each entry of `known` holds a name, an input row, its decoded text, if any, and its
    tokens, if there are contributions by position.
    """

    known: Mapping[
        tuple[str, int], tuple[str, NDArray[Any], str | None, NDArray[Any] | None]
    ]

    @classmethod
    def of(
        cls,
        attribution: xr.Dataset,
        queries: Inputs,
        gallery: Gallery,
        decode: Decode | None,
    ) -> ShownExamples:
        """Copy the queries and examples to be shown.

        If the examples are large, copy only those
        with the largest contributions to the first queries."""

        def copied(
            name: str, row: NDArray[Any], tokens: NDArray[Any] | None = None
        ) -> tuple[str, NDArray[Any], str | None, NDArray[Any] | None]:
            text = None if decode is None else str(texts(row[None], decode)[0])
            return name, row.copy(), text, tokens

        points = shown(queries)
        names = attribution["example"].to_numpy().tolist()
        query_places = set(range(len(points)))
        example_places = set(range(len(names)))
        stored_bytes = points.nbytes + sum(row.nbytes for row in gallery.rows.values())
        if stored_bytes > MAX_COPIED_BYTES:
            tops = top_examples_of(attribution)
            query_places = {top.point for top in tops}
            example_places = {index for top in tops for index in top.places}

        known = {
            ("query", index): copied(f"query {index}", points[index])
            for index in query_places
        }
        tokens = None
        if BY_POSITION in attribution:
            rows = gallery.of(names)
            words = words_of_tokens(attribution, rows, decode)
            tokens = rows if words is None else words
        for index in example_places:
            name = names[index]
            if name in gallery.rows:
                row_tokens = None if tokens is None else tokens[index]
                known["example", index] = copied(name, gallery.rows[name], row_tokens)
        return cls(known)

    def __call__(self, axis: str, index: int) -> Example | None:
        if (axis, index) not in self.known:
            return None
        return named_example(index, *self.known[axis, index])
