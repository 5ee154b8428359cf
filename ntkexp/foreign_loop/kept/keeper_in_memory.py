"""Steps are kept in memory, as they are on disk: some of their weights, and what the steps between took in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

import torch
from torch import Tensor, nn

from ntkexp.foreign_loop.keeper import AbstractKeeper, placed
from ntkexp.foreign_loop.kept.event import EventPlace, event_of
from ntkexp.foreign_loop.kept.loop_in_memory import LoopInMemory
from ntkexp.foreign_loop.kept.memories import groups_of, memories_of
from ntkexp.foreign_loop.kept.plan import KeepingPlan
from ntkexp.foreign_loop.kept.replayed_steps import ReplayedSteps
from ntkexp.foreign_loop.kept.signature import Signed
from ntkexp.foreign_loop.outside import Outside
from ntkexp.foreign_loop.step import FollowedStep
from ntkexp.foreign_loop.steps import AbstractSteps
from ntkexp.mistake import Mistake
from ntkexp.records.folder import RunFolder
from ntkexp.shapes import Weights


@dataclass
class KeeperInMemory(AbstractKeeper):
    """All steps are held, up to `memory_gb`."""

    output: str | int | None
    every: int | None
    memory_gb: float
    kept: LoopInMemory = field(default_factory=LoopInMemory)
    moved: frozenset[str] = frozenset()
    latest: Weights = field(default_factory=dict)
    since: int = 0  # the step before which weights were kept last
    waiting: set[int] = field(default_factory=set)  # the optimizers that have not moved since then

    @property
    def folder(self) -> RunFolder | None:
        return None

    @property
    def count(self) -> int:
        return len(self.kept.firsts)

    def steps_of(self, module: nn.Module) -> AbstractSteps:
        return ReplayedSteps(self.kept, module, self.output, [type(each).__name__ for each in self.optimizers])

    def begin(self, weights: Weights, optimizers: Sequence[torch.optim.Optimizer], names: dict[int, str]) -> None:
        self.optimizers, self.names = optimizers, names
        self.moved = frozenset(weights)  # whatever comes next is a step of its own
        size = sum(weight.nbytes for weight in weights.values())
        self.plan = KeepingPlan.of(self.every, size, size, inf, self.memory_gb)
        self.keep(weights)

    def take(self, step: FollowedStep, which: int, after: Weights, signed: Signed) -> None:
        index, self.moved = placed(step, self.moved, self.count)
        taken = EventPlace(index, which, groups_of(self.optimizers[which], self.names))
        event = event_of(step, taken, signed)
        self.kept.put({**event, "calls": step.calls, "whole": cloned(event["whole"])})
        self.latest = after
        self.refuse_too_much(index)
        self.waiting.discard(which)
        if not self.waiting and self.plan.due(self.count - self.since):
            self.keep(after)

    def keep(self, weights: Weights) -> None:
        """Keep the weights, and what the optimizers remember."""
        self.kept.keep({"weights": cloned(weights), "memories": memories_of(self.optimizers, self.names)})
        self.since, self.waiting = self.count, set(range(len(self.optimizers)))

    def end(self, outside: Outside, *, whole: bool) -> None:
        self.kept.left = outside
        if self.latest:  # what the optimizers remember by now may be of a step that was refused
            self.kept.keep({"weights": cloned(self.latest), "memories": None, "ended": None})

    def refuse_too_much(self, index: int) -> None:
        """Refuse to hold more than was allowed."""
        if self.kept.held > 1e9 * self.memory_gb:
            raise Mistake(
                f"step {index}: the steps followed so far take more than memory_gb={self.memory_gb:g}, about "
                f"{self.kept.held / 1e6 / self.count:.3g} MB each; raise it, follow fewer, or give a folder, to=…"
            )


def cloned(weights: Mapping[str, Any]) -> dict[str, Tensor]:
    """Copies of some weights, or gradients."""
    return {name: weight.clone() for name, weight in weights.items()}
