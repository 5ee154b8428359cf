"""The rules of PyTorch's optimizers. Each step is linear in the gradient if its
denominator is treated as a constant.

For example, the linear step of Adam holds the second moment v constant, at its value
after the step. No example is credited with the change of v.

The docstrings use the symbols of `optimizer.base.LinearStep`: p = g + λθ,
m ← βm + α ⊙ p and θ ← (1 − d)θ − S ⊙ m − N ⊙ p. S and N include the division by the
denominator n. Each docstring lists only the coefficients that differ from the defaults
d = N = λ = β = 0 and α = 1. η is the learning rate, and t the number of steps."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import sqrt
from typing import Any, ClassVar, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.foreign_loop.rule import AbstractOptimizerRule, StepInput
from ntkexp.mistake import Mistake
from ntkexp.optimizer.base import LinearStep, Mixing

Entries: TypeAlias = Mapping[str, Any]
"""The settings of a parameter group, or the optimizer's state of a parameter."""


class AbstractTorchRule(AbstractOptimizerRule):
    """Base class for rules of PyTorch's optimizers. With `maximize`, an optimizer uses
    −g in its step, and stores −m."""

    momentum_key: ClassVar[str | None] = None
    """The key of the momentum m in the optimizer state."""

    def step(
        self,
        group: Entries,
        state: Entries,
        step_input: StepInput,
        buffer: Tensor | None = None,
    ) -> LinearStep:
        step = self.downwards(group, state, step_input, buffer)
        return step.reversed() if group.get("maximize") else step

    @abstractmethod
    def downwards(
        self,
        group: Entries,
        state: Entries,
        step_input: StepInput,
        buffer: Tensor | None,
    ) -> LinearStep:
        """Return the linear step of an optimizer with `maximize=False`."""

    def momentum(self, group: Entries, state: Entries) -> Tensor | None:
        if self.momentum_key is None or self.momentum_key not in state:
            return None
        momentum: Tensor | None = state[self.momentum_key]
        return -momentum if momentum is not None and group.get("maximize") else momentum


class SGDRule(AbstractTorchRule):
    """Stochastic gradient descent with momentum μ, dampening τ, or Nesterov momentum.

    plain       S = η
    momentum    S = η,          β = μ,   α = 1 − τ     (at a parameter's first step β = 0, α = 1)
    Nesterov    S = ημ,  N = η,  β = μ
    """

    kinds = (torch.optim.SGD,)
    has_effects = True
    momentum_key = "momentum_buffer"

    def downwards(
        self,
        group: Entries,
        state: Entries,
        step_input: StepInput,
        buffer: Tensor | None,
    ) -> LinearStep:
        rate = float(group["lr"])
        momentum = float(group["momentum"])
        step = LinearStep(rate, l2=float(group["weight_decay"]))
        if not momentum:
            return step
        if group["nesterov"]:
            step = step.changed(momentum_scale=rate * momentum, gradient_scale=rate)
        if not step_input.earlier_steps:
            return step
        return step.changed(
            momentum_decay=momentum, momentum_gain=1 - float(group["dampening"])
        )


class AdamRule(AbstractTorchRule):
    """Adam, AdamW and their AMSGrad variants.

    S = η/(1 − β₁ᵗ) / n,   n = √v/ρ + ε,   ρ = √(1 − β₂ᵗ),   β = β₁,   α = 1 − β₁

    t counts the steps from 1. v is the mean of squared gradients after the step. With
    AMSGrad, v is its largest value so far. The field `denominator` is ρn = √v + ρε.
    Adam's weight decay is λ. AdamW has λ = 0, and d is η times its weight decay."""

    kinds = (torch.optim.Adam, torch.optim.AdamW)
    has_effects = True
    # the entry is missing for a parameter that never had a gradient
    momentum_key = "exp_avg"

    def downwards(
        self,
        group: Entries,
        state: Entries,
        step_input: StepInput,
        buffer: Tensor | None,
    ) -> LinearStep:
        rate = float(group["lr"])
        decay = float(group["weight_decay"])
        beta1, beta2 = group["betas"]
        count = float(state["step"])
        decoupled_decay = rate * decay
        if isinstance(group["lr"], Tensor) and not group["fused"]:
            # if the learning rate is a tensor, torch computes in the dtype of this
            # tensor
            decoupled_decay = 1 - float(1 - group["lr"] * decay)
            rate = float(group["lr"] / (1 - beta1**count)) * (1 - beta1**count)
        square = state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"]
        root = sqrt(1 - beta2**count)  # ρ
        step = LinearStep(
            momentum_scale=rate * root / (1 - beta1**count),
            momentum_decay=float(beta1),
            momentum_gain=1 - float(beta1),
            denominator=torch.sqrt(square, out=buffer).add_(group["eps"] * root),
        )
        if group["decoupled_weight_decay"]:
            return step.changed(decoupled_decay=decoupled_decay)
        return step.changed(l2=decay)


class RMSpropRule(AbstractTorchRule):
    """RMSprop divides by n = √v + ε, where v is the mean square of the gradients. If
    `centered`, n = √(v − a²) + ε, where a is the mean gradient.

    plain       S = η/n
    momentum    S = η,   β = μ,   α = 1/n
    """

    kinds = (torch.optim.RMSprop,)
    momentum_key = "momentum_buffer"

    def downwards(
        self,
        group: Entries,
        state: Entries,
        step_input: StepInput,
        buffer: Tensor | None,
    ) -> LinearStep:
        square = state["square_avg"]
        if group["centered"]:
            square = square.addcmul(state["grad_avg"], state["grad_avg"], value=-1)
        denominator = torch.sqrt(square, out=buffer).add_(group["eps"])
        step = LinearStep(float(group["lr"]), l2=float(group["weight_decay"]))
        if group["momentum"] > 0:
            return replace(
                step,
                momentum_decay=float(group["momentum"]),
                momentum_gain=denominator.reciprocal(),
            )
        return replace(step, denominator=denominator)


class AdagradRule(AbstractTorchRule):
    """Adagrad: S = η/(1 + (t − 1)δ) / (√v + ε),
    with v the sum of squared gradients, and δ = `lr_decay`."""

    kinds = (torch.optim.Adagrad,)

    def downwards(
        self,
        group: Entries,
        state: Entries,
        step_input: StepInput,
        buffer: Tensor | None,
    ) -> LinearStep:
        rate = float(group["lr"]) / (1 + (float(state["step"]) - 1) * group["lr_decay"])
        denominator = torch.sqrt(state["sum"], out=buffer).add_(group["eps"])
        return LinearStep(
            rate, l2=float(group["weight_decay"]), denominator=denominator
        )


class AdadeltaRule(AbstractTorchRule):
    """Adadelta: S = η √(u₋ + ε) / √(v + ε).

    v is the mean of squared gradients, and u₋ is the mean of squared
    updates before this step."""

    kinds = (torch.optim.Adadelta,)
    needs = ("acc_delta",)

    def downwards(
        self,
        group: Entries,
        state: Entries,
        step_input: StepInput,
        buffer: Tensor | None,
    ) -> LinearStep:
        square = state["square_avg"]
        eps = group["eps"]
        moved = step_input.state.get("acc_delta", torch.zeros_like(square))
        denominator = (
            torch.add(square, eps, out=buffer).sqrt_().div_(moved.add(eps).sqrt_())
        )
        return LinearStep(
            float(group["lr"]), l2=float(group["weight_decay"]), denominator=denominator
        )


class AdamaxRule(AbstractTorchRule):
    """Adamax: S = η/(1 − β₁ᵗ) / u,  β = β₁,  α = 1 − β₁, with u the decayed maximum of |p|."""

    kinds = (torch.optim.Adamax,)
    momentum_key = "exp_avg"

    def downwards(
        self,
        group: Entries,
        state: Entries,
        step_input: StepInput,
        buffer: Tensor | None,
    ) -> LinearStep:
        beta1 = float(group["betas"][0])
        return LinearStep(
            momentum_scale=float(group["lr"]) / (1 - beta1 ** float(state["step"])),
            momentum_decay=beta1,
            momentum_gain=1 - beta1,
            l2=float(group["weight_decay"]),
            denominator=state["exp_inf"],
        )


class NAdamRule(AbstractTorchRule):
    """NAdam: Adam with Nesterov momentum.

    n = √v/ρ + ε,   ρ = √(1 − β₂ᵗ),   μₜ = β₁(1 − 0.96^(tψ)/2),   Π = μ₁ ⋯ μₜ
    N = η(1 − μₜ)/(1 − Π) / n,   S = ημₜ₊₁/(1 − Πμₜ₊₁) / n,   β = β₁,   α = 1 − β₁

    ψ is `momentum_decay`.
    """

    kinds = (torch.optim.NAdam,)
    momentum_key = "exp_avg"

    def downwards(
        self,
        group: Entries,
        state: Entries,
        step_input: StepInput,
        buffer: Tensor | None,
    ) -> LinearStep:
        rate = float(group["lr"])
        count = float(state["step"])
        beta1, beta2 = group["betas"]
        # μₜ and μₜ₊₁
        mu, next_mu = (
            beta1 * (1 - 0.5 * 0.96 ** (time * group["momentum_decay"]))
            for time in (count, count + 1)
        )
        product = float(state["mu_product"])
        square = torch.div(state["exp_avg_sq"], 1 - beta2**count, out=buffer)
        l2, decoupled_decay = decay_of(group)
        return LinearStep(
            momentum_scale=rate * next_mu / (1 - product * next_mu),
            gradient_scale=rate * (1 - mu) / (1 - product),
            momentum_decay=float(beta1),
            momentum_gain=1 - float(beta1),
            l2=l2,
            decoupled_decay=decoupled_decay,
            denominator=square.sqrt_().add_(group["eps"]),
        )


class RAdamRule(AbstractTorchRule):
    """RAdam: Adam that omits its denominator in the first steps, while ρ ≤ 5.

    ρ∞ = 2/(1 − β₂) − 1,   ρ = ρ∞ − 2tβ₂ᵗ/(1 − β₂ᵗ),   β = β₁,   α = 1 − β₁
    S = η/(1 − β₁ᵗ) · √(1 − β₂ᵗ)√((ρ − 4)(ρ − 2)ρ∞ / ((ρ∞ − 4)(ρ∞ − 2)ρ)) / (√v + ε)    if ρ > 5
    S = η/(1 − β₁ᵗ)                                                                      if ρ ≤ 5
    """

    kinds = (torch.optim.RAdam,)
    momentum_key = "exp_avg"

    def downwards(
        self,
        group: Entries,
        state: Entries,
        step_input: StepInput,
        buffer: Tensor | None,
    ) -> LinearStep:
        beta1, beta2 = group["betas"]
        count = float(state["step"])
        l2, decoupled_decay = decay_of(group)
        unbiased = 1 - beta2**count
        rho_inf = 2 / (1 - beta2) - 1
        rho = rho_inf - 2 * count * beta2**count / unbiased
        step = LinearStep(
            momentum_scale=float(group["lr"]) / (1 - beta1**count),
            momentum_decay=float(beta1),
            momentum_gain=1 - float(beta1),
            l2=l2,
            decoupled_decay=decoupled_decay,
        )
        if rho <= 5.0:
            return step
        factor = (rho - 4) * (rho - 2) * rho_inf / ((rho_inf - 4) * (rho_inf - 2) * rho)
        denominator = torch.sqrt(state["exp_avg_sq"], out=buffer).add_(group["eps"])
        return replace(
            step,
            momentum_scale=float(step.momentum_scale) * sqrt(unbiased * factor),
            denominator=denominator,
        )


def decay_of(group: Entries) -> tuple[float, float]:
    """Return the decay coefficients λ (L2) and d (decoupled). At least one is zero."""
    decay = float(group["weight_decay"])
    if group["decoupled_weight_decay"]:
        return 0.0, float(group["lr"]) * decay
    return decay, 0.0


class ASGDRule(AbstractTorchRule):
    """Averaged stochastic gradient descent: S = η and d = η `lambd`. η is the rate
    after the previous step, because ASGD lowers its rate at the end of a step.

    The average of the weights does not affect the steps.
    """

    kinds = (torch.optim.ASGD,)
    needs = ("eta",)

    def downwards(
        self,
        group: Entries,
        state: Entries,
        step_input: StepInput,
        buffer: Tensor | None,
    ) -> LinearStep:
        first = torch.as_tensor(float(group["lr"]), dtype=state["eta"].dtype)
        rate = float(step_input.state.get("eta", first))
        return LinearStep(
            rate, l2=float(group["weight_decay"]), decoupled_decay=group["lambd"] * rate
        )


class AdafactorRule(AbstractTorchRule):
    """Adafactor. With ρ = max(ε₂, rms(θ)) min(η, 1/√t) and u = g/√v,

    S = ρ / max(1, rms(u)/δ) / √v,    d = η times the weight decay

    ε₂ is the second number of `eps`, and δ is the setting `d`. v is the mean of squared
    gradients. For a matrix, v = r cᵀ/mean(r), with the means r of rows and c of
    columns. The factor 1/max(1, rms(u)/δ) clips the step. It multiplies the gradients
    of all examples."""

    kinds = (torch.optim.Adafactor,)

    def downwards(
        self,
        group: Entries,
        state: Entries,
        step_input: StepInput,
        buffer: Tensor | None,
    ) -> LinearStep:
        rate = float(group["lr"])
        count = float(state["step"])
        eps1, eps2 = group["eps"]
        least = torch.finfo(step_input.weight.dtype).eps if eps1 is None else eps1
        if "variance" in state:
            square = state["variance"]
        else:
            rows = state["row_var"]
            square = (rows @ state["col_var"]).div_(
                rows.mean(dim=-2, keepdim=True).clamp_(min=least)
            )
        denominator = square.clamp(min=least * least).sqrt_()
        size = max(eps2, rms(step_input.weight)) * min(rate, 1 / sqrt(count))
        divisor = max(1.0, rms(step_input.gradient / denominator) / group["d"])
        return LinearStep(
            size / divisor,
            decoupled_decay=rate * float(group["weight_decay"]),
            denominator=denominator,
        )


def rms(tensor: Tensor) -> float:
    """Return the root mean square.

    >>> rms(torch.tensor([3.0, 4.0, 0.0, 0.0]))
    2.5
    """
    return float(tensor.norm()) / sqrt(tensor.numel())


class RpropRule(AbstractTorchRule):
    """Rprop moves each weight by its own step size s, against the sign of the gradient.

    S = s/|g|, or 0 if g is zero or has just changed its sign.
    """

    kinds = (torch.optim.Rprop,)

    def downwards(
        self,
        group: Entries,
        state: Entries,
        step_input: StepInput,
        buffer: Tensor | None,
    ) -> LinearStep:
        size = state["prev"].abs()
        scale = torch.where(size > 0, state["step_size"] / size, 0.0)
        if not bool(scale.isfinite().all()):
            raise Mistake(
                "the gradients of some steps of Rprop are too small to be divided "
                "among examples; train in float64, or with another optimizer"
            )
        return LinearStep(scale)


class MuonRule(AbstractTorchRule):
    """Muon orthogonalizes the momentum of a matrix approximately,
    by Newton–Schulz iterations.

    X = u/‖u‖,   u = (1 − μ)g + μm with Nesterov momentum, else u = m
    X ← (aI + bA + cA²)X with A = XXᵀ, repeated,   θ ← (1 − d)θ − η′X

    The result is X = Lu, so that the matrix M of the linear step is L:

    L = Π (aI + bA + cA²) / ‖u‖
    S = η′μ and N = η′(1 − μ) with Nesterov momentum, else S = η′ and N = 0

    A matrix with more rows than columns is transposed first. PyTorch computes X in
    bfloat16. L is the product of PyTorch's rounded factors. The rounding of X in each
    iteration is the residual of the linear step, which `store.replay` computes."""

    kinds = (torch.optim.Muon,)
    rounds = True
    momentum_key = "momentum_buffer"

    def downwards(
        self,
        group: Entries,
        state: Entries,
        step_input: StepInput,
        buffer: Tensor | None,
    ) -> LinearStep:
        update = self.update(group, state, step_input)
        rows, columns = update.shape
        momentum = float(group["momentum"])

        # L = Π (aI + bA + cA²) / ‖u‖
        matrix = torch.eye(min(rows, columns), dtype=update.dtype, device=update.device)
        first, *factors = newton_schulz(update, group)
        for factor in factors[:-1]:
            matrix = torch.addmm(
                matrix, factor.to(matrix), matrix, beta=group["ns_coefficients"][0]
            )
        momentum_scale = adjusted_rate(group, rows, columns)
        gradient_scale = 0.0
        if group["nesterov"]:
            gradient_scale = momentum_scale * (1 - momentum)
            momentum_scale = momentum_scale * momentum
        return replace(
            self.watched(group, state, step_input, None),
            momentum_scale=momentum_scale,
            gradient_scale=gradient_scale,
            mixing=Mixing(matrix / float(first), by_rows=rows > columns),
            residual=None,
        )

    def watched(
        self,
        group: Entries,
        state: Entries,
        step_input: StepInput,
        buffer: Tensor | None,
    ) -> LinearStep:
        """Return a linear step with S = N = 0, because the matrix L would be expensive.
        Its residual is η′X, the whole update except weight decay, in bfloat16."""
        update = self.update(group, state, step_input)
        momentum = float(group["momentum"])
        *_, made = newton_schulz(update, group)
        return LinearStep(
            momentum_scale=0.0,
            momentum_decay=momentum,
            momentum_gain=1 - momentum,
            decoupled_decay=float(group["lr"]) * float(group["weight_decay"]),
            residual=made.to(update.dtype) * adjusted_rate(group, *update.shape),
        )

    def update(self, group: Entries, state: Entries, step_input: StepInput) -> Tensor:
        """Return the matrix u that Muon orthogonalizes."""
        memory: Tensor = state["momentum_buffer"]
        if group["nesterov"]:
            return step_input.gradient.lerp(memory, group["momentum"])
        return memory


def newton_schulz(
    update: Float[Tensor, "row column"], group: Entries
) -> Iterator[Tensor]:
    """Orthogonalize u = `update`. Yield ‖u‖, the matrix bA + cA² of each iteration (see
    `MuonRule`), and the last X, in bfloat16 as in PyTorch."""
    a, b, c = group["ns_coefficients"]
    tall = len(update) > update.shape[1]
    x = update.bfloat16().T if tall else update.bfloat16()
    size = x.norm().clamp(min=group["eps"])
    yield size
    x = x / size
    for _ in range(group["ns_steps"]):
        gram = x @ x.T
        factor = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        yield factor
        x = torch.addmm(x, factor, x, beta=a)
    yield x.T if tall else x


def adjusted_rate(group: Entries, rows: int, columns: int) -> float:
    """Return η′, the learning rate after Muon has adjusted it to
    the shape of the matrix."""
    if group["adjust_lr_fn"] == "match_rms_adamw":
        return float(group["lr"]) * 0.2 * sqrt(max(rows, columns))
    return float(group["lr"]) * sqrt(max(1.0, rows / columns))


TORCH_RULES: tuple[AbstractOptimizerRule, ...] = (
    SGDRule(),
    AdamRule(),
    RMSpropRule(),
    AdagradRule(),
    AdadeltaRule(),
    AdamaxRule(),
    NAdamRule(),
    RAdamRule(),
    ASGDRule(),
    AdafactorRule(),
    RpropRule(),
    MuonRule(),
)
