"""The ledger: how the difference between two trainings splits over the examples in which they differ, exactly.

    F(B) − F(A) = Σᵢ sᵢ,        sᵢ = Σ_s  c̄ γ_s·∇ℓ̄ᵢ Δtᵢ + (Σⱼ t̄ⱼ γ_s·∇ℓ̄ⱼ) Δc/ΔW Δtᵢ

γ_s is what a change of the gradient of step s does to the output F in the end, by difference rules that go backwards
from it; ∇ℓ̄ᵢ is the mean of both ends, tᵢ the weight of the example in the batch, c(W) what the mean is divided by. For
two trainings that hardly differ the rules are derivatives, and sᵢ is the effect of i.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ntkexp.kernel.record.taping import plain_kernels
from ntkexp.removal.clipping import clipped
from ntkexp.removal.curvature import secant_curved, secant_outputs
from ntkexp.removal.film import GRADIENT, WEIGHTS, Film
from ntkexp.removal.gradient import scores
from ntkexp.removal.pair import Pair
from ntkexp.removal.rerun import Drawn, Rerun
from ntkexp.removal.rule.base import Adjoints, StepEnds
from ntkexp.removal.rule.choose import difference_rule


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """What each example and each step did of the actual change of chosen outputs."""

    before: Float[Tensor, " chosen"]  # the outputs in the first training
    actual: Float[Tensor, " chosen"]
    shares: Float[Tensor, "chosen train"]
    by_step: Float[Tensor, "chosen step"]
    growth: float  # of the adjoint, at most, over what it was in the end

    @property
    def closure(self) -> float:
        """How far the shares miss the actual change, relative to it."""
        missed = (self.shares.sum(1) - self.actual).norm() / self.actual.norm()
        return float(missed) if self.actual.any() else float(self.shares.norm())

    @property
    def cancellation(self) -> Float[Tensor, " chosen"]:
        """How much larger the shares are than their sum: Σ|s|/|Σs|."""
        return self.shares.abs().sum(1) / self.shares.sum(1).abs()


@dataclass(frozen=True, kw_only=True)
class LedgerSweep:
    """Both trainings on film, gone over from the end; `weight` are the weights of the examples in both."""

    rerun: Rerun
    film: Film
    weight: Pair

    def ledger(self, inputs: Tensor, chosen: Int[Tensor, "chosen 2"], tell: Callable[[int], None]) -> Ledger:
        """Split the change of chosen outputs: pairs of a point and an output. The number of steps back is told."""
        parts = [self.part(inputs, some, tell) for some in torch.split(chosen, self.rerun.directions)]
        each = zip(*((part.before, part.actual, part.shares, part.by_step) for part in parts), strict=True)
        before, actual, shares, by_step = (torch.cat(tensors) for tensors in each)
        growth = max(part.growth for part in parts)
        return Ledger(before=before, actual=actual, shares=shares, by_step=by_step, growth=growth)

    def part(self, inputs: Tensor, chosen: Int[Tensor, "chosen 2"], tell: Callable[[int], None]) -> Ledger:
        """Split the change of so many outputs as go back at once."""
        ends = self.film.read(self.rerun.length, WEIGHTS)
        with torch.no_grad(), plain_kernels():
            before, after = (self.rerun.outputs(end, inputs)[chosen[:, 0], chosen[:, 1]] for end in ends)
            adjoint = secant_outputs(self.rerun, ends, inputs, chosen)
            parts = after.new_zeros(len(chosen), self.rerun.examples)
            by_step = after.new_zeros(len(chosen), self.rerun.length)
            first = largest = float(adjoint.norm(dim=1).mean())
            for step, drawn, found, size in self.back(adjoint):
                parts[:, drawn.rows] += found
                by_step[:, step] = found.sum(1)
                largest = max(largest, size)
                tell(self.rerun.length - step)
        growth = largest / first if first else 1.0
        return Ledger(before=before, actual=after - before, shares=parts, by_step=by_step, growth=growth)

    def back(
        self, adjoint: Float[Tensor, "chosen weight"]
    ) -> Iterator[tuple[int, Drawn, Float[Tensor, "chosen row"], float]]:
        """Go back step by step, as long as the trainings differ: what each step did, and the size of the adjoint."""
        rule, optimizer = difference_rule(self.rerun), self.rerun.optimizer
        memory: Adjoints = {}
        for step in range(self.rerun.length - 1, self.begun - 1, -1):
            weights, clip = self.film.read(step, WEIGHTS), clipped(optimizer, self.film.read(step, GRADIENT))
            ends = self.ends(step, weights, clip.taken)
            pulled, memory = rule.back(ends, adjoint, memory)
            adjoint = self.through_decay(ends, adjoint, pulled)
            pulled, drawn = clip.back(pulled), self.rerun.batch(step)
            left, divided = self.left(drawn)
            share = (left.first * divided.first + left.second * divided.second) / 2
            adjoint = adjoint + secant_curved(self.rerun, weights, share, drawn.rows, pulled)
            found = self.parts(drawn, left, divided, weights, pulled)
            yield step, drawn, found, float(adjoint.norm(dim=1).mean())

    @property
    def begun(self) -> int:
        """The first step of whose batch the examples weigh differently: before it, both trainings are the same."""
        steps = range(self.rerun.length)
        return next((s for s in steps if self.left(self.rerun.batch(s))[0].differs), self.rerun.length)

    def ends(self, step: int, weights: Pair, clipped_gradient: Pair) -> StepEnds:
        """The step as its optimizer sees it."""
        optimizer, rerun = self.rerun.optimizer, self.rerun
        coupled = 0.0 if optimizer.decouples else optimizer.weight_decay
        taken = Pair(*(g + coupled * w for g, w in zip(clipped_gradient, weights, strict=True)))
        return StepEnds(
            index=step,
            sizes=rerun.spread(rerun.sizes(step)),
            taken=taken,
            before=partial(self.film.before, step),
            after=partial(self.film.read, step),
        )

    def through_decay(
        self, ends: StepEnds, adjoint: Float[Tensor, "chosen weight"], pulled: Float[Tensor, "chosen weight"]
    ) -> Float[Tensor, "chosen weight"]:
        """Take the adjoint of the weights back through their decay, by the gradient or past it."""
        decay = self.rerun.optimizer.weight_decay
        if self.rerun.optimizer.decouples:
            return adjoint * (1 - ends.sizes * decay)
        return adjoint + decay * pulled if decay else adjoint

    def left(self, drawn: Drawn) -> tuple[Pair, Pair]:
        """What examples weigh in a batch in both trainings, and what their gradients are divided by."""
        left = Pair(*(drawn.left(weight) for weight in self.weight))
        ours = [end if end.any() else left[1 - k] for k, end in enumerate(left)]  # no mean of nothing: the other's
        return left, Pair(*(self.rerun.divided(drawn, end) for end in ours))

    def parts(
        self, drawn: Drawn, left: Pair, divided: Pair, weights: Pair, pulled: Float[Tensor, "chosen weight"]
    ) -> Float[Tensor, "chosen row"]:
        """What the examples of a batch did by being there in one training only."""
        if not left.differs:
            return pulled.new_zeros(len(pulled), len(drawn.rows))
        found = Pair(*(scores(self.rerun, end, drawn.rows, pulled) for end in weights)).mean
        whole = left.change.sum()
        rate = torch.where(whole == 0, 0.0, divided.change / torch.where(whole == 0, 1.0, whole))
        return (found * divided.mean + (found @ left.mean)[:, None] * rate) * left.change
