"""What takes in the steps of a path and gives its integrals, with what can be said of their error.

Steps may come from a descent, from a recorded trajectory, or from a loop that someone else wrote.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxtyping import Float
from torch import Tensor

from ntkexp.path.accumulate.integrals import Integrals
from ntkexp.path.accumulate.mark import Mark
from ntkexp.path.accumulate.step_totals import StepTotals
from ntkexp.path.accumulate.tally import Tally
from ntkexp.path.backward.recording import Recording
from ntkexp.path.step import Step
from ntkexp.shapes import Weights


class Error(NamedTuple):
    """Estimates of ‖𝒮 − 𝒮_integral‖, and of the same for the sums over i where these are not exact."""

    parts: float
    sums: float | None = None


class AbstractAccumulator(ABC):
    """Takes in step after step; `integrals` are complete when the last one is taken, also on the way back."""

    @property
    @abstractmethod
    def integrals(self) -> Mapping[str, Integrals]:
        """𝒦 and 𝒮, by rule."""

    @abstractmethod
    def add(self, step: Step, *, due: bool = False) -> dict[str, Tally]:
        """Take in a step, at which a kernel may be due; what it adds by each rule, if that was measured."""

    def close(self, step: Step) -> None:
        """End sooner than was planned, before this step; most have nothing to finish."""
        return

    def steps_back(self, end: Weights, step_sizes: Sequence[float]) -> Iterator[tuple[int, int]]:
        """Go back over the steps from the weights at the end, if need be; how many are done of how many."""
        return iter(())

    @property
    def late_tallies(self) -> Sequence[dict[str, Tally]] | None:
        """What each step adds by each rule, where it took a way back to find that out."""
        return None

    @property
    def marks(self) -> Sequence[Mark]:
        """The sums at the end of each phase but the last, where there are phases."""
        return ()

    def recorded(self) -> Recording | None:
        """The steps as they were recorded, by those that go back over them."""
        return None

    @abstractmethod
    def error(self, rule: str, steps: int) -> Error | None:
        """How far off the integrals by a rule are after so many steps, where that is known."""

    def half_by(self, rule: str) -> Float[Tensor, "point out train"] | None:
        """The share of the path's time by which half of each contribution was done, where that was seen."""
        return None

    @abstractmethod
    def by_step(self, rule: str) -> StepTotals:
        """What came of each step by a rule; complete when the integrals are."""

    @property
    @abstractmethod
    def state(self) -> dict[str, Any]:
        """All that a checkpoint needs, as plain data and tensors."""

    @abstractmethod
    def restore(self, state: Mapping[str, Any]) -> None:
        """Stand where the checkpoint stood."""
