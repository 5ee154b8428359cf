"""A step of an optimizer as a linear map, for one parameter. What it scales by is taken as given along the run:

    p = g + λθ        m ← βm + αp        θ ← (1 − d)θ − S ⊙ m − N p

g is the gradient that was consumed, m what is remembered of past ones; S may be a number for each element.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
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

    def pulled(self, gradient: Tensor, weight: Tensor) -> Tensor:
        """g + λθ."""
        return gradient + self.coupled * weight if self.coupled else gradient


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

    def step(self, group: Mapping[str, Any], state: Mapping[str, Any], times: int) -> LinearStep:
        """The step that was taken, from the optimizer's settings and state after it; the parameter had moved `times`
        times before."""
        linear, below = self.common(group, state, times), self.below(group, state)
        return linear if below is None else replace(linear, scale=below.reciprocal_().mul_(linear.scale))

    @abstractmethod
    def common(self, group: Mapping[str, Any], state: Mapping[str, Any], times: int) -> LinearStep:
        """The same, with the part of its scale that all elements have in common."""

    @abstractmethod
    def below(self, group: Mapping[str, Any], state: Mapping[str, Any], out: Tensor | None = None) -> Tensor | None:
        """What each element of the scale is divided by, where they differ; it may be written to `out`."""

    @abstractmethod
    def remembered(self, group: Mapping[str, Any], state: Mapping[str, Any]) -> Tensor | None:
        """m after the step, as the optimizer has it."""
