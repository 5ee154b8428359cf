"""The rules of PyTorch's optimizers: each is linear in its gradients once what it divides by is known."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from math import sqrt
from typing import Any, ClassVar

import torch
from torch import Tensor

from ntkexp.foreign_loop.rule import AbstractOptimizerRule, StepInput
from ntkexp.mistake import Mistake, WrongArgument
from ntkexp.optimizer.base import LinearStep


class AbstractTorchRule(AbstractOptimizerRule):
    """The settings that PyTorch's optimizers share: `maximize` takes −g in, and −m is what is remembered."""

    remembers: ClassVar[str | None] = None
    """The entry of the state that holds m."""

    def step(
        self, group: Mapping[str, Any], state: Mapping[str, Any], taken: StepInput, room: Tensor | None = None
    ) -> LinearStep:
        found = self.downwards(group, state, taken, room)
        return found.reversed() if group.get("maximize") else found

    @abstractmethod
    def downwards(
        self, group: Mapping[str, Any], state: Mapping[str, Any], taken: StepInput, room: Tensor | None
    ) -> LinearStep:
        """The step down the gradient."""

    def momentum(self, group: Mapping[str, Any], state: Mapping[str, Any]) -> Tensor | None:
        found: Tensor | None = None if self.remembers is None else state.get(self.remembers)
        return -found if found is not None and group.get("maximize") else found


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
        self, group: Mapping[str, Any], state: Mapping[str, Any], taken: StepInput, room: Tensor | None
    ) -> LinearStep:
        size, momentum, decay = float(group["lr"]), float(group["momentum"]), float(group["weight_decay"])
        if not momentum:
            return LinearStep(size, coupled=decay)
        carry, intake = (momentum, 1 - float(group["dampening"])) if taken.times else (0.0, 1.0)
        if group["nesterov"]:
            return LinearStep(size * momentum, size, carry, intake, decay)
        return LinearStep(size, 0.0, carry, intake, decay)


class AdamRule(AbstractTorchRule):
    """Adam, AdamW and their AMSGrad variants. With v (or the largest so far) as the state has it after the step,

    S = η/(1 − β₁ᵗ) · r / (√v + εr),   r = √(1 − β₂ᵗ),   β = β₁,   α = 1 − β₁

    and decay λ in the gradient of Adam, d = ηλ past the memory of AdamW.
    """

    kinds = (torch.optim.Adam, torch.optim.AdamW)
    has_effects = True
    remembers = "exp_avg"  # none of a parameter that never got a gradient

    def downwards(
        self, group: Mapping[str, Any], state: Mapping[str, Any], taken: StepInput, room: Tensor | None
    ) -> LinearStep:
        rate, decay, (first, second) = float(group["lr"]), float(group["weight_decay"]), group["betas"]
        count = float(state["step"])
        decouples, lost = bool(group["decoupled_weight_decay"]), rate * decay
        if isinstance(group["lr"], Tensor) and not group["fused"]:  # which is divided in its own precision
            lost = 1 - float(1 - group["lr"] * decay)
            rate = float(group["lr"] / (1 - first**count)) * (1 - first**count)
        square, root = state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"], sqrt(1 - second**count)
        return LinearStep(
            scale=rate * root / (1 - first**count),
            carry=float(first),
            intake=1 - float(first),
            coupled=0.0 if decouples else decay,
            lost=lost if decouples else 0.0,
            below=torch.sqrt(square, out=room).add_(group["eps"] * root),
        )


class RMSpropRule(AbstractTorchRule):
    """RMSprop. With n = √v + ε, or √(v − a²) + ε where a mean gradient a is taken off,

    plain       S = η/n
    momentum    S = η,   β = μ,   α = 1/n
    """

    kinds = (torch.optim.RMSprop,)
    remembers = "momentum_buffer"

    def downwards(
        self, group: Mapping[str, Any], state: Mapping[str, Any], taken: StepInput, room: Tensor | None
    ) -> LinearStep:
        square = state["square_avg"]
        if group["centered"]:
            square = square.addcmul(state["grad_avg"], state["grad_avg"], value=-1)
        below = torch.sqrt(square, out=room).add_(group["eps"])
        rate, decay = float(group["lr"]), float(group["weight_decay"])
        if group["momentum"] > 0:
            return LinearStep(rate, carry=float(group["momentum"]), intake=below.reciprocal(), coupled=decay)
        return LinearStep(rate, coupled=decay, below=below)


class AdagradRule(AbstractTorchRule):
    """Adagrad, with the sum v of all squares so far: S = η/(1 + (t − 1)δ) / (√v + ε)."""

    kinds = (torch.optim.Adagrad,)

    def downwards(
        self, group: Mapping[str, Any], state: Mapping[str, Any], taken: StepInput, room: Tensor | None
    ) -> LinearStep:
        rate = float(group["lr"]) / (1 + (float(state["step"]) - 1) * group["lr_decay"])
        below = torch.sqrt(state["sum"], out=room).add_(group["eps"])
        return LinearStep(rate, coupled=float(group["weight_decay"]), below=below)


RULES: tuple[AbstractOptimizerRule, ...] = (SGDRule(), AdamRule(), RMSpropRule(), AdagradRule())


# --- Which rule an optimizer goes by: that of its class, or of one that it is derived from. A class that does anything
# else in its steps than the one that it is derived from is refused by the proof of the first such step.


@dataclass(frozen=True)
class KnownOptimizer:
    """A rule, and the one of its classes that an optimizer goes by; that takes the steps that are replayed."""

    rule: AbstractOptimizerRule
    kind: type[torch.optim.Optimizer]

    @property
    def name(self) -> str:
        """What a trace calls it: of rules that are not ours also by the rule, as a class may have any name.

        >>> KnownOptimizer(RULES[0], torch.optim.SGD).name
        'SGD'
        """
        return self.kind.__name__ if self.rule in RULES else f"{self.kind.__name__} by {type(self.rule).__name__}"

    def made(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """An optimizer of these groups, with what its class has no default for from the first of them."""
        needed = [name for name, each in signature(self.kind).parameters.items() if each.default is each.empty]
        return self.kind(groups, **{name: groups[0][name] for name in needed[1:] if name in groups[0]})


NOT_LINEAR = {
    "LBFGS": "each of its steps asks for the gradient at several weights",
    "SparseAdam": "its gradients are sparse, of some rows alone",
}


def known_optimizer(optimizer: torch.optim.Optimizer, rules: Sequence[AbstractOptimizerRule] = ()) -> KnownOptimizer:
    """By what rule an optimizer goes: one of those given, or of PyTorch's own."""
    kind = type(optimizer)
    where = f"{kind.__module__}.{kind.__qualname__}"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise Mistake(
            f"{kind.__name__} with differentiable=True: its steps are not followed; train without differentiable"
        )
    ours = () if "SAM" in kind.__name__ else RULES
    for base in kind.__mro__:
        for rule in (*rules, *ours):
            if base in rule.kinds:
                return KnownOptimizer(rule, base)
    if kind.__name__ == "ZeroRedundancyOptimizer":
        raise Mistake(
            "ZeroRedundancyOptimizer cuts its memory apart over the processes, and none sees a whole step; train with "
            "the optimizer that it holds, in every process"
        )
    if "SAM" in kind.__name__:
        raise Mistake(
            f"{kind.__name__} takes gradients at weights that it has moved up first (sharpness-aware minimisation), "
            "which is not followed; train with the optimizer that it is around, without that"
        )
    reason = next((f" ({NOT_LINEAR[base.__name__]})" for base in kind.__mro__ if base.__name__ in NOT_LINEAR), "")
    known = ", ".join(each.__name__ for rule in RULES for each in rule.kinds)
    instead = "" if reason else ", or give one, rules=[…]"
    raise Mistake(f"steps of {where} are not followed{reason}: rules are known for {known}{instead}")


def named(name: str, rules: Sequence[AbstractOptimizerRule] = ()) -> KnownOptimizer:
    """The optimizers that go by a name.

    >>> named("AdamW").kind
    <class 'torch.optim.adamw.AdamW'>
    """
    known = [KnownOptimizer(rule, kind) for rule in (*rules, *RULES) for kind in rule.kinds]
    found = next((each for each in known if each.name == name), None)
    if found is None:
        raise WrongArgument(f"rule=: the trace has steps of {name}, whose rule is needed again; give it", "rule")
    return found
