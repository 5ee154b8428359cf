"""How optimizers take in gradients, as linear maps: the interface of a rule, and the proof that a rule is right for
each step, by signatures of its tensors. The rules of PyTorch's optimizers are in `torch_rules.py`.
"""

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

# --- The linear step, in the letters of `optimizer.base`, that an optimizer took with a parameter:
#
#     p = g + λθ        m ← βm + α ⊙ p        θ ← (1 − d)θ − S ⊙ m − N ⊙ p
#
# where g is the gradient that was consumed. It is read of the optimizer's settings and state, after the step and
# before it, and may depend on the gradient as well, as a step that is clipped by its own size does: what counts is that
# the same numbers S, N, α multiply the gradient of every example.


class StepInput(NamedTuple):
    """What a step of a parameter began with."""

    gradient: Tensor  # g
    weight: Tensor  # θ, before the step
    times: int  # how often the parameter had moved
    state: Mapping[str, Any]  # of the optimizer before the step: the entries that its rule needs


class AbstractOptimizerRule(ABC):
    """How optimizers of some classes take in gradients. `ntkexp.follow(…, rules=[MyRule()])` follows them.

    A rule gives the linear step of each parameter, from the settings of its group and the optimizer's state after the
    step. It is not believed: at every step it has to lead from the weights before to the weights after, and the memory
    to what the optimizer holds, to rounding; a loop that it does not explain is refused there.

    Lion moves weights by the signs of c = β₁m₋ + (1 − β₁)g, with m ← β₂m₋ + (1 − β₂)g and m₋ = (m − (1 − β₂)g)/β₂:

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
    """The classes of optimizers; one that is derived from them is taken for one of them, as far as its steps are."""

    needs: ClassVar[tuple[str, ...]] = ()
    """The entries of a parameter's state whose values before the step are needed."""

    has_effects: ClassVar[bool] = False
    """Whether the derivative of what S is divided by is known, which effects ask for."""

    rounds: ClassVar[bool] = False
    """Whether the optimizer computes in shorter numbers than the weights have; what that did is found."""

    @abstractmethod
    def step(
        self,
        group: Mapping[str, Any],
        state: Mapping[str, Any],
        taken: StepInput,
        room: Tensor | None = None,
    ) -> LinearStep:
        """The step that was taken with a parameter of this state after it. A tensor may be formed in `room`."""

    def momentum(self, group: Mapping[str, Any], state: Mapping[str, Any]) -> Tensor | None:
        """m after the step, as the optimizer has it; none where it remembers no past gradients."""
        return None

    def watched(
        self,
        group: Mapping[str, Any],
        state: Mapping[str, Any],
        taken: StepInput,
        room: Tensor | None,
    ) -> LinearStep:
        """The step as the proof in the loop needs it, where that takes less than the map itself."""
        return self.step(group, state, taken, room)


# --- Signatures: a few sums that tell weights from others, or gradients, without keeping them.
#
#     σ_b = Σ_i r_i w_{b,i},   b a sixteenth of the tensor,   r_i ~ N(0, 1) drawn once
#
# An error e in a tensor shows in σ with its own size, E‖σ(e)‖² = ‖e‖²: only by chance could it be hidden.


PARTS = 16
PIECE = 2**14  # numbers of a sum
Numbers: TypeAlias = NDArray[np.float64]
"""A signature in double precision."""


@dataclass(frozen=True)
class Signed:
    """The signatures of a step, on the processor: of what it consumed, and of the weights after it."""

    gradient: Mapping[str, Tensor]
    after: Mapping[str, Tensor]

    @classmethod
    def of(cls, gradient: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> Signed:
        """Read the signatures from a device, with one transfer."""
        read = iter(to_host([*gradient.values(), *after.values()]))
        return cls({name: next(read) for name in gradient}, {name: next(read) for name in after})


@dataclass(frozen=True)
class Signatures:
    """The numbers r that were drawn so far, by how many they are."""

    numbers: dict[tuple[int, torch.dtype, torch.device], Tensor] = field(default_factory=dict)

    def of(self, tensors: Mapping[str, Tensor]) -> dict[str, Float[Tensor, " part"]]:
        """The signature of every tensor, on the processor; what is left over from equal parts is at its end.

        >>> Signatures().of({"w": torch.ones(3)})["w"].shape
        torch.Size([4])
        """
        signatures = self.on_device(tensors)
        return dict(zip(signatures, to_host(list(signatures.values())), strict=True))

    def on_device(self, tensors: Mapping[str, Tensor]) -> dict[str, Float[Tensor, " part"]]:
        """The signature of every tensor, where the tensor lies."""
        signatures = dict[str, Tensor]()
        for name, tensor in tensors.items():
            flat = tensor.detach().reshape(-1)
            parts = max(1, min(PARTS, flat.numel()))
            wide, rest = divmod(flat.numel(), parts)
            found = signatures[name] = flat.new_zeros(parts + 1)
            rows, drawn = flat[: wide * parts].view(parts, wide), self.drawn(wide, flat)
            if wide <= PIECE:
                torch.mv(rows, drawn, out=found[:parts])
            else:  # rounding grows with the length of a sum: a long one is added up of pieces, in double precision
                pieces = (
                    torch.mv(rows[:, at : at + PIECE], drawn[at : at + PIECE])
                    for at in range(0, wide, PIECE)
                )
                found[:parts] = sum(piece.double() for piece in pieces)
            if rest:
                found[parts] = flat[wide * parts :] @ self.drawn(rest, flat)
        return signatures

    def drawn(self, count: int, like: Tensor) -> Tensor:
        key = (count, like.dtype, like.device)
        if key not in self.numbers:
            generator = stream("signature", count)
            self.numbers[key] = torch.randn(count, generator=generator, dtype=torch.float64).to(
                like
            )
        return self.numbers[key]


def distance(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """How far two signatures of the same tensors are apart, relative to the second.

    >>> distance({"w": torch.ones(4)}, {"w": torch.full((4,), 2.0)})
    0.5
    """
    sizes = [theirs.norm() for theirs in other.values()]
    gaps = [(one[name] - theirs).norm() for name, theirs in other.items()]
    norms = read_numbers([*sizes, *gaps])
    size, missed = hypot(*norms[: len(sizes)]), hypot(*norms[len(sizes) :])
    return missed / size if size else missed


def in_doubles(signature: Tensor) -> Numbers:
    """A signature in double precision, on the processor.

    >>> in_doubles(torch.ones(1))
    array([1.])
    """
    doubles: Numbers = signature.double().numpy()
    return doubles


# --- Proof (b): what a rule makes of the gradients is what the optimizer made of them, seen through signatures.
#
# A step is linear in what it takes in, and so are signatures σ, 16 random sums of each tensor and what is left
# over:
#
#     σ(m) = βσ(m₋) + σ(α ⊙ p)      σ(θ) = (1 − d)σ(θ₋) − σ(S ⊙ m) − σ(N ⊙ p) − σ(r)      p = g + λθ₋
#
# Where S, N and α are numbers, so are what they multiply signatures with: no tensor is formed.
# Where S is a number for each element, σ(S ⊙ m) is read of what the optimizer remembers, and that m is held
# against the sum above. All this happens at every step of a user's training: it reads each gradient and weight
# once, where to form every element anew reads and writes them several times. An error in a tensor shows with its
# own size, in numbers of the size of the whole tensor. One that is smaller than 64 eps of that, as of one weight
# among very many, cannot be told from rounding; that nothing else moved a weight between two steps is seen element by
# element, in `outside`.


ROUNDING = 64  # eps: of the few operations of a step, fused or not, and of short sums
LONG = 4  # of long ones, up to a piece: it grows as the root of how many numbers they have


Held: TypeAlias = Generator[dict[str, Tensor], dict[str, Numbers], float]
"""The proof of a step of a parameter: it asks for signatures by name, and returns how far the weight is off."""


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
        self.weights[name] = in_doubles(self.signatures.of({"": weight})[""])

    def remember(self, name: str, momentum: Tensor) -> None:
        """The optimizer remembers this of a parameter already."""
        self.memory[name] = in_doubles(self.signatures.of({"": momentum})[""])
        self.made[name] = size(self.memory[name])

    def read(self, tensor: Tensor) -> Tensor:
        """The signature of a tensor, where it lies."""
        return self.signatures.on_device({"": tensor})[""]

    def settle(self, waiting: Sequence[Held]) -> list[float]:
        """Finish the proofs of several parameters; each round reads what all of them ask for with one transfer."""
        missed = [0.0] * len(waiting)
        asked = {place: next(each) for place, each in enumerate(waiting)}
        while asked:
            read = iter(
                to_host([tensor for tensors in asked.values() for tensor in tensors.values()])
            )
            answers = {
                place: {key: in_doubles(next(read)) for key in asked[place]} for place in asked
            }
            asked = {}
            for place, answer in answers.items():
                try:
                    asked[place] = waiting[place].send(answer)
                except StopIteration as end:
                    missed[place] = end.value
        return missed

    def hold(
        self,
        where: str,
        name: str,
        step: LinearStep,
        seen: tuple[Tensor, Tensor],
        taken: StepInput,
        momentum: Tensor | None,
        room: Tensor,
    ) -> Held:
        """Begin the proof of a step of a weight, which `settle` finishes: it refuses a step that the rule does not
        explain, and returns how far the weight is from where the rule leads, relative to it. `seen` are σ(g) and σ(θ);
        what tensors have to be formed is formed in `room`, before this returns."""
        pulled, after = seen
        asked, scale = {"pulled": pulled, "after": after}, 1.0
        if isinstance(step.momentum_gain, Tensor):
            asked["taken in"] = self.read(step.momentum_gain * p_of(step, taken))
        if step.residual is not None:
            asked["residual"] = self.read(step.residual)
        if step.moves_in_numbers is None:
            if momentum is not None:
                asked["memory"] = self.read(momentum)
            scale, asked["direction"] = self.read_direction(step, taken, momentum, room)
        return self.proved(where, name, step, asked, scale, taken.weight, momentum)

    def proved(
        self,
        where: str,
        name: str,
        step: LinearStep,
        asked: dict[str, Tensor],
        scale: float,
        weight: Tensor,
        momentum: Tensor | None,
    ) -> Held:
        """Ask for signatures, and compare them with the rule."""
        read = yield asked
        pulled, after, before, known = (
            read["pulled"],
            read["after"],
            self.weights[name],
            self.memory.get(name),
        )
        if not np.isfinite(after).all():
            raise Mistake(
                f"{where} is no longer finite; training has diverged, follow the steps before, or smaller ones"
            )
        rounds = (ROUNDING + sqrt(min(weight.numel() / PARTS, PIECE)) / LONG) * torch.finfo(
            weight.dtype
        ).eps

        # σ(p), σ(α ⊙ p), σ(m) by the rule, and what is left of the step without it: (1 − d)σ(θ₋) − σ(θ) − σ(r)
        pulled = pulled + step.l2 * before if step.l2 else pulled
        taken_in = read["taken in"] if "taken in" in read else step.momentum_gain * pulled
        memory = taken_in + (0.0 if known is None else step.momentum_decay * known)
        made = step.momentum_decay * self.made.get(name, 0.0) + size(taken_in)
        left, whole = (1 - float(step.decoupled_decay)) * before - after, size(before) + size(after)
        if "residual" in read:
            left, whole = left - read["residual"], whole + size(read["residual"])

        # σ(S ⊙ m + N ⊙ p), of the optimizer's m, which is compared with the rule's where it decides. Of numbers that is
        # read only where the rule's does not explain the step: each may have rounding of long ago.
        moves = step.moves_in_numbers
        if moves is not None:
            left, whole = left - moves[1] * pulled, whole + abs(moves[1]) * size(pulled)
        explained = (
            moves is not None
            and step.residual is None
            and size(left - moves[0] * memory) <= rounds * whole
        )
        if momentum is not None and not explained:
            if "memory" not in read:
                read |= yield {"memory": self.read(momentum)}
            if not (missed := size(read["memory"] - memory)) <= rounds * made:
                raise Mistake(astray(where, missed))
            memory = read["memory"]
        if moves is not None:
            pushed, whole = moves[0] * memory, whole + abs(moves[0]) * made
        else:
            pushed = scale * read["direction"]
        missed = size(left - pushed)
        if not missed <= rounds * (whole + size(pushed)):
            raise Mistake(astray(where, missed))
        self.weights[name] = after
        if momentum is not None:
            self.memory[name], self.made[name] = memory, made
        return missed / whole if missed else 0.0

    def read_direction(
        self, step: LinearStep, taken: StepInput, momentum: Tensor | None, room: Tensor
    ) -> tuple[float, Tensor]:
        """σ(M(S ⊙ m + N ⊙ p)), as a number and the signature it multiplies; without a memory m is α ⊙ p."""
        m = step.momentum_gain * p_of(step, taken) if momentum is None else momentum
        if (
            step.denominator is not None
            and not isinstance(step.momentum_scale, Tensor)
            and step.moves_by_momentum
        ):
            return step.momentum_scale, self.read(torch.div(m, step.denominator, out=room))
        whole = step.momentum_scale * m
        if not step.moves_by_momentum:
            whole = whole + step.gradient_scale * p_of(step, taken)
        whole = whole if step.denominator is None else whole.div_(step.denominator)
        return 1.0, self.read(whole if step.mixing is None else step.mixing.of(whole))


def p_of(step: LinearStep, taken: StepInput) -> Tensor:
    """g + λθ."""
    return taken.gradient.add(taken.weight, alpha=step.l2) if step.l2 else taken.gradient


def astray(where: str, missed: float) -> str:
    """What is said of a step that its rule does not explain."""
    return (
        f"{where} is not where its optimizer's rule leads, by {missed:.2g} or more; was its gradient changed in the "
        "step, or its memory, or the weight before the step was over?"
    )


def size(signature: Numbers) -> float:
    """The norm of a signature, which is about that of its tensor."""
    return hypot(*signature.tolist())
