"""The path kernel 𝒦 and the contributions 𝒮 from the kernel at only a few steps.

ℓ′ᵢ(s), the derivative of the loss by the outputs of example i, is known at every step s
at no cost. The kernel is expensive, but varies slowly. So kernels K_k (*snapshots*) are
computed only at steps s₀ < s₁ < …, which include the last step of the path. Between
them, the kernel is interpolated linearly in time. Let φ_k be the hat function that is 1
at step s_k and 0 at the other snapshots, and η_s the step size. Then

    𝒦 = Σ_k K_k Σ_s φ_k(s) η_s,        𝒮 = −Σ_k K_k Σ_s φ_k(s) η_s ℓ′(s).

The time t_s of a step is the sum of the earlier step sizes. Between a snapshot K_k at
time t_k and the next snapshot K at time t, the interpolated kernel is
(1 − u_s) K_k + u_s K with u_s = (t_s − t_k)/(t − t_k). The factors of K_k and K follow
from four sums over the steps between the snapshots. No kernel enters these sums:

    Σ_s η_s,   Σ_s (t_s − t_k) η_s,   Σ_s η_s ℓ′(s),   Σ_s (t_s − t_k) η_s ℓ′(s).

A step with a snapshot belongs to the interval that ends at this step, and has u = 1.

To estimate the error of 𝒮, omit every other snapshot. The intervals of interpolation
are then twice as long, so the error is four times as large if the kernel is smooth in
time. Therefore the error is a third of the difference between the two results:

    e = ⅓ Σ_{k odd} (K_k − Ǩ_k) Σ_s φ_k(s) η_s ℓ′(s),

where Ǩ_k is interpolated between K_{k−1} and K_{k+1}. The estimate misses fast changes
of the kernel between snapshots. With equally spaced snapshots, these occur in the first
steps."""

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
    """The factors of a kernel snapshot K_k in the sums 𝒦 and −𝒮."""

    size: float  # Σ_s φ_k(s) η_s, the factor in 𝒦
    pull: Float[Tensor, "train out_"]  # Σ_s φ_k(s) η_s ℓ′(s), the factor in −𝒮


@dataclass(kw_only=True)
class Moments(Resumable):
    """Four sums over the steps since the latest snapshot K_k, at time t_k.

    Sums with the factor ℓ′ are called `pull`, and sums with the factor t_s − t_k are
    called `late`. `elapsed` is the time since t_k.
    """

    pull: Float[Tensor, "train out_"]  # Σ_s η_s ℓ′(s)
    late_pull: Float[Tensor, "train out_"]  # Σ_s (t_s − t_k) η_s ℓ′(s)
    size: float = 0.0  # Σ_s η_s
    late_size: float = 0.0  # Σ_s (t_s − t_k) η_s
    elapsed: float = 0.0

    checkpointed: ClassVar[tuple[str, ...]] = (
        "size",
        "late_size",
        "elapsed",
        "pull",
        "late_pull",
    )

    def add(self, step: Step) -> None:
        late = self.elapsed * step.step_size
        self.size += step.step_size
        self.pull += step.step_size * step.output_gradient
        self.late_size += late
        self.late_pull += late * step.output_gradient
        self.elapsed += step.step_size

    def share_out(self, span: float) -> tuple[Weight, Weight]:
        """Return the factors of the snapshots at the start and the end of an interval.
        `span` is the length of the interval in time.

        If the length is zero, the factor of the first snapshot is zero.
        """
        second = Weight(self.size, self.pull)
        if span:
            second = Weight(self.late_size / span, self.late_pull / span)
        first = Weight(self.size - second.size, self.pull - second.pull)
        return first, second

    def restart(self, elapsed: float) -> None:
        """Reset the sums, at the time `elapsed` after a snapshot."""
        self.size = 0.0
        self.late_size = 0.0
        self.elapsed = elapsed
        self.pull.zero_()
        self.late_pull.zero_()


class SnapshotInterval(NamedTuple):
    """The weights of the snapshots K_k and K_{k+1} at the ends of an interval."""

    first: Weight
    second: Weight
    # Σ_s φ_k(s) η_s ℓ′(s), for the error e, or None if k is even
    middle: Float[Tensor, "train out_"] | None
    position: float  # time of K_k, on a scale from 0 at K_{k−1} to 1 at K_{k+1}
    end: int  # the step after the last step of the interval


@dataclass(frozen=True, kw_only=True)
class Track(Resumable):
    """The latest two snapshots, the sums 𝒦 and 𝒮, and the estimated error of 𝒮, for one
    quadrature rule."""

    integrals: Integrals
    totals: StepTotals  # one sum per interval between snapshots
    latest: Float[Tensor, "query out train out_"]  # K_k, the latest snapshot
    # λJ·θ, the term of weight decay, at the snapshot K_k
    pulled: Float[Tensor, "query out"]
    before: Float[Tensor, "query out train out_"]  # K_{k−1}
    error: Float[Tensor, "query out train"]  # e, the estimated error

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
        """Add an interval at the points in `rows`. `kernel` is the snapshot K_{k+1} at
        the end of the interval, and `pulled` the decay term at this snapshot."""
        change = self.add_snapshot(
            rows, self.latest[rows], self.pulled[rows], interval.first
        )
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
        """Add a snapshot to the sums, multiplied by its factors. Return the resulting
        change of the outputs, by contributions and decay together."""
        parts = contract(kernel, weight.pull)
        self.integrals.kernel[rows].add_(kernel, alpha=weight.size)
        self.integrals.contributions[rows].sub_(parts)
        self.integrals.decay[rows].sub_(pulled, alpha=weight.size)
        return -parts.sum(2) - weight.size * pulled


@dataclass(kw_only=True)
class SnapshotSum(AbstractAccumulator):
    """The sums 𝒦 and 𝒮 from kernel snapshots. There is a snapshot at each step that is
    `due`, and at step `last`."""

    domain: Domain
    tracks: Mapping[str, Track]
    moments: Moments
    # Σ_s φ_k(s) η_s ℓ′(s) over the steps s before the latest snapshot K_k
    arriving: Float[Tensor, "train out_"]
    last: int  # the last step of the path
    taken: int = 0  # number of kernel snapshots so far
    span: float = 0.0  # time between the latest two snapshots

    checkpointed: ClassVar[tuple[str, ...]] = (
        "tracks",
        "moments",
        "arriving",
        "taken",
        "span",
    )

    @property
    def integrals(self) -> dict[str, Integrals]:
        return {name: track.integrals for name, track in self.tracks.items()}

    def add(self, step: Step, *, due: bool = False) -> dict[str, Tally]:
        span = self.moments.elapsed
        self.moments.add(step)
        if not due and step.index != self.last:
            return {}
        tallies = self.add_interval(step, span, step.index + 1)
        self.moments.restart(step.step_size)
        return tallies

    def close(self, step: Step) -> None:
        if self.moments.size:
            self.add_interval(step, self.moments.elapsed, step.index)

    def add_interval(self, step: Step, span: float, end: int) -> dict[str, Tally]:
        """Compute the snapshot K_{k+1}, at the time `span` after K_k,
        and add the interval.

        The interval ends before step `end`.
        """
        interval = self.interval(span, end)
        weights = step.view.weights
        shrinking = decay(
            weights, step.weight_decay, sizes_of(weights, step.factors, 1.0)
        )
        tallies = {name: Tally() for name in self.tracks}
        for track in self.tracks.values():
            track.totals.append_stretch(end)
        for block in self.domain.blocks(step.segment):
            for name, track in self.tracks.items():
                # K_{k+1} and λJ·θ
                kernel, pulled = block.kernel(
                    track.integrals.substeps, step.right_factor, shrinking
                )
                add_step(tallies[name], block, step, kernel, pulled)
                track.add(block.rows, kernel, pulled, interval)
        self.arriving.copy_(interval.second.pull)
        self.span = span
        self.taken += 1
        return tallies

    def interval(self, span: float, end: int) -> SnapshotInterval:
        """Return the weights of the snapshots K_k and K_{k+1} in the sums 𝒦 and 𝒮, and
        the weight of K_k in the error estimate."""
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
    """Add the norms of the terms of one step to its tally. There is a snapshot at this
    step."""
    parts = contract(kernel, step.output_gradient).mul_(-step.step_size)
    summed = parts.sum(2)
    change = summed - step.step_size * pulled
    tally.add(block, step.step_size * kernel, parts, summed, expected=change)
