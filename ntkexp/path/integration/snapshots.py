"""The kernel at some steps, with exact moments of the loss, for optimizers that remember nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ntkexp.path.accumulate.integrals import integrals_at_zero
from ntkexp.path.accumulate.moments import Moments
from ntkexp.path.accumulate.snapshot_sum import SnapshotSum, Track
from ntkexp.path.extent import Extent
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
        return 3 * len(self.path.rule)

    @property
    def tapes(self) -> int:
        return len(self.path.positions(()))

    @property
    def details(self) -> Mapping[str, str]:
        return {rule: f"{detail} snapshots".lstrip() for rule, detail in self.path.details.items()}

    def begin(self, extent: Extent, weights: Weights, room: Room) -> SnapshotSum:
        return SnapshotSum(
            extent=extent,
            tracks={rule.option: self.track(rule, extent) for rule in self.path.rule},
            moments=Moments(pull=extent.no_pull(), late_pull=extent.no_pull()),
            arriving=extent.no_pull(),
            last=extent.steps - 1,
        )

    def track(self, rule: AbstractRule, extent: Extent) -> Track:
        """No snapshot taken yet."""
        return Track(
            integrals=integrals_at_zero(self.path.quadrature(rule), extent),
            latest=extent.zeros(4),
            pulled=extent.zeros(2),
            before=extent.zeros(4),
            error=extent.zeros(3),
        )
