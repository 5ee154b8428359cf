"""The sweep: a backward pass through training that computes the leave-out effect of each
example.

The sweep goes from the last step to the first. For each output F after training, it
computes the adjoint γ = ∂F/∂g of the gradient g of every step. At a step with batch B,
g = Σ κⱼ∇ℓⱼ, where ℓⱼ is the loss of example j and κⱼ its share in the loss of the step.
Give example i a weight wᵢ, which is 1 in training and 0 if i is left out. If wᵢ changes,
then g changes, and F changes by about the change of γ·g. There are two conventions for
the shares of the other examples:

    fixed           κⱼ(w) = κⱼwⱼ                   The others keep their shares:
                                                   ∂(γ·g)/∂wᵢ = κᵢ γ·∇ℓᵢ
    renormalised    κⱼ(w) = κⱼwⱼ Σκm/Σκmw          The mean is over the other examples only:
                                                   ∂(γ·g)/∂wᵢ = κᵢ (γ·∇ℓᵢ − mᵢ Σκⱼγ·∇ℓⱼ/Σκm)

Here mᵢ is the count of an example in the mean: 1, its class weight, or its number of tokens. If
example i is left out of a renormalised mean, the gradient is g⁻ⁱ. The change of γ·g is then known
exactly, not only to first order in wᵢ:

    γ·g⁻ⁱ − γ·g = −∂(γ·g)/∂wᵢ · 1/(1 − κᵢmᵢ/Σκm)
                = −∂(γ·g)/∂wᵢ · |B|/(|B| − 1)      if all m are equal

The change is −κᵢ γ·∇ℓᵢ if the shares are fixed, if the loss is a sum, or if i is the
only example of the batch.

>>> along, batch = torch.tensor([[1.0, 3.0]]), TakenBatch(
...     examples=torch.tensor([0, 1]),
...     shares=torch.tensor([0.5, 0.5]),
...     losses=lambda weights: weights,
... )
>>> FixedMean().slopes(along, batch).tolist(), RenormalisedMean().slopes(along, batch).tolist()
([[0.5, 1.5]], [[-0.5, 0.5]])
>>> FixedMean().removals(along, batch).tolist(), RenormalisedMean().removals(along, batch).tolist()
([[-0.5, -1.5]], [[1.0, -1.0]])
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ntkexp.capacity import split_range
from ntkexp.effects.curvature import (
    Clipping,
    credit_of_rows,
    recorded_gradient,
    row_gradients,
)
from ntkexp.effects.trajectory import (
    AbstractTrajectory,
    Denominator,
    TakenBatch,
    TrainedStep,
    Update,
)
from ntkexp.optimizer.base import GUARD

# --- The adjoints of the training state: of the weights, and of the optimizer's state.
#
#     a = ∂F/∂θ      −b = ∂F/∂m      d = ∂F/∂u      e = ∂F/∂t        one row for each output F
#
# `effects.trajectory` defines the step and its symbols. Below is the backward pass of a
# step. It ends with p̂ = ∂F/∂p, the adjoint of the update's input p. Here r = m/n, primes
# denote values before the step, and 1[u > t′] is 1 where u exceeds AMSGrad's running
# maximum, else 0:
#
#     b ← b + S⊙a
#     if the step has a denominator n = t/ρ + ε:
#         e ← e + S⊙a⊙r/ρ
#         AMSGrad   d ← d + 1[u > t′] e,  e ← 1[u ≤ t′] e
#         Adam      d ← d + e,            e ← 0
#     p̂ = −αb − N⊙a + (1 − β₂)(p/u) d
#     b ← βb,   d ← β₂(u′/u) d,   a ← (1 − d)a + λp̂


@dataclass(kw_only=True)
class StateAdjoint:
    """The adjoints of the training state: a of the weights, and b, d and e of the
    optimizer's state. b, d and e are created when a step needs them."""

    weights: Float[Tensor, "vector weight"]  # a = ∂F/∂θ, for the weights θ
    memory: Tensor | None = None  # b = −∂F/∂m, for the momentum m
    # d = ∂F/∂u, for u = √v of adaptive optimizers such as Adam
    latest: Tensor | None = None
    largest: Tensor | None = None  # e = ∂F/∂t, for AMSGrad's running maximum t

    def pull_back(
        self, step: TrainedStep, gradient: Float[Tensor, " weight"]
    ) -> Float[Tensor, "vector weight"]:
        """Pull the adjoints back through one step. This replaces the adjoints of the
        state after the step by the adjoints of the state before the step.

        `gradient` is the clipped gradient of the step. Return its adjoint, p̂.
        """
        adjoint = torch.zeros_like(self.weights)
        for update in step.updates:
            part = update.weight_slice
            linear = update.linear
            p = gradient[part] + linear.l2 * step.weights[part]
            adjoint[:, part] = self.through(update, p)

            # a ← (1 − d) a + λ p̂
            self.weights[:, part] *= 1 - linear.decoupled_decay
            if linear.l2:
                self.weights[:, part] += linear.l2 * adjoint[:, part]
        return adjoint

    def through(
        self, update: Update, p: Float[Tensor, " part"]
    ) -> Float[Tensor, "vector part"]:
        """Pull the adjoints back through one update. Return the adjoint p̂ of its input
        p (the clipped gradient plus L2 decay)."""
        linear = update.linear
        a = self.weights[:, update.weight_slice]

        # −N⊙a + (1 − β₂)(p/u) d
        scaled_adjoint = linear.momentum_scale * a
        adjoint = torch.zeros_like(a)
        if isinstance(linear.gradient_scale, Tensor) or linear.gradient_scale != 0.0:
            adjoint = -linear.gradient_scale * a
        if update.denominator is not None:
            adjoint += self.through_denominator(
                update.denominator, update.weight_slice, scaled_adjoint, p
            )

        # b ← b + S⊙a,  p̂ ← p̂ − αb,  b ← βb
        if not linear.momentum_decay and self.memory is None:
            return adjoint.sub_(scaled_adjoint, alpha=float(linear.momentum_gain))
        if self.memory is None:
            self.memory = torch.zeros_like(self.weights)
        memory = self.memory[:, update.weight_slice]
        memory += scaled_adjoint
        adjoint.sub_(memory, alpha=float(linear.momentum_gain))
        memory *= linear.momentum_decay
        return adjoint

    def through_denominator(
        self,
        denominator: Denominator,
        weight_slice: slice,
        scaled_adjoint: Float[Tensor, "vector part"],
        p: Float[Tensor, " part"],
    ) -> Float[Tensor, "vector part"]:
        """Pull the adjoints back through the denominator n of a step. Return the
        resulting term of p̂. `scaled_adjoint` is S⊙a."""
        if self.latest is None:
            self.latest = torch.zeros_like(self.weights)
        latest = self.latest[:, weight_slice]
        u = denominator.second_moment.sqrt()
        u_before = denominator.second_moment_before.sqrt()

        # S⊙a⊙r/ρ
        n = denominator.value(denominator.t)
        ratio = denominator.mean / n
        adjoint_of_t = scaled_adjoint * (ratio / denominator.bias_correction)

        # AMSGrad: d ← d + 1[u > t′] e,  e ← 1[u ≤ t′] e
        if denominator.max_second_moment_before is not None:
            if self.largest is None:
                self.largest = torch.zeros_like(self.weights)
            max_slope = denominator.max_slope
            if max_slope is None:
                max_slope = (u > denominator.max_second_moment_before.sqrt()).to(u)
            largest = self.largest[:, weight_slice]
            largest += adjoint_of_t
            adjoint_of_t = largest * max_slope
            largest *= 1 - max_slope

        # from u² = β₂u′² + (1 − β₂)p²:  p̂ += (1 − β₂)(p/u) d,  d ← β₂(u′/u) d
        latest += adjoint_of_t
        inverse = torch.where(u > 0, 1 / torch.where(u > 0, u, 1.0), 0.0)
        adjoint = latest * ((1 - denominator.beta2) * p * inverse)
        latest *= denominator.beta2 * u_before * inverse
        return adjoint

    @property
    def state(self) -> dict[str, Tensor]:
        rows = {
            "weights": self.weights,
            "memory": self.memory,
            "latest": self.latest,
            "largest": self.largest,
        }
        return {name: row for name, row in rows.items() if row is not None}


Effects: TypeAlias = Literal["one_step", "derivative"] | bool
"""The kind of effects.

False: no effects. True: leave each example out of the mean of its batch, and linearise
the rest of training. "one_step": also repeat the optimizer's step without the example.
"derivative": differentiate with respect to the weight of the example."""

MeanName: TypeAlias = Literal["renormalised", "fixed"]


class AbstractMean(ABC):
    """A convention for the shares κ in the loss of a batch. It determines how the
    shares of the other examples change if the weight of one example changes."""

    @abstractmethod
    def shares(
        self, batch: TakenBatch, weights: Float[Tensor, "#group row"]
    ) -> Float[Tensor, "group row"]:
        """Return the share κ of each row in the loss, given the weights of the rows."""

    @abstractmethod
    def slopes(
        self, along: Float[Tensor, "vector row"], batch: TakenBatch
    ) -> Float[Tensor, "vector row"]:
        """Return ∂(γ·g)/∂wᵢ for each row of a batch. `along` holds γ·∇ℓᵢ."""

    @abstractmethod
    def removals(
        self, along: Float[Tensor, "vector row"], batch: TakenBatch
    ) -> Float[Tensor, "vector row"]:
        """Return γ·g⁻ⁱ − γ·g, the change of γ·g if example i is left out, for each row
        of a batch. `along` holds γ·∇ℓᵢ.

        If an example has several rows, its change is the sum over these rows.
        """


class FixedMean(AbstractMean):
    """Fixed shares: the other examples keep their shares in the loss."""

    def shares(
        self, batch: TakenBatch, weights: Float[Tensor, "#group row"]
    ) -> Float[Tensor, "group row"]:
        return batch.shares * weights

    def slopes(
        self, along: Float[Tensor, "vector row"], batch: TakenBatch
    ) -> Float[Tensor, "vector row"]:
        return along * batch.shares

    def removals(
        self, along: Float[Tensor, "vector row"], batch: TakenBatch
    ) -> Float[Tensor, "vector row"]:
        return -self.slopes(along, batch)


class RenormalisedMean(AbstractMean):
    """Renormalised shares: if an example is left out, the mean of its batch is over the
    other examples only. If there are no other examples, the loss of the batch is 0."""

    def shares(
        self, batch: TakenBatch, weights: Float[Tensor, "#group row"]
    ) -> Float[Tensor, "group row"]:
        weighted = batch.shares * weights
        if not batch.is_mean:
            return weighted
        remaining = (weighted * batch.counts).sum(-1, keepdim=True)
        return torch.where(
            remaining != 0, weighted * batch.counted.sum() / remaining, 0.0
        )

    def slopes(
        self, along: Float[Tensor, "vector row"], batch: TakenBatch
    ) -> Float[Tensor, "vector row"]:
        if not batch.is_mean:
            return along * batch.shares
        mean = along @ batch.shares / batch.counted.sum()
        return (along - mean[:, None] * batch.counts) * batch.shares

    def removals(
        self, along: Float[Tensor, "vector row"], batch: TakenBatch
    ) -> Float[Tensor, "vector row"]:
        fixed_removal = -along * batch.shares
        if not batch.is_mean:
            return fixed_removal
        # `count`: for each row, the sum of κm over all rows of its example
        # `total`: the sum of κm over the batch
        examples, rows = torch.unique(batch.examples, return_inverse=True)
        counts = batch.shares.new_zeros(len(examples)).index_add_(
            0, rows, batch.counted
        )
        count = counts[rows]
        total = batch.counted.sum()

        # True if other examples remain, up to rounding. The absolute value is needed
        # because κ is negative if the loss has the opposite sign.
        eps = torch.finfo(total.dtype).eps
        remaining = total - count
        has_others = remaining.abs() > len(rows) * eps * total.abs()

        # −∂(γ·g)/∂wᵢ · 1/(1 − κᵢmᵢ/Σκm)
        divisor = torch.where(has_others, remaining, 1.0)
        growth = torch.where(has_others, total / divisor, 1.0)
        removal = -self.slopes(along, batch) * growth
        return torch.where(has_others, removal, fixed_removal)


@dataclass(frozen=True)
class Infinitesimal(AbstractMean):
    """The convention `mean`, but with derivatives: `removals` returns −∂(γ·g)/∂wᵢ
    instead of the change if example i is left out."""

    mean: AbstractMean

    def shares(
        self, batch: TakenBatch, weights: Float[Tensor, "#group row"]
    ) -> Float[Tensor, "group row"]:
        return self.mean.shares(batch, weights)

    def slopes(
        self, along: Float[Tensor, "vector row"], batch: TakenBatch
    ) -> Float[Tensor, "vector row"]:
        return self.mean.slopes(along, batch)

    def removals(
        self, along: Float[Tensor, "vector row"], batch: TakenBatch
    ) -> Float[Tensor, "vector row"]:
        return -self.mean.slopes(along, batch)


MEANS: dict[MeanName, AbstractMean] = {
    "renormalised": RenormalisedMean(),
    "fixed": FixedMean(),
}


def mean_of(effects: Effects, mean: MeanName) -> AbstractMean:
    """Return the convention with the name `mean`. If `effects` is "derivative", return
    this convention with derivatives instead of removals."""
    return Infinitesimal(MEANS[mean]) if effects == "derivative" else MEANS[mean]


def kind_of(effects: Effects) -> str:
    """Return the name of a kind of effects: "removal", "one_step" or "derivative"."""
    return "removal" if isinstance(effects, bool) else effects


# --- One-step removal: repeat each step exactly without each of its examples, and
# linearise only the later steps.
#
#     effect of i = Σ_s a·(θ⁻ⁱ − θ) − b·(m⁻ⁱ − m) + d·(u⁻ⁱ − u) + e·(t⁻ⁱ − t)
#
# The sum is over the steps s whose batch contains i. θ⁻ⁱ, m⁻ⁱ, … are the values after
# the step without example i. One-step removal includes the nonlinear response of an
# optimizer such as Adam to the finite change of the gradient. It needs the gradient of
# every single example.


@dataclass(frozen=True)
class Change:
    """The changes of weights and optimizer state by one update, if the step is repeated
    without an example. There is one row for each example of the step."""

    examples: Int[Tensor, " left"]
    weight_slice: slice
    weights: Float[Tensor, "left part"]
    # −(m⁻ⁱ − m) for the momentum m; negative, because its adjoint is −b
    memory: Float[Tensor, "left part"]
    latest: Float[Tensor, "left part"] | None
    largest: Float[Tensor, "left part"] | None

    def effect(self, adjoint: StateAdjoint) -> Float[Tensor, "vector left"]:
        """Return the effect of each example on each output. `adjoint` belongs to the
        state after the step."""
        effect = adjoint.weights[:, self.weight_slice] @ self.weights.T
        pairs = (
            (adjoint.memory, self.memory),
            (adjoint.latest, self.latest),
            (adjoint.largest, self.largest),
        )
        for rows, change in pairs:
            if rows is not None and change is not None:
                effect += rows[:, self.weight_slice] @ change.T
        return effect


def changes_without(
    step: TrainedStep, gradient: Float[Tensor, " weight"], mean: AbstractMean
) -> list[Change]:
    """Repeat a step without each of its examples. Return the changes by each update.

    `gradient` is the gradient of the step before clipping.
    """
    examples, without = gradients_without(step, mean)
    if step.with_grad is not None:
        without = without * step.with_grad
    clipped_gradient = clipped(gradient[None], step.clip_norm)[0]
    clipped_without = clipped(without, step.clip_norm)
    changes = []
    for update in step.updates:
        part = update.weight_slice
        decay = update.linear.l2 * step.weights[part]
        p = clipped_gradient[part] + decay
        p_without = clipped_without[:, part] + decay
        changes.append(change_of(examples, update, p, p_without))
    return changes


def gradients_without(
    step: TrainedStep, mean: AbstractMean
) -> tuple[Tensor, Float[Tensor, "left weight"]]:
    """Return the distinct examples of a step, and the gradients of the
    step without each of them."""
    examples = torch.unique(torch.cat([batch.examples for batch in step.batches]))
    total = step.weights.new_zeros(len(examples), len(step.weights))
    gradients = row_gradients(step.batches, step.weights)
    for batch, rows in zip(step.batches, gradients, strict=True):
        # weights of the rows: 0 for the left-out example, 1 for all others
        is_other = batch.examples[None] != examples[:, None]
        shares = mean.shares(batch, is_other.to(rows))
        total += shares @ rows
    return examples, total


def clipped(
    gradient: Float[Tensor, "left weight"], norm: float | None
) -> Float[Tensor, "left weight"]:
    """Clip each row of gradients to a norm."""
    if norm is None:
        return gradient
    norms: Tensor = torch.linalg.vector_norm(gradient, dim=1, keepdim=True)
    factors = (norm / (norms + GUARD)).clamp(max=1.0)
    return gradient * factors


def change_of(
    examples: Int[Tensor, " left"],
    update: Update,
    p: Float[Tensor, " part"],
    p_without: Float[Tensor, "left part"],
) -> Change:
    """Return the changes of weights and optimizer state if the input p of an update is
    replaced by each row of `p_without`."""
    linear = update.linear
    denominator = update.denominator
    change = p_without - p
    momentum_change = linear.momentum_gain * change
    if denominator is None:
        step_change = -linear.momentum_scale * momentum_change
        weights = step_change - linear.gradient_scale * change
        return Change(
            examples, update.weight_slice, weights, -momentum_change, None, None
        )

    # u and t, without the example
    squares = denominator.beta2 * denominator.second_moment_before
    u = (squares + (1 - denominator.beta2) * p_without.square()).sqrt()
    t = u
    if denominator.max_second_moment_before is not None:
        t = torch.maximum(u, denominator.max_second_moment_before.sqrt())

    # the change of m/n, where n also changes without the example
    n = denominator.value(denominator.t)
    ratio = denominator.mean / n
    ratio_without = (denominator.mean + momentum_change) / denominator.value(t)
    step_change = -linear.momentum_scale * n * (ratio_without - ratio)

    weights = step_change - linear.gradient_scale * change
    latest = u - denominator.second_moment.sqrt()
    largest = None
    if denominator.max_second_moment is not None:
        largest = t - denominator.t
    return Change(
        examples, update.weight_slice, weights, -momentum_change, latest, largest
    )


# --- The sweep, for each output F.
#
# It begins with a_T = ∂F/∂θ_T. For each step s, from the last to the first:
#
#     p̂_s, a ← the backward pass of the update (`StateAdjoint.pull_back`)
#     γ_s    ← the backward pass of clipping, applied to p̂_s
#     a_s    ← a + H_s γ_s,   with the Hessian H_s = ∂g_s/∂θ of the batch's loss
#
# Then the derivative of F by the weight of example i is ∂F/∂wᵢ = Σ_s γ_s·∂g_s/∂wᵢ, and
# the leave-out effect of i is Σ_s γ_s·(g_s⁻ⁱ − g_s).
#
# The derivative passes through all of training: gradients, the optimizer's state, its
# denominators, clipping and decay (the metagradient of Engstrom et al. 2025). A
# leave-out effect uses the exact change of each batch's gradient without the example,
# and linearises everything after this change. If `one_step` is set, the optimizer's step
# is also repeated without the example.


@dataclass(kw_only=True)
class AdjointSweep:
    """The backward pass through all training steps for some outputs. `steps_left` is
    the number of remaining steps.

    The outputs are split into parts. Each part is so small that its adjoints stay in
    the CPU cache during a step."""

    trajectory: AbstractTrajectory
    mean: AbstractMean
    adjoints: list[StateAdjoint]  # one for each part of the outputs
    effects: Float[Tensor, "vector example"]
    steps_left: int
    one_step: bool = False
    # for s = T, T − 1, …: the sum over the outputs of ‖a_s‖, the norm of the adjoint of
    # the weights
    norms: list[float] = field(default_factory=list)

    def steps_back(self) -> Iterator[int]:
        """Run the remaining steps. After each step,
        yield the number of remaining steps."""
        while self.steps_left:
            self.pull_back(self.steps_left - 1)
            self.steps_left -= 1
            yield self.steps_left

    def pull_back(self, index: int) -> None:
        """Pull all adjoints back through one step, and add to the effects."""
        # g with its autograd graph, and the clipped gradient c g
        step = self.trajectory.step(index)
        recorded = recorded_gradient(step.batches, step.weights)
        gradient = recorded.gradient
        if step.with_grad is not None:
            gradient = gradient * step.with_grad
        clipping = Clipping(gradient, step.clip_norm)
        consumed = clipping.factor * clipping.gradient

        # if `one_step`: the change of the step when each example is left out
        changes: list[Change] = []
        if self.one_step and step.batches:
            changes = changes_without(step, clipping.gradient, self.mean)
        # 0 where a gradient is only a rounding error, 1 elsewhere
        credited = self.credit(step, recorded.gradient)

        parts = torch.split(
            self.effects, [len(adjoint.weights) for adjoint in self.adjoints]
        )
        for adjoint, effects in zip(self.adjoints, parts, strict=True):
            # With `one_step`, multiply the exact changes of the weights and of the
            # optimizer's state by the adjoints after the step: a·(θ⁻ⁱ − θ), and so on.
            for change in changes:
                effects.index_add_(1, change.examples, change.effect(adjoint))

            # γ from p̂, and a ← a + H γ
            gamma = clipping.pull_back(adjoint.pull_back(step, consumed))
            if credited is not None:
                gamma = gamma * credited
            curved, along = recorded.curvature(gamma)
            adjoint.weights += curved

            # Without `one_step`, add γ·(g⁻ⁱ − g): the change of the gradient, times the
            # derivative of all that follows.
            if not self.one_step:
                self.add_removals(step, along, effects)
        self.norms.append(sum(map(total_norm, self.adjoints)))

    def credit(
        self, step: TrainedStep, gradient: Float[Tensor, " weight"]
    ) -> Float[Tensor, " weight"] | None:
        """Return the credit of a step's gradient: 0 for an element that is only
        rounding error, else 1. Return None if it is 1 everywhere.

        Rounding errors matter only if the step divides by past gradients."""
        divides = any(update.denominator is not None for update in step.updates)
        if not divides or not step.batches:
            return None
        return credit_of_rows(
            step.batches, step.weights, gradient, self.trajectory.flat
        )

    def add_removals(
        self,
        step: TrainedStep,
        along: Float[Tensor, "vector row"],
        effects: Float[Tensor, "vector example"],
    ) -> None:
        """Add γ·(g⁻ⁱ − g) for each example i: the effect of leaving i out of the step's
        gradient g. `along` is γ·∇ℓ of each row."""
        lengths = [len(batch.examples) for batch in step.batches]
        for rows, batch in zip(
            torch.split(along, lengths, dim=1), step.batches, strict=True
        ):
            effects.index_add_(1, batch.examples, self.mean.removals(rows, batch))

    @property
    def state(self) -> dict[str, Any]:
        adjoints = [adjoint.state for adjoint in self.adjoints]
        return {
            "left": self.steps_left,
            "sizes": self.norms,
            "effects": self.effects,
            "adjoints": adjoints,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.steps_left = state["left"]
        self.norms = list(state["sizes"])
        self.effects = state["effects"].to(self.effects.device)
        device = self.effects.device
        self.adjoints = [
            StateAdjoint(**{name: row.to(device) for name, row in adjoint.items()})
            for adjoint in state["adjoints"]
        ]


def sweep_from(
    trajectory: AbstractTrajectory,
    end: Float[Tensor, "vector weight"],
    mean: AbstractMean,
    outputs_per_pass: int | None = None,
    *,
    one_step: bool = False,
) -> AdjointSweep:
    """Return a backward pass that begins with `end`, the gradients ∂F/∂θ_T of the
    outputs F. It handles parts of `outputs_per_pass` outputs, or
    all outputs at once by default."""
    adjoints = [
        StateAdjoint(weights=part.clone())
        for part in torch.split(end, outputs_per_pass or max(1, len(end)))
    ]
    return AdjointSweep(
        trajectory=trajectory,
        mean=mean,
        adjoints=adjoints,
        effects=end.new_zeros(len(end), trajectory.examples),
        steps_left=trajectory.length,
        one_step=one_step,
        norms=[sum(map(total_norm, adjoints))],
    )


# --- Backward passes for many points, in chunks whose adjoints fit into memory.
#
# Each chunk requires a backward pass over all of training.


@dataclass(kw_only=True)
class ChunkedSweep:
    """The backward passes through training for all points,
    one for each chunk of points."""

    training: AbstractTrajectory
    # a function from a slice of the points to the gradients ∂F/∂θ_T of the outputs F at
    # these points
    end_gradients: Callable[[slice], Float[Tensor, "vector weight"]]
    points_per_chunk: int  # number of points per chunk
    outputs_per_pass: int  # number of outputs per backward pass
    kind: Effects
    mean: MeanName
    effects: Float[Tensor, "point out example"]
    # for s = T, T − 1, …: ‖a_s‖, summed over the outputs of the completed chunks
    norms: Float[Tensor, " moment"] | None = None
    done: int = 0  # number of completed chunks
    sweep: AdjointSweep | None = None  # the sweep of the current chunk
    # state of the current sweep, from a checkpoint
    saved: Mapping[str, Any] | None = None

    def steps_back(self) -> Iterator[tuple[int, int]]:
        """Run the remaining steps. After each step, yield the number of completed steps
        and the number of all steps."""
        length = self.training.length
        chunks = split_range(0, len(self.effects), self.points_per_chunk)
        while self.done < len(chunks):
            points = chunks[self.done]
            self.sweep = sweep_from(
                self.training,
                self.end_gradients(points),
                mean_of(self.kind, self.mean),
                self.outputs_per_pass,
                one_step=self.kind == "one_step",
            )
            if self.saved is not None:
                self.sweep.restore(self.saved)
                self.saved = None
            for steps_left in self.sweep.steps_back():
                yield (self.done + 1) * length - steps_left, len(chunks) * length
            self.effects[points] = self.sweep.effects.view(-1, *self.effects.shape[1:])
            norms = torch.tensor(self.sweep.norms, dtype=torch.float64)
            self.norms = norms if self.norms is None else self.norms + norms
            self.done += 1
            self.sweep = None

    @property
    def growth(self) -> float:
        """The growth of the adjoint a of the weights towards earlier
        steps: max_s ‖a_s‖/‖a_T‖."""
        if self.norms is None or not self.norms.isfinite().all():
            return float("inf")
        return float(self.norms.max() / self.norms[0])

    @property
    def state(self) -> dict[str, Any]:
        return {
            "points_per_chunk": self.points_per_chunk,
            "done": self.done,
            "effects": self.effects,
            "sizes": self.norms,
            "sweep": None if self.sweep is None else self.sweep.state,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint.

        If its chunks have another size (because of another memory limit), do nothing,
        because the completed chunks contain other points."""
        if state.get("points_per_chunk") != self.points_per_chunk:
            return
        self.done = state["done"]
        self.norms = state["sizes"]
        self.saved = state["sweep"]
        self.effects.copy_(state["effects"])


def total_norm(adjoint: StateAdjoint) -> float:
    """Return the sum over the outputs of ‖a‖,
    the norm of the adjoint of the weights."""
    return float(torch.linalg.vector_norm(adjoint.weights, dim=1).sum())
