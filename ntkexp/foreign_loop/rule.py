"""How the optimizers of PyTorch take in gradients, as linear maps, and the proof of that for each step by signatures
of its tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import hypot, sqrt
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from ntkexp.mistake import Mistake
from ntkexp.optimizer.base import LinearStep
from ntkexp.stream import stream

# --- The linear step, in the letters of `optimizer.base`, that an optimizer of PyTorch took with a parameter:
#
#     p = g + λθ        m ← βm + αp        θ ← (1 − d)θ − S ⊙ m − N p
#
# where g is the gradient that was consumed. It is read of the optimizer's settings and state after the step.


class AbstractRule(ABC):
    """An optimizer is understood by this, if it is of one of these very classes."""

    kinds: ClassVar[tuple[type[torch.optim.Optimizer], ...]]

    def step(self, group: Mapping[str, Any], state: Mapping[str, Any], times: int) -> LinearStep:
        """The step that was taken with a parameter that had moved `times` times before."""
        linear, below = self.common(group, state, times), self.denominator(group, state, None)
        return linear if below is None else replace(linear, scale=below.reciprocal_().mul_(linear.scale))

    @abstractmethod
    def common(self, group: Mapping[str, Any], state: Mapping[str, Any], times: int) -> LinearStep:
        """The same, with the part of S that all elements have in common."""

    @abstractmethod
    def denominator(self, group: Mapping[str, Any], state: Mapping[str, Any], out: Tensor | None) -> Tensor | None:
        """What each element of S is divided by, where they differ; it may be written to `out`."""

    @abstractmethod
    def momentum(self, group: Mapping[str, Any], state: Mapping[str, Any]) -> Tensor | None:
        """m after the step, as the optimizer has it."""


class SGDRule(AbstractRule):
    """Stochastic gradient descent, with momentum, dampening or Nesterov's look ahead.

    plain       S = η
    momentum    S = η,          β = μ,   α = 1 − τ     (at a parameter's first step β = 0, α = 1)
    Nesterov    S = ημ,  N = η,  β = μ
    """

    kinds: ClassVar[tuple[type[torch.optim.Optimizer], ...]] = (torch.optim.SGD,)

    def common(self, group: Mapping[str, Any], state: Mapping[str, Any], times: int) -> LinearStep:
        size, momentum, decay = float(group["lr"]), float(group["momentum"]), float(group["weight_decay"])
        if not momentum:
            return LinearStep(size, coupled=decay)
        carry, intake = (momentum, 1 - float(group["dampening"])) if times else (0.0, 1.0)
        if group["nesterov"]:
            return LinearStep(size * momentum, size, carry, intake, decay)
        return LinearStep(size, 0.0, carry, intake, decay)

    def denominator(self, group: Mapping[str, Any], state: Mapping[str, Any], out: Tensor | None) -> Tensor | None:
        return None

    def momentum(self, group: Mapping[str, Any], state: Mapping[str, Any]) -> Tensor | None:
        found: Tensor | None = state.get("momentum_buffer")
        return found


class AdamRule(AbstractRule):
    """Adam, AdamW and their AMSGrad variants. With v (or the largest so far) as the state has it after the step,

    S = η/(1 − β₁ᵗ) · r / (√v + εr),   r = √(1 − β₂ᵗ),   β = β₁,   α = 1 − β₁

    and decay λ in the gradient of Adam, d = ηλ past the memory of AdamW.
    """

    kinds: ClassVar[tuple[type[torch.optim.Optimizer], ...]] = (torch.optim.Adam, torch.optim.AdamW)

    def common(self, group: Mapping[str, Any], state: Mapping[str, Any], times: int) -> LinearStep:
        rate, decay, (first, second) = float(group["lr"]), float(group["weight_decay"]), group["betas"]
        count = float(state["step"])
        decouples, lost = bool(group["decoupled_weight_decay"]), rate * decay
        if isinstance(group["lr"], Tensor) and not group["fused"]:  # which is divided in its own precision
            lost = 1 - float(1 - group["lr"] * decay)
            rate = float(group["lr"] / (1 - first**count)) * (1 - first**count)
        return LinearStep(
            scale=rate * sqrt(1 - second**count) / (1 - first**count),
            carry=float(first),
            intake=1 - float(first),
            coupled=0.0 if decouples else decay,
            lost=lost if decouples else 0.0,
        )

    def denominator(self, group: Mapping[str, Any], state: Mapping[str, Any], out: Tensor | None) -> Tensor | None:
        square = state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"]
        root = sqrt(1 - group["betas"][1] ** float(state["step"]))
        return torch.sqrt(square, out=out).add_(group["eps"] * root)

    def momentum(self, group: Mapping[str, Any], state: Mapping[str, Any]) -> Tensor | None:
        return state.get("exp_avg")  # none of a parameter that never got a gradient


RULES: tuple[AbstractRule, ...] = (SGDRule(), AdamRule())
UNKNOWN = ("maximize", "differentiable")  # settings under which the rules would be others


def rule_of(optimizer: torch.optim.Optimizer) -> AbstractRule:
    """The rule of an optimizer of this very class: a class that is derived from it may do anything."""
    kind = type(optimizer)
    for rule in RULES:
        if kind in rule.kinds:
            for name, group in ((name, group) for group in optimizer.param_groups for name in UNKNOWN):
                if group.get(name):
                    raise Mistake(
                        f"{kind.__name__} with {name}={group[name]}: its steps are not followed; train without {name}"
                    )
            return rule
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
    known = ", ".join(each.__name__ for rule in RULES for each in rule.kinds)
    raise Mistake(f"steps of {kind.__module__}.{kind.__qualname__} are not followed: their rule is known for {known}")


def named(kind: str) -> tuple[AbstractRule, Callable[[list[dict[str, Any]]], torch.optim.Optimizer]]:
    """The rule and the class of the optimizers that go by a name.

    >>> named("AdamW")[1]
    <class 'torch.optim.adamw.AdamW'>
    """
    return next((rule, each) for rule in RULES for each in rule.kinds if each.__name__ == kind)


# --- Signatures: a few sums that tell weights from others, or gradients, without keeping them.
#
#     σ_b = Σ_i r_i w_{b,i},   b a sixteenth of the tensor,   r_i ~ N(0, 1) drawn once
#
# An error e in a tensor shows in σ with its own size, E‖σ(e)‖² = ‖e‖²: only by chance could it be hidden.


PARTS = 16
Numbers: TypeAlias = NDArray[np.float64]
"""A signature in double precision."""


@dataclass(frozen=True)
class Signed:
    """The signatures of a step: of what it consumed, and of the weights after it."""

    gradient: Mapping[str, Tensor]
    after: Mapping[str, Tensor]


@dataclass(frozen=True)
class Signatures:
    """The numbers r that were drawn so far, by how many they are."""

    numbers: dict[tuple[int, torch.dtype, torch.device], Tensor] = field(default_factory=dict)

    def of(self, tensors: Mapping[str, Tensor]) -> dict[str, Float[Tensor, " part"]]:
        """The signature of every tensor, what is left over from equal parts at its end.

        >>> Signatures().of({"w": torch.ones(3)})["w"].shape
        torch.Size([4])
        """
        signatures = dict[str, Tensor]()
        for name, tensor in tensors.items():
            flat = tensor.detach().reshape(-1)
            parts = max(1, min(PARTS, flat.numel()))
            wide, rest = divmod(flat.numel(), parts)
            found = signatures[name] = flat.new_zeros(parts + 1)
            torch.mv(flat[: wide * parts].view(parts, wide), self.drawn(wide, flat), out=found[:parts])
            if rest:
                found[parts] = flat[wide * parts :] @ self.drawn(rest, flat)
        return signatures

    def drawn(self, count: int, like: Tensor) -> Tensor:
        key = (count, like.dtype, like.device)
        if key not in self.numbers:
            generator = stream("signature", count)
            self.numbers[key] = torch.randn(count, generator=generator, dtype=torch.float64).to(like)
        return self.numbers[key]


def distance(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """How far two signatures of the same tensors are apart, relative to the second.

    >>> distance({"w": torch.ones(4)}, {"w": torch.full((4,), 2.0)})
    0.5
    """
    ours, theirs = (torch.cat([each[name] for name in other]) for each in (one, other))
    size, missed = float(theirs.norm()), float((ours - theirs).norm())
    return missed / size if size else missed


def numbers(signatures: Mapping[str, Tensor]) -> dict[str, Numbers]:
    """Signatures in double precision.

    >>> numbers({"a": torch.ones(1), "b": torch.zeros(2)})
    {'a': array([1.]), 'b': array([0., 0.])}
    """
    if not signatures:
        return {}
    found = torch.cat([part.double() for part in signatures.values()]).cpu().numpy()
    ends = list(accumulate(map(len, signatures.values())))
    return {name: found[end - len(part) : end] for (name, part), end in zip(signatures.items(), ends, strict=True)}


# --- Proof (b): what a rule makes of the gradients is what the optimizer made of them, seen through signatures.
#
# A step is linear in what it takes in, and so are signatures σ, 16 random sums of each tensor and what is left
# over:
#
#     σ(m) ← βσ(m) + ασ(p)        σ(θ) = (1 − d)σ(θ₋) − S σ(m) − N σ(p)        p = g + λθ₋
#
# Where S is a number for each element, σ(S ⊙ m) is read of what the optimizer remembers, and that m is held
# against the sum above. All this happens at every step of somebody's training: it reads each gradient and weight
# once, where to form every element anew reads and writes them several times. An error in a tensor shows with its
# own size, in numbers of the size of the whole tensor. One that is smaller than 64 eps of that, as of one weight
# among very many, cannot be told from rounding; that nothing else moved a weight between two steps is seen element by
# element, in `outside`.


ROUNDING = 64  # eps: of the few operations of a step, fused or not, and of short sums
LONG = 16  # of long ones: it grows as the root of how many numbers they have


@dataclass
class RuleProof:
    """Signatures of the `weights` after the latest step, of the `memory` of the optimizer, and the sizes of what that
    was `made` of, by the names of parameters; `moved` says how often each has moved."""

    signatures: Signatures = field(default_factory=Signatures)
    weights: dict[str, Numbers] = field(default_factory=dict)
    memory: dict[str, Numbers] = field(default_factory=dict)
    made: dict[str, float] = field(default_factory=dict)
    moved: dict[str, int] = field(default_factory=dict)

    def begin(self, name: str, weight: Tensor) -> None:
        """A parameter begins here."""
        self.weights[name] = self.read(weight)

    def remember(self, name: str, momentum: Tensor) -> None:
        """The optimizer remembers this of a parameter already."""
        self.memory[name] = self.read(momentum)
        self.made[name] = size(self.memory[name])

    def read(self, tensor: Tensor) -> Numbers:
        return numbers(self.signatures.of({"": tensor}))[""]

    def hold(
        self,
        where: str,
        name: str,
        step: LinearStep,
        seen: tuple[Numbers, Numbers],
        weight: Tensor,
        momentum: Tensor | None,
        below: Tensor | None,
    ) -> float:
        """Refuse a step to this weight that the rule does not explain; how far it is from where that leads, relative to
        it. `seen` are σ(g) and σ(θ). Where S is a number for each element, the momentum is divided by `below`, which
        is written to."""
        (pulled, after), before, known = seen, self.weights[name], self.memory.get(name)
        if not np.isfinite(after).all():
            raise Mistake(
                f"{where} is no longer finite; training has diverged, follow the steps before, or smaller ones"
            )
        rounds = (ROUNDING + sqrt(weight.numel() / PARTS) / LONG) * torch.finfo(weight.dtype).eps
        scale, ahead = float(step.scale), float(step.ahead)

        # σ(p), σ(m) by the rule, and what is left of the step without it: (1 − d)σ(θ₋) − N σ(p) − σ(θ)
        pulled = pulled + step.coupled * before if step.coupled else pulled
        memory = step.intake * pulled + (0.0 if known is None else step.carry * known)
        made = step.carry * self.made.get(name, 0.0) + step.intake * size(pulled)
        left = (1 - float(step.lost)) * before - ahead * pulled - after
        whole = size(before) + size(after) + ahead * size(pulled)

        # σ(S ⊙ m): of the optimizer's m, which is held against the rule's where it decides. Else that is read only
        # where the rule's does not explain the step: each may have rounding of long ago.
        if momentum is not None and (below is not None or not size(left - scale * memory) <= rounds * whole):
            read = self.read(momentum)
            if not (missed := size(read - memory)) <= rounds * made:
                raise Mistake(astray(where, missed))
            memory = read
        if momentum is not None and below is not None:
            pushed = self.read(torch.div(momentum, below, out=below))
        else:
            pushed, whole = memory, whole + scale * made
        missed = size(left - scale * pushed)
        if not missed <= rounds * (whole + scale * size(pushed)):
            raise Mistake(astray(where, missed))
        self.weights[name] = after
        if momentum is not None:
            self.memory[name], self.made[name] = memory, made
        return missed / whole if missed else 0.0


def astray(where: str, missed: float) -> str:
    """What is said of a step that its rule does not explain."""
    return (
        f"{where} is not where its optimizer's rule leads, by {missed:.2g} or more; was its gradient changed in the "
        "step, or its memory, or the weight before the step was over?"
    )


def size(signature: Numbers) -> float:
    """The norm of a signature, which is about that of its tensor."""
    return hypot(*signature.tolist())
