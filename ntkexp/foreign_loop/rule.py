"""Proof (b): the linear step of an optimizer leads from the weights before a step to those after
it.

`AbstractOptimizerRule` is the interface for rules of other optimizers. `torch_rules.py` has the
rules of PyTorch's optimizers. `RuleProof` checks a rule at every step, by signatures of the
tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from math import hypot, sqrt
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

# --- The linear step of a parameter, in the letters of `optimizer.base`:
#
#     p = g + λθ        m ← βm + α ⊙ p        θ ← (1 − d)θ − S ⊙ m − N ⊙ p
#
# g is the consumed gradient. The coefficients follow from the optimizer's settings and its state
# before and after the step. They may depend on g, as in a step that is clipped by its own size: all
# that counts is that the same S, N and α multiply the gradient of every example.


class StepInput(NamedTuple):
    """One parameter before a step, and its gradient."""

    gradient: Tensor  # g
    weight: Tensor  # θ, before the step
    times: int  # earlier steps of this parameter
    state: Mapping[str, Any]  # the entries in `needs` of the optimizer's state before the step


class AbstractOptimizerRule(ABC):
    """The linear steps of some classes of optimizers, for `ntkexp.follow(…, rules=[MyRule()])`.

    A rule returns the linear step of each parameter, from the settings of its group and the
    optimizer's state after the step. Every step is checked: the rule must lead from the weights
    before to the weights after, and to the optimizer's own memory, up to rounding. A step that it
    does not explain is refused.

    Lion moves weights by the signs of c = β₁m₋ + (1 − β₁)g, with m ← β₂m₋ + (1 − β₂)g and m₋ = (m −
    (1 − β₂)g)/β₂:

    >>> import torch
    >>> import ntkexp
    >>> from ntkexp import AbstractOptimizerRule, LinearStep
    >>> class Lion(torch.optim.Optimizer):
    ...     def __init__(self, params, lr=0.01, betas=(0.9, 0.99)):
    ...         super().__init__(params, {"lr": lr, "betas": betas})
    ...     @torch.no_grad()
    ...     def step(self, closure=None):
    ...         for group in self.param_groups:
    ...             first, second = group["betas"]
    ...             for weight in group["params"]:
    ...                 m = self.state[weight].setdefault("m", torch.zeros_like(weight))
    ...                 weight.sub_(group["lr"] * torch.sign(first * m + (1 - first) * weight.grad))
    ...                 m.mul_(second).add_((1 - second) * weight.grad)
    >>> class LionRule(AbstractOptimizerRule):
    ...     kinds = (Lion,)
    ...     needs = ("m",)
    ...     def step(self, group, state, taken, room=None):
    ...         first, second = group["betas"]
    ...         before = taken.state.get("m", torch.zeros_like(taken.gradient))
    ...         c = first * before + (1 - first) * taken.gradient
    ...         size = torch.where(c == 0, 0.0, group["lr"] / c.abs())
    ...         return LinearStep(
    ...             momentum_scale=size * first / second,
    ...             gradient_scale=size * ((1 - first) - first * (1 - second) / second),
    ...             momentum_decay=second,
    ...             momentum_gain=1 - second,
    ...         )
    ...     def momentum(self, group, state):
    ...         return state.get("m")
    >>> x = torch.eye(2, dtype=torch.double)
    >>> model = torch.nn.Linear(2, 1).double()
    >>> optimizer, before = Lion(model.parameters()), model(x).detach()
    >>> with ntkexp.follow(model, optimizer, queries=x, rules=[LionRule()]) as trace:
    ...     for _ in range(3):
    ...         optimizer.zero_grad()
    ...         (model(x) - 1).square().sum().backward()
    ...         optimizer.step()
    >>> parts = trace.attribute()["contribution"].sum("example")
    >>> bool(abs(before.numpy() + parts - model(x).detach().numpy()).max() < 1e-12)
    True
    """

    kinds: ClassVar[tuple[type[torch.optim.Optimizer], ...]]
    """The classes of optimizers. Derived classes are tried with this rule, too."""

    needs: ClassVar[tuple[str, ...]] = ()
    """The entries of a parameter's state whose values before the step the rule needs."""

    has_effects: ClassVar[bool] = False
    """True if the derivative of the denominator of S is known, which effects need."""

    rounds: ClassVar[bool] = False
    """True if the optimizer computes in lower precision than the weights; the residual shows it."""

    @abstractmethod
    def step(
        self,
        group: Mapping[str, Any],
        state: Mapping[str, Any],
        taken: StepInput,
        room: Tensor | None = None,
    ) -> LinearStep:
        """Return the linear step that led to this state. `room` is a buffer for one tensor."""

    def momentum(self, group: Mapping[str, Any], state: Mapping[str, Any]) -> Tensor | None:
        """Return m after the step, as the optimizer stores it; None if it has no momentum."""
        return None

    def watched(
        self,
        group: Mapping[str, Any],
        state: Mapping[str, Any],
        taken: StepInput,
        room: Tensor | None,
    ) -> LinearStep:
        """Return the step as the proof needs it, if that is cheaper than the full map."""
        return self.step(group, state, taken, room)


# --- Signatures: a few random sums that represent a tensor in comparisons.
#
#     σ_b = Σ_i r_i w_{b,i},   b a sixteenth of the tensor,   r_i ~ N(0, 1), drawn once
#
# An error e in a tensor appears in σ with its own size, E‖σ(e)‖² = ‖e‖². Only chance could hide it.


SIGNATURE_PARTS = 16
MAX_SUMMED = 2**14  # numbers in one sum
Numbers: TypeAlias = NDArray[np.float64]
"""A signature in double precision."""


@dataclass(frozen=True)
class Signed:
    """The signatures of a step in host memory: of its gradients, and of the weights after it."""

    gradient: Mapping[str, Tensor]
    after: Mapping[str, Tensor]

    @classmethod
    def of(cls, gradient: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> Signed:
        """Read the signatures from a device, with one transfer."""
        read = to_host([*gradient.values(), *after.values()])
        of_gradient = dict(zip(gradient, read[: len(gradient)], strict=True))
        of_weights = dict(zip(after, read[len(gradient) :], strict=True))
        return cls(of_gradient, of_weights)


@dataclass(frozen=True)
class Signatures:
    """The vectors r drawn so far, by length, precision and device."""

    numbers: dict[tuple[int, torch.dtype, torch.device], Tensor] = field(default_factory=dict)

    def of(self, tensors: Mapping[str, Tensor]) -> dict[str, Float[Tensor, " part"]]:
        """Return the signature of every tensor in host memory. The last number sums the remainder.

        >>> Signatures().of({"w": torch.ones(3)})["w"].shape
        torch.Size([4])
        """
        signatures = self.on_device(tensors)
        return dict(zip(signatures, to_host(list(signatures.values())), strict=True))

    def on_device(self, tensors: Mapping[str, Tensor]) -> dict[str, Float[Tensor, " part"]]:
        """Return the signature of every tensor, on the device of the tensor."""
        return {name: self.signature(tensor) for name, tensor in tensors.items()}

    def signature(self, tensor: Tensor) -> Float[Tensor, " part"]:
        """Return the signature of one tensor, on its device."""
        flat = tensor.detach().reshape(-1)
        parts = max(1, min(SIGNATURE_PARTS, flat.numel()))
        width, rest = divmod(flat.numel(), parts)
        signature = flat.new_zeros(parts + 1)
        rows, drawn = flat[: width * parts].view(parts, width), self.drawn(width, flat)
        if width <= MAX_SUMMED:
            torch.mv(rows, drawn, out=signature[:parts])
        else:  # rounding grows with the length of a sum: add up shorter ones in double precision
            sums = (
                torch.mv(rows[:, at : at + MAX_SUMMED], drawn[at : at + MAX_SUMMED])
                for at in range(0, width, MAX_SUMMED)
            )
            signature[:parts] = sum(each.double() for each in sums)
        if rest:
            signature[parts] = flat[width * parts :] @ self.drawn(rest, flat)
        return signature

    def drawn(self, count: int, like: Tensor) -> Tensor:
        """Return r of this length, in the precision and on the device of a tensor."""
        key = (count, like.dtype, like.device)
        if key not in self.numbers:
            generator = stream("signature", count)
            drawn = torch.randn(count, generator=generator, dtype=torch.float64)
            self.numbers[key] = drawn.to(like)
        return self.numbers[key]


def distance(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Return the distance of two signatures of the same tensors, relative to the second.

    >>> distance({"w": torch.ones(4)}, {"w": torch.full((4,), 2.0)})
    0.5
    """
    sizes = [theirs.norm() for theirs in other.values()]
    gaps = [(one[name] - theirs).norm() for name, theirs in other.items()]
    norms = read_numbers([*sizes, *gaps])
    size, missed = hypot(*norms[: len(sizes)]), hypot(*norms[len(sizes) :])
    return missed / size if size else missed


def in_doubles(signature: Tensor) -> Numbers:
    """Convert a signature to double precision in host memory.

    >>> in_doubles(torch.ones(1))
    array([1.])
    """
    doubles: Numbers = signature.double().numpy()
    return doubles


# --- Proof (b), through signatures.
#
# A step is linear in its inputs, and so are signatures σ:
#
#     σ(m) = βσ(m₋) + σ(α ⊙ p)      σ(θ) = (1 − d)σ(θ₋) − σ(S ⊙ m) − σ(N ⊙ p) − σ(r)      p = g + λθ₋
#
# If S, N and α are numbers, they multiply signatures, and no tensor is formed. If S differs from
# weight to weight, σ(S ⊙ m) is computed from the optimizer's memory, and that m is compared with
# the sum above. The proof runs at every step of a user's training. It reads each gradient and
# weight once; forming every weight again would read and write them several times.
#
# An error in a tensor appears with its own size, next to numbers of the size of the whole tensor.
# An error below 64 eps of the size, as in one weight among very many, cannot be separated from
# rounding. `outside` checks between steps, weight by weight, that nothing else moved a weight.


STEP_EPS = 64  # eps: rounding of the operations of a step, fused or not, and of short sums
LONG_SUM_DIVISOR = 4  # rounding of long sums: √length/4 eps


PendingProof: TypeAlias = Generator[dict[str, Tensor], dict[str, Numbers], float]
"""The proof of one parameter in one step: it asks for signatures by name, and returns the error."""


@dataclass(frozen=True)
class StepClaim:
    """The step of one parameter as the rule has it, which the proof compares with the
    optimizer's."""

    where: str  # for the message of a refusal
    name: str
    step: LinearStep
    weight: Tensor
    momentum: Tensor | None  # of the optimizer, after the step

    @property
    def rounding(self) -> float:
        """The relative rounding of a step."""
        length = min(self.weight.numel() / SIGNATURE_PARTS, MAX_SUMMED)
        eps: float = torch.finfo(self.weight.dtype).eps
        return (STEP_EPS + sqrt(length) / LONG_SUM_DIVISOR) * eps


@dataclass
class RuleProof:
    """The proof of all steps. By the name of each parameter, after the latest step:"""

    signatures: Signatures = field(default_factory=Signatures)
    weights: dict[str, Numbers] = field(default_factory=dict)  # σ(θ)
    memory: dict[str, Numbers] = field(default_factory=dict)  # σ(m)
    made: dict[str, float] = field(default_factory=dict)  # sizes of the terms that m sums
    moved: dict[str, int] = field(default_factory=dict)  # number of steps

    def begin(self, name: str, weight: Tensor) -> None:
        """Begin the proof of a parameter at this weight."""
        self.weights[name] = in_doubles(self.signatures.of({"": weight})[""])

    def remember(self, name: str, momentum: Tensor) -> None:
        """Note the momentum of a parameter from before the followed steps."""
        self.memory[name] = in_doubles(self.signatures.of({"": momentum})[""])
        self.made[name] = size(self.memory[name])

    def read(self, tensor: Tensor) -> Tensor:
        """Return the signature of a tensor, on its device."""
        return self.signatures.signature(tensor)

    def settle(self, waiting: Sequence[PendingProof]) -> list[float]:
        """Finish the proofs of several parameters, and return the error of each.

        Each round reads all signatures that the proofs ask for with one transfer.
        """
        errors = [0.0] * len(waiting)
        asked = {place: next(proof) for place, proof in enumerate(waiting)}
        while asked:
            tensors = [tensor for requests in asked.values() for tensor in requests.values()]
            read = iter(to_host(tensors))
            answers = {
                place: {key: in_doubles(next(read)) for key in asked[place]} for place in asked
            }
            asked = {}
            for place, answer in answers.items():
                try:
                    asked[place] = waiting[place].send(answer)
                except StopIteration as end:
                    errors[place] = end.value
        return errors

    def hold(
        self,
        where: str,
        name: str,
        step: LinearStep,
        seen: tuple[Tensor, Tensor],
        taken: StepInput,
        momentum: Tensor | None,
        room: Tensor,
    ) -> PendingProof:
        """Begin the proof of one parameter in a step, which `settle` finishes.

        It raises if the rule does not explain the step, and returns the relative distance of the
        weight from where the rule leads. `seen` are σ(g) and σ(θ). Tensors are formed in the buffer
        `room`, before this returns."""
        gradient, after = seen
        asked = {"gradient": gradient, "after": after}
        scale = 1.0
        if isinstance(step.momentum_gain, Tensor):
            asked["α ⊙ p"] = self.read(step.momentum_gain * p_of(step, taken))
        if step.residual is not None:
            asked["residual"] = self.read(step.residual)
        if step.moves_in_numbers is None:
            if momentum is not None:
                asked["momentum"] = self.read(momentum)
            scale, asked["direction"] = self.read_direction(step, taken, momentum, room)
        claim = StepClaim(where, name, step, taken.weight, momentum)
        return self.proved(claim, asked, scale)

    def proved(self, claim: StepClaim, asked: dict[str, Tensor], scale: float) -> PendingProof:
        """Ask for signatures, and compare the step with the rule."""
        step, name = claim.step, claim.name
        read = yield asked
        after, before = read["after"], self.weights[name]
        if not np.isfinite(after).all():
            raise Mistake(
                f"{claim.where} is no longer finite; training has diverged, follow the steps "
                "before, or "
                "smaller ones"
            )
        rounding = claim.rounding

        # σ(p), σ(α ⊙ p), and σ(m) by the rule; `made` is the size of the terms of m
        p = read["gradient"] + step.l2 * before if step.l2 else read["gradient"]
        gained = read["α ⊙ p"] if "α ⊙ p" in read else step.momentum_gain * p
        known = self.memory.get(name)
        momentum = gained + (0.0 if known is None else step.momentum_decay * known)
        made = step.momentum_decay * self.made.get(name, 0.0) + size(gained)

        # the step without its part by momentum, (1 − d)σ(θ₋) − σ(θ) − σ(r) − Nσ(p), and the size of
        # its terms
        left = (1 - float(step.decoupled_decay)) * before - after
        terms = size(before) + size(after)
        if "residual" in read:
            left = left - read["residual"]
            terms = terms + size(read["residual"])
        moves = step.moves_in_numbers
        if moves is not None:
            left = left - moves[1] * p
            terms = terms + abs(moves[1]) * size(p)

        # σ(m) of the optimizer, which must be the rule's. If S is a number, it is read only if the
        # rule's own m does not explain the step: each m may have rounding from long ago
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

        # the part by momentum, σ(S ⊙ m), or with N and M, σ(M(S ⊙ m + N ⊙ p))
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
        self, step: LinearStep, taken: StepInput, momentum: Tensor | None, room: Tensor
    ) -> tuple[float, Tensor]:
        """Return σ(M(S ⊙ m + N ⊙ p)), as a number and a signature to multiply. Without momentum, m
        is α ⊙ p."""
        m = step.momentum_gain * p_of(step, taken) if momentum is None else momentum
        if (
            step.denominator is not None
            and not isinstance(step.momentum_scale, Tensor)
            and step.moves_by_momentum
        ):
            return step.momentum_scale, self.read(torch.div(m, step.denominator, out=room))
        direction = step.momentum_scale * m
        if not step.moves_by_momentum:
            direction = direction + step.gradient_scale * p_of(step, taken)
        if step.denominator is not None:
            direction = direction.div_(step.denominator)
        if step.mixing is not None:
            direction = step.mixing.of(direction)
        return 1.0, self.read(direction)


def p_of(step: LinearStep, taken: StepInput) -> Tensor:
    """Return g + λθ."""
    return taken.gradient.add(taken.weight, alpha=step.l2) if step.l2 else taken.gradient


def astray(where: str, missed: float) -> str:
    """Word the refusal of a step that its rule does not explain."""
    return (
        f"{where} is not where its optimizer's rule leads, by {missed:.2g} or more; was its "
        "gradient "
        "changed in the step, or its memory, or the weight before the step was over?"
    )


def size(signature: Numbers) -> float:
    """Return the norm of a signature, about the norm of its tensor."""
    return hypot(*signature.tolist())
