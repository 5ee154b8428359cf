"""Steps are stored in memory, as they are on disk: some of their weights, and what the steps between took in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from ntkexp.foreign_loop.call import Autocast, ModelCall
from ntkexp.foreign_loop.outside import Outside
from ntkexp.foreign_loop.rule import Signed
from ntkexp.foreign_loop.step import AbstractSteps, AbstractStore, FollowedStep, placed
from ntkexp.foreign_loop.store.files import Event, event_of
from ntkexp.foreign_loop.store.replay import CheckpointPlan, ReplayedSteps, optimizer_states
from ntkexp.foreign_loop.torch_rules import KnownOptimizer
from ntkexp.kernel.record.tape import tensors
from ntkexp.mistake import Mistake
from ntkexp.shapes import Weights


@dataclass
class LoopInMemory:
    """`contents` are those of checkpoints, by the event after them; all of it takes `nbytes`."""

    events: list[Event] = field(default_factory=list)
    firsts: list[int] = field(default_factory=list)
    checkpoints: list[int] = field(default_factory=list)
    outside: Outside = field(default_factory=Outside)
    contents: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    nbytes: int = 0
    processes: int = 1

    def refresh(self) -> None:
        """Nothing can have come that is not here."""

    def add(self, event: Event) -> None:
        place = len(self.events)
        if not self.events or self.events[-1]["step"] < event["step"]:
            self.firsts.append(place)
            self.checkpoints += [place] if place in self.contents else []
        self.events.append(event)
        for call in event["calls"]:
            states = list(call.how.states.values())
            self.nbytes += bytes_in(
                [tensors(call.inputs), call.gradient, call.signed, states, call.statistics]
            )
        self.nbytes += bytes_in([event["whole"], event["gradient"], event["after"]])

    def add_checkpoint(self, content: Mapping[str, Any]) -> None:
        """Add a checkpoint before the next event."""
        self.contents[len(self.events)] = content
        self.nbytes += bytes_in(content)

    def checkpoint(self, event: int, device: torch.device) -> Mapping[str, Any] | None:
        return self.contents.get(event)

    def calls(self, event: Event, device: torch.device) -> tuple[ModelCall, ...]:
        return tuple(event["calls"])

    def names_and_casts(self, event: Event) -> Iterator[tuple[tuple[str, ...], Autocast | None]]:
        return ((call.names, call.how.autocast) for call in event["calls"])


def bytes_in(content: object) -> int:
    """What the tensors of some content take in memory.

    >>> bytes_in({"a": torch.ones(2), "b": [1, torch.ones(1)]})
    12
    """
    return sum(part.nbytes for part in tree_iter(content) if isinstance(part, Tensor))


@dataclass
class MemoryStore(AbstractStore):
    """All steps are held, up to `memory_gb`."""

    known: Sequence[KnownOptimizer]
    output: str | int | None
    every: int | None
    memory_gb: float
    before: int = 0  # steps of the loop, which are not here
    held: int = 0  # bytes, elsewhere
    loop: LoopInMemory = field(default_factory=LoopInMemory)
    moved: frozenset[str] = frozenset()  # by the latest step, as far as it was taken
    latest: Weights = field(default_factory=dict)
    checkpoint_at: int = 0  # the step before which the latest checkpoint is
    waiting: set[int] = field(default_factory=set)  # the optimizers that have not moved since then

    @property
    def count(self) -> int:
        return self.before + len(self.loop.firsts)

    def steps_of(self, module: nn.Module, *, same_kernels: bool) -> AbstractSteps:
        return ReplayedSteps(self.loop, module, self.output, self.known, same_kernels)

    def begin(
        self, weights: Weights, optimizers: Sequence[torch.optim.Optimizer], names: dict[int, str]
    ) -> None:
        self.optimizers, self.names = optimizers, names
        self.moved = frozenset(weights)  # whatever comes next is a step of its own
        size = sum(weight.nbytes for weight in weights.values())
        self.plan = CheckpointPlan.of(self.every, size, size, inf, self.memory_gb)
        self.add_checkpoint(weights)

    def add(self, step: FollowedStep, which: int, after: Weights, signed: Signed) -> None:
        index, self.moved = placed(step, self.moved, self.count)
        event = event_of(step, index, which, self.optimizers[which], self.names, signed)
        self.loop.add({**event, "calls": step.calls, "whole": cloned(event["whole"])})
        self.latest = after
        if self.held + self.loop.nbytes > 1e9 * self.memory_gb:
            each = self.loop.nbytes / 1e6 / len(self.loop.firsts)
            raise Mistake(
                f"step {index}: the steps followed so far take more than memory_gb={self.memory_gb:g}, about "
                f"{each:.3g} MB each; raise it, follow fewer, or give a folder, to=…"
            )
        self.waiting.discard(which)
        if not self.waiting and self.count - self.checkpoint_at >= self.plan.every:
            self.add_checkpoint(after)

    def add_checkpoint(self, weights: Weights) -> None:
        memories = optimizer_states(self.optimizers, self.names)
        self.loop.add_checkpoint({"weights": cloned(weights), "memories": memories})
        self.checkpoint_at, self.waiting = self.count, set(range(len(self.optimizers)))

    def end(self, outside: Outside, *, whole: bool) -> None:
        self.loop.outside = outside
        if self.latest:  # the optimizers' states by now may be of a step that was refused
            self.loop.add_checkpoint(
                {"weights": cloned(self.latest), "memories": None, "ended": None}
            )


def cloned(weights: Mapping[str, Any]) -> dict[str, Tensor]:
    """Copies of some weights, or gradients."""
    return {name: weight.clone() for name, weight in weights.items()}
