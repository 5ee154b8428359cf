"""The sum over every step, whose kernel is read anew by every rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ntkexp.path.accumulate.base import AbstractAccumulator, Error
from ntkexp.path.accumulate.error_bar import ErrorBar
from ntkexp.path.accumulate.integrals import Integrals
from ntkexp.path.accumulate.step_totals import StepTotals
from ntkexp.path.accumulate.tally import Tally
from ntkexp.path.domain import Domain
from ntkexp.path.step import Step


@dataclass(frozen=True, kw_only=True)
class StepSum(AbstractAccumulator):
    """𝒦 and 𝒮 by several rules, which share the tapes of a step."""

    domain: Domain
    rules: Mapping[str, Integrals]
    totals: Mapping[str, StepTotals]
    error_bar: ErrorBar | None = None

    @property
    def integrals(self) -> Mapping[str, Integrals]:
        return self.rules

    def add(self, step: Step, *, due: bool = False) -> dict[str, Tally]:
        tallies = {name: Tally() for name in self.rules}
        for block in self.domain.blocks(step.segment):
            for name, integrals in self.rules.items():
                self.totals[name].add(step.index, block.rows, integrals.add(step, block, tallies[name]))
            if self.error_bar is not None and self.error_bar.measures(step.index):
                self.error_bar.add(step, block)
        return tallies

    def error(self, rule: str, steps: int) -> Error | None:
        return Error(bar.estimate(steps)) if (bar := self.error_bar) is not None and rule == bar.rule else None

    def by_step(self, rule: str) -> StepTotals:
        return self.totals[rule]

    @property
    def state(self) -> dict[str, Any]:
        return {
            "integrals": {name: integrals.state for name, integrals in self.rules.items()},
            "totals": {name: totals.state for name, totals in self.totals.items()},
            "error_bar": {} if self.error_bar is None else self.error_bar.state,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        for name, integrals in self.rules.items():
            integrals.restore(state["integrals"][name])
            self.totals[name].restore(state["totals"][name])
        if self.error_bar is not None:
            self.error_bar.restore(state["error_bar"])
