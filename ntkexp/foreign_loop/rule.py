"""Proof (b): the linear step of an optimizer maps the weights before a step
to the weights after it.

A rule computes this linear step. `AbstractOptimizerRule` is the interface of all rules,
and `torch_rules.py` has the rules of PyTorch's optimizers. `RuleProof` checks a rule at
every step, by comparing random projections of the tensors (signatures)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import hypot, isfinite, nan, sqrt
from typing import Any, ClassVar, NamedTuple, TypeAlias

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from ntkexp.foreign_loop.host_reads import read_numbers, to_host
from ntkexp.mistake import Mistake
from ntkexp.optimizer.base import LinearStep
from ntkexp.stream import stream

# --- The linear step of a parameter θ (`optimizer.base.LinearStep` defines the symbols):
#
#     p = g + λθ        m ← βm + α ⊙ p        θ ← (1 − d)θ − M(S ⊙ m + N ⊙ p) − r
#
# g is the gradient that the optimizer used. A rule computes the coefficients from the
# optimizer's settings and from its state before and after the step. Coefficients may
# depend on g, for example if the optimizer clips its own update. The step is linear in
# the gradients of the examples, because the same S, N and α multiply each of them.


class StepInput(NamedTuple):
    """One parameter before a step, and its gradient."""

    gradient: Tensor  # g
    weight: Tensor  # θ before the step
    earlier_steps: int  # number of earlier steps of this parameter
    # optimizer state before the step; only entries in the rule's `needs`
    state: Mapping[str, Any]
    # norm of the gradients of all parameters of the optimizer; NaN unless the rule has
    # `reads_norm`
    gradient_norm: float = nan


class AbstractOptimizerRule(ABC):
    """Base class for rules, which compute the linear steps of some classes of
    optimizers. Pass a rule of your own as `ntkexp.follow(…, rules=[MyRule()])`.

    A rule returns the linear step of each parameter, from the settings of its group and
    the optimizer's state after the step. Every step is checked: applied to the weights
    before the step, the linear step must give the weights after it and the optimizer's
    momentum, up to rounding. Otherwise an error is raised.

    Example: ADOPT divides the gradient by √v₋, where v₋ is the mean of squared
    gradients before the step: m ← β₁m + (1 − β₁)g/√v₋ and θ ← θ − ηm. So α is the
    tensor (1 − β₁)/√v₋, and the rule `needs` v₋ from the state before the step:

    >>> import torch
    >>> import ntkexp
    >>> from ntkexp import AbstractOptimizerRule, LinearStep
    >>> class Adopt(torch.optim.Optimizer):
    ...     def __init__(self, params, lr=0.01, betas=(0.9, 0.99)):
    ...         super().__init__(params, {"lr": lr, "betas": betas})
    ...     @torch.no_grad()
    ...     def step(self, closure=None):
    ...         for group in self.param_groups:
    ...             first, second = group["betas"]
    ...             for weight in group["params"]:
    ...                 m = self.state[weight].setdefault("m", torch.zeros_like(weight))
    ...                 v = self.state[weight].setdefault("v", torch.ones_like(weight))
    ...                 m.mul_(first).add_((1 - first) * weight.grad / v.sqrt())
    ...                 weight.sub_(group["lr"] * m)
    ...                 v.mul_(second).add_((1 - second) * weight.grad.square())
    >>> class AdoptRule(AbstractOptimizerRule):
    ...     kinds = (Adopt,)
    ...     needs = ("v",)
    ...     def step(self, group, state, step_input, buffer=None):
    ...         first, _ = group["betas"]
    ...         before = step_input.state.get("v", torch.ones_like(step_input.gradient))
    ...         return LinearStep(
    ...             momentum_scale=group["lr"],
    ...             momentum_decay=first,
    ...             momentum_gain=(1 - first) / before.sqrt(),
    ...         )
    ...     def momentum(self, group, state):
    ...         return state.get("m")
    >>> x = torch.eye(2, dtype=torch.double)
    >>> model = torch.nn.Linear(2, 1).double()
    >>> optimizer, before = Adopt(model.parameters()), model(x).detach()
    >>> with ntkexp.follow(model, optimizer, queries=x, rules=[AdoptRule()]) as trace:
    ...     for _ in range(3):
    ...         optimizer.zero_grad()
    ...         (model(x) - 1).square().sum().backward()
    ...         optimizer.step()
    >>> parts = trace.attribute()["contribution"].sum("example")
    >>> bool(abs(before.numpy() + parts - model(x).detach().numpy()).max() < 1e-12)
    True
    """

    kinds: ClassVar[tuple[type[torch.optim.Optimizer], ...]]
    """The classes of optimizers. The rule is also applied to their subclasses."""

    needs: ClassVar[tuple[str, ...]] = ()
    """The entries of the optimizer state that the rule reads from before the step."""

    has_effects: ClassVar[bool] = False
    """True if leave-out effects can differentiate the step,
    including its denominator."""

    reads_norm: ClassVar[bool] = False
    """True if the rule needs the norm of the gradients of all parameters together."""

    changes_settings: ClassVar[bool] = False
    """True if a step changes settings of the parameter groups, such as a step count. A
    replay then begins with the settings from before the step."""

    overwrites_gradient: ClassVar[bool] = False
    """True if the optimizer writes into the gradients in its step."""

    swaps_weights: ClassVar[bool] = False
    """True if functions of the optimizer move the weights to an average and back
    between steps. These functions compute the weights from z, an entry of the optimizer
    state, so the weights come back only up to rounding."""

    rounds: ClassVar[bool] = False
    """True if the optimizer computes in lower precision than the weights. The rounding
    error is then the `residual` of the linear step."""

    @abstractmethod
    def step(
        self,
        group: Mapping[str, Any],
        state: Mapping[str, Any],
        step_input: StepInput,
        buffer: Tensor | None = None,
    ) -> LinearStep:
        """Return the linear step that led to this state.

        Args:
            group: settings of the parameter group.
            state: optimizer state of the parameter after the step.
            step_input: gradient, weight and state of the parameter before the step.
            buffer: buffer of the parameter's shape. The rule may write into it, and use
                it as a tensor of the returned step, such as the denominator.

        Returns:
            The linear step. Fields that are not given have their defaults.
        """

    def momentum(
        self, group: Mapping[str, Any], state: Mapping[str, Any]
    ) -> Tensor | None:
        """Return the momentum m after the step, as the optimizer stores it.

        Args:
            group: settings of the parameter group.
            state: optimizer state of the parameter after the step.

        Returns:
            The momentum, or None for an optimizer without momentum.
        """
        return None

    def momentum_at(
        self, group: Mapping[str, Any], state: Mapping[str, Any], weight: Tensor
    ) -> Tensor | None:
        """Return the momentum m after the step, which may also depend on the weights
        after the step. Override this method if `momentum` returns only the part of m
        that the state holds.

        Args:
            group: settings of the parameter group.
            state: optimizer state of the parameter after the step.
            weight: the parameter after the step.

        Returns:
            The momentum, or None for an optimizer without momentum.
        """
        return self.momentum(group, state)

    def watched(
        self,
        group: Mapping[str, Any],
        state: Mapping[str, Any],
        step_input: StepInput,
        buffer: Tensor | None,
    ) -> LinearStep:
        """Return a linear step for proof (b). Override this method if a step that is
        cheaper than the result of `step` suffices for proof (b).

        Args:
            group: settings of the parameter group.
            state: optimizer state of the parameter after the step.
            step_input: gradient, weight and state of the parameter before the step.
            buffer: buffer of the parameter's shape, as in `step`.

        Returns:
            A step that leads to the same weights and momentum as the result of `step`.
        """
        return self.step(group, state, step_input, buffer)


# --- Signatures: random projections of a tensor w,
# which are compared instead of the tensor.
#
#     σ_b = Σ_i r_i w_{b,i}
#
# w_b is one of 16 equal parts of the flattened tensor. The r_i ~ N(0, 1) are drawn
# once. If a tensor has an error e, its signature has the error σ(e), and E‖σ(e)‖² =
# ‖e‖². So the distance of two signatures is about the distance of the tensors.


SIGNATURE_PARTS = 16
# A sum in the tensor's dtype has at most this many terms. Longer sums are split, and
# their parts are added in float64.
MAX_SUMMED = 2**14
Numbers: TypeAlias = NDArray[np.float64]
"""A signature in double precision, in host memory."""


@dataclass(frozen=True)
class Signed:
    """Signatures of a step's gradients and of the weights after
    the step, in host memory."""

    gradient: Mapping[str, Tensor]
    after: Mapping[str, Tensor]

    @classmethod
    def of(cls, gradient: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> Signed:
        """Copy the signatures to the host, with one transfer."""
        read = to_host([*gradient.values(), *after.values()])
        of_gradient = dict(zip(gradient, read[: len(gradient)], strict=True))
        of_weights = dict(zip(after, read[len(gradient) :], strict=True))
        return cls(of_gradient, of_weights)


@dataclass(frozen=True)
class Signatures:
    """Functions that compute signatures, and the random vectors r drawn so far, by
    length, dtype and device."""

    numbers: dict[tuple[int, torch.dtype, torch.device], Tensor] = field(
        default_factory=dict
    )

    def of(self, tensors: Mapping[str, Tensor]) -> dict[str, Float[Tensor, " part"]]:
        """Return the signature of every tensor, in host memory.

        A signature has one element for each part, and one more element. If the size of
        the tensor is not a multiple of 16, the last element is the projection of the
        remaining numbers. Else it is 0. Small tensors have one number in each part.

        >>> Signatures().of({"w": torch.ones(3)})["w"].shape
        torch.Size([4])
        """
        signatures = self.on_device(tensors)
        return dict(zip(signatures, to_host(list(signatures.values())), strict=True))

    def on_device(
        self, tensors: Mapping[str, Tensor]
    ) -> dict[str, Float[Tensor, " part"]]:
        """Return the signature of every tensor, on the device of the tensor."""
        return {name: self.signature(tensor) for name, tensor in tensors.items()}

    def signature(self, tensor: Tensor) -> Float[Tensor, " part"]:
        """Return the signature of one tensor, on its device."""
        count = tensor.numel()
        parts = max(1, min(SIGNATURE_PARTS, count))
        width, rest = divmod(count, parts)
        values = tensor.detach()
        signature = values.new_zeros(parts + 1)
        if not rest and width <= MAX_SUMMED:
            # the most frequent case, with the fewest Python calls
            torch.mv(
                values.reshape(parts, width),
                self.drawn(width, values),
                out=signature[:parts],
            )
            return signature
        flat = values.reshape(-1)
        rows = flat[: width * parts] if rest else flat
        rows, drawn = rows.view(parts, width), self.drawn(width, flat)
        if width <= MAX_SUMMED:
            torch.mv(rows, drawn, out=signature[:parts])
        else:
            # rounding errors grow with the length of a sum: add short sums in float64
            sums = (
                torch.mv(rows[:, at : at + MAX_SUMMED], drawn[at : at + MAX_SUMMED])
                for at in range(0, width, MAX_SUMMED)
            )
            signature[:parts] = sum(each.double() for each in sums)
        if rest:
            signature[parts] = flat[width * parts :] @ self.drawn(rest, flat)
        return signature

    def drawn(self, count: int, like: Tensor) -> Tensor:
        """Return the random vector r of length `count`,
        with the dtype and device of `like`."""
        key = (count, like.dtype, like.device)
        if key not in self.numbers:
            generator = stream("signature", count)
            drawn = torch.randn(count, generator=generator, dtype=torch.float64)
            self.numbers[key] = drawn.to(like)
        return self.numbers[key]


def distance(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Return the relative distance ‖σ₁ − σ₂‖ / ‖σ₂‖ of two signatures,
    or ‖σ₁‖ if σ₂ = 0.

    >>> distance({"w": torch.ones(4)}, {"w": torch.full((4,), 2.0)})
    0.5
    """
    sizes = [theirs.norm() for theirs in other.values()]
    gaps = [(one[name] - theirs).norm() for name, theirs in other.items()]
    norms = read_numbers([*sizes, *gaps])
    size, missed = hypot(*norms[: len(sizes)]), hypot(*norms[len(sizes) :])
    return missed / size if size else missed


def in_doubles(signatures: Sequence[Tensor]) -> list[Numbers]:
    """Convert signatures to double precision in host memory, all at once.

    >>> in_doubles([torch.ones(1), torch.zeros(2)])
    [array([1.]), array([0., 0.])]
    """
    joined: Numbers = torch.cat(to_host(signatures)).double().numpy()
    doubles = list[Numbers]()
    start = 0
    for signature in signatures:
        end = start + len(signature)
        doubles.append(joined[start:end])
        start = end
    return doubles


# --- Proof (b), by signatures.
#
# A step is linear in its inputs, and so is the signature σ. With θ₋ and m₋ before the
# step, and the residual r (rounding of an optimizer that computes in lower precision):
#
#     σ(m) = βσ(m₋) + σ(α ⊙ p)      σ(θ) = (1 − d)σ(θ₋) − σ(S ⊙ m) − σ(N ⊙ p) − σ(r)      p = g + λθ₋
#
# If S, N and α are scalars, these equations need only the signatures of the weights and
# of the gradient. If S is a tensor, σ(S ⊙ m) is computed from the m that the optimizer
# stores, and σ(m) is compared with the first equation.
#
# The check runs at every step of a user's training, so it must be fast. Signatures
# read each gradient and weight once. To recompute the weights instead, the check would
# read and write them several times.
#
# An error changes the signature by about its own norm. An error below 64 eps times the
# norm of the tensor cannot be distinguished from rounding. An error in a single one of
# very many weights can be that small. Between steps, `outside.LatestWeights`
# compares every weight with a copy, so it finds any change that no step made.


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
        step, name = claim.step, claim.name
        read = yield asked
        after, before = read["after"], self.weights[name]
        size_after = size(after)
        if not isfinite(size_after):
            raise Mistake(
                f"{claim.where} is no longer finite, because training has diverged; "
                "follow only the steps before, or take smaller steps"
            )
        rounding = claim.rounding

        # σ(p), σ(α ⊙ p), and σ(m) by the rule. `made` is the sum of the norms of the
        # terms of m.
        p = read["gradient"] + signature_of_l2(step, read, before)
        gained = read["α ⊙ p"] if "α ⊙ p" in read else step.momentum_gain * p
        known = self.memory.get(name)
        momentum = gained + (0.0 if known is None else step.momentum_decay * known)
        made = step.momentum_decay * self.made.get(name, 0.0) + size(gained)

        # `left` = (1 − d)σ(θ₋) − σ(θ) − σ(r) − Nσ(p), the part of the step that
        # momentum must explain. `terms` is the sum of the norms of these terms.
        left = (1 - float(step.decoupled_decay)) * before - after
        terms = size(before) + size_after
        if "residual" in read:
            left = left - read["residual"]
            terms = terms + size(read["residual"])
        moves = step.moves_in_numbers
        if "N ⊙ p" in read:
            left = left - read["N ⊙ p"]
            terms = terms + size(read["N ⊙ p"])
            moves = (float(step.momentum_scale), 0.0)
        elif moves is not None and moves[1]:
            left = left - moves[1] * p
            terms = terms + abs(moves[1]) * size(p)

        # Compare σ(m) of the optimizer's m with σ(m) by the rule. Both have accumulated
        # rounding errors. If S is a scalar, first try whether the rule's m explains the
        # step; if so, the optimizer's m need not be read.
        explained = (
            moves is not None
            and step.residual is None
            and size(left - moves[0] * momentum) <= rounding * terms
        )
        if claim.momentum is not None and not explained:
            if "momentum" not in read:
                read |= yield {"momentum": self.read(claim.momentum)}
            missed = size(read["momentum"] - momentum)
            if not missed <= rounding * made:
                raise Mistake(astray(claim.where, missed))
            momentum = read["momentum"]

        # `left` must be σ(S ⊙ m). If N ⊙ p was not subtracted above, it must be
        # σ(M(S ⊙ m + N ⊙ p)).
        if moves is not None:
            moved = moves[0] * momentum
            terms = terms + abs(moves[0]) * made
        else:
            moved = scale * read["direction"]
        missed = size(left - moved)
        if not missed <= rounding * (terms + size(moved)):
            raise Mistake(astray(claim.where, missed))
        self.weights[name] = after
        if claim.momentum is not None:
            self.memory[name] = momentum
            self.made[name] = made
        return missed / terms if missed else 0.0

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


def norm_of(tensors: Iterable[Tensor]) -> float:
    """Return the norm of the concatenated tensors.

    >>> norm_of([torch.tensor([3.0]), torch.tensor([4.0])])
    5.0
    """
    return hypot(*read_numbers([tensor.norm() for tensor in tensors]))


def p_of(step: LinearStep, step_input: StepInput) -> Tensor:
    """Return p = g + λθ, the gradient with L2 decay."""
    if isinstance(step.l2, Tensor):
        return step_input.gradient + step.l2 * step_input.weight
    return (
        step_input.gradient.add(step_input.weight, alpha=step.l2)
        if step.l2
        else step_input.gradient
    )


def signature_of_l2(
    step: LinearStep, read: Mapping[str, Numbers], before: Numbers
) -> Numbers:
    """Return the signature of the L2 decay λθ."""
    return read["λθ"] if isinstance(step.l2, Tensor) else step.l2 * before


def astray(where: str, missed: float) -> str:
    """Return the error message for a step that differs from the optimizer's rule."""
    return (
        f"{where} does not follow its optimizer's rule (relative difference at least "
        f"{missed:.2g}); did something change its gradient, the optimizer's state or the "
        "weight during the step? If the loop resets or loads this state, end follow "
        "before, and begin again with a new optimizer"
    )


def size(signature: Numbers) -> float:
    """Return the norm of a signature, which approximates the norm of its tensor."""
    return hypot(*signature.tolist())
