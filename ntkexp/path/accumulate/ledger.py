"""A ledger: what is accumulated along a path, and what can be said of its error."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from jaxtyping import Float
from torch import Tensor

from ntkexp.path.accumulate.error_bar import ErrorBar
from ntkexp.path.accumulate.integrals import Integrals, Tally
from ntkexp.path.descent import Step
from ntkexp.path.points import Block

Blocks: TypeAlias = Callable[[Step], Iterable[Block]]
"""The points at which the path is integrated, block by block, during a step."""


class Error(NamedTuple):
    """Estimates of ‖𝒮 − 𝒮_integral‖, and of the same for the sums over i where these are not exact."""

    parts: float
    sums: float | None = None


class Hindsight(NamedTuple):
    """What a pass backwards finds out of the parts by a rule beside them: their error, where that was measured, and the
    share of the path's time by which half of each was done.
    """

    error: Error | None
    half_by: Float[Tensor, "point out train"]


class AbstractLedger(ABC):
    """Takes in step after step; `integrals` are complete when the ledger is closed."""

    @property
    @abstractmethod
    def integrals(self) -> Mapping[str, Integrals]:
        """𝒦 and 𝒮, by rule."""

    @abstractmethod
    def add(self, step: Step, blocks: Blocks, *, due: bool) -> dict[str, Tally]:
        """Take in a step, at which a kernel may be due; what it adds by each rule, if that was measured."""

    @abstractmethod
    def close(self, step: Step, blocks: Blocks) -> None:
        """End sooner than was planned, before this step."""

    @abstractmethod
    def error(self, rule: str, steps: int) -> Error | None:
        """How far off the integrals by a rule are after so many steps, where that is known."""

    def half_by(self, rule: str) -> Float[Tensor, "point out train"] | None:
        """When each example acted, where that was seen."""
        return None

    @property
    @abstractmethod
    def state(self) -> dict[str, Any]:
        """The accumulators, for a checkpoint."""

    @abstractmethod
    def restore(self, state: Mapping[str, Any]) -> None:
        """Take the accumulators of a checkpoint."""


@dataclass(frozen=True)
class EveryStep(AbstractLedger):
    """The kernel of every step, read anew by every rule."""

    rules: Mapping[str, Integrals]
    error_bar: ErrorBar | None
    hindsight: Mapping[str, Hindsight] = field(default_factory=dict)

    @property
    def integrals(self) -> Mapping[str, Integrals]:
        return self.rules

    def add(self, step: Step, blocks: Blocks, *, due: bool) -> dict[str, Tally]:
        tallies = {name: Tally() for name in self.rules}
        for block in blocks(step) if self.rules else ():
            for name, integrals in self.rules.items():
                integrals.add(step, block, tallies[name])
            if self.error_bar is not None and self.error_bar.measures(step.index):
                self.error_bar.add(step, block)
        return tallies

    def close(self, step: Step, blocks: Blocks) -> None:
        pass

    def error(self, rule: str, steps: int) -> Error | None:
        if rule in self.hindsight:
            return self.hindsight[rule].error
        return Error(bar.estimate(steps)) if (bar := self.error_bar) is not None and rule == bar.rule else None

    def half_by(self, rule: str) -> Float[Tensor, "point out train"] | None:
        return self.hindsight[rule].half_by if rule in self.hindsight else None

    @property
    def state(self) -> dict[str, Any]:
        return {
            "integrals": {name: integrals.state for name, integrals in self.rules.items()},
            "error_bar": {} if self.error_bar is None else self.error_bar.state,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        for name, integrals in self.rules.items():
            integrals.restore(state["integrals"][name])
        if self.error_bar is not None:
            self.error_bar.restore(state["error_bar"])
