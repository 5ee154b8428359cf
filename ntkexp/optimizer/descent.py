"""Optimizers with discrete steps: gradient descent, SGD, momentum, RMSprop,
Adam and AdamW."""

from __future__ import annotations

from math import sqrt
from typing import Annotated, ClassVar

import torch
from jaxtyping import Int
from pydantic import Field, NonNegativeFloat, PositiveFloat
from torch import Tensor

from ntkexp.component import Count
from ntkexp.optimizer.base import (
    AbstractBatched,
    AbstractPlain,
    AbstractStable,
    DenominatorFormula,
    LinearStep,
    Memory,
    Sizes,
    after_step,
)
from ntkexp.shapes import Weights


class GD(AbstractPlain):
    """Gradient descent on all training examples: θ ← θ − η ∇L."""

    def batch_indices(
        self, step: int, examples: int, seed: int
    ) -> Int[Tensor, " batch"] | None:
        return None


class SGD(AbstractBatched, AbstractPlain):
    """Stochastic gradient descent: θ ← θ − η ∇L_B on a mini-batch B.

    By default, a mini-batch has 32 examples.

    >>> SGD(batch=2).batch_indices(step=0, examples=4, seed=0).shape
    torch.Size([2])
    """

    batch: Count | None = 32


class Momentum(AbstractBatched, AbstractStable):
    """Heavy-ball momentum (Polyak 1964) as in PyTorch: v ← μv + (1 − τ)g, θ ← θ − ηv.

    μ is `momentum` and τ is `dampening`. At the first step, v = g. As a `LinearStep`,
    S = η, β = μ, and α = 1 − τ (1 at the first step)."""

    momentum: float = Field(0.9, ge=0, lt=1)
    dampening: float = Field(0.0, ge=0, lt=1)

    needs_backward_sum: ClassVar[bool] = True

    def update(
        self,
        step: int,
        weights: Weights,
        gradient: Weights,
        sizes: Sizes,
        memory: Memory,
    ) -> tuple[Weights, Memory]:
        gradient = self.with_decay(gradient, weights)
        velocity = dict(gradient)
        if step:
            for name, part in gradient.items():
                decayed = self.momentum * memory["velocity"][name]
                velocity[name] = torch.add(decayed, part, alpha=1 - self.dampening)
        return after_step(weights, velocity, sizes), {"velocity": velocity}

    def recursion(
        self, step: int, sizes: Sizes, memory: Memory
    ) -> dict[str, LinearStep]:
        gain = 1 - self.dampening * (step > 0)
        return {
            name: LinearStep(size, momentum_decay=self.momentum, momentum_gain=gain)
            for name, size in sizes.items()
        }


class Nesterov(AbstractBatched, AbstractStable):
    """Nesterov's momentum as in PyTorch: v ← μv + g, θ ← θ − η(g + μv).

    μ is `momentum`. At the first step, v = g. As a `LinearStep` with m = μv, it has
    S = N = η and α = β = μ.
    """

    momentum: float = Field(0.9, gt=0, lt=1)

    needs_backward_sum: ClassVar[bool] = True

    def update(
        self,
        step: int,
        weights: Weights,
        gradient: Weights,
        sizes: Sizes,
        memory: Memory,
    ) -> tuple[Weights, Memory]:
        gradient = self.with_decay(gradient, weights)
        velocity = gradient
        if step:
            velocity = {
                name: self.momentum * memory["velocity"][name] + part
                for name, part in gradient.items()
            }
        direction = {
            name: torch.add(part, velocity[name], alpha=self.momentum)
            for name, part in gradient.items()
        }
        return after_step(weights, direction, sizes), {"velocity": velocity}

    def recursion(
        self, step: int, sizes: Sizes, memory: Memory
    ) -> dict[str, LinearStep]:
        return {
            name: LinearStep(size, size, self.momentum, self.momentum)
            for name, size in sizes.items()
        }


class AbstractAdaptive(AbstractBatched):
    """An optimizer that divides the step of each weight by a denominator n, computed
    from a mean v of squared gradients (see `DenominatorFormula`).

    In a recorded run, n is known. With n as a constant, steps are linear in past
    gradients, and the backward sum over steps is exact."""

    step_size: PositiveFloat

    # True, because the forward sum needs one step size for all weights
    needs_backward_sum: ClassVar[bool] = True
    records: ClassVar[tuple[str, ...]] = ("square",)
    elementwise: ClassVar[bool] = True

    def chosen_step(self, largest_stable: float) -> float:
        return self.step_size


class Rmsprop(AbstractAdaptive):
    """RMSprop (Tieleman & Hinton 2012) as in PyTorch: v ← β₂v + (1 − β₂)g²,
    θ ← θ − η g/n, n = √v + ε.

    β₂ is `smoothing`. As a `LinearStep`, S = η/n.
    """

    step_size: PositiveFloat = 1e-2
    smoothing: float = Field(0.99, ge=0, lt=1)
    eps: PositiveFloat = 1e-8

    def update(
        self,
        step: int,
        weights: Weights,
        gradient: Weights,
        sizes: Sizes,
        memory: Memory,
    ) -> tuple[Weights, Memory]:
        gradient = self.with_decay(gradient, weights)
        if not memory:
            memory = {
                "square": {name: torch.zeros_like(g) for name, g in gradient.items()}
            }
        # v ← β₂v + (1 − β₂)g²
        square = {}
        for name, g in gradient.items():
            decayed = self.smoothing * memory["square"][name]
            square[name] = torch.addcmul(decayed, g, g, value=1 - self.smoothing)

        # n = √v + ε,   θ ← θ − η g/n
        after = {}
        for name, weight in weights.items():
            denominator = square[name].sqrt() + self.eps
            after[name] = torch.addcdiv(
                weight, gradient[name], denominator, value=-sizes[name]
            )
        # without momentum, m is the gradient
        return after, {"mean": gradient, "square": square}

    def denominator_at(self, step: int) -> DenominatorFormula:
        return DenominatorFormula(self.smoothing, 1.0, self.eps, amsgrad=False)

    @property
    def differentiated(self) -> tuple[str, ...]:
        return ("mean",)

    def recursion(
        self, step: int, sizes: Sizes, memory: Memory
    ) -> dict[str, LinearStep]:
        return {
            name: LinearStep(sizes[name] / (v.sqrt() + self.eps))
            for name, v in memory["square"].items()
        }


# --- Step s = 0, 1, … of Adam (Kingma & Ba 2015), as in PyTorch:
#
#     m ← β₁m + (1 − β₁)g        v ← β₂v + (1 − β₂)g²
#     n = √v/ρ + ε               ρ = √(1 − β₂ˢ⁺¹)
#     θ ← θ − η/(1 − β₁ˢ⁺¹) · m/n
#
# AMSGrad (Reddi, Kale & Kumar 2018) replaces v in n by the largest v so far.


class AbstractAdam(AbstractAdaptive):
    """The step of Adam. As a `LinearStep`, S = η/(1 − β₁ˢ⁺¹)/n, β = β₁ and α = 1 − β₁."""

    step_size: PositiveFloat = 1e-3
    betas: tuple[
        Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]
    ] = (
        0.9,
        0.999,
    )
    eps: PositiveFloat = 1e-8
    amsgrad: bool = False

    def update(
        self,
        step: int,
        weights: Weights,
        gradient: Weights,
        sizes: Sizes,
        memory: Memory,
    ) -> tuple[Weights, Memory]:
        if not self.decouples:
            gradient = self.with_decay(gradient, weights)
        if not memory:
            zeros = {name: torch.zeros_like(g) for name, g in gradient.items()}
            memory = {"mean": zeros, "latest": zeros, "square": zeros}
        # m, v, and the largest v so far (AMSGrad)
        beta1, beta2 = self.betas
        mean = {}
        latest = {}
        square = {}
        for name, g in gradient.items():
            mean[name] = torch.lerp(memory["mean"][name], g, 1 - beta1)
            decayed = beta2 * memory["latest"][name]
            latest[name] = torch.addcmul(decayed, g, g, value=1 - beta2)
            square[name] = latest[name]
            if self.amsgrad:
                square[name] = torch.maximum(memory["square"][name], latest[name])

        # θ ← (1 − ηλ)θ − η/(1 − β₁ˢ⁺¹) · m/n
        after = {}
        for name, weight in weights.items():
            start = weight
            if self.decouples:
                start = weight * (1 - sizes[name] * self.weight_decay)
            scale = -sizes[name] / (1 - beta1 ** (step + 1))
            denominator = self.denominator(step, square[name])
            after[name] = torch.addcdiv(start, mean[name], denominator, value=scale)
        return after, {"mean": mean, "latest": latest, "square": square}

    def denominator(self, step: int, square: Tensor) -> Tensor:
        """Return the denominator n = √v/ρ + ε of each weight, with v = `square`."""
        bias_correction = sqrt(1 - self.betas[1] ** (step + 1))  # ρ
        return (square.sqrt() / bias_correction).add_(self.eps)

    def denominator_at(self, step: int) -> DenominatorFormula:
        beta2 = self.betas[1]
        bias_correction = sqrt(1 - beta2 ** (step + 1))
        return DenominatorFormula(beta2, bias_correction, self.eps, self.amsgrad)

    @property
    def differentiated(self) -> tuple[str, ...]:
        return ("mean", "latest") if self.amsgrad else ("mean",)

    def recursion(
        self, step: int, sizes: Sizes, memory: Memory
    ) -> dict[str, LinearStep]:
        beta1 = self.betas[0]
        linear = {}
        for name, square in memory["square"].items():
            size = sizes[name] / (1 - beta1 ** (step + 1))
            scale = size / self.denominator(step, square)
            linear[name] = LinearStep(
                scale, momentum_decay=beta1, momentum_gain=1 - beta1
            )
        return linear


class Adam(AbstractAdam):
    """Adam (Kingma & Ba 2015), with L2 weight decay: g + λθ replaces the gradient g.

    The means m and v of gradients therefore contain the decay, unlike in AdamW.
    """


class AdamW(AbstractAdam):
    """AdamW (Loshchilov & Hutter 2019): Adam with decoupled weight decay.

    The weights decay by θ ← (1 − ηλ)θ before each step. The means m and v of gradients
    do not contain the decay."""

    weight_decay: NonNegativeFloat = 0.01

    decouples: ClassVar[bool] = True
