"""The rules of optimizers from other libraries: Lion, signSGD, LAMB, LARS,
and schedule-free ones.

These libraries need not be installed. A rule applies to every class with one of its
names, for example `timm.optim.Lion`. If a class with this name computes other steps,
the proof of its first step (`rule_proof.RuleProof`) raises an error.

The docstrings use the symbols of `torch_rules.py`.
"""

from __future__ import annotations

from math import inf
from typing import ClassVar

import torch
from torch import Tensor

from ntkexp.foreign_loop.rule import StepInput
from ntkexp.foreign_loop.torch_rules import AbstractTorchRule, Entries
from ntkexp.mistake import Mistake
from ntkexp.optimizer.base import LinearStep

LEAST_CAUTION = 1e-3  # smallest divisor of the mask in `caution`, as in timm


class AbstractLibraryRule(AbstractTorchRule):
    """Base class for rules that find their optimizer by the name of its class."""

    kinds = ()
    class_names: ClassVar[tuple[str, ...]]


class LionRule(AbstractLibraryRule):
    """Lion: θ ← (1 − ηλ)θ − η sign(c), with c = β₁m₋ + (1 − β₁)g
    and m ← β₂m₋ + (1 − β₂)g.

    m₋ and m are the momenta before and after the step. With m₋ = (m − (1 − β₂)g)/β₂,

        c = a m + b g,   a = β₁/β₂,   b = (1 − β₁) − a(1 − β₂)
        S = aη/|c|,   N = bη/|c|   (0 where c = 0),   β = β₂,   α = 1 − β₂

    With the setting `caution`, S and N are multiplied by a mask (see `caution`).
    """

    class_names = ("Lion",)
    momentum_key = "exp_avg"

    def downwards(
        self,
        group: Entries,
        state: Entries,
        step_input: StepInput,
        buffer: Tensor | None,
    ) -> LinearStep:
        beta1, beta2 = (float(beta) for beta in group["betas"])
        if not beta2:
            raise Mistake(
                "Lion with betas=(…, 0) forgets the momentum of its step; choose "
                "another second beta"
            )
        a = beta1 / beta2
        b = (1 - beta1) - a * (1 - beta2)
        gradient = (
            -step_input.gradient if group.get("maximize") else step_input.gradient
        )
        c = a * state[self.momentum_key] + b * gradient
        denominator, residual = sign_denominator(c, float(group["lr"]))
        if group.get("caution"):
            mask = caution(c, gradient)
            denominator = denominator / mask
            residual = None if residual is None else mask * residual
        return LinearStep(
            momentum_scale=a,
            gradient_scale=b,
            momentum_decay=beta2,
            momentum_gain=1 - beta2,
            decoupled_decay=decay_rate(group) * float(group["weight_decay"]),
            denominator=denominator,
            residual=residual,
        )


class SignSGDRule(AbstractLibraryRule):
    """signSGD, or Signum with momentum: θ ← (1 − ηλ)θ − η sign(m).

    S = η/|m|, and 0 where m = 0. With momentum μ, β = μ and α = 1 − μ. Without
    momentum, m = g.
    """

    class_names = ("SignSGD", "SignSgd", "Signum")
    momentum_key = "momentum_buffer"

    def downwards(
        self,
        group: Entries,
        state: Entries,
        step_input: StepInput,
        buffer: Tensor | None,
    ) -> LinearStep:
        momentum = float(group.get("momentum", 0.0))
        direction = state[self.momentum_key] if momentum else step_input.gradient
        denominator, residual = sign_denominator(direction, float(group["lr"]))
        return LinearStep(
            momentum_scale=1.0,
            momentum_decay=momentum,
            momentum_gain=1 - momentum,
            decoupled_decay=float(group["lr"]) * float(group.get("weight_decay", 0.0)),
            denominator=denominator,
            residual=residual,
        )


def sign_denominator(direction: Tensor, rate: float) -> tuple[Tensor, Tensor | None]:
    """Return n and r with direction/n + r = rate · sign(direction).

    n is |direction|/rate, or ∞ where the direction is 0. Where 1/n would overflow, n is
    ∞, and r is the movement, which no example caused. r is None if nothing overflows.

    >>> sign_denominator(torch.tensor([2.0, 0.0, -4.0]), 0.5)
    (tensor([4., inf, 8.]), None)
    >>> sign_denominator(torch.tensor([2.0, -1e-44]), 0.5)
    (tensor([4., inf]), tensor([ 0.0000, -0.5000]))
    """
    if not rate:
        return torch.full_like(direction, inf), None
    size = direction.abs() / rate
    denominator = size.where(direction != 0, inf)
    is_finite = denominator.reciprocal().isfinite()
    if bool(is_finite.all()):
        return denominator, None
    residual = rate * direction.sign().where(~is_finite, 0.0)
    return denominator.where(is_finite, inf), residual


def caution(update: Tensor, gradient: Tensor) -> Tensor:
    """Return the mask of a cautious update. It is 0 where update and gradient differ in
    sign. Elsewhere it is one number, chosen so that the mean of the mask is 1."""
    mask = (update * gradient > 0).to(update.dtype)
    return mask / mask.mean().clamp(min=LEAST_CAUTION)


def decay_rate(group: Entries) -> float:
    """Return the rate that multiplies weight decay: η,
    or η²/η_max for timm's corrected decay."""
    rate = float(group["lr"])
    if group.get("corrected_weight_decay"):
        return rate**2 / float(group["max_lr_snapshot"])
    return rate


class LAMBRule(AbstractLibraryRule):
    """LAMB as in timm: Adam's update u, times the trust ratio r = ‖θ‖/‖u‖
    of the parameter.

        u = (m/(1 − β₁ᵗ)) / n + λθ,   n = √v/ρ + ε,   ρ = √(1 − β₂ᵗ)
        S = rη/(1 − β₁ᵗ)/n,   d = rηλ,   β = β₁,   α = (1 − β₁)/k

    k = max(1, ‖g‖/`max_grad_norm`) clips the gradients of all parameters together. With
    decoupled decay, d = ηλ, u has no term λθ, and r uses θ after the decay. r is 1 if a
    norm is 0. Without decay, r is also 1 unless `always_adapt` is set. r and k are
    treated as constants, which multiply the gradients of all examples."""

    class_names = ("Lamb",)
    momentum_key = "exp_avg"
    reads_norm = True
    changes_settings = True

    def downwards(
        self,
        group: Entries,
        state: Entries,
        step_input: StepInput,
        buffer: Tensor | None,
    ) -> LinearStep:
        rate = float(group["lr"])
        decay = float(group["weight_decay"])
        beta1, beta2 = (float(beta) for beta in group["betas"])
        gain = 1 - beta1 if group["grad_averaging"] else 1.0
        unbiased1 = 1.0
        unbiased2 = 1.0
        if group["bias_correction"]:
            unbiased1 = 1 - beta1 ** float(group["step"])
            unbiased2 = 1 - beta2 ** float(group["step"])

        # the update u, and the weight θ of the trust ratio ‖θ‖/‖u‖
        denominator = (state["exp_avg_sq"] / unbiased2).sqrt_().add_(group["eps"])
        denominator *= unbiased1
        if group["caution"]:
            denominator = denominator / caution(
                state[self.momentum_key], step_input.gradient
            )
        update = state[self.momentum_key] / denominator
        weight = step_input.weight
        decoupled_decay = 0.0
        if group["decoupled_decay"]:
            decoupled_decay = decay_rate(group) * decay
            weight = (1 - decoupled_decay) * weight
        elif decay:
            update = update.add(weight, alpha=decay)

        ratio = 1.0
        if decay or group["always_adapt"]:
            ratio = trust_ratio(float(weight.norm()), float(update.norm()))
            if group["trust_clip"]:
                ratio = min(ratio, 1.0)
        if not group["decoupled_decay"]:
            decoupled_decay = ratio * rate * decay
        clipping = 1.0
        if group["max_grad_norm"] is not None:
            clipping = max(
                1.0, step_input.gradient_norm / float(group["max_grad_norm"])
            )
        return LinearStep(
            momentum_scale=ratio * rate,
            momentum_decay=beta1,
            momentum_gain=gain / clipping,
            decoupled_decay=decoupled_decay,
            denominator=denominator,
        )


def trust_ratio(weights: float, update: float) -> float:
    """Return ‖weights‖/‖update‖, or 1 if one of the norms is 0.

    >>> trust_ratio(1.0, 4.0), trust_ratio(0.0, 4.0)
    (0.25, 1.0)
    """
    return weights / update if weights > 0 and update > 0 else 1.0


class LARSRule(AbstractLibraryRule):
    """LARS: SGD whose gradient p is multiplied by the trust ratio r of the parameter.

        timm, Lightning Bolts    r = κ‖θ‖ / (‖g‖ + λ‖θ‖ + ε);   r = 1 and λ = 0 without decay
        MoCo v3, MAE             r = κ‖θ‖ / ‖g + λθ‖ for matrices;   r = 1 and λ = 0 for vectors

    κ is the trust coefficient, and r is 1 if a norm is 0. `SGDRule` gives the
    coefficients. But α is multiplied by r, and N = rη for Nesterov momentum. r
    multiplies the gradients of all examples."""

    class_names = ("Lars", "LARS")

    def momentum(self, group: Entries, state: Entries) -> Tensor | None:
        momentum: Tensor | None = state.get("mu", state.get("momentum_buffer"))
        return momentum

    def downwards(
        self,
        group: Entries,
        state: Entries,
        step_input: StepInput,
        buffer: Tensor | None,
    ) -> LinearStep:
        rate = float(group["lr"])
        momentum = float(group["momentum"])
        ratio, l2 = (
            self.of_matrices(group, step_input)
            if "mu" in state
            else self.of_all(group, step_input)
        )
        momentum_scale = rate
        gradient_scale = 0.0
        if group.get("nesterov"):
            momentum_scale = rate * momentum
            gradient_scale = rate * ratio
        gain = ratio
        if step_input.earlier_steps:
            gain = ratio * (1 - float(group.get("dampening", 0.0)))
        return LinearStep(
            momentum_scale=momentum_scale,
            gradient_scale=gradient_scale,
            momentum_decay=momentum if step_input.earlier_steps else 0.0,
            momentum_gain=gain,
            l2=l2,
        )

    def of_all(self, group: Entries, step_input: StepInput) -> tuple[float, float]:
        """Return the trust ratio r and the decay λ as in timm."""
        decay = float(group["weight_decay"])
        if not decay and not group.get("always_adapt"):
            return 1.0, 0.0
        weight = float(step_input.weight.norm())
        gradient = float(step_input.gradient.norm())
        ratio = 1.0
        if weight > 0 and gradient > 0:
            ratio = trust_coefficient(group) * weight
            ratio /= gradient + weight * decay + float(group["eps"])
        if group.get("trust_clip"):
            ratio = min(ratio / float(group["lr"]), 1.0)
        return ratio, decay

    def of_matrices(self, group: Entries, step_input: StepInput) -> tuple[float, float]:
        """Return the trust ratio r and the decay λ as in MoCo v3."""
        if step_input.weight.dim() <= 1:
            return 1.0, 0.0
        decay = float(group["weight_decay"])
        update = step_input.gradient.add(step_input.weight, alpha=decay)
        weight = float(step_input.weight.norm())
        size = float(update.norm())
        ratio = (
            trust_coefficient(group) * weight / size if weight > 0 and size > 0 else 1.0
        )
        return ratio, decay


def trust_coefficient(group: Entries) -> float:
    """Return the trust coefficient κ. Libraries use different names for it."""
    name = "trust_coeff" if "trust_coeff" in group else "trust_coefficient"
    return float(group[name])


class ScheduleFreeRule(AbstractLibraryRule):
    """Schedule-free SGD and AdamW. The weights θ are the points y where gradients are
    computed.

        y ← (1 − c)y + cz + η(β(1 − c) − 1)u,   z ← z − ηu,   u = (g + λny)/n

    η is the learning rate with warmup, and c is the weight of this step in the average
    x of z. n = 1 for SGD, and n = √v/ρ + ε with ρ = √(1 − β₂ᵗ) for AdamW. The momentum
    is m = y − z, which is 0 before the first step. In terms of y and m,

        m ← (1 − c)m + (1 − c)βη/n p,   y ← y − c/(1 − c) m − η(1 − β)/n p,   p = g + λny

    If c = 1, then y ← y − η/n p and m ← 0. `eval()` moves the weights to x."""

    class_names = ("SGDScheduleFree", "AdamWScheduleFree")
    momentum_key = "z"
    changes_settings = True
    overwrites_gradient = True
    swaps_weights = True

    def momentum_at(
        self, group: Entries, state: Entries, weight: Tensor
    ) -> Tensor | None:
        return weight - state["z"] if "z" in state else None

    def downwards(
        self,
        group: Entries,
        state: Entries,
        step_input: StepInput,
        buffer: Tensor | None,
    ) -> LinearStep:
        rate = float(group["scheduled_lr"])
        weight = (
            float(group["k"]) ** group["r"]
            * group["lr_max"] ** group["weight_lr_power"]
        )
        share = weight / group["weight_sum"] if group["weight_sum"] else 0.0
        momentum = float(
            group["momentum"] if "momentum" in group else group["betas"][0]
        )
        decay = float(group["weight_decay"])

        # the denominator n, and λn
        inverse: Tensor | float = 1.0
        l2: Tensor | float = decay
        if "exp_avg_sq" in state:
            unbiased = 1 - float(group["betas"][1]) ** group["k"]
            denominator = (state["exp_avg_sq"] / unbiased).sqrt_().add_(group["eps"])
            inverse = denominator.reciprocal()
            l2 = decay * denominator if decay else 0.0
        if share == 1:
            return LinearStep(0.0, rate * inverse, momentum_gain=0.0, l2=l2)
        return LinearStep(
            momentum_scale=share / (1 - share),
            gradient_scale=rate * (1 - momentum) * inverse,
            momentum_decay=1 - share,
            momentum_gain=(1 - share) * momentum * rate * inverse,
            l2=l2,
        )


LIBRARY_RULES: tuple[AbstractLibraryRule, ...] = (
    LionRule(),
    SignSGDRule(),
    LAMBRule(),
    LARSRule(),
    ScheduleFreeRule(),
)
