"""Proof (b): what a rule makes of the gradients is what the optimizer made of them.

The memory is summed here too, of the gradients alone: one that was changed by hand shows in the step that uses it. All
this happens at every step of somebody's training, so it is quick first: no row is off by more than rounding of the
typical element. Where one is, every element is held against the sizes of the numbers that it was made of.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ntkexp.foreign_loop.rule.base import LinearStep
from ntkexp.mistake import Mistake

ROUNDING = 64  # eps: of the few operations of a step, fused or not
FEW = 4096  # numbers that tell of what size the others are


@dataclass
class RuleProof:
    """`memory` is what the optimizer remembers after the latest step of a parameter, by its name; `moved` says how
    often it has moved. `place` is where differences are formed: fresh memory for each costs more than they do."""

    memory: dict[str, Tensor] = field(default_factory=dict)
    moved: dict[str, int] = field(default_factory=dict)
    place: dict[tuple[torch.dtype, torch.device], Tensor] = field(default_factory=dict)

    def hold(
        self,
        where: str,
        name: str,
        step: LinearStep,
        gradient: Tensor,
        ends: tuple[Tensor, Tensor],
        kept: Tensor | None,
    ) -> float:
        """Refuse a step between these weights that the rule does not explain; how far they are from where it leads,
        relative to them. What the optimizer has `kept` is asked where it decides."""
        (before, after), known = ends, self.memory.get(name)
        memory, there = step.memory(gradient, before, known, out=known), self.there(before)
        if kept is not None:
            self.memory[name] = memory
        missed, typical = off(after, step.after(gradient, before, memory, out=there)), root_mean_square(after)
        if missed <= bound(after) * typical < math.inf:
            return missed / typical if missed else 0.0
        made, reached = sizes(step, gradient, before, memory)
        if kept is not None:  # two sums of the same, each with its own rounding of what came in long ago
            refuse_unexplained(where, kept, there.copy_(memory), made.clamp_(min=float(made.mean())))
            memory.copy_(kept)
        return refuse_unexplained(where, after, step.after(gradient, before, memory, out=there), reached)

    def there(self, like: Tensor) -> Tensor:
        """The place for a difference of this shape."""
        if like.numel() <= FEW:
            return torch.empty_like(like)
        key = (like.dtype, like.device)
        if key not in self.place or self.place[key].numel() < like.numel():
            self.place[key] = torch.empty_like(like).flatten()
        return self.place[key][: like.numel()].view(like.shape)


def sizes(step: LinearStep, gradient: Tensor, before: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    """The sizes of what memory and weights were made of, element by element; what was in memory before is no larger
    than what is in it now, and what came in.

    >>> one = torch.ones(1)
    >>> sizes(LinearStep(0.1, carry=0.5), -one, one, 2 * one)
    (tensor([4.]), tensor([1.4000]))
    """
    pulled = step.pulled(gradient.abs(), before.abs())
    made = memory.abs() + 2 * step.intake * pulled
    return made, before.abs() + step.scale * made + step.ahead * pulled


def bound(found: Tensor) -> float:
    """How far rounding takes numbers of size one."""
    return ROUNDING * torch.finfo(found.dtype).eps


def off(found: Tensor, expected: Tensor) -> float:
    """No element is further than this from what was expected, which is overwritten by the difference."""
    return largest_row(expected.sub_(found)) if found.numel() else 0.0


def refuse_unexplained(where: str, found: Tensor, expected: Tensor, size: Tensor) -> float:
    """Refuse numbers that are not where a rule leads, where rounding of numbers of this size does not explain it; how
    far they are from there, relative to them."""
    if not found.isfinite().all():
        raise Mistake(f"{where} is no longer finite; training has diverged, follow the steps before, or smaller ones")
    missed = expected.sub_(found).abs_()
    beyond = float((missed - bound(found) * size).max())
    if not beyond <= 0:
        raise Mistake(
            f"{where} is not where its optimizer's rule leads, by {beyond:.2g} or more; was its gradient changed in "
            "the step, or its memory, or the weight after it, or by a write to its .data?"
        )
    return float(missed.max()) / float(size.max())


def largest_row(values: Tensor) -> float:
    """The largest norm of a row, than which no element is larger.

    >>> largest_row(torch.tensor([[3.0, 4.0], [1.0, -1.0]]))
    5.0
    """
    if values.dim() < 2:
        return float(torch.linalg.vector_norm(values))
    return float(torch.linalg.vector_norm(values.flatten(1), dim=1).amax())


def root_mean_square(values: Tensor) -> float:
    """The root of the mean square of the first few, which is no larger than the largest.

    >>> root_mean_square(torch.tensor([3.0, -3.0]))
    3.0
    """
    few = values.flatten()[:FEW]
    return math.sqrt(float(few @ few) / max(1, len(few)))
