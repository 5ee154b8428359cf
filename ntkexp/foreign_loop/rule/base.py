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

    def memory(self, gradient: Tensor, weight: Tensor, before: Tensor | None, out: Tensor | None = None) -> Tensor:
        """m after the step, which may be written over m before it.

        >>> one = torch.ones(1)
        >>> LinearStep(0.1, carry=0.5, coupled=2.0).memory(one, 3 * one, 4 * one)
        tensor([9.])
        """
        found = torch.zeros_like(gradient) if before is None else torch.mul(before, self.carry, out=out)
        found.add_(gradient, alpha=self.intake)
        return found.add_(weight, alpha=self.intake * self.coupled) if self.coupled else found

    def pulled(self, gradient: Tensor, weight: Tensor) -> Tensor:
        """g + λθ."""
        return gradient + self.coupled * weight if self.coupled else gradient

    def after(self, gradient: Tensor, weight: Tensor, memory: Tensor, out: Tensor | None = None) -> Tensor:
        """θ after the step.

        >>> one = torch.ones(1)
        >>> LinearStep(0.1, lost=0.5).after(one, 4 * one, 10 * one)
        tensor([1.])
        """
        if isinstance(self.scale, Tensor):
            found = torch.addcmul(weight, self.scale, memory, value=-1, out=out)
        else:
            found = torch.add(weight, memory, alpha=-self.scale, out=out)
        if self.lost:
            found.sub_(weight, alpha=self.lost)
        return found.sub_(self.pulled(gradient, weight), alpha=self.ahead) if self.ahead else found


IDLE = LinearStep(scale=0.0, carry=1.0, intake=0.0)
"""A parameter that got no gradient stays where it is, and so does what is remembered of it."""


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
