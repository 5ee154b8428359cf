"""The integral over time, for an optimizer whose weights move on a curve."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ntkexp.mistake import Mistake
from ntkexp.optimizer.base import Memory
from ntkexp.path.accumulate.error_bar import ErrorBar
from ntkexp.path.accumulate.flow_integral import RULE, FlowIntegral
from ntkexp.path.accumulate.integrals import integrals_at_zero
from ntkexp.path.accumulate.step_totals import totals_at_zero
from ntkexp.path.domain import Domain
from ntkexp.path.integration.base import AbstractIntegration, Room
from ntkexp.path.rule.left import Left
from ntkexp.path.settings import Path
from ntkexp.shapes import Weights


@dataclass(frozen=True, kw_only=True)
class AlongFlow(AbstractIntegration):
    """It refuses snapshots, and takes `path.nodes` readings of every arc."""

    path: Path

    def __post_init__(self) -> None:
        if self.path.every == "snapshots":
            raise Mistake(
                "path.every=snapshots: a flow is integrated over time on each of its arcs, not step by step; use "
                "path.every=1 (path.nodes and path.probes limit its cost), or optimizer=gd"
            )

    @property
    def rules(self) -> int:
        return 1

    @property
    def kernels(self) -> int:
        return 1 + self.errors  # a finer one at work

    @property
    def errors(self) -> int:
        return 1 if self.path.error_samples else 0

    @property
    def details(self) -> Mapping[str, str]:
        return {RULE: f"nodes={self.path.nodes} in time"}

    def facts(self, memory: Memory) -> dict[str, float]:
        if not memory:
            return {}
        arcs = memory["controller"]
        return {"flow_error": float(arcs["error"] / arcs["way"])}

    def begin(self, domain: Domain, weights: Weights, room: Room) -> FlowIntegral:
        tangent = integrals_at_zero(Left().quadrature(1, 1, 0), domain)
        return FlowIntegral(
            domain=domain,
            nodes=self.path.nodes,
            rule=tangent,
            totals=totals_at_zero(domain, 1),
            error_bar=self.error_bar(domain),
        )

    def error_bar(self, domain: Domain) -> ErrorBar | None:
        """The measure by one node more, on a sample of the steps."""
        if not self.path.error_samples:
            return None
        every = self.path.sampled_every(domain.steps)
        return ErrorBar(rule=RULE, coarse=(), fine=(), gain=1.0, every=every, total=domain.zeros(3))
