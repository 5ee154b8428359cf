"""A store in memory: each step of each optimizer (an `Event`),
and a checkpoint every few steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from ntkexp.capacity import MemoryBudget
from ntkexp.foreign_loop.call import Autocast, ModelCall
from ntkexp.foreign_loop.cross_entropy import CrossEntropyGradient
from ntkexp.foreign_loop.known_optimizers import KnownOptimizer
from ntkexp.foreign_loop.outside import Outside
from ntkexp.foreign_loop.signatures import Signed
from ntkexp.foreign_loop.step import (
    AbstractSteps,
    AbstractStore,
    FollowedStep,
    step_index,
)
from ntkexp.foreign_loop.store.checkpoints import (
    CheckpointPlan,
    cloned,
    optimizer_states,
)
from ntkexp.foreign_loop.store.files import Event, event_of
from ntkexp.foreign_loop.store.replay import ReplayedSteps
from ntkexp.kernel.record.tape import tensors
from ntkexp.model.functional import Output
from ntkexp.shapes import Weights


@dataclass
class LoopInMemory:
    """A loop stored in memory. This class implements `files.StoredLoop`."""

    events: list[Event] = field(default_factory=list)
    firsts: list[int] = field(default_factory=list)
    checkpoints: list[int] = field(default_factory=list)
    outside: Outside = field(default_factory=Outside)
    # contents of the checkpoints, by event number
    contents: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    nbytes: int = 0
    processes: int = 1

    def refresh(self) -> None:
        return

    def add(self, event: Event) -> None:
        """Add an event, and update `firsts`, `checkpoints` and `nbytes`."""
        index = len(self.events)
        begins_step = not self.events or self.events[-1]["step"] < event["step"]
        if begins_step:
            self.firsts.append(index)
            if index in self.contents:
                self.checkpoints.append(index)
        self.events.append(event)
        for key in ("whole", "gradient", "after"):
            self.nbytes += sum(tensor.nbytes for tensor in event[key].values())
        for call in event["calls"]:
            self.nbytes += sum(tensor.nbytes for tensor in tensors_of(call))

    def add_checkpoint(self, content: Mapping[str, Any]) -> None:
        """Add a checkpoint of the present state, which is
        the state before the next event."""
        self.contents[len(self.events)] = content
        self.nbytes += bytes_in(content)

    def checkpoint(self, event: int, device: torch.device) -> Mapping[str, Any] | None:
        return self.contents.get(event)

    def calls(self, event: Event, device: torch.device) -> tuple[ModelCall, ...]:
        return tuple(event["calls"])

    def names_and_casts(
        self, event: Event
    ) -> Iterator[tuple[tuple[str, ...], Autocast | None]]:
        return ((call.names, call.circumstances.autocast) for call in event["calls"])


def tensors_of(call: ModelCall) -> Iterator[Tensor]:
    """Yield all tensors that a recorded call holds."""
    yield from tensors(call.inputs)
    yield from call.circumstances.states.values()
    if isinstance(call.gradient, CrossEntropyGradient):
        yield from call.gradient.content.values()
    for tensor in (call.gradient, call.fingerprint):
        if isinstance(tensor, Tensor):
            yield tensor
    for statistics in call.statistics or ():
        yield from statistics.values()
    yield from (call.weights or {}).values()


def bytes_in(content: object) -> int:
    """Return the total bytes of all tensors in a nested structure.

    >>> bytes_in({"a": torch.ones(2), "b": [1, torch.ones(1)]})
    12
    """
    return sum(part.nbytes for part in tree_iter(content) if isinstance(part, Tensor))


@dataclass
class MemoryStore(AbstractStore):
    """A store of steps in memory."""

    known: Sequence[KnownOptimizer]
    output: Output
    every: int | None
    budget: MemoryBudget
    before: int = 0  # number of steps before the first stored step
    loop: LoopInMemory = field(default_factory=LoopInMemory)
    # parameters that the latest step has moved so far
    moved: frozenset[str] = frozenset()
    latest: Weights = field(default_factory=dict)
    checkpoint_at: int = 0  # number of steps at the latest checkpoint
    # indices of the optimizers that have taken no step since the latest checkpoint
    waiting: set[int] = field(default_factory=set)

    @property
    def count(self) -> int:
        return self.before + len(self.loop.firsts)

    def steps_of(self, module: nn.Module, *, same_kernels: bool) -> AbstractSteps:
        return ReplayedSteps(self.loop, module, self.output, self.known, same_kernels)

    def begin(
        self,
        weights: Weights,
        optimizers: Sequence[torch.optim.Optimizer],
        names: dict[int, str],
    ) -> None:
        self.optimizers = optimizers
        self.names = names
        self.moved = frozenset(weights)  # so that the next event begins a new step
        size = sum(weight.nbytes for weight in weights.values())
        self.plan = CheckpointPlan.of(self.every, size, size, inf, self.budget)
        self.add_checkpoint(weights)

    def add(
        self, step: FollowedStep, which: int, after: Weights, signed: Signed
    ) -> None:
        index, self.moved = step_index(step, self.moved, self.count)
        event = event_of(step, index, which, self.optimizers[which], self.names, signed)
        copies = {key: cloned(event[key]) for key in ("whole", "admitted")}
        self.loop.add({**event, "calls": step.calls, **copies})
        self.latest = after
        remedy = "follow fewer steps, or give a folder, to=…"
        self.budget.require(
            self.loop.nbytes, f"the followed steps up to step {index}", remedy
        )
        self.waiting.discard(which)
        if not self.waiting and self.count - self.checkpoint_at >= self.plan.every:
            self.add_checkpoint(after)

    def add_checkpoint(self, weights: Weights) -> None:
        """Copy the weights and the states of the optimizers."""
        states = optimizer_states(self.optimizers, self.names)
        self.loop.add_checkpoint({"weights": cloned(weights), "memories": states})
        self.checkpoint_at = self.count
        self.waiting = set(range(len(self.optimizers)))

    def end(self, outside: Outside, *, whole: bool) -> None:
        self.loop.outside = outside
        if self.latest:
            # omit the optimizer states, because a step that raised an error may have
            # changed them
            content = {"weights": cloned(self.latest), "memories": None, "ended": None}
            self.loop.add_checkpoint(content)
