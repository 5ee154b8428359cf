"""The path of a flow: integrals over time, by Gauss nodes on every arc,

    𝒦 = ∫ K_t dt ≈ Σ_arcs h Σ_j w_j K(θ(t_j)),        𝒮 = −∫ K_t ℓ′(t) dt,

with tangents on both sides. On a sample of steps one more node tells how far off n nodes are.
"""

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

RULE = "gauss"


@dataclass(frozen=True, kw_only=True)
class FlowIntegral(AbstractAccumulator):
    """𝒦 and 𝒮 by `nodes` Gauss nodes on an arc."""

    domain: Domain
    nodes: int
    rule: Integrals
    totals: StepTotals
    error_bar: ErrorBar | None = None

    @property
    def integrals(self) -> Mapping[str, Integrals]:
        return {RULE: self.rule}

    def add(self, step: Step, *, due: bool = False) -> dict[str, Tally]:
        before, together = self.rule.contributions.clone(), self.rule.together()
        self.integrate(self.rule, step, self.nodes)
        self.totals.add(step.index, slice(None), self.rule.together() - together)
        if self.error_bar is not None and self.error_bar.measures(step.index):
            finer = self.rule.at_zero()
            self.integrate(finer, step, self.nodes + 1)
            self.error_bar.collect(finer.contributions - (self.rule.contributions - before))
        return {}

    def integrate(self, integrals: Integrals, step: Step, nodes: int) -> None:
        """Integrate over the arcs of a step."""
        for node in step.nodes(nodes):
            for block in self.domain.blocks(node.segment):
                integrals.take(node, block)

    def error(self, rule: str, steps: int) -> Error | None:
        return None if self.error_bar is None else Error(self.error_bar.estimate(steps))

    def by_step(self, rule: str) -> StepTotals:
        return self.totals

    @property
    def state(self) -> dict[str, Any]:
        error_bar = {} if self.error_bar is None else self.error_bar.state
        return {"rule": self.rule.state, "totals": self.totals.state, "error_bar": error_bar}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.rule.restore(state["rule"])
        self.totals.restore(state["totals"])
        if self.error_bar is not None:
            self.error_bar.restore(state["error_bar"])
