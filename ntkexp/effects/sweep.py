"""The sweep: from the end of a training to its beginning, with the adjoint of every output, each example's effect is
read off on the way.

What leaving an example out does to the others of its batch: the convention of the mean.

    fixed           κⱼ(w) = κⱼwⱼ                     the others keep their shares:         ∂/∂wᵢ = κᵢ γ·∇ℓᵢ
    renormalised    κⱼ(w) = κⱼwⱼ Σκm/Σκmw            they share what is left, as a mean over a smaller batch does:
                                                     ∂/∂wᵢ = κᵢ (γ·∇ℓᵢ − mᵢ Σκⱼγ·∇ℓⱼ/Σκm)

where mᵢ is what an example counts in the mean: 1, or its class weight, or its number of tokens, if a mean divides by
their sum. An example that leaves takes all of its weight along, and what that does to a mean is known exactly: of |B|,

    γ·g⁻ⁱ − γ·g = −∂/∂wᵢ · 1/(1 − κᵢmᵢ/Σκm)            = −∂/∂wᵢ · |B|/(|B| − 1) where all count the same

and −κᵢ γ·∇ℓᵢ where the others keep their shares, where a sum has no mean to share, and where the example is alone.

>>> along, batch = torch.tensor([[1.0, 3.0]]), TakenBatch(
...     examples=torch.tensor([0, 1]), shares=torch.tensor([0.5, 0.5]), losses=lambda weights: weights
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

from ntkexp.effects.curvature import Clipping, credit_of_rows, recorded_gradient, row_gradients
from ntkexp.effects.trajectory import (
    AbstractTrajectory,
    Denominator,
    TakenBatch,
    TrainedStep,
    Update,
)
from ntkexp.optimizer.base import GUARD

# --- What every output would feel of a change of the training's state: of weights, and of what the optimizer
# remembers.
#
#     a = ∂F/∂θ      −b = ∂F/∂m      d = ∂F/∂u      e = ∂F/∂t        a row for every output F
#
# Back over a step of `trajectory`, with r = m/n and 1[u > t′] where AMSGrad's largest t′ so far was passed:
#
#     b ← b + S⊙a
#     t ∋ n:   e ← e + S⊙a⊙r/ρ          AMSGrad   d ← d + 1[u > t′] e,  e ← 1[u ≤ t′] e;     Adam   d ← d + e,  e ← 0
#     p̂ = −αb − N⊙a + (1 − β₂)(p/u) d
#     b ← βb,   d ← β₂(u′/u) d,   a ← (1 − d)a + λp̂


@dataclass(kw_only=True)
class StateAdjoint:
    """The rows a, b, d and e; the last three are made when a step first needs them."""

    weights: Float[Tensor, "vector weight"]
    memory: Tensor | None = None
    latest: Tensor | None = None
    largest: Tensor | None = None

    def back(
        self, step: TrainedStep, taken: Float[Tensor, " weight"]
    ) -> Float[Tensor, "vector weight"]:
        """Take one step back, which took this gradient in; what is pulled on that."""
        pulled = torch.zeros_like(self.weights)
        for update in step.updates:
            place, linear = update.place, update.linear
            p = taken[place] + linear.l2 * step.weights[place]
            pulled[:, place] = self.through(update, p)
            self.weights[:, place] *= 1 - linear.decoupled_decay
            if linear.l2:
                self.weights[:, place] += linear.l2 * pulled[:, place]
        return pulled

    def through(self, update: Update, p: Float[Tensor, " part"]) -> Float[Tensor, "vector part"]:
        """Take an update back: what is pulled on p."""
        felt, linear = self.weights[:, update.place], update.linear
        moved = linear.momentum_scale * felt
        straight = isinstance(linear.gradient_scale, Tensor) or linear.gradient_scale != 0.0
        pulled = -linear.gradient_scale * felt if straight else torch.zeros_like(felt)
        if update.denominator is not None:
            pulled += self.through_denominator(update.denominator, update.place, moved, p)
        if not linear.momentum_decay and self.memory is None:
            return pulled.sub_(moved, alpha=float(linear.momentum_gain))
        if self.memory is None:
            self.memory = torch.zeros_like(self.weights)
        memory = self.memory[:, update.place]
        memory += moved
        pulled.sub_(memory, alpha=float(linear.momentum_gain))
        memory *= linear.momentum_decay
        return pulled

    def through_denominator(
        self,
        by: Denominator,
        place: slice,
        moved: Float[Tensor, "vector part"],
        p: Float[Tensor, " part"],
    ) -> Float[Tensor, "vector part"]:
        """Take what a step was divided by back: what that pulls on p."""
        if self.latest is None:
            self.latest = torch.zeros_like(self.weights)
        u, before, latest = by.latest.sqrt(), by.latest_before.sqrt(), self.latest[:, place]
        t = u if by.largest is None else by.largest.sqrt()
        felt = moved * (by.mean / (t / by.root + by.eps) / by.root)
        if by.largest_before is not None:
            # to u goes on what has passed the largest so far, the rest stays with that
            if self.largest is None:
                self.largest = torch.zeros_like(self.weights)
            passed = (u > by.largest_before.sqrt()).to(u) if by.passed is None else by.passed
            largest = self.largest[:, place]
            largest += felt
            felt = largest * passed
            largest *= 1 - passed
        latest += felt
        shares = torch.where(u > 0, 1 / torch.where(u > 0, u, 1.0), 0.0)
        pulled = latest * ((1 - by.second) * p * shares)
        latest *= by.second * before * shares
        return pulled

    @property
    def state(self) -> dict[str, Tensor]:
        """The rows, for a checkpoint."""
        rows = {
            "weights": self.weights,
            "memory": self.memory,
            "latest": self.latest,
            "largest": self.largest,
        }
        return {name: row for name, row in rows.items() if row is not None}


Effects: TypeAlias = Literal["one_step", "derivative"] | bool
"""Whether effects are asked for: of who leaves, by steps that are taken without an example, or as a mere derivative."""

MeanName: TypeAlias = Literal["renormalised", "fixed"]


class AbstractMean(ABC):
    """A convention."""

    @abstractmethod
    def shares(
        self, batch: TakenBatch, weights: Float[Tensor, "#group row"]
    ) -> Float[Tensor, "group row"]:
        """κ of each row, when the rows have these weights."""

    @abstractmethod
    def slopes(
        self, along: Float[Tensor, "vector row"], batch: TakenBatch
    ) -> Float[Tensor, "vector row"]:
        """∂/∂wᵢ of γ·g for every row of a batch, given γ·∇ℓᵢ."""

    @abstractmethod
    def removals(
        self, along: Float[Tensor, "vector row"], batch: TakenBatch
    ) -> Float[Tensor, "vector row"]:
        """What γ·g changes by when an example leaves, for every row of a batch: those of an example add up to it."""


class FixedMean(AbstractMean):
    """The others keep their shares."""

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
    """The other examples share the weight that is left; an example that is alone leaves nothing to share."""

    def shares(
        self, batch: TakenBatch, weights: Float[Tensor, "#group row"]
    ) -> Float[Tensor, "group row"]:
        weighted = batch.shares * weights
        if not batch.is_mean:
            return weighted
        left = (weighted * batch.counts).sum(-1, keepdim=True)
        return torch.where(left != 0, weighted * batch.counted.sum() / left, 0.0)

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
        alone = -along * batch.shares
        if not batch.is_mean:
            return alone
        examples, rows = torch.unique(batch.examples, return_inverse=True)
        own = batch.shares.new_zeros(len(examples)).index_add_(0, rows, batch.counted)[rows]
        whole = batch.counted.sum()
        # beyond what summing rounds; a loss that is given with the other sign has shares below zero
        others = (whole - own).abs() > len(rows) * torch.finfo(whole.dtype).eps * whole.abs()
        grown = torch.where(others, whole / torch.where(others, whole - own, 1.0), 1.0)
        return torch.where(others, -self.slopes(along, batch) * grown, alone)


@dataclass(frozen=True)
class Infinitesimal(AbstractMean):
    """No example leaves: its weight shrinks a little, and effects are the derivative."""

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


MEANS: dict[MeanName, AbstractMean] = {"renormalised": RenormalisedMean(), "fixed": FixedMean()}


def mean_of(effects: Effects, mean: MeanName) -> AbstractMean:
    """The convention by which effects are found."""
    return Infinitesimal(MEANS[mean]) if effects == "derivative" else MEANS[mean]


def kind_of(effects: Effects) -> str:
    """What effects are, in a word: `removal` of who leaves his batches, first order from there on, or as asked for."""
    return "removal" if isinstance(effects, bool) else effects


# --- One-step removal: each step is taken without each of its examples in turn, exactly, and only what follows is
# linear.
#
#     effect of i = Σ_s a·(θ⁻ⁱ − θ) − b·(m⁻ⁱ − m) + d·(u⁻ⁱ − u) + e·(t⁻ⁱ − t)        after step s, whose batch lacks i
#
# The derivative has slopes in place of these differences. This variant counts what a mean over one example less
# is, and what Adam makes of a change that is no small one; it needs the gradient of every example of a batch by
# itself.


@dataclass(frozen=True)
class Change:
    """What becomes of some of the weights, and of what is remembered beside them, by an update without each example."""

    examples: Int[Tensor, " left"]
    place: slice
    weights: Float[Tensor, "left part"]
    memory: Float[Tensor, "left part"]  # −(m⁻ⁱ − m), as its adjoint is −b
    latest: Float[Tensor, "left part"] | None
    largest: Float[Tensor, "left part"] | None

    def felt(self, adjoint: StateAdjoint) -> Float[Tensor, "vector left"]:
        """What it does to every output, as far as the adjoint of the state after the step tells."""
        found = adjoint.weights[:, self.place] @ self.weights.T
        beside = (
            (adjoint.memory, self.memory),
            (adjoint.latest, self.latest),
            (adjoint.largest, self.largest),
        )
        for rows, change in beside:
            if (
                rows is not None and change is not None
            ):  # None: nothing depends on it yet, or there is none
                found += rows[:, self.place] @ change.T
        return found


def changes_without(
    step: TrainedStep, gradient: Float[Tensor, " weight"], mean: AbstractMean
) -> list[Change]:
    """What becomes of all that a step moves, update by update.

    `gradient` is what the step took in, before it was clipped.
    """
    examples, without = gradients_without(step, mean)
    if step.with_grad is not None:
        without = without * step.with_grad
    p, left = clipped(gradient[None], step.clip_norm), clipped(without, step.clip_norm)
    found = []
    for update in step.updates:
        decay = update.linear.l2 * step.weights[update.place]
        found.append(
            change_of(examples, update, p[0, update.place] + decay, left[:, update.place] + decay)
        )
    return found


def gradients_without(
    step: TrainedStep, mean: AbstractMean
) -> tuple[Tensor, Float[Tensor, "left weight"]]:
    """The examples of a step, each once, and its gradient without each of them."""
    examples = torch.unique(torch.cat([batch.examples for batch in step.batches]))
    total = step.weights.new_zeros(len(examples), len(step.weights))
    for batch, rows in zip(step.batches, row_gradients(step.batches, step.weights), strict=True):
        there = (batch.examples[None] != examples[:, None]).to(rows)
        total += mean.shares(batch, there) @ rows
    return examples, total


def clipped(
    gradient: Float[Tensor, "left weight"], norm: float | None
) -> Float[Tensor, "left weight"]:
    """Each gradient, shortened if it is longer than that."""
    if norm is None:
        return gradient
    factors: Tensor = (
        norm / (torch.linalg.vector_norm(gradient, dim=1, keepdim=True) + GUARD)
    ).clamp(max=1.0)
    return gradient * factors


def change_of(
    examples: Int[Tensor, " left"],
    update: Update,
    p: Float[Tensor, " part"],
    left: Float[Tensor, "left part"],
) -> Change:
    """What an update does differently that takes in `left` in place of p."""
    change, linear, by = left - p, update.linear, update.denominator
    remembered = linear.momentum_gain * change
    latest = largest = None
    if by is None:
        moved = -linear.momentum_scale * remembered
    else:
        u = (by.second * by.latest_before + (1 - by.second) * left.square()).sqrt()
        t = u if by.largest_before is None else torch.maximum(u, by.largest_before.sqrt())
        n = divided(by, by.latest.sqrt() if by.largest is None else by.largest.sqrt())
        moved = -linear.momentum_scale * n * ((by.mean + remembered) / divided(by, t) - by.mean / n)
        latest = u - by.latest.sqrt()
        largest = None if by.largest is None else t - by.largest.sqrt()
    return Change(
        examples, update.place, moved - linear.gradient_scale * change, -remembered, latest, largest
    )


def divided(by: Denominator, t: Tensor) -> Tensor:
    """The denominator n."""
    return t / by.root + by.eps


# --- The sweep: from the end of a training to its beginning, with what every output feels of each step on the way.
#
#     a_T = ∂F/∂θ_T        p̂_s, a = adjoint of step s        γ_s = p̂_s back through clipping
#     a_s = a + H_s γ_s        ∂F/∂wᵢ = Σ_s γ_s·∂g_s/∂wᵢ        effect of i = Σ_s γ_s·(g_s⁻ⁱ − g_s)
#
# With the former sum this is the derivative of F(θ_T) by the weight of every example, through the whole map of
# training: through every gradient, the optimizer's memory, its scalings, its clipping and its decay (Engstrom et
# al. 2025 call it metagradient). An effect has the whole step that each mean takes when an example leaves, and is
# linear in what comes of it. `one_step` takes the optimizer's step without the example exactly, too.


@dataclass(kw_only=True)
class AdjointSweep:
    """The sweep for some outputs; `left` steps are before it. `sizes[s]` is Σ‖a_s‖ over the outputs.

    The outputs take a step back part by part, as what a small part feels stays at hand until the step is done with it.
    """

    trajectory: AbstractTrajectory
    mean: AbstractMean
    adjoints: list[StateAdjoint]  # of each part
    effects: Float[Tensor, "vector example"]  # what would come of F without each example
    left: int
    one_step: bool = False
    sizes: list[float] = field(default_factory=list)  # from the end on

    def steps_back(self) -> Iterator[int]:
        """Take the steps that are left back; how many are left after each."""
        while self.left:
            self.take(self.left - 1)
            self.left -= 1
            yield self.left

    def take(self, index: int) -> None:
        """Take one step back."""
        step = self.trajectory.step(index)
        recorded = recorded_gradient(step.batches, step.weights)
        clipping = Clipping(
            recorded.gradient if step.with_grad is None else recorded.gradient * step.with_grad,
            step.clip_norm,
        )
        taken, exact = clipping.factor * clipping.gradient, self.one_step and bool(step.batches)
        without = changes_without(step, clipping.gradient, self.mean) if exact else []
        lengths = [len(batch.examples) for batch in step.batches]
        divides = any(update.denominator is not None for update in step.updates) and bool(
            step.batches
        )
        credited = None
        if divides:
            credited = credit_of_rows(
                step.batches, step.weights, recorded.gradient, self.trajectory.flat
            )
        parts = torch.split(self.effects, [len(adjoint.weights) for adjoint in self.adjoints])
        for adjoint, effects in zip(self.adjoints, parts, strict=True):
            # exactly: a·(θ⁻ⁱ − θ) and the like, of the adjoint after the step
            for change in without:
                effects.index_add_(1, change.examples, change.felt(adjoint))
            # γ, and a ← a + H γ
            pulled = clipping.back(adjoint.back(step, taken))
            pulled = pulled if credited is None else pulled * credited
            curved, along = recorded.curvature(pulled)
            adjoint.weights += curved
            # to the first order: γ·(g⁻ⁱ − g)
            if not self.one_step:
                for rows, batch in zip(
                    torch.split(along, lengths, dim=1), step.batches, strict=True
                ):
                    effects.index_add_(1, batch.examples, self.mean.removals(rows, batch))
        self.sizes.append(sum(map(size, self.adjoints)))

    @property
    def state(self) -> dict[str, Any]:
        """All that a checkpoint needs."""
        adjoints = [adjoint.state for adjoint in self.adjoints]
        return {
            "left": self.left,
            "sizes": self.sizes,
            "effects": self.effects,
            "adjoints": adjoints,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Stand where the checkpoint stood."""
        self.left, self.sizes = state["left"], list(state["sizes"])
        self.effects = state["effects"].to(self.effects.device)
        device = self.effects.device
        self.adjoints = [
            StateAdjoint(**{name: row.to(device) for name, row in each.items()})
            for each in state["adjoints"]
        ]


def sweep_from(
    trajectory: AbstractTrajectory,
    end: Float[Tensor, "vector weight"],
    mean: AbstractMean,
    together: int | None = None,
    *,
    one_step: bool = False,
) -> AdjointSweep:
    """The reverse pass before its first step, from ∂F/∂θ_T; `together` outputs at once, by default all."""
    adjoints = [
        StateAdjoint(weights=part.clone())
        for part in torch.split(end, together or max(1, len(end)))
    ]
    return AdjointSweep(
        trajectory=trajectory,
        mean=mean,
        adjoints=adjoints,
        effects=end.new_zeros(len(end), trajectory.examples),
        left=trajectory.length,
        one_step=one_step,
        sizes=[sum(map(size, adjoints))],
    )


# --- Reverse passes for many points, in chunks whose adjoints fit into memory;
# every chunk goes over the whole training, a run's or a followed loop's.


@dataclass(kw_only=True)
class ChunkedSweep:
    """Where the sweeps stand: `done` chunks of points are behind, `sweep` is that of the next one."""

    training: AbstractTrajectory
    end_gradients: Callable[
        [slice], Float[Tensor, "vector weight"]
    ]  # ∂F/∂θ_T of all outputs of some points
    chunk: int  # points
    together: int  # outputs that take a step back together
    kind: Effects
    mean: MeanName
    effects: Float[Tensor, "point out example"]
    sizes: Float[Tensor, " moment"] | None = (
        None  # Σ‖a‖ from the end on, over the chunks that are done
    )
    done: int = 0
    sweep: AdjointSweep | None = None
    saved: Mapping[str, Any] | None = None  # of a checkpoint, of a sweep under way

    def steps_back(self) -> Iterator[tuple[int, int]]:
        """Sweep back over what is left; how many steps are done of how many."""
        points, length = len(self.effects), self.training.length
        chunks = [slice(at, min(at + self.chunk, points)) for at in range(0, points, self.chunk)]
        while self.done < len(chunks):
            here, mean = chunks[self.done], mean_of(self.kind, self.mean)
            vectors, one_step = self.end_gradients(here), self.kind == "one_step"
            self.sweep = sweep_from(self.training, vectors, mean, self.together, one_step=one_step)
            if self.saved is not None:
                self.sweep.restore(self.saved)
                self.saved = None
            for left in self.sweep.steps_back():
                yield (self.done + 1) * length - left, len(chunks) * length
            self.effects[here] = self.sweep.effects.view(-1, *self.effects.shape[1:])
            sizes = torch.tensor(self.sweep.sizes, dtype=torch.float64)
            self.sizes = sizes if self.sizes is None else self.sizes + sizes
            self.done, self.sweep = self.done + 1, None

    @property
    def growth(self) -> float:
        """How much more outputs feel of the weights at most than of those at the end: max_s ‖a_s‖/‖a_T‖."""
        if self.sizes is None or not self.sizes.isfinite().all():
            return float("inf")
        return float(self.sizes.max() / self.sizes[0])

    @property
    def state(self) -> dict[str, Any]:
        """All that a checkpoint needs, as plain data and tensors."""
        return {
            "done": self.done,
            "effects": self.effects,
            "sizes": self.sizes,
            "sweep": None if self.sweep is None else self.sweep.state,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Stand where the checkpoint stood."""
        self.done, self.sizes, self.saved = state["done"], state["sizes"], state["sweep"]
        self.effects.copy_(state["effects"])


def size(adjoint: StateAdjoint) -> float:
    """Σ‖a‖ over the outputs."""
    return float(torch.linalg.vector_norm(adjoint.weights, dim=1).sum())
