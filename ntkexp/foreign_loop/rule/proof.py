"""Proof (b): what a rule makes of the gradients is what the optimizer made of them, seen through signatures.

A step is linear in what it takes in, and so are signatures σ, 16 random sums of each tensor and what is left over:

    σ(m) ← βσ(m) + ασ(p)        σ(θ) = (1 − d)σ(θ₋) − S σ(m) − N σ(p)        p = g + λθ₋

Where S is a number for each element, σ(S ⊙ m) is read of what the optimizer remembers, and that m is held against the
sum above. All this happens at every step of somebody's training: it reads each gradient and weight once, where to form
every element anew reads and writes them several times. An error in a tensor shows with its own size, in numbers of the
size of the whole tensor. One that is smaller than 64 eps of that, as of one weight among very many, is not told from
rounding; that nobody else moved a weight between two steps is seen element by element, in `untouched`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from math import hypot, sqrt
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ntkexp.foreign_loop.kept.signature import PARTS, Signatures
from ntkexp.foreign_loop.rule.base import LinearStep
from ntkexp.mistake import Mistake

Numbers: TypeAlias = NDArray[np.float64]

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

    def remember(self, name: str, kept: Tensor) -> None:
        """An optimizer remembers this of a parameter."""
        self.memory[name] = self.read(kept)
        self.made[name] = size(self.memory[name])

    def read(self, tensor: Tensor) -> Numbers:
        """The signature of a tensor."""
        return numbers(self.signatures.of({"": tensor.detach()}))[""]

    def hold(
        self,
        where: str,
        name: str,
        step: LinearStep,
        seen: tuple[Numbers, Numbers],
        weight: Tensor,
        kept: Tensor | None,
        below: Tensor | None,
    ) -> float:
        """Refuse a step to this weight that the rule does not explain; how far it is from where that leads, relative to
        it. Signatures of its gradient and of itself are `seen`. What the optimizer has `kept` is asked where it
        decides; it is divided by `below`, which is written to."""
        (pulled, after), before, known = seen, self.weights[name], self.memory.get(name)
        rounds, scale = bound(weight), float(step.scale)
        refuse_infinite(where, after)
        pulled = pulled + step.coupled * before if step.coupled else pulled
        memory = step.intake * pulled + (0.0 if known is None else step.carry * known)
        made = step.carry * self.made.get(name, 0.0) + step.intake * size(pulled)
        left = (1 - step.lost) * before - step.ahead * pulled - after
        whole = size(before) + size(after) + step.ahead * size(pulled)
        if below is not None and kept is not None:
            memory = same(where, self.read(kept), memory, rounds * made)
            pushed = self.read(torch.div(kept, below, out=below))
        else:
            if kept is not None and not size(left - scale * memory) <= rounds * whole:
                memory = same(where, self.read(kept), memory, rounds * made)  # each with rounding of long ago
            pushed, whole = memory, whole + scale * made
        missed = size(left - scale * pushed)
        if not missed <= rounds * (whole + scale * size(pushed)):
            raise Mistake(astray(where, missed))
        self.weights[name] = after
        if kept is not None:
            self.memory[name], self.made[name] = memory, made
        return missed / whole if missed else 0.0


def same(where: str, found: Numbers, expected: Numbers, rounds: float) -> Numbers:
    """What was found, if it is what was expected but for rounding."""
    missed = size(found - expected)
    if not missed <= rounds:
        raise Mistake(astray(where, missed))
    return found


def astray(where: str, missed: float) -> str:
    """What is said of a step that its rule does not explain."""
    return (
        f"{where} is not where its optimizer's rule leads, by {missed:.2g} or more; was its gradient changed in the "
        "step, or its memory, or the weight before the step was over?"
    )


def refuse_infinite(where: str, after: Numbers) -> None:
    """Refuse a training that has diverged."""
    if not np.isfinite(after).all():
        raise Mistake(f"{where} is no longer finite; training has diverged, follow the steps before, or smaller ones")


def bound(weight: Tensor) -> float:
    """How far rounding takes signatures of tensors like this, of size one.

    >>> 64 < bound(torch.ones(512, 512)) / torch.finfo(torch.float32).eps < 73
    True
    """
    return (ROUNDING + sqrt(weight.numel() / PARTS) / LONG) * torch.finfo(weight.dtype).eps


def size(signature: Numbers) -> float:
    """The norm of a signature, which is about that of its tensor.

    >>> size(np.array([3.0, 4.0]))
    5.0
    """
    return hypot(*signature.tolist())


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
