"""The sum from the last step to the first, for optimizers that remember."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from ntkexp.mistake import Mistake
from ntkexp.optimizer.base import AbstractOptimizer
from ntkexp.path.accumulate.integrals import Integrals, integrals_at_zero
from ntkexp.path.accumulate.step_totals import totals_at_zero
from ntkexp.path.accumulate.tally import Tally
from ntkexp.path.attributed_points import shares
from ntkexp.path.backward.doubled import Doubled, sample_points
from ntkexp.path.backward.half_times import halves_at_zero
from ntkexp.path.backward.playback import Playback
from ntkexp.path.backward.recording import Recording, row_length
from ntkexp.path.backward.second_pass import SecondPass
from ntkexp.path.backward.two_passes import TwoPasses
from ntkexp.path.budget import Budget
from ntkexp.path.domain import Domain
from ntkexp.path.integration.base import AbstractIntegration, Room
from ntkexp.path.settings import Path
from ntkexp.shapes import Weights


@dataclass(frozen=True, kw_only=True)
class Backward(AbstractIntegration):
    """It refuses snapshots, goes over the path twice, and holds a bracket for each attributed point and output."""

    path: Path
    optimizer: AbstractOptimizer

    def __post_init__(self) -> None:
        if self.path.every == "snapshots":
            raise Mistake(
                f"path.every=snapshots: optimizer={self.optimizer.option} carries past gradients from step to step, so "
                "every step is needed; use path.every=1 (path.attributed limits its cost), or optimizer=gd or sgd"
            )

    @property
    def passes(self) -> int:
        return 2

    @property
    def doubles(self) -> bool:
        return bool(self.path.finer)

    def counts(self, sizes: Sequence[int]) -> list[int]:
        return shares(self.path.attributed, sizes)

    def chunk(self, budget: Budget, attributed: int) -> int:
        return budget.chunk(attributed)

    def begin(self, domain: Domain, weights: Weights, room: Room) -> TwoPasses:
        differentiated = self.optimizer.differentiated if self.path.effects else ()
        records, pull = (*self.optimizer.records, *differentiated), domain.no_pull()
        rows = room(domain.steps + 1, row_length(weights, records, pull))
        recording = Recording(rows=rows, like=weights, records=records, pull=pull)
        return TwoPasses(recording=recording, turn=partial(self.turn, domain), switches=domain.switches)

    def turn(self, domain: Domain, recording: Recording, step_sizes: Sequence[float]) -> SecondPass:
        """The second pass before its first step back."""
        rules = {rule.option: integrals_at_zero(self.path.quadrature(rule), domain) for rule in self.path.rule}
        totals = {name: totals_at_zero(domain, len(rules)) for name in rules}
        for each in totals.values():
            each.reach(len(step_sizes))
        like = domain.like.new_zeros(len(domain.attributed), *domain.shape[1:3])
        return SecondPass(
            steps=self.playback(domain, recording, step_sizes),
            optimizer=self.optimizer,
            domain=domain,
            integrals=rules,
            totals=totals,
            tallies={name: [Tally() for _ in step_sizes] for name in rules},
            halves={name: halves_at_zero(len(step_sizes), like) for name in rules},
            doubled=self.doubled(domain),
        )

    def playback(self, domain: Domain, recording: Recording, step_sizes: Sequence[float]) -> Playback:
        """The steps as they were recorded."""
        return Playback(
            recording=recording,
            points=domain.points,
            step_sizes=step_sizes,
            factors=self.optimizer.factors(recording.like),
            weight_decay=self.optimizer.weight_decay,
        )

    def doubled(self, domain: Domain) -> Doubled | None:
        """The measure of the parts by the closing rule, at a sample of the points."""
        if self.path.closing is None or not self.path.finer:
            return None
        sample = sample_points(len(domain.attributed), self.path.error_samples).to(domain.attributed.device)
        room = (domain.like.new_zeros(len(sample), *domain.shape[1:axes]) for axes in (4, 3, 2))
        integrals = Integrals(self.path.finer, *room)
        return Doubled(rule=self.path.closing.option, integrals=integrals, sample=sample, gain=self.path.gain)
