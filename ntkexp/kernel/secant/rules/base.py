"""What a difference rule is, sums of its terms, and the folding of an axis."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from ntkexp.kernel.secant.call import Call, Ends

Result: TypeAlias = Tensor | tuple[Tensor | None, ...]
"""The difference of the (first) result, or of each; None for one that a network does not use (and may not)."""

Rule: TypeAlias = Callable[[Call], Result]
Slope: TypeAlias = Callable[[Call, Tensor, Tensor], Tensor]


def total(terms: list[Tensor], shape: torch.Size) -> Tensor:
    """The sum of at least one term, at the given shape."""
    result = terms[0]
    for term in terms[1:]:
        result = result + term
    return result.expand(shape)


# --- Folding an axis: many values become one, pair by pair, in a fixed order.


Pair: TypeAlias = Callable[[Ends, Ends], Ends]
"""What becomes of two values."""


def fold(value: Ends, pair: Pair) -> Ends:
    """All values along the last axis as one: neighbours of a round are half of its length apart."""
    while (n := value.start.shape[-1]) > 1:
        half = n // 2
        left, right = (value.view(window(start, half)) for start in (0, half))
        result = pair(left, right)
        value = result if n % 2 == 0 else with_last(result, value)
    return value.view(lambda v: v[..., 0])


def last(value: Ends, dims: int | list[int] | tuple[int, ...]) -> Ends:
    """The given axes as one, behind all others; all of them, if none are given."""
    dims = [dims] if isinstance(dims, int) else list(dims) or list(range(value.start.dim()))
    if value.start.dim() == 0:
        return value.view(lambda v: v[None])
    return value.view(lambda v: v.movedim(dims, tuple(range(-len(dims), 0))).flatten(-len(dims)))


def window(start: int, size: int) -> Callable[[Tensor], Tensor]:
    """Consecutive elements along the last axis."""
    return lambda v: v[..., start : start + size]


def with_last(result: Ends, value: Ends) -> Ends:
    """The results of a round, and what had no partner."""
    parts = ((result.start, value.start), (result.end, value.end), (result.change, value.change))
    start, end, delta = (torch.cat([made, all_[..., -1:]], dim=-1) for made, all_ in parts)
    return Ends(start, end, delta)
