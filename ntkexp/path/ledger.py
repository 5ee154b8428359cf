"""A ledger: what is accumulated along a path, and what can be said of its error."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from ntkexp.path.descent import Step
from ntkexp.path.error_bar import ErrorBar
from ntkexp.path.integrals import Integrals, Tally
from ntkexp.path.points import Block

Blocks: TypeAlias = Callable[[Step], Iterable[Block]]
"""The points at which the path is integrated, block by block, during a step."""


class Error(NamedTuple):
    """Estimates of ‖𝒮 − 𝒮_integral‖, and of the same for the sums over i where these are not exact."""

    parts: float
    sums: float | None = None


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
        return Error(self.error_bar.estimate(steps)) if self.error_bar is not None and rule == "secant" else None

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
