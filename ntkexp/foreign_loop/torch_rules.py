"""The rules of PyTorch's optimizers. Each step is linear in the gradients, given its
denominator."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from math import sqrt
from typing import Any, ClassVar, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.foreign_loop.rule import AbstractOptimizerRule, StepInput
from ntkexp.mistake import Mistake, WrongArgument
from ntkexp.optimizer.base import LinearStep, Mixing

Entries: TypeAlias = Mapping[str, Any]
"""The settings of a parameter group, or the optimizer's state of a parameter."""


class AbstractTorchRule(AbstractOptimizerRule):
    """The settings that PyTorch's optimizers share. With `maximize`, the step consumes −g and
    stores −m."""

    remembers: ClassVar[str | None] = None
    """The entry of the state that holds m."""

    def step(
        self, group: Entries, state: Entries, taken: StepInput, room: Tensor | None = None
    ) -> LinearStep:
        step = self.downwards(group, state, taken, room)
        return step.reversed() if group.get("maximize") else step

    @abstractmethod
    def downwards(
        self, group: Entries, state: Entries, taken: StepInput, room: Tensor | None
    ) -> LinearStep:
        """Return the step down the gradient."""

    def momentum(self, group: Entries, state: Entries) -> Tensor | None:
        if self.remembers is None or self.remembers not in state:
            return None
        momentum: Tensor | None = state[self.remembers]
        return -momentum if momentum is not None and group.get("maximize") else momentum


class SGDRule(AbstractTorchRule):
    """Stochastic gradient descent, with momentum, dampening or Nesterov's look ahead.

    plain       S = η
    momentum    S = η,          β = μ,   α = 1 − τ     (at a parameter's first step β = 0, α = 1)
    Nesterov    S = ημ,  N = η,  β = μ
    """

    kinds = (torch.optim.SGD,)
    has_effects = True
    remembers = "momentum_buffer"

    def downwards(
        self, group: Entries, state: Entries, taken: StepInput, room: Tensor | None
    ) -> LinearStep:
        rate = float(group["lr"])
        momentum = float(group["momentum"])
        step = LinearStep(rate, l2=float(group["weight_decay"]))
        if not momentum:
            return step
        if group["nesterov"]:
            step = replace(step, momentum_scale=rate * momentum, gradient_scale=rate)
        if not taken.times:
            return step
        return replace(step, momentum_decay=momentum, momentum_gain=1 - float(group["dampening"]))


class AdamRule(AbstractTorchRule):
    """Adam, AdamW and their AMSGrad variants. With v (or the largest so far) after the step,

    S = η/(1 − β₁ᵗ) · r / (√v + εr),   r = √(1 − β₂ᵗ),   β = β₁,   α = 1 − β₁

    Decay is λ in the gradient of Adam, and d = ηλ in AdamW.
    """

    kinds = (torch.optim.Adam, torch.optim.AdamW)
    has_effects = True
    remembers = "exp_avg"  # none of a parameter that never got a gradient

    def downwards(
        self, group: Entries, state: Entries, taken: StepInput, room: Tensor | None
    ) -> LinearStep:
        rate, decay = float(group["lr"]), float(group["weight_decay"])
        first, second = group["betas"]
        count = float(state["step"])
        decoupled_decay = rate * decay
        if isinstance(group["lr"], Tensor) and not group["fused"]:
            # torch divides by a rate that is a tensor, in the precision of the tensor
            decoupled_decay = 1 - float(1 - group["lr"] * decay)
            rate = float(group["lr"] / (1 - first**count)) * (1 - first**count)
        square = state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"]
        root = sqrt(1 - second**count)
        step = LinearStep(
            momentum_scale=rate * root / (1 - first**count),
            momentum_decay=float(first),
            momentum_gain=1 - float(first),
            denominator=torch.sqrt(square, out=room).add_(group["eps"] * root),
        )
        if group["decoupled_weight_decay"]:
            return replace(step, decoupled_decay=decoupled_decay)
        return replace(step, l2=decay)


class RMSpropRule(AbstractTorchRule):
    """RMSprop. With n = √v + ε, or √(v − a²) + ε if the mean gradient a is subtracted (`centered`),

    plain       S = η/n
    momentum    S = η,   β = μ,   α = 1/n
    """

    kinds = (torch.optim.RMSprop,)
    remembers = "momentum_buffer"

    def downwards(
        self, group: Entries, state: Entries, taken: StepInput, room: Tensor | None
    ) -> LinearStep:
        square = state["square_avg"]
        if group["centered"]:
            square = square.addcmul(state["grad_avg"], state["grad_avg"], value=-1)
        denominator = torch.sqrt(square, out=room).add_(group["eps"])
        step = LinearStep(float(group["lr"]), l2=float(group["weight_decay"]))
        if group["momentum"] > 0:
            return replace(
                step,
                momentum_decay=float(group["momentum"]),
                momentum_gain=denominator.reciprocal(),
            )
        return replace(step, denominator=denominator)


class AdagradRule(AbstractTorchRule):
    """Adagrad, with the sum v of all squares so far: S = η/(1 + (t − 1)δ) / (√v + ε)."""

    kinds = (torch.optim.Adagrad,)

    def downwards(
        self, group: Entries, state: Entries, taken: StepInput, room: Tensor | None
    ) -> LinearStep:
        rate = float(group["lr"]) / (1 + (float(state["step"]) - 1) * group["lr_decay"])
        denominator = torch.sqrt(state["sum"], out=room).add_(group["eps"])
        return LinearStep(rate, l2=float(group["weight_decay"]), denominator=denominator)


class AdadeltaRule(AbstractTorchRule):
    """Adadelta, with the mean squares v of gradients, and u₋ of moves before the step:

    S = η √(u₋ + ε) / √(v + ε)
    """

    kinds = (torch.optim.Adadelta,)
    needs = ("acc_delta",)

    def downwards(
        self, group: Entries, state: Entries, taken: StepInput, room: Tensor | None
    ) -> LinearStep:
        square, eps = state["square_avg"], group["eps"]
        moved = taken.state.get("acc_delta", torch.zeros_like(square))
        denominator = torch.add(square, eps, out=room).sqrt_().div_(moved.add(eps).sqrt_())
        return LinearStep(
            float(group["lr"]), l2=float(group["weight_decay"]), denominator=denominator
        )


class AdamaxRule(AbstractTorchRule):
    """Adamax, with the largest gradient u so far: S = η/(1 − β₁ᵗ) / u,  β = β₁,  α = 1 − β₁."""

    kinds = (torch.optim.Adamax,)
    remembers = "exp_avg"

    def downwards(
        self, group: Entries, state: Entries, taken: StepInput, room: Tensor | None
    ) -> LinearStep:
        first = float(group["betas"][0])
        return LinearStep(
            momentum_scale=float(group["lr"]) / (1 - first ** float(state["step"])),
            momentum_decay=first,
            momentum_gain=1 - first,
            l2=float(group["weight_decay"]),
            denominator=state["exp_inf"],
        )


class NAdamRule(AbstractTorchRule):
    """NAdam, Adam that looks ahead. With n = √(v/(1 − β₂ᵗ)) + ε and Π the product of all μ so far,

    μₜ = β₁(1 − 0.96^(tψ)/2),   β = β₁,   α = 1 − β₁
    N = η(1 − μₜ)/(1 − Π) / n,   S = ημₜ₊₁/(1 − Πμₜ₊₁) / n
    """

    kinds = (torch.optim.NAdam,)
    remembers = "exp_avg"

    def downwards(
        self, group: Entries, state: Entries, taken: StepInput, room: Tensor | None
    ) -> LinearStep:
        rate, count = float(group["lr"]), float(state["step"])
        first, second = group["betas"]
        now, next_ = (
            first * (1 - 0.5 * 0.96 ** (time * group["momentum_decay"]))
            for time in (count, count + 1)
        )
        product = float(state["mu_product"])
        square = torch.div(state["exp_avg_sq"], 1 - second**count, out=room)
        l2, decoupled_decay = decay_of(group)
        return LinearStep(
            momentum_scale=rate * next_ / (1 - product * next_),
            gradient_scale=rate * (1 - now) / (1 - product),
            momentum_decay=float(first),
            momentum_gain=1 - float(first),
            l2=l2,
            decoupled_decay=decoupled_decay,
            denominator=square.sqrt_().add_(group["eps"]),
        )


class RAdamRule(AbstractTorchRule):
    """RAdam, Adam without its denominator until the variance of that is known. With
    ρ∞ = 2/(1 − β₂) − 1 and ρ = ρ∞ − 2tβ₂ᵗ/(1 − β₂ᵗ),

    S = η/(1 − β₁ᵗ) · √(1 − β₂ᵗ)√((ρ − 4)(ρ − 2)ρ∞ / ((ρ∞ − 4)(ρ∞ − 2)ρ)) / (√v + ε)    if ρ > 5
    S = η/(1 − β₁ᵗ)                                                                      if ρ ≤ 5
    """

    kinds = (torch.optim.RAdam,)
    remembers = "exp_avg"

    def downwards(
        self, group: Entries, state: Entries, taken: StepInput, room: Tensor | None
    ) -> LinearStep:
        first, second = group["betas"]
        count = float(state["step"])
        l2, decoupled_decay = decay_of(group)

        # ρ∞ and ρ
        longest = 2 / (1 - second) - 1
        unbiased = 1 - second**count
        length = longest - 2 * count * second**count / unbiased
        step = LinearStep(
            momentum_scale=float(group["lr"]) / (1 - first**count),
            momentum_decay=float(first),
            momentum_gain=1 - float(first),
            l2=l2,
            decoupled_decay=decoupled_decay,
        )
        if length <= 5.0:
            return step
        shorter = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
        denominator = torch.sqrt(state["exp_avg_sq"], out=room).add_(group["eps"])
        return replace(
            step,
            momentum_scale=float(step.momentum_scale) * sqrt(unbiased * shorter),
            denominator=denominator,
        )


def decay_of(group: Entries) -> tuple[float, float]:
    """Return λ and d. One is zero."""
    decay = float(group["weight_decay"])
    return (0.0, float(group["lr"]) * decay) if group["decoupled_weight_decay"] else (decay, 0.0)


class ASGDRule(AbstractTorchRule):
    """Averaged stochastic gradient descent: S = η, d = λη, with the η of the step before.

    Its average of the weights moves nothing.
    """

    kinds = (torch.optim.ASGD,)
    needs = ("eta",)

    def downwards(
        self, group: Entries, state: Entries, taken: StepInput, room: Tensor | None
    ) -> LinearStep:
        first = torch.as_tensor(float(group["lr"]), dtype=state["eta"].dtype)
        rate = float(taken.state.get("eta", first))
        return LinearStep(
            rate, l2=float(group["weight_decay"]), decoupled_decay=group["lambd"] * rate
        )


class AdafactorRule(AbstractTorchRule):
    """Adafactor. With v = r cᵀ/mean(r), with mean squares r of rows and c of columns; a vector has
    v itself,

    S = α / max(1, rms(u)/δ) / √v,    u = g/√v,    α = max(ε₂, rms(θ)) min(η, 1/√t),    d = ηλ

    The factor by which rms(u) clips a step multiplies the gradients of all examples.
    """

    kinds = (torch.optim.Adafactor,)

    def downwards(
        self, group: Entries, state: Entries, taken: StepInput, room: Tensor | None
    ) -> LinearStep:
        rate, count = float(group["lr"]), float(state["step"])
        least, smallest = group["eps"]
        least = torch.finfo(taken.weight.dtype).eps if least is None else least
        if "variance" in state:
            square = state["variance"]
        else:
            rows = state["row_var"]
            square = (rows @ state["col_var"]).div_(
                rows.mean(dim=-2, keepdim=True).clamp_(min=least)
            )
        denominator = square.clamp(min=least * least).sqrt_()
        size = max(smallest, rms(taken.weight)) * min(rate, 1 / sqrt(count))
        clipped = max(1.0, rms(taken.gradient / denominator) / group["d"])
        return LinearStep(
            size / clipped,
            decoupled_decay=rate * float(group["weight_decay"]),
            denominator=denominator,
        )


def rms(tensor: Tensor) -> float:
    """Return the root of the mean square.

    >>> rms(torch.tensor([3.0, 4.0, 0.0, 0.0]))
    2.5
    """
    return float(tensor.norm()) / sqrt(tensor.numel())


class RpropRule(AbstractTorchRule):
    """Rprop moves each weight by its size s, with the sign of the gradient.

    S = s/|g|, and 0 where g is zero or changed its sign.
    """

    kinds = (torch.optim.Rprop,)

    def downwards(
        self, group: Entries, state: Entries, taken: StepInput, room: Tensor | None
    ) -> LinearStep:
        size = state["prev"].abs()
        scale = torch.where(size > 0, state["step_size"] / size, 0.0)
        if not bool(scale.isfinite().all()):
            raise Mistake(
                "Rprop took steps by gradients that are too small to be divided among examples; "
                "train in "
                "float64, or with another optimizer"
            )
        return LinearStep(scale)


class MuonRule(AbstractTorchRule):
    """Muon replaces the memory by a matrix with singular values near 1, by Newton–Schulz steps.
    With u = (1 − μ)g + μm (Nesterov), or m, and X₀ = u/‖u‖, transposed if it is tall,

    A = XXᵀ,   X ← (aI + bA + cA²)X,   L = Π (aI + bA + cA²) / ‖u‖,   θ ← (1 − d)θ − η′X

    X is L u, so that S = η′μ, N = η′(1 − μ), M = L. PyTorch computes X in bfloat16. L is the
    product of PyTorch's own iterates, and r the rounding of X between them."""

    kinds = (torch.optim.Muon,)
    rounds = True
    remembers = "momentum_buffer"

    def downwards(
        self, group: Entries, state: Entries, taken: StepInput, room: Tensor | None
    ) -> LinearStep:
        update = self.update(group, state, taken)
        rows, columns = update.shape
        momentum = float(group["momentum"])

        # L = Π (aI + bA + cA²) / ‖u‖
        matrix = torch.eye(min(rows, columns), dtype=update.dtype, device=update.device)
        first, *factors = newton_schulz(update, group)
        for factor in factors[:-1]:
            matrix = torch.addmm(
                matrix, factor.to(matrix), matrix, beta=group["ns_coefficients"][0]
            )
        momentum_scale, gradient_scale = adjusted_rate(group, rows, columns), 0.0
        if group["nesterov"]:
            gradient_scale = momentum_scale * (1 - momentum)
            momentum_scale = momentum_scale * momentum
        return replace(
            self.watched(group, state, taken, None),
            momentum_scale=momentum_scale,
            gradient_scale=gradient_scale,
            mixing=Mixing(matrix / float(first), by_rows=rows > columns),
            residual=None,
        )

    def watched(
        self, group: Entries, state: Entries, taken: StepInput, room: Tensor | None
    ) -> LinearStep:
        """Return the step with the rounded X as its residual, without L."""
        update, momentum = self.update(group, state, taken), float(group["momentum"])
        *_, made = newton_schulz(update, group)
        return LinearStep(
            momentum_scale=0.0,
            momentum_decay=momentum,
            momentum_gain=1 - momentum,
            decoupled_decay=float(group["lr"]) * float(group["weight_decay"]),
            residual=made.to(update.dtype) * adjusted_rate(group, *update.shape),
        )

    def update(self, group: Entries, state: Entries, taken: StepInput) -> Tensor:
        """Return u."""
        memory: Tensor = state["momentum_buffer"]
        return taken.gradient.lerp(memory, group["momentum"]) if group["nesterov"] else memory


def newton_schulz(update: Float[Tensor, "row column"], group: Entries) -> Iterator[Tensor]:
    """Yield ‖u‖, the bA + cA² of each iteration, and the last X, in bfloat16 as PyTorch computes
    them."""
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
    """Return η′, the step size for a matrix of this shape."""
    if group["adjust_lr_fn"] == "match_rms_adamw":
        return float(group["lr"]) * 0.2 * sqrt(max(rows, columns))
    return float(group["lr"]) * sqrt(max(1.0, rows / columns))


OPTIMIZER_RULES: tuple[AbstractOptimizerRule, ...] = (
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


# --- An optimizer follows the rule of its class, or of the first base class with a rule. If a
# derived class changes the step, proof (b) refuses its first such step.


@dataclass(frozen=True)
class KnownOptimizer:
    """A rule, and the class of optimizer that it applies to, which also takes the replayed
    steps."""

    rule: AbstractOptimizerRule
    kind: type[torch.optim.Optimizer]

    @property
    def name(self) -> str:
        """The name in a trace. A user's rule adds its own name, as a class may have any name.

        >>> KnownOptimizer(OPTIMIZER_RULES[0], torch.optim.SGD).name
        'SGD'
        """
        if self.rule in OPTIMIZER_RULES:
            return self.kind.__name__
        return f"{self.kind.__name__} by {type(self.rule).__name__}"

    def made(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Make an optimizer of these groups. Arguments without default come from the first
        group."""
        needed = [
            name
            for name, each in signature(self.kind).parameters.items()
            if each.default is each.empty
        ]
        return self.kind(
            groups, **{name: groups[0][name] for name in needed[1:] if name in groups[0]}
        )


NOT_LINEAR = {
    "LBFGS": "each of its steps asks for the gradient at several weights",
    "SparseAdam": "its gradients are sparse, of some rows alone",
}


def known_optimizer(
    optimizer: torch.optim.Optimizer, rules: Sequence[AbstractOptimizerRule] = ()
) -> KnownOptimizer:
    """Return the rule of an optimizer, one of the user's or of PyTorch's, or raise."""
    kind = type(optimizer)
    where = f"{kind.__module__}.{kind.__qualname__}"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise Mistake(
            f"{kind.__name__} with differentiable=True: its steps are not followed; train with "
            "differentiable=False"
        )
    ours = () if "SAM" in kind.__name__ else OPTIMIZER_RULES
    for base in kind.__mro__:
        for rule in (*rules, *ours):
            if base in rule.kinds:
                return KnownOptimizer(rule, base)
    if kind.__name__ == "ZeroRedundancyOptimizer":
        raise Mistake(
            "ZeroRedundancyOptimizer splits its state over the processes, so that none sees a "
            "whole step; train with "
            "the optimizer that it holds, in every process"
        )
    if "SAM" in kind.__name__:
        raise Mistake(
            f"{kind.__name__} takes gradients at weights that it has moved up first "
            "(sharpness-aware minimisation), "
            "which is not followed; train with the optimizer that it wraps"
        )
    reason = next(
        (f" ({NOT_LINEAR[base.__name__]})" for base in kind.__mro__ if base.__name__ in NOT_LINEAR),
        "",
    )
    known = ", ".join(each.__name__ for rule in OPTIMIZER_RULES for each in rule.kinds)
    instead = "" if reason else ", or give one, rules=[…]"
    raise Mistake(
        f"steps of {where} are not followed{reason}: rules are known for {known}{instead}"
    )


def named(name: str, rules: Sequence[AbstractOptimizerRule] = ()) -> KnownOptimizer:
    """Return the optimizer of this name in a trace.

    >>> named("AdamW").kind
    <class 'torch.optim.adamw.AdamW'>
    """
    known = [
        KnownOptimizer(rule, kind) for rule in (*rules, *OPTIMIZER_RULES) for kind in rule.kinds
    ]
    optimizer = next((each for each in known if each.name == name), None)
    if optimizer is None:
        raise WrongArgument(
            f"rule=: the trace has steps of {name}, whose rule has to be given again", "rule"
        )
    return optimizer
