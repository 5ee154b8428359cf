"""Divide the difference between two recorded training runs among examples and steps.

The second run leaves some examples out. A backward pass goes through the steps of both
runs at once. It uses exact rules for differences (`Pair`) instead of derivatives, so the
shares of the left-out examples add up to the actual change of the outputs."""

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

# --- Pairs: a quantity x of the first training run and the same quantity x′
# of the second.
#
# These rules hold exactly for differences Δx = x′ − x of any size, unlike derivatives:
#
#     Δ(xy) = x̄ Δy + ȳ Δx,        Δφ(x) = φ[x, x′] Δx
#
# where x̄ = (x + x′)/2, and φ[x, x′] = (φ(x′) − φ(x))/(x′ − x) is the slope
# of the secant.


CLOSE = 1e-9
"""If the relative difference of x and x′ is below this, the derivative is more precise
than the difference quotient."""


class Pair(NamedTuple):
    """A quantity in the first and in the second training run."""

    first: Tensor
    second: Tensor

    @property
    def mean(self) -> Tensor:
        """The mean over both runs, x̄ = (x + x′)/2.

        >>> Pair(torch.tensor(1.0), torch.tensor(2.0)).mean
        tensor(1.5000)
        """
        return (self.first + self.second) / 2

    @property
    def change(self) -> Tensor:
        """The second quantity minus the first, Δx = x′ − x."""
        return self.second - self.first

    @property
    def differs(self) -> bool:
        return not torch.equal(self.first, self.second)


def slope(at: Pair, value: Pair, derivative: Tensor) -> Tensor:
    """Return the difference quotient φ[x, x′]. If x and x′ are equal up to rounding in
    some element, return `derivative` for this element.

    `at` is the pair (x, x′), and `value` is the pair (φ(x), φ(x′)).

    >>> x = Pair(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 2.0]))
    >>> slope(x, Pair(x.first**2, x.second**2), 2 * x.mean)
    tensor([4., 4.])
    """
    is_equal = at.change.abs() <= CLOSE * torch.maximum(at.first.abs(), at.second.abs())
    divisor = torch.where(is_equal, torch.ones_like(at.change), at.change)
    return torch.where(is_equal, derivative, value.change / divisor)


# --- Secant Jacobians: J with the smallest correction such that J̄ δ = Δf.
#
#     J̄ = J + (Δf − J δ) δᵀ/‖δ‖²,        δ = θ′ − θ        (Broyden 1965)
#
# For the gradient g of a batch, J is the Hessian H at the midpoint of θ and θ′. The
# backward pass needs only the rows γᵀH. Each row is corrected in the same way, with
# γ·Δg instead of Δf.


def secant(
    slopes: Float[Tensor, "row weight"],
    value: Float[Tensor, " row"],
    change: Float[Tensor, " weight"],
) -> Float[Tensor, "row weight"]:
    """Correct the rows `slopes` as little as possible, so that their product with
    `change` is `value`.

    If `change` is zero, return `slopes`.

    >>> from torch import tensor
    >>> secant(tensor([[1.0, 0.0]]), tensor([3.0]), tensor([1.0, 1.0]))
    tensor([[2., 1.]])
    """
    if not change.any():
        return slopes
    # the matrix of least norm whose product with `change` is `error`
    error = value - slopes @ change
    return slopes + error[:, None] * change / (change @ change)


# --- Clipping by norm, N = ‖g‖: p = c g with c = min(1, clip_norm/(N + 1e-6)).
#
# Δp = c̄ Δg + ḡ Δc,        Δc = c[N, N′] ΔN,        ΔN = (g + g′)·Δg/(N + N′)
#
# c[N, N′] = (c(N′) − c(N))/(N′ − N) is the divided difference of c as a function of N.


@dataclass(frozen=True)
class Clipped:
    """The gradients of both training runs, and their clipping factors."""

    gradient: Pair
    factor: Pair  # the clipping factors c
    bound: float | None  # `clip_norm`, or None without clipping

    @property
    def clipped(self) -> Pair:
        """The clipped gradients of both runs."""
        first = self.factor.first * self.gradient.first
        second = self.factor.second * self.gradient.second
        return Pair(first, second)

    def pull_back(
        self, adjoint: Float[Tensor, "direction weight"]
    ) -> Float[Tensor, "direction weight"]:
        """Return the adjoint of the gradient,
        given the `adjoint` of the clipped gradient."""
        if self.bound is None:
            return adjoint
        norm = Pair(self.gradient.first.norm(), self.gradient.second.norm())
        mean = self.gradient.mean
        # ΔN = 2 ḡ·Δg/(N + N′)
        summed = norm.first + norm.second
        inverse = torch.where(summed > 0, 2 / torch.where(summed > 0, summed, 1.0), 0.0)
        norm_gradient = inverse * mean
        # c̄ Δg + ḡ Δc
        by_factor = self.rate(norm) * (adjoint @ mean)[:, None] * norm_gradient
        return self.factor.mean * adjoint + by_factor

    def rate(self, norm: Pair) -> Tensor:
        """Return c[N, N′].

        If only one of the two gradients is clipped, c has a kink between N and N′. Then
        only the difference quotient is correct."""
        clips = self.factor.first < 1
        derivative = torch.where(
            clips, -(self.bound or 0.0) / (norm.mean + GUARD) ** 2, 0.0
        )
        if bool(clips) == bool(self.factor.second < 1):
            return slope(norm, self.factor, derivative)
        return self.factor.change / norm.change


# --- One step of two training runs, combined into a mean step.
#
# `effects.sweep` pulls derivatives back through a step. The symbols of a step of Adam are
#
#     p    the gradient with weight decay
#     m    the momentum after the step
#     u    the root of the second moment: u² ← β₂u² + (1 − β₂)p²
#     n    the denominator
#     S    the factor of the momentum, θ ← θ − S m, and σ = S n, the step size
#     r    the ratio m/n
#
# A prime marks the second run; σ is equal in both. If the quantities of the step are
# replaced by the following means, the code for derivatives pulls differences back
# exactly:
#
#     p̄ = (p + p′)/2        S̄ = σ/n̄        r̄ = (m/n + m′/n′)/2        ū = (u + u′)/2
#
# The means suffice because a step consists of products, such as m = r n, and
# Δ(ab) = ā Δb + b̄ Δa holds exactly. For the square u², this gives
# ū Δu = β₂ū₋ Δu₋ + (1 − β₂)p̄ Δp, where u₋ is u before the step. The change of AMSGrad's
# running maximum of u is Δu times a fraction between 0 and 1.


SAME_SIZE = 1e-5
"""Relative tolerance for equal step sizes in both training runs, in float32."""

COEFFICIENTS = (
    "momentum_decay",
    "momentum_gain",
    "gradient_scale",
    "l2",
    "decoupled_decay",
)
"""Fields of the optimizer's linear step that must be equal in both training runs."""


@dataclass(frozen=True, kw_only=True)
class StepPair:
    """The same step of both training runs."""

    first: TrainedStep
    second: TrainedStep

    @property
    def weights(self) -> Pair:
        return Pair(self.first.weights, self.second.weights)

    @cached_property
    def clipped(self) -> Clipped:
        """The gradients of both training runs, before and after clipping."""
        first = Clipping(self.used_gradient(self.first), self.first.clip_norm)
        second = Clipping(self.used_gradient(self.second), self.second.clip_norm)
        gradients = Pair(first.gradient, second.gradient)
        factors = Pair(
            *(end.gradient.new_tensor(end.factor) for end in (first, second))
        )
        return Clipped(gradients, factors, first.norm or second.norm)

    def used_gradient(self, step: TrainedStep) -> Float[Tensor, " weight"]:
        """Return the gradient of a step before clipping.

        This gradient is needed only if the step is nonlinear in it, which is the case
        with clipping or a denominator. Otherwise return zeros.
        """
        clips = self.first.clip_norm is not None or self.second.clip_norm is not None
        divides = any(update.denominator is not None for update in self.first.updates)
        if not step.batches or not (clips or divides):
            return torch.zeros_like(step.weights)
        raw = gradient(step.batches, step.weights)
        if step.with_grad is None:
            return raw
        return raw * step.with_grad

    @cached_property
    def mean(self) -> TrainedStep:
        """The mean of the two steps. Raise if they are not comparable."""
        self.refuse_other()
        pairs = zip(self.first.updates, self.second.updates, strict=True)
        updates = tuple(
            mean_update(first, second, self.first.index) for first, second in pairs
        )
        return replace(self.first, weights=self.weights.mean, updates=updates)

    def refuse_other(self) -> None:
        """Raise if the steps updated different parameters
        or made different numbers of calls."""
        slices = [update.weight_slice for update in self.first.updates]
        other_slices = [update.weight_slice for update in self.second.updates]
        if slices != other_slices or len(self.first.batches) != len(
            self.second.batches
        ):
            raise Mistake(
                f"step {self.first.index}: without the examples, the step updates other "
                "parameters or makes other calls of the model; only the weights may depend on "
                "earlier steps"
            )


def mean_update(first: Update, second: Update, step: int) -> Update:
    """Return the mean of two updates of the same weights, as defined above."""
    linear = first.linear
    other_linear = second.linear
    for name in COEFFICIENTS:
        refuse_other_size(getattr(linear, name), getattr(other_linear, name), step)
    if first.denominator is None or second.denominator is None:
        refuse_other_size(linear.momentum_scale, other_linear.momentum_scale, step)
        return first

    # σ = S n is equal in both runs; S̄ = σ/n̄ and m̄ = r̄ n̄
    first_n = first.denominator.value(first.denominator.t)
    second_n = second.denominator.value(second.denominator.t)
    n = Pair(first_n, second_n)
    size = Pair(linear.momentum_scale * n.first, other_linear.momentum_scale * n.second)
    refuse_other_size(size.first, size.second, step)
    ratio = Pair(first.denominator.mean / n.first, second.denominator.mean / n.second)
    momentum = ratio.mean * n.mean
    mean_linear = replace(linear, momentum_scale=size.first / n.mean)
    denominator = mean_denominator(first.denominator, second.denominator, momentum)
    return replace(first, linear=mean_linear, denominator=denominator)


def mean_denominator(
    first: Denominator, second: Denominator, mean: Tensor
) -> Denominator:
    """Return the mean of the denominators of both runs. `mean` is m̄ = r̄ n̄, the mean
    of the momenta."""
    u = roots(first.second_moment, second.second_moment)
    u_before = roots(first.second_moment_before, second.second_moment_before)
    denominator = replace(
        first,
        mean=mean,
        second_moment=u.mean.square(),
        second_moment_before=u_before.mean.square(),
    )
    if first.max_second_moment is None or second.max_second_moment is None:
        return denominator
    assert first.max_second_moment_before is not None
    assert second.max_second_moment_before is not None

    # AMSGrad's running maximum t grows by max(u − t₋, 0)
    t = roots(first.max_second_moment, second.max_second_moment)
    t_before = roots(first.max_second_moment_before, second.max_second_moment_before)
    excess = Pair(u.first - t_before.first, u.second - t_before.second)
    gain = Pair(excess.first.relu(), excess.second.relu())
    return replace(
        denominator,
        max_second_moment=t.mean.square(),
        max_second_moment_before=t_before.mean.square(),
        max_slope=slope(excess, gain, (excess.first > 0).to(excess.first)),
    )


def roots(first: Tensor, second: Tensor) -> Pair:
    return Pair(first.sqrt(), second.sqrt())


def refuse_other_size(first: Tensor | float, second: Tensor | float, step: int) -> None:
    """Raise if a coefficient of the optimizer differs between the training runs.

    For example, a schedule that depends on the loss changes the step size, and this
    change belongs to no example."""
    value = torch.as_tensor(first)
    other_value = torch.as_tensor(second)
    differs = value.shape != other_value.shape
    if differs or float((value - other_value).abs().max()) > SAME_SIZE * float(
        value.abs().max()
    ):
        raise Mistake(
            f"step {step}: without the examples, the optimizer has other settings at this step, "
            "for example because a schedule depends on the loss; use a schedule that does not "
            "depend on the loss"
        )


# --- The breakdown: the shares of examples and steps
# in the change ΔF = F′ − F caused by a removal.
#
# The shares sᵢ add up to the actual change, up to rounding. In both training runs and
# in the backward pass, each sum has a rounding error of at most ε (machine epsilon)
# times the sum of the magnitudes of its terms. With the adjoints a_s of the weights and
# γ_s of the gradients,
#
#     closure_error = |Σᵢ sᵢ − ΔF|  ≤  ε M
#     M = |F| + |F′| + ‖a_T‖·‖θ_T‖ + Σ_s ( |a_s|·|θ_s| + |γ_s|·|g_s| + Σᵢ κᵢ|γ_s·∇ℓᵢ| )
#
# where |·| takes the magnitude of each entry, and κᵢ∇ℓᵢ is the term of example i in the
# gradient. If training amplifies rounding errors, then a, γ and M grow during the
# backward pass, and so does the bound.
#
# The bound is safe: in about a hundred training runs, with all optimizers and
# architectures, in float32 and float64, `closure_error` was between 0.001 ε M and
# 0.05 ε M. This includes runs whose error grew from 1e-15 to 1e-8 of the change.


LARGEST_CLOSURE = 1e-2
"""Maximum relative error of the sum of all shares. A breakdown with a larger error is
rejected, even if rounding explains the error."""


@dataclass(frozen=True, kw_only=True)
class Breakdown:
    """The shares of examples and steps in the actual change of chosen outputs."""

    before: Float[Tensor, " chosen"]  # the outputs after the first training run
    # the change from the first to the second training run
    actual: Float[Tensor, " chosen"]
    shares: Float[Tensor, "chosen train"]
    by_step: Float[Tensor, "chosen step"]
    # M, the summed magnitudes of all terms (see above)
    magnitude: Float[Tensor, " chosen"]
    growth: float  # largest norm of the adjoint, relative to its norm at the end of training
    # number of steps whose batch is empty, because all of its examples are left out
    emptied: int

    @property
    def closure_error(self) -> float:
        """The norm of the difference between the summed shares
        and the actual change."""
        return float((self.shares.sum(1) - self.actual).norm())

    @property
    def closure(self) -> float:
        """`closure_error`, relative to the actual change."""
        if not self.actual.any():
            return self.closure_error
        return self.closure_error / float(self.actual.norm())

    @property
    def rounding(self) -> float:
        """The bound ε M on the rounding error, where M is `magnitude`."""
        return torch.finfo(self.shares.dtype).eps * float(self.magnitude.norm())

    def checked(self) -> Breakdown:
        """Return the breakdown if its shares add up to the actual change.
        Raise otherwise."""
        if not self.closure_error <= self.rounding:
            raise Mistake(
                f"the shares of the examples miss the actual change by {short(self.closure)} of "
                f"it: the error {short(self.closure_error)} exceeds the rounding error "
                f"{short(self.rounding)}, so something else differed between both trainings; seed "
                "all random numbers, and use one thread"
            )
        if not self.closure_error <= LARGEST_CLOSURE * float(self.actual.norm()):
            raise Mistake(
                f"the shares of the examples miss the actual change by {short(self.closure)} of "
                "it, because training amplifies rounding errors; take smaller steps, or use "
                "float64"
            )
        return self


def concatenated(parts: Sequence[Breakdown]) -> Breakdown:
    names = ("before", "actual", "shares", "by_step", "magnitude")
    columns = {
        name: torch.cat([getattr(part, name) for part in parts]) for name in names
    }
    growth = max(part.growth for part in parts)
    return Breakdown(**columns, growth=growth, emptied=parts[0].emptied)


# --- The breakdown between two recorded training runs: A with all examples, and B
# without some.
#
#     F(B) − F(A) = Σᵢ sᵢ
#     sᵢ = Σ_s [ c̄ γ_s·∇ℓ̄ᵢ Δtᵢ + (Σⱼ t̄ⱼ γ_s·∇ℓ̄ⱼ) Δc mᵢΔtᵢ/Σⱼ mⱼΔtⱼ ]
#
#     γ_s       adjoint of the gradient of step s, pulled back from the output F
#     ∇ℓ̄ᵢ       mean of the gradients of example i in both runs
#     tᵢ        κᵢwᵢ, the share of the example in its batch times its weight
#     c         factor that renormalises the mean: c = Σmκ/Σmt, where m is the count of an
#               example in the mean. c = 1 if the mean is not renormalised, or if the batch
#               is empty
#
# The first term is the example's own term in the gradient of the batch. The second term
# comes from the effect of example i on c, the common factor of all examples. If the two
# runs become equal, the rules become derivatives, and sᵢ becomes the leave-out effect
# of example i.


SAME_SHARES = 1e-4
"""Relative tolerance, in float32, for the shares of a batch in the second run. They are
compared with the shares that follow from the first run and the example weights."""

Jacobian = Callable[[Tensor], tuple[Tensor, Tensor]]
"""A function from the weights to the chosen outputs, and their gradients as rows."""


@dataclass(kw_only=True)
class TrainingPair:
    """Two recorded training runs that differ only in the weights of their examples."""

    first: AbstractTrajectory
    second: AbstractTrajectory
    weights: Pair  # the weights of the examples
    mean: AbstractMean
    # number of vectors per backward pass; None means all
    vectors_per_pass: int | None = None
    start_step: int = 0  # the first step at which the runs differ
    # number of steps of the last backward pass whose batch is empty, because all of its
    # examples are left out
    emptied: int = 0

    def breakdown(self, outputs: Jacobian, report: Callable[[int], None]) -> Breakdown:
        """Split the change of the outputs among examples and steps.

        After each step of the backward pass,
        call `report` with the number of completed steps."""
        ends = Pair(self.first.end, self.second.end)
        before, slopes_before = outputs(ends.first)
        after, slopes_after = outputs(ends.second)
        mean_slopes = (slopes_before + slopes_after) / 2
        adjoint = StateAdjoint(weights=secant(mean_slopes, after - before, ends.change))
        shares = mean_slopes.new_zeros(len(mean_slopes), self.first.examples)
        by_step = mean_slopes.new_zeros(len(mean_slopes), self.first.length)
        sizes = adjoint.weights.norm(dim=1)
        magnitude = before.abs() + after.abs() + sizes * ends.mean.norm()

        self.emptied = 0
        last_size = float(sizes.mean())
        largest = last_size
        for index in reversed(range(self.start_step, self.first.length)):
            by_step[:, index] = self.step_back(index, adjoint, shares, magnitude)
            largest = max(largest, float(adjoint.weights.norm(dim=1).mean()))
            report(self.first.length - index)
        return Breakdown(
            before=before,
            actual=after - before,
            shares=shares,
            by_step=by_step,
            magnitude=magnitude,
            growth=largest / last_size if last_size else 1.0,
            emptied=self.emptied,
        )

    def step_back(
        self,
        index: int,
        adjoint: StateAdjoint,
        shares: Float[Tensor, "vector example"],
        magnitude: Float[Tensor, " vector"],
    ) -> Float[Tensor, " vector"]:
        """Pull the adjoint back through one step,
        and add to the shares and magnitudes in place.

        Return the share of the step in the change.
        """
        pair = StepPair(first=self.first.step(index), second=self.second.step(index))
        # γ: the adjoint of the gradient, before clipping
        clipped_adjoint = adjoint.pull_back(pair.mean, pair.clipped.clipped.mean)
        gamma = pair.clipped.pull_back(clipped_adjoint)
        share = shares.new_zeros(len(shares))
        if pair.first.batches:
            magnitude += self.add_curvature(pair, adjoint, gamma)
            share += self.add_shares(pair, gamma, shares)
        magnitude += adjoint.weights.abs() @ pair.weights.mean.abs()
        return share

    def add_curvature(
        self,
        pair: StepPair,
        adjoint: StateAdjoint,
        gamma: Float[Tensor, "vector weight"],
    ) -> Float[Tensor, " vector"]:
        """Add γᵀH̄ to the adjoint. H̄ is the secant Jacobian of the gradient, from θ to
        θ′.

        Return |γ|·|g| + Σᵢ κᵢ|γ·∇ℓᵢ|.
        """
        # γᵀH and γ·∇ℓᵢ at the midpoint, and the gradients g and g′
        count = len(pair.first.batches)
        batches = tuple(self.mean_batch(pair, index) for index in range(count))
        midpoint = recorded_gradient(batches, pair.weights.mean)
        curved, rows = midpoint.curvature(gamma, self.vectors_per_pass)
        gradients = Pair(*(gradient(batches, weights) for weights in pair.weights))

        # add γᵀH̄ to the adjoint; the secant is defined by γᵀH̄ Δθ = γ·Δg
        change = gamma @ gradients.change
        adjoint.weights += secant(curved, change, pair.weights.change)

        # |γ|·|g| + Σᵢ κᵢ|γ·∇ℓᵢ|
        shares = torch.cat([batch.shares for batch in batches]).abs()
        gradient_magnitude = gamma.abs() @ gradients.mean.abs()
        row_magnitude = rows.abs() @ shares
        return gradient_magnitude + row_magnitude

    def mean_batch(self, pair: StepPair, index: int) -> TakenBatch:
        """Return batch number `index`, with the mean shares of both training runs.

        Raise if the batches differ in more than the weights of their examples.
        """
        first = pair.first.batches[index]
        second = pair.second.batches[index]
        has_other_examples = not torch.equal(first.examples, second.examples)
        if has_other_examples or self.has_other_shares(first, second):
            raise Mistake(
                f"step {pair.first.index}: without the examples, a call has other examples or "
                "another loss; only the weights may depend on earlier steps"
            )
        return replace(first, shares=(first.shares + second.shares) / 2)

    def has_other_shares(self, batch: TakenBatch, other_batch: TakenBatch) -> bool:
        """Return True if the shares of the two runs differ for another reason than the
        example weights."""
        unweighted = replace(batch, shares=batch.unweighted_shares)

        def shares(weights: Tensor) -> Tensor:
            return self.mean.shares(unweighted, weights[batch.examples][None])[0]

        first = shares(self.weights.first)
        if not first.any():
            return False
        scale = batch.shares.sum() / first.sum()
        expected = shares(self.weights.second) * scale
        difference = float((expected - other_batch.shares).abs().max())
        return difference > SAME_SHARES * float(expected.abs().max())

    def add_shares(
        self,
        pair: StepPair,
        gamma: Float[Tensor, "vector weight"],
        shares: Float[Tensor, "vector example"],
    ) -> Float[Tensor, " vector"]:
        """Add the terms of this step to the shares of the examples whose weights differ
        between the runs. Return the sum of these terms."""
        batches = list(zip(pair.first.batches, pair.second.batches, strict=True))
        weights = []
        for first, _ in batches:
            rows = first.examples
            weights.append(Pair(self.weights.first[rows], self.weights.second[rows]))
        self.emptied += not any(bool(weight.second.any()) for weight in weights)
        if not any(weight.differs for weight in weights):
            return shares.new_zeros(len(shares))

        # γ·∇ℓ̄ᵢ of every row
        def row_scores(weights: Tensor) -> Tensor:
            return scores(pair.first.batches, weights, gamma, self.vectors_per_pass)

        both_scores = Pair(
            row_scores(pair.weights.first), row_scores(pair.weights.second)
        )
        lengths = [len(first.examples) for first, _ in batches]
        by_batch = torch.split(both_scores.mean, lengths, dim=1)

        parts = []
        for (first, second), weight, batch_scores in zip(
            batches, weights, by_batch, strict=True
        ):
            part = row_shares(first, second, weight, batch_scores)
            shares.index_add_(1, first.examples, part)
            parts.append(part)
        return torch.cat(parts, dim=1).sum(1)


def row_shares(
    first: TakenBatch,
    second: TakenBatch,
    weight: Pair,
    rows: Float[Tensor, "vector row"],
) -> Float[Tensor, "vector row"]:
    """Return c̄ γ·∇ℓ̄ᵢ Δtᵢ + (Σⱼ t̄ⱼ γ·∇ℓ̄ⱼ) Δc mᵢΔtᵢ/Σⱼ mⱼΔtⱼ for the rows i of a batch.

    `weight` are the weights of the examples in both training runs,
    and `rows` is γ·∇ℓ̄ᵢ."""
    # cκ; an empty batch has no mean, so use c of the other training run
    per_weight = Pair(first.unweighted_shares, second.unweighted_shares)
    if not weight.second.any():
        per_weight = Pair(first.unweighted_shares, first.unweighted_shares)
    elif not weight.first.any():
        per_weight = Pair(second.unweighted_shares, second.unweighted_shares)
    # c̄ Δtᵢ,  c̄ mᵢΔtᵢ  and  Δc Σⱼ t̄ⱼ γ·∇ℓ̄ⱼ
    changed = per_weight.mean * weight.change
    counted = changed * first.counts
    change_by_mean = rows @ (weight.mean * per_weight.change)
    # if the total weight does not change, Δc and the second term are zero
    if counted.sum().abs() <= CLOSE * counted.abs().sum():
        return rows * changed
    by_mean = change_by_mean[:, None] / counted.sum() * first.counts
    return (rows + by_mean) * changed
