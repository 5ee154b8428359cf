"""An accumulator of steps as they come, whose sums are noted at the switches between phases."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxtyping import Float
from torch import Tensor

from ntkexp.path.accumulate.base import AbstractAccumulator, Error
from ntkexp.path.accumulate.integrals import Integrals
from ntkexp.path.accumulate.mark import Mark, mark_of, marks_from, states
from ntkexp.path.accumulate.step_totals import StepTotals
from ntkexp.path.accumulate.tally import Tally
from ntkexp.path.step import Step
from ntkexp.shapes import Weights


@dataclass(kw_only=True)
class Marked(AbstractAccumulator):
    """What another accumulates is noted where a phase ends."""

    accumulator: AbstractAccumulator
    switches: tuple[int, ...]
    noted: list[Mark] = field(default_factory=list)

    @property
    def integrals(self) -> Mapping[str, Integrals]:
        return self.accumulator.integrals

    @property
    def marks(self) -> Sequence[Mark]:
        return self.noted

    def add(self, step: Step, *, due: bool = False) -> dict[str, Tally]:
        found = self.accumulator.add(step, due=due)
        if step.index + 1 in self.switches:
            self.noted.append(mark_of(self.integrals))
        return found

    def close(self, step: Step) -> None:
        self.accumulator.close(step)

    def steps_back(self, end: Weights, step_sizes: Sequence[float]) -> Iterator[tuple[int, int]]:
        return self.accumulator.steps_back(end, step_sizes)

    def error(self, rule: str, steps: int) -> Error | None:
        return self.accumulator.error(rule, steps)

    def half_by(self, rule: str) -> Float[Tensor, "point out train"] | None:
        return self.accumulator.half_by(rule)

    def by_step(self, rule: str) -> StepTotals:
        return self.accumulator.by_step(rule)

    @property
    def state(self) -> dict[str, Any]:
        return {"accumulator": self.accumulator.state, "marks": states(self.noted)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.accumulator.restore(state["accumulator"])
        like = next((found.contributions for found in self.integrals.values()), None)
        self.noted = [] if like is None else marks_from(state["marks"], like)
