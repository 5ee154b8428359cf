"""The kernel at some steps, with exact moments of the loss, for optimizers that remember nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ntkexp.path.accumulate.integrals import integrals_at_zero
from ntkexp.path.accumulate.moments import Moments
from ntkexp.path.accumulate.snapshot_sum import SnapshotSum, Track
from ntkexp.path.accumulate.step_totals import totals_at_zero
from ntkexp.path.domain import Domain
from ntkexp.path.integration.base import AbstractIntegration, Room
from ntkexp.path.rule.base import AbstractRule
from ntkexp.path.settings import Path
from ntkexp.shapes import Weights


@dataclass(frozen=True, kw_only=True)
class Snapshots(AbstractIntegration):
    """It holds two snapshots beside each path kernel, and knows its error by them."""

    path: Path

    @property
    def kernels(self) -> int:
        return 3 * self.rules

    @property
    def errors(self) -> int:
        return self.rules

    @property
    def tapes(self) -> int:
        return len(self.path.positions(()))

    @property
    def details(self) -> Mapping[str, str]:
        return {rule: f"{detail} snapshots".lstrip() for rule, detail in self.path.details.items()}

    def begin(self, domain: Domain, weights: Weights, room: Room) -> SnapshotSum:
        return SnapshotSum(
            domain=domain,
            tracks={rule.option: self.track(rule, domain) for rule in self.path.rule},
            moments=Moments(pull=domain.no_pull(), late_pull=domain.no_pull()),
            arriving=domain.no_pull(),
            last=domain.steps - 1,
        )

    def track(self, rule: AbstractRule, domain: Domain) -> Track:
        """No snapshot taken yet."""
        return Track(
            integrals=integrals_at_zero(self.path.quadrature(rule), domain),
            totals=totals_at_zero(domain, len(self.path.rule)),
            latest=domain.zeros(4),
            pulled=domain.zeros(2),
            before=domain.zeros(4),
            error=domain.zeros(3),
        )
