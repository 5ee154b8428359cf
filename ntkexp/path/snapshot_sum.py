"""Cheaper than every step: the kernel at some steps, with exact moments of the loss between them."""

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

# --- The exact moments of the loss between two snapshots of the kernel, gathered before the second one is known.
#
# Between snapshots at times t_k < t the kernel is interpolated linearly, K(t_s) = (1 − u_s) K_k + u_s K with u_s
# = (t_s − t_k)/(t − t_k). What each of the two is multiplied with follows from four sums over the steps in
# between,
#
#     Σ_s η_s,   Σ_s (t_s − t_k) η_s,   Σ_s η_s ℓ′(s),   Σ_s (t_s − t_k) η_s ℓ′(s).
#
# A step at which a snapshot is taken belongs to the interval that ends there, so that u = 1.


class Weight(NamedTuple):
    """What the kernel of a snapshot is multiplied with: Σ φη for 𝒦, Σ φηℓ′ for 𝒮, φ the hat function around it."""

    size: float
    pull: Float[Tensor, "train out_"]


@dataclass(kw_only=True)
class Moments(Resumable):
    """Sums over the steps since the latest snapshot, which lies `elapsed` behind."""

    pull: Float[Tensor, "train out_"]
    late_pull: Float[Tensor, "train out_"]
    size: float = 0.0
    late_size: float = 0.0
    elapsed: float = 0.0

    checkpointed: ClassVar[tuple[str, ...]] = ("size", "late_size", "elapsed", "pull", "late_pull")

    def add(self, step: Step) -> None:
        """Take in one step."""
        late = self.elapsed * step.step_size
        self.size += step.step_size
        self.pull += step.step_size * step.output_gradient
        self.late_size += late
        self.late_pull += late * step.output_gradient
        self.elapsed += step.step_size

    def share_out(self, span: float) -> tuple[Weight, Weight]:
        """The weights of the two snapshots, so far apart; all of it is the second one's where they coincide."""
        right = Weight(self.size, self.pull)
        if span:
            right = Weight(self.late_size / span, self.late_pull / span)
        return Weight(self.size - right.size, self.pull - right.pull), right

    def begin(self, elapsed: float) -> None:
        """Start anew, so long after a snapshot."""
        self.size, self.late_size, self.elapsed = 0.0, 0.0, elapsed
        self.pull.zero_()
        self.late_pull.zero_()


# --- Cheaper than every step: the kernel at some steps, with exact moments of the loss.
#
# ℓ′ᵢ(s) is known at every step for nothing, and the kernel varies slowly. So K is read at steps s_0 < s_1 < …
# alone, the last of them the last of all, and interpolated linearly in time; φ_k the hat function around s_k,
#
#     𝒦 = Σ_k K_k Σ_s φ_k(s) η_s,        𝒮 = −Σ_k K_k Σ_s φ_k(s) η_s ℓ′(s).
#
# The error is estimated from the same sum with every other snapshot left out. Its interpolation reaches twice as
# far, and is off by four times as much where the kernel is smooth in time, so that a third of the difference is
# the error:
#
#     e = ⅓ Σ_{k odd} (K_k − Ǩ_k) Σ_s φ_k(s) η_s ℓ′(s),    Ǩ_k from K_{k−1} and K_{k+1}.
#
# What is faster than the snapshots follow, such as the first steps under an even schedule, no such estimate can
# see.


@dataclass(frozen=True, kw_only=True)
class Track(Resumable):
    """The two latest snapshots by one rule, and the error so far."""

    integrals: Integrals
    totals: StepTotals  # of the steps between snapshots, which are not told apart
    latest: Float[Tensor, "probe out train out_"]
    pulled: Float[Tensor, "probe out"]  # λJ·θ at the latest
    before: Float[Tensor, "probe out train out_"]
    error: Float[Tensor, "probe out train"]

    checkpointed: ClassVar[tuple[str, ...]] = (
        "integrals",
        "totals",
        "latest",
        "pulled",
        "before",
        "error",
    )

    def add(
        self, rows: slice, kernel: Tensor, pulled: Tensor, weight: Weight
    ) -> Float[Tensor, "chosen out"]:
        """Accumulate a snapshot, as often as it counts; all that comes of it."""
        parts = contract(kernel, weight.pull)
        self.integrals.kernel[rows].add_(kernel, alpha=weight.size)
        self.integrals.contributions[rows].sub_(parts)
        self.integrals.decay[rows].sub_(pulled, alpha=weight.size)
        return -parts.sum(2) - weight.size * pulled


@dataclass(kw_only=True)
class SnapshotSum(AbstractAccumulator):
    """The kernel at the steps that are due and at the `last`, by every rule."""

    domain: Domain
    tracks: Mapping[str, Track]
    moments: Moments
    arriving: Float[
        Tensor, "train out_"
    ]  # what the latest snapshot is multiplied with, from the steps before it
    last: int
    taken: int = 0
    span: float = 0.0  # between the two latest

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
        self.moments.begin(step.step_size)
        return tallies

    def close(self, step: Step) -> None:
        if self.moments.size:
            self.take(step, self.moments.elapsed, step.index)

    def take(self, step: Step, span: float, end: int) -> dict[str, Tally]:
        """Take snapshot K_{k+1}, so long after K_k; the stretch of steps between them ends before step `end`."""
        # Σ φη and Σ φηℓ′ of the steps in between, for K_k and for K_{k+1}; if k is odd, all that K_k is multiplied with
        left, right = self.moments.share_out(span)
        middle = self.arriving + left.pull if self.taken and self.taken % 2 == 0 else None
        position = self.span / (self.span + span) if span else 1.0  # of K_k between its neighbours
        weights = step.view.weights
        shrinking = decay(weights, step.weight_decay, sizes_of(weights, step.factors, 1.0))
        tallies = {name: Tally() for name in self.tracks}
        for track in self.tracks.values():
            track.totals.extend(end)
        for block in self.domain.blocks(step.segment):
            rows = block.rows
            for name, track in self.tracks.items():
                # K_{k+1} and λJ·θ, and what the step adds by itself
                kernel, pulled = block.kernel(track.integrals.pieces, step.side, shrinking)
                own = contract(kernel, step.output_gradient).mul_(-step.step_size)
                summed = own.sum(2)
                tallies[name].add(
                    block, step.step_size * kernel, own, summed, summed - step.step_size * pulled
                )
                # 𝒦 and 𝒮 take in both snapshots
                before = track.add(rows, track.latest[rows], track.pulled[rows], left)
                track.totals.add(
                    track.totals.edges[-1] - 1,
                    rows,
                    before + track.add(rows, kernel, pulled, right),
                )
                if middle is not None:
                    missed = track.latest[rows] - torch.lerp(track.before[rows], kernel, position)
                    track.error[rows].add_(contract(missed, middle), alpha=1 / 3)
                track.before[rows] = track.latest[rows]
                track.latest[rows] = kernel
                track.pulled[rows] = pulled
        self.arriving.copy_(right.pull)
        self.span = span
        self.taken += 1
        return tallies

    def error(self, rule: str, steps: int) -> Error | None:
        error = self.tracks[rule].error
        return Error(float(error.norm()), float(error.sum(2).norm())) if self.taken > 2 else None

    def by_step(self, rule: str) -> StepTotals:
        return self.tracks[rule].totals
