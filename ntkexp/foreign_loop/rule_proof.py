"""Proof (b): the linear step of an optimizer maps the weights before a step
to the weights after it. `RuleProof` checks this at every step, by signatures.

A step is linear in its inputs, and so is the signature σ. With θ₋ and m₋ before the step,
and the residual r (rounding of an optimizer that computes in lower precision):

    σ(m) = βσ(m₋) + σ(α ⊙ p)      σ(θ) = (1 − d)σ(θ₋) − σ(S ⊙ m) − σ(N ⊙ p) − σ(r)      p = g + λθ₋

If S, N and α are scalars, these equations need only the signatures of the weights and of
the gradient. If S is a tensor, σ(S ⊙ m) is computed from the m that the optimizer stores,
and σ(m) is compared with the first equation.

The check runs at every step of a user's training, so it must be fast. Signatures read
each gradient and weight once. To recompute the weights instead, the check would read and
write them several times. Small parameters with the same kind of step are checked
together, because for them the calls of torch would take longer than the arithmetic.

An error changes the signature by about its own norm. An error below 64 eps times the norm
of the tensor cannot be distinguished from rounding. An error in a single one of very many
weights can be that small. Between steps, `outside.LatestWeights` compares every weight
with a copy, so it finds any change that no step made.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from ntkexp.foreign_loop.rule import StepInput, p_of
from ntkexp.foreign_loop.signatures import (
    MAX_SUMMED,
    SIGNATURE_PARTS,
    Numbers,
    Signatures,
    in_doubles,
    sizes,
)
from ntkexp.mistake import Mistake
from ntkexp.optimizer.base import LinearStep

# rounding error of the operations of a step and of short sums, in units of eps
STEP_EPS = 64
LONG_SUM_DIVISOR = 4  # the rounding error of a long sum is √length/4 eps

Norms: TypeAlias = NDArray[np.float64]
"""One number for each parameter of a claim."""

PendingProof: TypeAlias = Generator[dict[str, Tensor], dict[str, Numbers], float]
"""A generator that checks one claim. It yields signatures on the device, by name,
receives them in host memory, and finally returns the relative error."""


@dataclass(frozen=True)
class StepClaim:
    """The linear step of one parameter by the rule, or of several parameters as one
    vector. The proof compares this step with the optimizer's step."""

    index: int  # index of the step
    names: Sequence[str]
    step: LinearStep
    step_input: StepInput
    momentum: Tensor | None  # m that the optimizer stores after the step

    @cached_property
    def rounding(self) -> Norms:
        """The bound on the rounding error of each parameter's signature after the step.
        The bound is relative to the sum of the norms of all terms of the update."""
        weights = self.step_input.weights
        lengths = [min(each.numel() / SIGNATURE_PARTS, MAX_SUMMED) for each in weights]
        eps: float = torch.finfo(weights[0].dtype).eps
        return (STEP_EPS + np.sqrt(lengths) / LONG_SUM_DIVISOR) * eps

    def parts(self, joined: Tensor) -> Sequence[Tensor]:
        """Return the part of each parameter in a tensor of all parameters."""
        if len(self.names) == 1:
            return [joined]
        counts = [weight.numel() for weight in self.step_input.weights]
        return torch.split(joined, counts)

    def refuse(self, missed: Norms, bound: Norms) -> None:
        """Raise if a difference is larger than its bound, or NaN."""
        for name, gap, is_rounding in zip(
            self.names, missed, missed <= bound, strict=True
        ):
            if not is_rounding:
                raise Mistake(
                    f"step {self.index}: '{name}' does not follow its optimizer's rule "
                    f"(relative difference at least {gap:.2g}); did something change its "
                    "gradient, the optimizer's state or the weight during the step? If "
                    "the loop resets or loads this state, end follow before, and begin "
                    "again with a new optimizer"
                )

    def refuse_divergence(self, after: Norms) -> None:
        """Raise if the norm of a weight after the step is infinite or NaN."""
        for name, is_finite in zip(self.names, np.isfinite(after), strict=True):
            if not is_finite:
                raise Mistake(
                    f"step {self.index}: '{name}' is no longer finite, because training "
                    "has diverged; follow only the steps before, or take smaller steps"
                )


@dataclass
class RuleProof:
    """Proof (b) of all steps. Between steps, the dicts hold the state of each parameter
    after the latest step."""

    signatures: Signatures = field(default_factory=Signatures)
    # signature σ(θ) of the weight
    weights: dict[str, Float[NDArray[np.float64], " part"]] = field(
        default_factory=dict
    )
    # signature σ(m) of the momentum
    memory: dict[str, Float[NDArray[np.float64], " part"]] = field(default_factory=dict)
    # sum of the norms of the terms of m
    made: dict[str, float] = field(default_factory=dict)
    # number of steps of each parameter
    moved: dict[str, int] = field(default_factory=dict)

    def begin(self, name: str, weight: Tensor) -> None:
        """Store the signature of a parameter before its first step."""
        (self.weights[name],) = self.read_now(weight)

    def remember(self, name: str, momentum: Tensor) -> None:
        """Store the momentum that a parameter has before the first followed step."""
        signature = self.read_now(momentum)
        (self.memory[name],) = signature
        self.made[name] = float(sizes(signature)[0])

    def read_now(self, tensor: Tensor) -> Numbers:
        """Return the signature of one tensor, in host memory."""
        (signature,) = in_doubles([self.signatures.rows([tensor])])
        return signature

    def settle(self, waiting: Sequence[PendingProof]) -> list[float]:
        """Finish the pending checks of several claims, and return the error of each.

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
        self,
        claim: StepClaim,
        gradient: Float[Tensor, "parameter part"],
        after: Float[Tensor, "parameter part"],
        buffer: Tensor,
    ) -> PendingProof:
        """Return the check of a claim. `settle` finishes it.

        The check raises if the rule does not explain the step. It returns the largest
        relative distance of a weight from its value by the rule.

        Args:
            claim: linear step by the rule.
            gradient: signatures of the gradient.
            after: signatures of the weights after the step.
            buffer: buffer of the shape of the tensors in the claim.
                It is free again when this function returns.
        """
        step = claim.step
        step_input = claim.step_input
        momentum = claim.momentum
        asked = {"gradient": gradient, "after": after}
        scale = 1.0
        if isinstance(step.momentum_gain, Tensor):
            gained = step.momentum_gain * p_of(step, step_input)
            asked["α ⊙ p"] = self.read(claim, gained)
        if isinstance(step.l2, Tensor):
            asked["λθ"] = self.read(claim, step.l2 * step_input.weight)
        if step.residual is not None:
            asked["residual"] = self.read(claim, step.residual)
        if step.moves_momentum_by_number and isinstance(step.gradient_scale, Tensor):
            moved = step.gradient_scale * p_of(step, step_input)
            asked["N ⊙ p"] = self.read(claim, moved)
        elif step.moves_in_numbers is None:
            if momentum is not None:
                asked["momentum"] = self.read(claim, momentum)
            scale, direction = direction_of(step, step_input, momentum, buffer)
            asked["direction"] = self.read(claim, direction)
        return self.proved(claim, asked, scale)

    def read(self, claim: StepClaim, joined: Tensor) -> Float[Tensor, "parameter part"]:
        """Return the signature of each parameter's part of a tensor, on its device."""
        return self.signatures.rows(claim.parts(joined))

    def proved(
        self, claim: StepClaim, asked: dict[str, Tensor], scale: float
    ) -> PendingProof:
        """Check a claim. First yield the signatures that must be copied to the host,
        then compare the optimizer's step with its rule. `scale` is the factor of the
        signature "direction" (see `direction_of`)."""
        step = claim.step
        read = yield asked
        after = read["after"]
        before = np.stack([self.weights[name] for name in claim.names])
        sizes_after = sizes(after)
        claim.refuse_divergence(sizes_after)
        rounding = claim.rounding

        # σ(p), σ(α ⊙ p), and σ(m) by the rule. `made` is the sum of the norms of the
        # terms of m.
        p = read["gradient"] + signature_of_l2(step, read, before)
        gained = read["α ⊙ p"] if "α ⊙ p" in read else step.momentum_gain * p
        momentum = gained
        made = sizes(gained)
        if claim.names[0] in self.memory:
            known = np.stack([self.memory[name] for name in claim.names])
            momentum = momentum + step.momentum_decay * known
            earlier = np.array([self.made[name] for name in claim.names])
            made = made + step.momentum_decay * earlier

        # `left` = (1 − d)σ(θ₋) − σ(θ) − σ(r) − Nσ(p), the part of the step that
        # momentum must explain. `terms` is the sum of the norms of these terms.
        left = (1 - float(step.decoupled_decay)) * before - after
        terms = sizes(before) + sizes_after
        if "residual" in read:
            left = left - read["residual"]
            terms = terms + sizes(read["residual"])
        moves = step.moves_in_numbers
        if "N ⊙ p" in read:
            left = left - read["N ⊙ p"]
            terms = terms + sizes(read["N ⊙ p"])
            moves = (float(step.momentum_scale), 0.0)
        elif moves is not None and moves[1]:
            left = left - moves[1] * p
            terms = terms + abs(moves[1]) * sizes(p)

        # Compare σ(m) of the optimizer's m with σ(m) by the rule. Both have accumulated
        # rounding errors. If S is a scalar, first try whether the rule's m explains the
        # step; if so, the optimizer's m need not be read.
        explained = (
            moves is not None
            and step.residual is None
            and bool((sizes(left - moves[0] * momentum) <= rounding * terms).all())
        )
        if claim.momentum is not None and not explained:
            if "momentum" not in read:
                read |= yield {"momentum": self.read(claim, claim.momentum)}
            claim.refuse(sizes(read["momentum"] - momentum), rounding * made)
            momentum = read["momentum"]

        # `left` must be σ(S ⊙ m). If N ⊙ p was not subtracted above, it must be
        # σ(M(S ⊙ m + N ⊙ p)).
        if moves is not None:
            moved = moves[0] * momentum
            terms = terms + abs(moves[0]) * made
        else:
            moved = scale * read["direction"]
        missed = sizes(left - moved)
        claim.refuse(missed, rounding * (terms + sizes(moved)))
        self.weights |= zip(claim.names, after, strict=True)
        if claim.momentum is not None:
            self.memory |= zip(claim.names, momentum, strict=True)
            self.made |= zip(claim.names, made.tolist(), strict=True)
        return float(np.max(missed / np.where(missed, terms, 1.0)))


def direction_of(
    step: LinearStep, step_input: StepInput, momentum: Tensor | None, buffer: Tensor
) -> tuple[float, Tensor]:
    """Return a scalar and a tensor. Their product is the update without decay,
    M(S ⊙ m + N ⊙ p). The tensor may be `buffer`.

    M is the identity unless the step has `mixing`. Without momentum, m = α ⊙ p.
    """
    m = step.momentum_gain * p_of(step, step_input) if momentum is None else momentum
    if (
        step.denominator is not None
        and not isinstance(step.momentum_scale, Tensor)
        and step.moves_by_momentum
    ):
        return step.momentum_scale, torch.div(m, step.denominator, out=buffer)
    direction = step.momentum_scale * m
    if not step.moves_by_momentum:
        direction = direction + step.gradient_scale * p_of(step, step_input)
    if step.denominator is not None:
        direction = direction.div_(step.denominator)
    if step.mixing is not None:
        direction = step.mixing.of(direction)
    return 1.0, direction


def signature_of_l2(
    step: LinearStep, read: Mapping[str, Numbers], before: Numbers
) -> Numbers:
    """Return the signature of the L2 decay λθ."""
    return read["λθ"] if isinstance(step.l2, Tensor) else step.l2 * before
