"""A step of an optimizer as a linear map, for one parameter. What it scales by is taken as given along the run:

    p = g + λθ        m ← βm + αp        θ ← (1 − d)θ − S ⊙ m − N p

g is the gradient that was consumed, m what is remembered of past ones; S may be a number for each element.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ntkexp.mistake import Mistake


@dataclass(frozen=True)
class LinearStep:
    """The coefficients of a step: of what is remembered, of this gradient, and of the weights."""

    scale: Tensor | float  # S
    ahead: float = 0.0  # N
    carry: float = 0.0  # β
    intake: float = 1.0  # α
    coupled: float = 0.0  # λ
    lost: float = 0.0  # d

    def memory(self, gradient: Tensor, weight: Tensor, before: Tensor | None) -> Tensor:
        """m after the step.

        >>> one = torch.ones(1)
        >>> LinearStep(0.1, carry=0.5, coupled=2.0).memory(one, 3 * one, 4 * one)
        tensor([9.])
        """
        taken = self.intake * self.pulled(gradient, weight)
        return taken if before is None else self.carry * before + taken

    def pulled(self, gradient: Tensor, weight: Tensor) -> Tensor:
        """g + λθ."""
        return gradient + self.coupled * weight if self.coupled else gradient

    def after(self, gradient: Tensor, weight: Tensor, memory: Tensor) -> Tensor:
        """θ after the step.

        >>> one = torch.ones(1)
        >>> LinearStep(0.1, lost=0.5).after(one, 4 * one, 10 * one)
        tensor([1.])
        """
        return (1 - self.lost) * weight - self.scale * memory - self.ahead * self.pulled(gradient, weight)


IDLE = LinearStep(scale=0.0, carry=1.0, intake=0.0)
"""A parameter that got no gradient stays where it is, and so does what is remembered of it."""


ROUNDING = 64  # eps: of the few operations of a step, fused or not


def refuse_unexplained(place: str, found: Tensor, expected: Tensor, size: Tensor) -> float:
    """Refuse numbers that are not where a rule leads, where rounding of numbers of this size does not explain it; how
    far they are from there, relative to the largest."""
    difference = (found - expected).abs()
    beyond = difference - ROUNDING * torch.finfo(found.dtype).eps * size
    if beyond.numel() and not float(beyond.max()) <= 0:
        raise Mistake(
            f"{place} is not where its optimizer's rule leads, by {float(beyond.max()):.2g} or more; was its gradient "
            "changed in the step, or the weight right after?"
        )
    return float(difference.max()) / (float(size.max()) or 1.0) if beyond.numel() else 0.0


class AbstractRule(ABC):
    """An optimizer is understood by this, if it is of one of these very classes."""

    kinds: ClassVar[tuple[type[torch.optim.Optimizer], ...]]
    unknown: ClassVar[tuple[str, ...]] = ("maximize", "differentiable")  # settings that nobody has thought through

    def refuse(self, group: Mapping[str, Any], kind: str) -> None:
        """Refuse settings under which the rule would be another one."""
        for name in self.unknown:
            if group.get(name):
                raise Mistake(f"{kind} with {name}={group[name]}: its steps are not followed; train without {name}")

    @abstractmethod
    def step(self, group: Mapping[str, Any], state: Mapping[str, Any], times: int) -> LinearStep:
        """The step that was taken, from the optimizer's settings and state after it; the parameter had moved `times`
        times before."""

    @abstractmethod
    def remembered(self, group: Mapping[str, Any], state: Mapping[str, Any]) -> Tensor | None:
        """m after the step, as the optimizer has it."""
