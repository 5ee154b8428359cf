"""A step of an optimizer turns differences of the weights, of its memory and of the gradient into others.

A linear functional of the differences after the step (the adjoint a of the weights, and one for each part of the
memory) is one of those before it and of the gradient p that the optimizer took in:

    a·Δθ_{s+1} + b·Δm_{s+1}  =  a·Δθ_s + b′·Δm_s + p̂·Δp_s

Decay and clipping are the same for all, and are dealt with elsewhere.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from jaxtyping import Float
from torch import Tensor

from ntkexp.removal.pair import Pair

Adjoints: TypeAlias = Mapping[str, Float[Tensor, "direction weight"]]
"""The adjoints of the parts of the memory."""


@dataclass(frozen=True, kw_only=True)
class StepEnds:
    """One step of both trainings; `before` and `after` give a part of the memory as it was then."""

    index: int
    sizes: Float[Tensor, " weight"]
    taken: Pair  # p
    before: Callable[[str], Pair]
    after: Callable[[str], Pair]


class AbstractDifferenceRule(ABC):
    """The rule of one optimizer."""

    @property
    def records(self) -> tuple[str, ...]:
        """The parts of the memory that the rule needs of every step."""
        return ()

    @abstractmethod
    def back(
        self, ends: StepEnds, weights: Float[Tensor, "direction weight"], memory: Adjoints
    ) -> tuple[Float[Tensor, "direction weight"], Adjoints]:
        """Find p̂ and the adjoints of the memory before the step; there are none after the last."""
