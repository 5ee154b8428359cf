"""Proof (b): what a rule makes of the gradient is what the optimizer made of it, in its memory and in the weights.

It is read at every step of somebody's training, so it is quick first: no element is off by more than rounding of the
typical one. Where one is, every element is held against the sizes of the numbers that it was made of.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ntkexp.foreign_loop.rule.base import LinearStep
from ntkexp.mistake import Mistake

ROUNDING = 64  # eps: of the few operations of a step, fused or not


@dataclass
class RuleProof:
    """`memory` is what the optimizer remembered after the latest step of a parameter, by its name; `moved` says how
    often it has moved."""

    memory: dict[str, Tensor] = field(default_factory=dict)
    moved: dict[str, int] = field(default_factory=dict)

    def hold(
        self,
        place: str,
        name: str,
        step: LinearStep,
        gradient: Tensor,
        ends: tuple[Tensor, Tensor],
        kept: Tensor | None,
    ) -> float:
        """Refuse a step between these weights, or a memory `kept` after it, that the rule does not explain; how far
        the weights are from where it leads, relative to them."""
        (before, after), known = ends, self.memory.get(name)
        memory = step.memory(gradient, before, known)
        missed = refuse_unexplained(
            place, after, step.after(gradient, before, memory), lambda: sizes(step, gradient, before, known)[1]
        )
        if kept is not None:
            refuse_unexplained(place, kept, memory, lambda: sizes(step, gradient, before, known)[0])
            self.memory[name] = kept.detach().clone() if known is None else known.copy_(kept.detach())
        return missed


def sizes(step: LinearStep, gradient: Tensor, before: Tensor, known: Tensor | None) -> tuple[Tensor, Tensor]:
    """The sizes of what memory and weights were made of, element by element: the same step of absolute values.

    >>> one = torch.ones(1)
    >>> sizes(LinearStep(0.1, carry=0.5), -one, one, 2 * one)
    (tensor([2.]), tensor([1.2000]))
    """
    memory = step.memory(gradient.abs(), before.abs(), None if known is None else known.abs())
    pulled = step.pulled(gradient.abs(), before.abs())
    return memory, before.abs() + step.scale * memory + step.ahead * pulled


def refuse_unexplained(place: str, found: Tensor, expected: Tensor, size: Callable[[], Tensor]) -> float:
    """Refuse numbers that are not where a rule leads, where rounding of numbers of this size does not explain it; how
    far they are from there, relative to them. What was expected is overwritten."""
    if not found.numel():
        return 0.0
    bound, typical = ROUNDING * torch.finfo(found.dtype).eps, mean_size(found.detach())
    off = expected.sub_(found.detach())
    if (most := max(map(abs, map(float, off.aminmax())))) <= bound * typical:
        return most / typical if most else 0.0
    if not found.isfinite().all():
        raise Mistake(f"{place} is no longer finite; training has diverged, follow the steps before, or smaller ones")
    sized = size()
    beyond = off.abs_().sub_(sized, alpha=bound)
    if not float(beyond.max()) <= 0:
        raise Mistake(
            f"{place} is not where its optimizer's rule leads, by {float(beyond.max()):.2g} or more; was its gradient "
            "changed in the step, or the weight right after?"
        )
    return most / float(sized.max())


def mean_size(found: Tensor) -> float:
    """The root of the mean square, which is no larger than the largest.

    >>> mean_size(torch.tensor([3.0, -3.0]))
    3.0
    """
    flat = found.flatten()
    return math.sqrt(float(flat @ flat) / len(flat))
