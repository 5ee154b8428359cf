"""What is accumulated along a path, and when kernels are kept."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from ntkexp.component import Component
from ntkexp.path.rule.base import AbstractRule, Piece


class Path(Component):
    """The rules that read each step, where they are read, and the schedule of kernel snapshots."""

    rule: tuple[AbstractRule, ...]
    nodes: PositiveInt = 2
    pieces: PositiveInt = 1
    romberg: NonNegativeInt = 0
    probes: tuple[Literal["train", "probe", "test"], ...] = ("train", "probe", "test")
    error_samples: NonNegativeInt = 16
    schedule: Literal["log"] | PositiveInt | tuple[NonNegativeInt, ...] = "log"
    count: int = Field(16, ge=2)

    def quadrature(self, rule: AbstractRule) -> tuple[Piece, ...]:
        """How this rule reads a step under these settings."""
        return rule.quadrature(self.nodes, self.pieces, self.romberg)

    def detail(self, rule: AbstractRule) -> str:
        """The settings that concern this rule."""
        return rule.detail(self.nodes, self.pieces, self.romberg)

    def snapshots(self, steps: int) -> tuple[int, ...]:
        """The steps at which the tangent kernel is kept; the first and the last are always among them.

        >>> Path(rule=(), count=5).snapshots(1000)
        (0, 1, 10, 100, 1000)
        >>> Path(rule=(), schedule=40).snapshots(100)
        (0, 40, 80, 100)
        """
        if self.schedule == "log":
            positions = [k / (self.count - 2) for k in range(self.count - 1)] if self.count > 2 else [1.0]
            chosen = {round(steps**position) for position in positions}
        elif isinstance(self.schedule, int):
            chosen = set(range(0, steps, self.schedule))
        else:
            chosen = {step for step in self.schedule if step <= steps}
        return tuple(sorted(chosen | {0, steps}))
