"""The ledger between two trainings that were recorded: differences go back through each step by rules that close
exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.effects.curvature import Clipping, gradient, recorded_gradient, scores
from ntkexp.effects.sweep import AbstractMean, StateAdjoint
from ntkexp.effects.trajectory import (
    AbstractTrajectory,
    Denominator,
    TakenBatch,
    TrainedStep,
    Update,
)
from ntkexp.mistake import Mistake
from ntkexp.optimizer.base import GUARD
from ntkexp.text import short

# --- A number of one training beside the same number of another, and what difference rules are written in.
#
#     Δ(xy) = x̄ Δy + ȳ Δx,        Δφ(x) = φ[x, x′] Δx
#
# with the mean x̄ of both ends and the slope φ[x, x′] of the secant between them. Rules of this kind are exact
# for the longest differences, and those of derivatives for none.


CLOSE = 1e-9  # of numbers that differ by less than that share of themselves, a quotient tells less than a derivative


class Pair(NamedTuple):
    """The number in the first training, and in the second."""

    first: Tensor
    second: Tensor

    @property
    def mean(self) -> Tensor:
        """Half of the sum.

        >>> Pair(torch.tensor(1.0), torch.tensor(2.0)).mean
        tensor(1.5000)
        """
        return (self.first + self.second) / 2

    @property
    def change(self) -> Tensor:
        """The second less the first."""
        return self.second - self.first

    @property
    def differs(self) -> bool:
        """Whether there is any change."""
        return not torch.equal(self.first, self.second)


def slope(at: Pair, value: Pair, derivative: Tensor) -> Tensor:
    """φ[x, x′], and the derivative where both ends are the same to rounding.

    >>> x = Pair(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 2.0]))
    >>> slope(x, Pair(x.first**2, x.second**2), 2 * x.mean)
    tensor([4., 4.])
    """
    near = at.change.abs() <= CLOSE * torch.maximum(at.first.abs(), at.second.abs())
    return torch.where(
        near, derivative, value.change / torch.where(near, torch.ones_like(at.change), at.change)
    )


# --- A matrix of slopes is made a secant between two weights: the smallest change of it that is right along their
# change.
#
#     J̄ = J + (Δf − J δ) δᵀ/‖δ‖²,        δ = θ′ − θ        J̄ δ = Δf        (Broyden 1965)
#
# The gradient of a batch has the Hessian H at the midpoint for J. What is taken back is Hγ, and H is symmetric,
# so that γ·(Hδ) = δ·(Hγ): rows γᵀH are set right as rows of any other matrix.


def secant(
    slopes: Float[Tensor, "row weight"],
    value: Float[Tensor, " row"],
    change: Float[Tensor, " weight"],
) -> Float[Tensor, "row weight"]:
    """Rows that make `value` of `change`; the slopes themselves where nothing changed.

    >>> from torch import tensor
    >>> secant(tensor([[1.0, 0.0]]), tensor([3.0]), tensor([1.0, 1.0]))
    tensor([[2., 1.]])
    """
    return slopes + along(value - slopes @ change, change) if change.any() else slopes


def along(
    missed: Float[Tensor, " row"], change: Float[Tensor, " weight"]
) -> Float[Tensor, "row weight"]:
    """The smallest matrix that makes up for what is missed along a change."""
    return missed[:, None] * change / (change @ change)


# --- Clipping by norm, N = ‖g‖: p = c g with c = min(1, clip_norm/(N + 1e-6)).
#
# Δp = c̄ Δg + ḡ Δc,        Δc = c[N, N′] ΔN,        ΔN = (g + g′)·Δg/(N + N′)


@dataclass(frozen=True)
class Clipped:
    """A gradient at both ends, and what the optimizer makes of it before anything else."""

    gradient: Pair
    factor: Pair  # c
    bound: float | None

    @property
    def taken(self) -> Pair:
        """The gradients c g."""
        return Pair(
            self.factor.first * self.gradient.first, self.factor.second * self.gradient.second
        )

    def back(self, pulled: Float[Tensor, "direction weight"]) -> Float[Tensor, "direction weight"]:
        """The adjoint of g, given that of c g."""
        if self.bound is None:
            return pulled
        norm = Pair(self.gradient.first.norm(), self.gradient.second.norm())
        mean, whole = self.gradient.mean, norm.first + norm.second
        turned = torch.where(whole > 0, 2 / torch.where(whole > 0, whole, 1.0), 0.0) * mean
        return self.factor.mean * pulled + self.rate(norm) * (pulled @ mean)[:, None] * turned

    def rate(self, norm: Pair) -> Tensor:
        """The slope of c between both norms; across the bound, where c has a kink, it is a quotient however close."""
        short = self.factor.first < 1
        derivative = torch.where(short, -(self.bound or 0.0) / (norm.mean + GUARD) ** 2, 0.0)
        if bool(short) == bool(self.factor.second < 1):
            return slope(norm, self.factor, derivative)
        return self.factor.change / norm.change


# --- A step of two trainings as one, back through which differences go as derivatives do through a step of one
# training.
#
#     p̄ = (p + p′)/2        S̄ = σ/n̄        r̄ = (m/n + m′/n′)/2        ū = (u + u′)/2
#
# With these means in place of its letters, `effects.sweep` takes a functional of differences back exactly, as the
# step is made of products: m = r n, and u², so that ū Δu = β₂ū₋ Δu₋ + (1 − β₂)p̄ Δp. The largest u so far grows
# by a share of Δu between 0 and 1.


SAME_SIZE = 1e-5  # of the step sizes of both trainings, in float32


@dataclass(frozen=True, kw_only=True)
class StepPair:
    """The same step of two trainings, which took the same calls with the same schedules."""

    first: TrainedStep
    second: TrainedStep

    @property
    def weights(self) -> Pair:
        """θ in both."""
        return Pair(self.first.weights, self.second.weights)

    @cached_property
    def clipped(self) -> Clipped:
        """The gradients, and what both trainings made of them before anything else."""
        ends = [Clipping(self.taken_in(step), step.clip_norm) for step in (self.first, self.second)]
        bound = self.first.clip_norm or self.second.clip_norm
        factor = Pair(*(each.gradient.new_tensor(each.factor) for each in ends))
        return Clipped(Pair(ends[0].gradient, ends[1].gradient), factor, bound)

    def taken_in(self, step: TrainedStep) -> Float[Tensor, " weight"]:
        """The gradient of one of the steps, before it is clipped; nothing where neither asks for it, as steps are then
        linear in it. One may be clipped alone.
        """
        clips = self.first.clip_norm is not None or self.second.clip_norm is not None
        divides = any(update.denominator is not None for update in self.first.updates)
        if not step.batches or not (clips or divides):
            return torch.zeros_like(step.weights)
        found = gradient(step.batches, step.weights)
        return found if step.with_grad is None else found * step.with_grad

    @cached_property
    def mean(self) -> TrainedStep:
        """Both as one."""
        self.refuse_other()
        pairs = zip(self.first.updates, self.second.updates, strict=True)
        updates = tuple(mean_update(one, other, self.first.index) for one, other in pairs)
        return replace(self.first, weights=self.weights.mean, updates=updates)

    def refuse_other(self) -> None:
        """Refuse steps that moved other parameters."""
        places = [[update.place for update in step.updates] for step in (self.first, self.second)]
        if places[0] != places[1] or len(self.first.batches) != len(self.second.batches):
            raise Mistake(
                f"step {self.first.index}: without the examples it was another step, of other parameters or calls; "
                "nothing in the loop should depend on what it has learned but its weights"
            )


def mean_update(first: Update, second: Update, step: int) -> Update:
    """How a parameter took gradients in, in the mean."""
    one, other = first.linear, second.linear
    for letter in ("carry", "intake", "ahead", "coupled", "lost"):
        refuse_other_size(getattr(one, letter), getattr(other, letter), step)
    if first.denominator is None or second.denominator is None:
        refuse_other_size(one.momentum_scale, other.momentum_scale, step)
        return first
    by = (first.denominator, second.denominator)
    n = Pair(*map(divided, by))
    size = Pair(one.momentum_scale * n.first, other.momentum_scale * n.second)
    refuse_other_size(size.first, size.second, step)
    ratio = Pair(by[0].mean / n.first, by[1].mean / n.second).mean
    linear = replace(one, momentum_scale=size.first / n.mean)
    return replace(first, linear=linear, denominator=mean_denominator(*by, ratio * n.mean))


def mean_denominator(first: Denominator, second: Denominator, mean: Tensor) -> Denominator:
    """What both steps were divided by, in the mean, with an m that has the mean ratio to it."""
    now, before = (
        roots(first.latest, second.latest),
        roots(first.latest_before, second.latest_before),
    )
    found = replace(first, mean=mean, latest=now.mean.square(), latest_before=before.mean.square())
    if first.largest is None or second.largest is None:
        return found
    assert first.largest_before is not None
    assert second.largest_before is not None
    largest, so_far = (
        roots(first.largest, second.largest),
        roots(first.largest_before, second.largest_before),
    )
    beyond = Pair(now.first - so_far.first, now.second - so_far.second)
    gained = Pair(beyond.first.relu(), beyond.second.relu())
    return replace(
        found,
        largest=largest.mean.square(),
        largest_before=so_far.mean.square(),
        passed=slope(beyond, gained, (beyond.first > 0).to(beyond.first)),
    )


def divided(by: Denominator) -> Tensor:
    """The n of a step."""
    return (by.latest if by.largest is None else by.largest).sqrt() / by.root + by.eps


def roots(first: Tensor, second: Tensor) -> Pair:
    """The square roots of both."""
    return Pair(first.sqrt(), second.sqrt())


def refuse_other_size(first: Tensor | float, second: Tensor | float, step: int) -> None:
    """Refuse steps of other sizes: no example has a share in what a schedule decides by what it sees."""
    one, other = torch.as_tensor(first), torch.as_tensor(second)
    if one.shape != other.shape or float((one - other).abs().max()) > SAME_SIZE * float(
        one.abs().max()
    ):
        raise Mistake(
            f"step {step}: without the examples it was taken with other settings of the optimizer; a schedule that "
            "looks at the loss has a share in the change that belongs to no example; use another"
        )


# --- The ledger: what each example and each step did of the change that a removal made, and how far that may miss it.
#
# Shares add up to the actual change exactly, but for rounding. Both trainings and the way back round whatever
# they add up, each time by ε of it, so that with what outputs feel of weights (a) and of gradients (γ)
#
#     missed = |Σᵢ sᵢ − ΔF|  ≤  ε M        M = |F| + |F′| + ‖a_T‖·‖θ_T‖ + Σ_s |a_s|·|θ_s| + |γ_s|·|g_s| + Σᵢ
#                            κᵢ|γ_s·∇ℓᵢ|
#
# in sums of magnitudes. Where training amplifies rounding, so do a and γ on the way back, and M tells by how
# much. In some hundred trainings, of all optimizers and architectures and in both precisions, 0.001 to 0.05 of it
# was missed, also where growth took that from 1e-15 of the change to 1e-8: so ε M is twenty times more than
# rounding has done.


CLOSES = 1e-2
"""Of the actual change: shares that miss more of it say too little, whatever rounding is."""


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """What each example and each step did of the actual change of chosen outputs."""

    before: Float[Tensor, " chosen"]  # the outputs in the first training
    actual: Float[Tensor, " chosen"]
    shares: Float[Tensor, "chosen train"]
    by_step: Float[Tensor, "chosen step"]
    magnitude: Float[Tensor, " chosen"]  # M
    growth: float  # of the adjoint, at most, over what it was in the end
    emptied: int  # steps of whose calls nothing was left, as far as was seen

    @property
    def missed(self) -> float:
        """How far the shares are from adding up."""
        return float((self.shares.sum(1) - self.actual).norm())

    @property
    def closure(self) -> float:
        """The same, relative to the actual change."""
        return self.missed / float(self.actual.norm()) if self.actual.any() else self.missed

    @property
    def rounding(self) -> float:
        """How far rounding may take them."""
        return torch.finfo(self.shares.dtype).eps * float(self.magnitude.norm())

    def closed(self) -> Ledger:
        """The ledger, if it closes."""
        if not self.missed <= self.rounding:
            raise Mistake(
                f"shares of the examples miss the actual change by {short(self.closure)} of it, more than rounding "
                f"explains ({short(self.rounding)} where they miss {short(self.missed)}): something beside the "
                "examples had a share in it, as in a training that is not the same each time; seed it, and use one "
                "thread"
            )
        if not self.missed <= CLOSES * float(self.actual.norm()):
            raise Mistake(
                f"shares of the examples miss the actual change by {short(self.closure)} of it, as rounding grows "
                "along the training; take smaller steps, or float64"
            )
        return self


def joined(parts: Sequence[Ledger]) -> Ledger:
    """The ledgers of several outputs as one."""
    names = ("before", "actual", "shares", "by_step", "magnitude")
    each = {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
    return Ledger(**each, growth=max(part.growth for part in parts), emptied=parts[0].emptied)


# --- The ledger between two recorded trainings: with all examples, and without some.
#
#     F(B) − F(A) = Σᵢ sᵢ,        sᵢ = Σ_s  c̄ γ_s·∇ℓ̄ᵢ Δtᵢ + (Σⱼ t̄ⱼ γ_s·∇ℓ̄ⱼ) Δc/ΔW mᵢΔtᵢ
#
# γ_s is what a change of the gradient of step s does to the output F in the end, by difference rules that go
# backwards from it; ∇ℓ̄ᵢ is the mean of both ends, tᵢ = κᵢwᵢ the share of the example in its batch times its
# weight, c(W) what makes these a mean: 1/W where it is renormalised, with W = Σmt/Σmκ, of what examples count in
# the mean; 1 where not, or where nothing is left of a batch. For two trainings that hardly differ the rules are
# derivatives, and sᵢ is the effect of i.


SAME_SHARES = 1e-4  # of what comes back in float32, relative to it

Jacobian = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Weights ↦ the chosen outputs, and their gradients, a row each."""


@dataclass(kw_only=True)
class TrainingPair:
    """Two trainings that differ in the weights of their examples; before the step `begun` they do not."""

    first: AbstractTrajectory
    second: AbstractTrajectory
    weights: Pair  # of the examples
    mean: AbstractMean
    together: int | None = None  # vectors in one pass; None: all
    begun: int = 0
    emptied: int = 0  # steps of whose calls nothing was left, on the way back that was taken last

    def ledger(self, outputs: Jacobian, tell: Callable[[int], None]) -> Ledger:
        """Split the change of the outputs; `tell` gets the number of steps back."""
        ends = Pair(self.first.end, self.second.end)
        (before, slopes), (after, others) = map(outputs, ends)
        adjoint = StateAdjoint(weights=secant((slopes + others) / 2, after - before, ends.change))
        shares = slopes.new_zeros(len(slopes), self.first.examples)
        by_step = slopes.new_zeros(len(slopes), self.first.length)
        magnitude = before.abs() + after.abs() + adjoint.weights.norm(dim=1) * ends.mean.norm()
        self.emptied = 0
        size = largest = float(adjoint.weights.norm(dim=1).mean())
        for index in reversed(range(self.begun, self.first.length)):
            by_step[:, index] = self.take(index, adjoint, shares, magnitude)
            largest = max(largest, float(adjoint.weights.norm(dim=1).mean()))
            tell(self.first.length - index)
        return Ledger(
            before=before,
            actual=after - before,
            shares=shares,
            by_step=by_step,
            magnitude=magnitude,
            growth=largest / size if size else 1.0,
            emptied=self.emptied,
        )

    def take(
        self,
        index: int,
        adjoint: StateAdjoint,
        shares: Float[Tensor, "vector example"],
        magnitude: Float[Tensor, " vector"],
    ) -> Float[Tensor, " vector"]:
        """Take one step back, and add up what examples did in it; what all of them did."""
        pair = StepPair(first=self.first.step(index), second=self.second.step(index))
        pulled = pair.clipped.back(adjoint.back(pair.mean, pair.clipped.taken.mean))
        done = shares.new_zeros(len(shares))
        if pair.first.batches:
            magnitude += self.curve(pair, adjoint, pulled)
            done += self.split(pair, pulled, shares)
        magnitude += adjoint.weights.abs() @ pair.weights.mean.abs()
        return done

    def curve(
        self, pair: StepPair, adjoint: StateAdjoint, pulled: Float[Tensor, "vector weight"]
    ) -> Float[Tensor, " vector"]:
        """Take the secant of the gradient between both weights, with the mean of both shares, back to them; the
        magnitudes of that gradient, and of what examples add to it."""
        batches = tuple(self.averaged(pair, k) for k in range(len(pair.first.batches)))
        curved, rows = recorded_gradient(batches, pair.weights.mean).curvature(
            pulled, self.together
        )
        ends = Pair(*(gradient(batches, end) for end in pair.weights))
        adjoint.weights += secant(curved, pulled @ ends.change, pair.weights.change)
        added = torch.cat([batch.shares for batch in batches]).abs()
        return pulled.abs() @ ends.mean.abs() + rows.abs() @ added

    def averaged(self, pair: StepPair, place: int) -> TakenBatch:
        """A batch with the mean of the shares that its rows had in both trainings."""
        one, other = pair.first.batches[place], pair.second.batches[place]
        if not torch.equal(one.examples, other.examples) or self.other_shares(one, other):
            raise Mistake(
                f"step {pair.first.index}: without the examples, a call of others or with another loss came back; "
                "nothing in the loop should depend on what it has learned but its weights"
            )
        return replace(one, shares=(one.shares + other.shares) / 2)

    def other_shares(self, one: TakenBatch, other: TakenBatch) -> bool:
        """Whether shares differ otherwise than by weights of examples, and by what makes a mean of them."""
        alike = replace(one, shares=one.by_weight)
        ours, theirs = (self.mean.shares(alike, at[one.examples][None])[0] for at in self.weights)
        if not ours.any():
            return False
        expected = theirs * (one.shares.sum() / ours.sum())
        return float((expected - other.shares).abs().max()) > SAME_SHARES * float(
            expected.abs().max()
        )

    def split(
        self,
        pair: StepPair,
        pulled: Float[Tensor, "vector weight"],
        shares: Float[Tensor, "vector example"],
    ) -> Float[Tensor, " vector"]:
        """Add up what examples did by weighing less in one training; what all of them did."""
        batches = list(zip(pair.first.batches, pair.second.batches, strict=True))
        weights = [Pair(*(at[one.examples] for at in self.weights)) for one, _ in batches]
        self.emptied += not any(bool(weight.second.any()) for weight in weights)
        if not any(weight.differs for weight in weights):
            return shares.new_zeros(len(shares))
        ends = (scores(pair.first.batches, end, pulled, self.together) for end in pair.weights)
        rows = torch.split(Pair(*ends).mean, [len(one.examples) for one, _ in batches], dim=1)
        each = zip(batches, weights, rows, strict=True)
        found = [parts(one, other, weight, along) for (one, other), weight, along in each]
        for part, (one, _) in zip(found, batches, strict=True):
            shares.index_add_(1, one.examples, part)
        return torch.cat(found, dim=1).sum(1)


def parts(
    one: TakenBatch, other: TakenBatch, weight: Pair, rows: Float[Tensor, "vector row"]
) -> Float[Tensor, "vector row"]:
    """What the rows of a batch did, of which these weights are those of their examples."""
    each = Pair(one.by_weight, other.by_weight)
    if not weight.first.any() or not weight.second.any():  # no mean of nothing: the other's
        each = Pair(*[other.by_weight if weight.second.any() else one.by_weight] * 2)
    changed = each.mean * weight.change
    left, others = changed * one.counts, rows @ (weight.mean * each.change)
    if (
        left.sum().abs() <= CLOSE * left.abs().sum()
    ):  # as many came as went, and the mean is one over as much
        return rows * changed
    return (rows + others[:, None] / left.sum() * one.counts) * changed
