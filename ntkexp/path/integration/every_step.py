"""The kernel of every step, for optimizers that remember nothing."""

from __future__ import annotations

from dataclasses import dataclass

from ntkexp.path.accumulate.error_bar import ErrorBar
from ntkexp.path.accumulate.integrals import integrals_at_zero
from ntkexp.path.accumulate.step_sum import StepSum
from ntkexp.path.accumulate.step_totals import totals_at_zero
from ntkexp.path.domain import Domain
from ntkexp.path.integration.base import AbstractIntegration, Room
from ntkexp.path.settings import Path
from ntkexp.shapes import Weights


@dataclass(frozen=True, kw_only=True)
class EveryStep(AbstractIntegration):
    """It goes with every step, and costs a reading of each by each rule."""

    path: Path

    @property
    def errors(self) -> int:
        return 1 if self.path.finer else 0

    def begin(self, domain: Domain, weights: Weights, room: Room) -> StepSum:
        rules = {rule.option: integrals_at_zero(self.path.quadrature(rule), domain) for rule in self.path.rule}
        totals = {name: totals_at_zero(domain, len(rules)) for name in rules}
        return StepSum(domain=domain, rules=rules, totals=totals, error_bar=self.error_bar(domain))

    def error_bar(self, domain: Domain) -> ErrorBar | None:
        """The measure of the parts by the closing rule, on a sample of the steps."""
        if self.path.closing is None or not self.path.finer:
            return None
        return ErrorBar(
            rule=self.path.closing.option,
            coarse=self.path.quadrature(self.path.closing),
            fine=self.path.finer,
            gain=self.path.gain,
            every=self.path.sampled_every(domain.steps),
            total=domain.zeros(3),
            makes_kernels=domain.points.makes_kernels,
        )
