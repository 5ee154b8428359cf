"""What a difference rule sees: one operation at both ends of a segment, and the differences of its arguments."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ntkexp.kernel.record.tape import Entry
from ntkexp.mistake import Mistake

# --- What a difference rule sees: one operation at both ends of a segment, and the differences of its arguments.
#
# A rule is a function of a `Call` that returns the exact difference Δv of the operation's result, as a linear map
# of the differences of its arguments. Whatever multiplies a difference is a *coefficient*: a mean of two values,
# a slope. Coefficients are asked of the call, because the search for which example owns which element replaces
# every one of them that inputs or weights decide by a random number in [1, 2]: no unit is dead then, no pixel
# black, and nothing cancels.


class NoRule(Mistake):
    """An operation through which no difference can be passed exactly."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)

    @property
    def remark(self) -> str:
        """What it means for a tangent."""
        return f"{self.reason}: the tangent is read from plain Jacobians, which is right and slow"


@dataclass(frozen=True, eq=False)
class Ends:
    """A tensor at both ends of a segment. `delta` is None where it cannot change."""

    start: Tensor
    end: Tensor
    delta: Tensor | None
    from_weights: bool = False  # a function of trained weights, not of the inputs
    from_inputs: bool = True

    @property
    def change(self) -> Tensor:
        """The difference of a value that does change."""
        assert self.delta is not None, "a rule asked for the difference of a value that cannot change"
        return self.delta

    def view(self, function: Callable[[Tensor], Tensor]) -> Ends:
        """The same rearrangement of the value at both ends and of the difference."""
        delta = None if self.delta is None else function(self.delta)
        return Ends(function(self.start), function(self.end), delta, self.from_weights, self.from_inputs)


class AbstractCall:
    """One operation at both ends."""

    entry: Entry
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @cached_property
    def given(self) -> dict[str, Any]:
        """The arguments by the names that torch has for them, or what it takes where none was given."""
        defaults = {each.name: each.default_value for each in self.entry.op._schema.arguments}
        return defaults | dict(zip(defaults, self.args, strict=False)) | self.kwargs

    @property
    @abstractmethod
    def ends(self) -> list[tuple[Tensor, Tensor]]:
        """Every result at both ends."""

    @property
    def start(self) -> Tensor:
        """The (first) result at the start, for its shape."""
        return self.ends[0][0]

    @property
    @abstractmethod
    def is_point(self) -> bool:
        """Whether the segment has length zero, so that differences are derivatives."""

    @property
    @abstractmethod
    def is_still(self) -> bool:
        """Whether every difference is zero, and what it reaches is all that is asked."""

    @abstractmethod
    def is_cut(self, value: Ends) -> bool:
        """Whether the network is cut between this value and the operation: one is made of weights, one of inputs."""

    @abstractmethod
    def delta(self, value: Ends, shape: torch.Size | None = None, gain: Tensor | float = 1.0) -> Tensor:
        """The difference of an argument, expanded to the shape at which the operation uses it, times a coefficient."""

    @abstractmethod
    def pieces(self, value: Ends, dim: int) -> tuple[Tensor, ...] | None:
        """The differences along an axis one by one, if the network takes each of them: put together again at once."""

    @abstractmethod
    def picked(self, value: Ends, arranged: Callable[[Tensor], Tensor]) -> Tensor:
        """The difference of a weight from which the operation picks elements; `arranged` picks those of any tensor."""

    @abstractmethod
    def mean(self, value: Ends) -> Tensor:
        """The coefficient (v₀ + v₁)/2."""

    @abstractmethod
    def slope(self, value: Ends, slope: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """The coefficient slope(v₀, v₁)."""

    @abstractmethod
    def product(
        self, left: Ends, right: Ends, gain: float = 1.0, bias: Ends | None = None, shift: float = 1.0
    ) -> Tensor:
        """The difference of gain · left @ right + shift · bias, for matrices."""

    @abstractmethod
    def use(self, factor: Tensor, weight: Ends, bias: Ends | None, shift: float = 1.0) -> Tensor:
        """factor ΔW + shift · Δb as a use of the weights: rows for rows, images [example, out, use] for patches."""

    @abstractmethod
    def grouped_use(self, factor: Tensor, groups: int, weight: Ends, bias: Ends | None) -> Tensor:
        """factor_g ΔW_gᵀ + Δb_g as a use of the weights, images [example, out, use] for patches."""


Result: TypeAlias = Tensor | tuple[Tensor | None, ...]
"""The difference of the (first) result, or of each; None for one that a network does not use (and may not)."""

Rule: TypeAlias = Callable[[AbstractCall], Result]
Slope: TypeAlias = Callable[[AbstractCall, Tensor, Tensor], Tensor]


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
