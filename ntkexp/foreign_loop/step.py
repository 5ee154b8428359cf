"""A step as it was followed: where it began, what it consumed, and how its optimizer took that in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ntkexp.foreign_loop.model_call import ModelCall
from ntkexp.foreign_loop.rule.base import IDLE, LinearStep
from ntkexp.shapes import Weights


@dataclass(frozen=True)
class FollowedStep:
    """The calls whose gradients it consumed, the gradient itself, and the linear step of every parameter that some
    optimizer moved, with the optimizer's settings; those that are `silent` got no gradient."""

    index: int
    calls: tuple[ModelCall, ...]
    start: Weights
    gradient: Weights
    linear: Mapping[str, LinearStep]
    silent: frozenset[str]
    settings: Mapping[str, Mapping[str, Any]]
    rule_error: float  # proof (b): how far the weights are from where the rule leads, relative to them

    def joined(self, other: FollowedStep) -> FollowedStep:
        """This step and one of another optimizer that took in the same gradients, as one."""
        return replace(
            self,
            linear={**self.linear, **other.linear},
            settings={**self.settings, **other.settings},
            gradient=self.gradient | other.gradient,
            silent=self.silent | other.silent,
            rule_error=max(self.rule_error, other.rule_error),
        )

    @property
    def heard(self) -> list[str]:
        """The parameters whose gradients were consumed."""
        return [name for name in self.linear if name not in self.silent]

    def of(self, name: str) -> LinearStep:
        """How a parameter moved."""
        return self.linear.get(name, IDLE)

    @property
    def scale(self) -> Weights:
        """S, a number for every weight."""
        return {name: self.spread(weight, self.of(name).scale) for name, weight in self.start.items()}

    @property
    def carry(self) -> Mapping[str, float]:
        """β of every parameter."""
        return {name: self.of(name).carry for name in self.start}

    @property
    def intake(self) -> Mapping[str, float]:
        """α of every parameter."""
        return {name: self.of(name).intake for name in self.start}

    @property
    def ahead(self) -> Mapping[str, float]:
        """N of every parameter."""
        return {name: self.of(name).ahead for name in self.start}

    @property
    def coupled(self) -> Weights | None:
        """λθ, if any."""
        return self.share({name: self.of(name).coupled for name in self.start})

    @property
    def lost(self) -> Weights | None:
        """dθ, if any."""
        return self.share({name: self.of(name).lost for name in self.start})

    def share(self, factors: Mapping[str, float]) -> Weights | None:
        """Each weight times its factor, unless all of these are zero."""
        return {name: factors[name] * weight for name, weight in self.start.items()} if any(factors.values()) else None

    def spread(self, weight: Tensor, scale: Tensor | float) -> Tensor:
        """A scale in the shape of its weight."""
        return scale if isinstance(scale, Tensor) else torch.full_like(weight, scale)
