"""Proof (b): the linear step of an optimizer maps the weights before a step
to the weights after it. `RuleProof` checks this at every step, by signatures.

A step is linear in its inputs, and so is the signature σ. With θ₋ and m₋ before the step,
and the residual r (rounding of an optimizer that computes in lower precision):

    σ(m) = βσ(m₋) + σ(α ⊙ p)      σ(θ) = (1 − d)σ(θ₋) − σ(S ⊙ m) − σ(N ⊙ p) − σ(r)      p = g + λθ₋

If S, N and α are scalars, these equations need only the signatures of the weights and of
the gradient. If S is a tensor, σ(S ⊙ m) is computed from the m that the optimizer stores,
and σ(m) is compared with the first equation.

The check runs at every step of a user's training, so it must be fast. Signatures read
each gradient and weight once. A recomputation of the weights would read and write them
several times.

An error changes the signature by about its own norm. An error below 64 eps times the norm
of the tensor cannot be distinguished from rounding. An error in a single one of very many
weights can be that small. Between steps, `outside.LatestWeights` compares every weight
with a copy, so it finds any change that no step made.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite, sqrt
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from ntkexp.foreign_loop.rule import StepInput, p_of
from ntkexp.foreign_loop.signatures import (
    MAX_SUMMED,
    SIGNATURE_PARTS,
    Numbers,
    Signatures,
    in_doubles,
    size,
)
from ntkexp.mistake import Mistake
from ntkexp.optimizer.base import LinearStep

# rounding error of the operations of a step and of short sums, in units of eps
STEP_EPS = 64
LONG_SUM_DIVISOR = 4  # the rounding error of a long sum is √length/4 eps


PendingProof: TypeAlias = Generator[dict[str, Tensor], dict[str, Numbers], float]
"""A generator that checks one parameter in one step. It yields signatures on the
device, by name, receives them in host memory, and finally returns the relative
error."""


@dataclass(frozen=True)
class StepClaim:
    """The linear step of one parameter by the rule. The proof compares this step with
    the optimizer's step."""

    where: str  # parameter and step, for the error message
    name: str
    step: LinearStep
    step_input: StepInput
    momentum: Tensor | None  # m that the optimizer stores after the step

    @property
    def rounding(self) -> float:
        """The bound on the rounding error of the parameter's signature after the step.
        The bound is relative to the sum of the norms of all terms of the update."""
        weight = self.step_input.weight
        length = min(weight.numel() / SIGNATURE_PARTS, MAX_SUMMED)
        eps: float = torch.finfo(weight.dtype).eps
        return (STEP_EPS + sqrt(length) / LONG_SUM_DIVISOR) * eps


class SignatureOfSum(NamedTuple):
    """The signature of a sum of tensors. `terms` is the sum of the norms of these
    tensors, which bounds the rounding error."""

    value: Numbers
    terms: float


@dataclass
class RuleProof:
    """Proof (b) of all steps. Between steps, the dicts hold the state of each parameter
    after the latest step."""

    signatures: Signatures = field(default_factory=Signatures)
    # signature σ(θ) of the weight
    weights: dict[str, Numbers] = field(default_factory=dict)
    # signature σ(m) of the momentum
    memory: dict[str, Numbers] = field(default_factory=dict)
    # sum of the norms of the terms of m
    made: dict[str, float] = field(default_factory=dict)
    # number of steps of each parameter
    moved: dict[str, int] = field(default_factory=dict)

    def begin(self, name: str, weight: Tensor) -> None:
        """Store the signature of a parameter before its first step."""
        (self.weights[name],) = in_doubles([self.read(weight)])

    def remember(self, name: str, momentum: Tensor) -> None:
        """Store the momentum that a parameter has before the first followed step."""
        (self.memory[name],) = in_doubles([self.read(momentum)])
        self.made[name] = size(self.memory[name])

    def read(self, tensor: Tensor) -> Tensor:
        """Return the signature of a tensor, on its device."""
        return self.signatures.signature(tensor)

    def settle(self, waiting: Sequence[PendingProof]) -> list[float]:
        """Finish the pending checks of several parameters,
        and return the error of each.

        Each round copies all signatures that the checks need to the host,
        with one transfer."""
        errors = [0.0] * len(waiting)
        asked = {index: next(proof) for index, proof in enumerate(waiting)}
        while asked:
            tensors = [
                tensor for requests in asked.values() for tensor in requests.values()
            ]
            read = iter(in_doubles(tensors))
            answers = {
                index: {key: next(read) for key in asked[index]} for index in asked
            }
            asked = {}
            for index, answer in answers.items():
                try:
                    asked[index] = waiting[index].send(answer)
                except StopIteration as end:
                    errors[index] = end.value
        return errors

    def check(
        self, claim: StepClaim, signatures: tuple[Tensor, Tensor], buffer: Tensor
    ) -> PendingProof:
        """Return the check of one parameter in a step. `settle` finishes it.

        The check raises if the rule does not explain the step. It returns the relative
        distance of the weight from its value by the rule.

        Args:
            claim: linear step by the rule.
            signatures: signatures of the gradient, and of the weight after the step.
            buffer: buffer of the parameter's shape.
                It is free again when this function returns.
        """
        step = claim.step
        step_input = claim.step_input
        momentum = claim.momentum
        gradient, after = signatures
        asked = {"gradient": gradient, "after": after}
        scale = 1.0
        if isinstance(step.momentum_gain, Tensor):
            asked["α ⊙ p"] = self.read(step.momentum_gain * p_of(step, step_input))
        if isinstance(step.l2, Tensor):
            asked["λθ"] = self.read(step.l2 * step_input.weight)
        if step.residual is not None:
            asked["residual"] = self.read(step.residual)
        if step.moves_momentum_by_number and isinstance(step.gradient_scale, Tensor):
            asked["N ⊙ p"] = self.read(step.gradient_scale * p_of(step, step_input))
        elif step.moves_in_numbers is None:
            if momentum is not None:
                asked["momentum"] = self.read(momentum)
            scale, asked["direction"] = self.read_direction(
                step, step_input, momentum, buffer
            )
        return self.proved(claim, asked, scale)

    def proved(
        self, claim: StepClaim, asked: dict[str, Tensor], scale: float
    ) -> PendingProof:
        """Check one parameter. First yield the signatures that must be copied to the
        host, then compare the optimizer's step with its rule. `scale` is the factor of
        the signature "direction" (see `read_direction`)."""
        step = claim.step
        read = yield asked
        before = self.weights[claim.name]
        refuse_divergence(claim.where, read["after"])
        rounding = claim.rounding

        # σ(p) = σ(g) + λσ(θ₋), σ(m) by the rule, and the part of the step that m explains
        p = read["gradient"] + signature_of_l2(step, read, before)
        momentum = self.momentum_by_rule(claim, read, p)
        left = without_momentum(step, read, before, p)
        factor = momentum_factor(step, read)

        # Compare σ(m) of the optimizer's m with σ(m) by the rule. Both have accumulated
        # rounding errors. If S is a scalar, first try whether the rule's m explains the
        # step; if so, the optimizer's m need not be read.
        explained = (
            factor is not None
            and step.residual is None
            and size(left.value - factor * momentum.value) <= rounding * left.terms
        )
        if claim.momentum is not None and not explained:
            if "momentum" not in read:
                read |= yield {"momentum": self.read(claim.momentum)}
            missed = size(read["momentum"] - momentum.value)
            refuse_astray(claim.where, missed, rounding * momentum.terms)
            momentum = SignatureOfSum(read["momentum"], momentum.terms)

        # The part of the step that m explains must be σ(S ⊙ m). If N ⊙ p is in it, it
        # must be σ(M(S ⊙ m + N ⊙ p)).
        terms = left.terms
        if factor is not None:
            moved = factor * momentum.value
            terms = terms + abs(factor) * momentum.terms
        else:
            moved = scale * read["direction"]
        missed = size(left.value - moved)
        refuse_astray(claim.where, missed, rounding * (terms + size(moved)))
        self.weights[claim.name] = read["after"]
        if claim.momentum is not None:
            self.memory[claim.name] = momentum.value
            self.made[claim.name] = momentum.terms
        return missed / terms if missed else 0.0

    def momentum_by_rule(
        self, claim: StepClaim, read: Mapping[str, Numbers], p: Numbers
    ) -> SignatureOfSum:
        """Return σ(m) = βσ(m₋) + σ(α ⊙ p), where `p` is σ(p)."""
        step = claim.step
        gained = read["α ⊙ p"] if "α ⊙ p" in read else step.momentum_gain * p
        known = self.memory.get(claim.name)
        value = gained + (0.0 if known is None else step.momentum_decay * known)
        made = self.made.get(claim.name, 0.0)
        return SignatureOfSum(value, step.momentum_decay * made + size(gained))

    def read_direction(
        self,
        step: LinearStep,
        step_input: StepInput,
        momentum: Tensor | None,
        buffer: Tensor,
    ) -> tuple[float, Tensor]:
        """Return a scalar and a signature on the device. Their product is the signature
        of the update without decay, σ(M(S ⊙ m + N ⊙ p)).

        M is the identity unless the step has `mixing`. Without momentum, m = α ⊙ p.
        """
        m = (
            step.momentum_gain * p_of(step, step_input)
            if momentum is None
            else momentum
        )
        if (
            step.denominator is not None
            and not isinstance(step.momentum_scale, Tensor)
            and step.moves_by_momentum
        ):
            return step.momentum_scale, self.read(
                torch.div(m, step.denominator, out=buffer)
            )
        direction = step.momentum_scale * m
        if not step.moves_by_momentum:
            direction = direction + step.gradient_scale * p_of(step, step_input)
        if step.denominator is not None:
            direction = direction.div_(step.denominator)
        if step.mixing is not None:
            direction = step.mixing.of(direction)
        return 1.0, self.read(direction)


def refuse_divergence(where: str, after: Numbers) -> None:
    """Raise if the weight after a step is not finite."""
    if not isfinite(size(after)):
        raise Mistake(
            f"{where} is no longer finite, because training has diverged; "
            "follow only the steps before, or take smaller steps"
        )


def without_momentum(
    step: LinearStep, read: Mapping[str, Numbers], before: Numbers, p: Numbers
) -> SignatureOfSum:
    """Return (1 − d)σ(θ₋) − σ(θ) − σ(r) − σ(N ⊙ p), the part of the step that momentum
    must explain. `p` is σ(p).

    Do not subtract σ(N ⊙ p) if "direction" contains it."""
    after = read["after"]
    left = (1 - float(step.decoupled_decay)) * before - after
    terms = size(before) + size(after)
    if "residual" in read:
        left = left - read["residual"]
        terms = terms + size(read["residual"])
    moves = step.moves_in_numbers
    if "N ⊙ p" in read:
        left = left - read["N ⊙ p"]
        terms = terms + size(read["N ⊙ p"])
    elif moves is not None and moves[1]:
        left = left - moves[1] * p
        terms = terms + abs(moves[1]) * size(p)
    return SignatureOfSum(left, terms)


def momentum_factor(step: LinearStep, read: Mapping[str, Numbers]) -> float | None:
    """Return S if it is one number, so that σ(S ⊙ m) = Sσ(m). Return None if the
    signature "direction" replaces this product."""
    if "N ⊙ p" in read:
        return float(step.momentum_scale)
    moves = step.moves_in_numbers
    return None if moves is None else moves[0]


def signature_of_l2(
    step: LinearStep, read: Mapping[str, Numbers], before: Numbers
) -> Numbers:
    """Return the signature of the L2 decay λθ."""
    return read["λθ"] if isinstance(step.l2, Tensor) else step.l2 * before


def refuse_astray(where: str, missed: float, bound: float) -> None:
    """Raise if a step differs from the optimizer's rule by more than `bound`."""
    if not missed <= bound:
        raise Mistake(
            f"{where} does not follow its optimizer's rule (relative difference at "
            f"least {missed:.2g}); did something change its gradient, the optimizer's "
            "state or the weight during the step? If the loop resets or loads this "
            "state, end follow before, and begin again with a new optimizer"
        )
