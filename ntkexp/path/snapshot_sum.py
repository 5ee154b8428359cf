"""The sum along a path from the kernel at a few steps, with exact sums of ℓ′ between them.

ℓ′ᵢ(s) is known at every step at no cost, and the kernel varies slowly. So the kernel is computed at
steps s₀ < s₁ < …, the last step of the path among them, and interpolated linearly in time. With the
hat function φ_k around s_k,

    𝒦 = Σ_k K_k Σ_s φ_k(s) η_s,        𝒮 = −Σ_k K_k Σ_s φ_k(s) η_s ℓ′(s).

Between snapshots at times t_k < t this is K(t_s) = (1 − u_s) K_k + u_s K with u_s = (t_s − t_k)/(t
− t_k). The factors of both kernels follow from four sums over the steps between them, which are
known before the second kernel is:

    Σ_s η_s,   Σ_s (t_s − t_k) η_s,   Σ_s η_s ℓ′(s),   Σ_s (t_s − t_k) η_s ℓ′(s).

A step with a snapshot belongs to the interval that ends there, so that u = 1.

The error is estimated from the same sum without every other snapshot. Its interpolation reaches
twice as far, and its error is four times as large if the kernel is smooth in time. So a third of
the difference is the error:

    e = ⅓ Σ_{k odd} (K_k − Ǩ_k) Σ_s φ_k(s) η_s ℓ′(s),    Ǩ_k interpolated between K_{k−1} and K_{k+1}.

This estimate cannot see changes that are faster than the snapshots, such as the first steps under
an even schedule.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.path.checkpoint import Resumable
from ntkexp.path.domain import Domain
from ntkexp.path.forward_sum import AbstractAccumulator, Error
from ntkexp.path.integrals import Integrals, StepTotals, Tally, contract
from ntkexp.path.step import Step, decay, sizes_of
from ntkexp.path.step_kernel import StepBlock


class Weight(NamedTuple):
    """The factors of a snapshot: Σ φη for 𝒦, and Σ φηℓ′ for 𝒮."""

    size: float
    pull: Float[Tensor, "train out_"]


@dataclass(kw_only=True)
class Moments(Resumable):
    """The four sums over the steps since the latest snapshot, `elapsed` ago."""

    pull: Float[Tensor, "train out_"]  # Σ_s η_s ℓ′(s)
    late_pull: Float[Tensor, "train out_"]  # Σ_s (t_s − t_k) η_s ℓ′(s)
    size: float = 0.0  # Σ_s η_s
    late_size: float = 0.0  # Σ_s (t_s − t_k) η_s
    elapsed: float = 0.0

    checkpointed: ClassVar[tuple[str, ...]] = ("size", "late_size", "elapsed", "pull", "late_pull")

    def add(self, step: Step) -> None:
        """Add one step to the sums."""
        late = self.elapsed * step.step_size
        self.size += step.step_size
        self.pull += step.step_size * step.output_gradient
        self.late_size += late
        self.late_pull += late * step.output_gradient
        self.elapsed += step.step_size

    def share_out(self, span: float) -> tuple[Weight, Weight]:
        """Return the factors of two snapshots with the time `span` between them.

        If they coincide, the second has all of it.
        """
        second = Weight(self.size, self.pull)
        if span:
            second = Weight(self.late_size / span, self.late_pull / span)
        first = Weight(self.size - second.size, self.pull - second.pull)
        return first, second

    def restart(self, elapsed: float) -> None:
        """Start new sums, at the time `elapsed` after a snapshot."""
        self.size = 0.0
        self.late_size = 0.0
        self.elapsed = elapsed
        self.pull.zero_()
        self.late_pull.zero_()


class SnapshotInterval(NamedTuple):
    """The factors of the kernels K_k and K_{k+1} at the ends of an interval, and of the error of
    K_k.
    """

    first: Weight
    second: Weight
    middle: Float[Tensor, "train out_"] | None  # Σ_s φ_k(s) η_s ℓ′(s); None if k is even
    position: float  # of K_k in time, from 0 at K_{k−1} to 1 at K_{k+1}
    end: int  # the step before which the interval ends


@dataclass(frozen=True, kw_only=True)
class Track(Resumable):
    """The latest two snapshots by one rule, the sums, and their error."""

    integrals: Integrals
    totals: StepTotals  # of the intervals between snapshots
    latest: Float[Tensor, "query out train out_"]  # K_k
    pulled: Float[Tensor, "query out"]  # λJ·θ at K_k
    before: Float[Tensor, "query out train out_"]  # K_{k−1}
    error: Float[Tensor, "query out train"]  # e

    checkpointed: ClassVar[tuple[str, ...]] = (
        "integrals",
        "totals",
        "latest",
        "pulled",
        "before",
        "error",
    )

    def add(
        self,
        rows: slice,
        kernel: Float[Tensor, "chosen out train out_"],
        pulled: Float[Tensor, "chosen out"],
        interval: SnapshotInterval,
    ) -> None:
        """Add an interval that ends with this snapshot K_{k+1}, at some of the points."""
        change = self.add_snapshot(rows, self.latest[rows], self.pulled[rows], interval.first)
        change = change + self.add_snapshot(rows, kernel, pulled, interval.second)
        self.totals.add(interval.end - 1, rows, change)
        # e += ⅓ (K_k − Ǩ_k) Σ_s φ_k(s) η_s ℓ′(s)
        if interval.middle is not None:
            interpolated = torch.lerp(self.before[rows], kernel, interval.position)
            missed = self.latest[rows] - interpolated
            self.error[rows].add_(contract(missed, interval.middle), alpha=1 / 3)
        self.before[rows] = self.latest[rows]
        self.latest[rows] = kernel
        self.pulled[rows] = pulled

    def add_snapshot(
        self,
        rows: slice,
        kernel: Float[Tensor, "chosen out train out_"],
        pulled: Float[Tensor, "chosen out"],
        weight: Weight,
    ) -> Float[Tensor, "chosen out"]:
        """Add a snapshot times its factors, and return the change of the outputs that it explains.
        """
        parts = contract(kernel, weight.pull)
        self.integrals.kernel[rows].add_(kernel, alpha=weight.size)
        self.integrals.contributions[rows].sub_(parts)
        self.integrals.decay[rows].sub_(pulled, alpha=weight.size)
        return -parts.sum(2) - weight.size * pulled


@dataclass(kw_only=True)
class SnapshotSum(AbstractAccumulator):
    """The sums from the kernel at the steps that are due and at the `last` one, by every rule."""

    domain: Domain
    tracks: Mapping[str, Track]
    moments: Moments
    arriving: Float[Tensor, "train out_"]  # Σ φηℓ′ of the latest snapshot, over the steps before it
    last: int
    taken: int = 0  # snapshots
    span: float = 0.0  # the time between the latest two

    checkpointed: ClassVar[tuple[str, ...]] = ("tracks", "moments", "arriving", "taken", "span")

    @property
    def integrals(self) -> dict[str, Integrals]:
        return {name: track.integrals for name, track in self.tracks.items()}

    def add(self, step: Step, *, due: bool = False) -> dict[str, Tally]:
        span = self.moments.elapsed
        self.moments.add(step)
        if not due and step.index != self.last:
            return {}
        tallies = self.take(step, span, step.index + 1)
        self.moments.restart(step.step_size)
        return tallies

    def close(self, step: Step) -> None:
        if self.moments.size:
            self.take(step, self.moments.elapsed, step.index)

    def take(self, step: Step, span: float, end: int) -> dict[str, Tally]:
        """Take the snapshot K_{k+1}, at the time `span` after K_k; the interval ends before step
        `end`.
        """
        interval = self.interval(span, end)
        weights = step.view.weights
        shrinking = decay(weights, step.weight_decay, sizes_of(weights, step.factors, 1.0))
        tallies = {name: Tally() for name in self.tracks}
        for track in self.tracks.values():
            track.totals.extend(end)
        for block in self.domain.blocks(step.segment):
            for name, track in self.tracks.items():
                # K_{k+1} and λJ·θ
                kernel, pulled = block.kernel(track.integrals.substeps, step.side, shrinking)
                add_step(tallies[name], block, step, kernel, pulled)
                track.add(block.rows, kernel, pulled, interval)
        self.arriving.copy_(interval.second.pull)
        self.span = span
        self.taken += 1
        return tallies

    def interval(self, span: float, end: int) -> SnapshotInterval:
        """Return the factors of both snapshots, and those of the error."""
        first, second = self.moments.share_out(span)
        middle: Tensor | None = None
        if self.taken > 0 and self.taken % 2 == 0:
            middle = self.arriving + first.pull
        position = self.span / (self.span + span) if span else 1.0
        return SnapshotInterval(first, second, middle, position, end)

    def error(self, rule: str, steps: int) -> Error | None:
        if self.taken < 3:
            return None
        error = self.tracks[rule].error
        return Error(parts=float(error.norm()), sums=float(error.sum(2).norm()))

    def by_step(self, rule: str) -> StepTotals:
        return self.tracks[rule].totals


def add_step(
    tally: Tally,
    block: StepBlock,
    step: Step,
    kernel: Float[Tensor, "chosen out train out_"],
    pulled: Float[Tensor, "chosen out"],
) -> None:
    """Count the contributions of one step, which are not those of its interval."""
    parts = contract(kernel, step.output_gradient).mul_(-step.step_size)
    summed = parts.sum(2)
    change = summed - step.step_size * pulled
    tally.add(block, step.step_size * kernel, parts, summed, expected=change)
