"""What is kept of a loop, in memory or on disk: an event for every step, and the weights before some of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from ntkexp.foreign_loop.calls import Autocast, ModelCall
from ntkexp.foreign_loop.outside import Outside
from ntkexp.foreign_loop.rule import Signed
from ntkexp.foreign_loop.step import AbstractKeeper, AbstractSteps, FollowedStep, placed
from ntkexp.foreign_loop.store.events import AbstractKeptLoop, Event, EventPlace, event_of
from ntkexp.foreign_loop.store.replay import KeepingPlan, ReplayedSteps, groups_of, memories_of
from ntkexp.kernel.record.tape import tensors
from ntkexp.mistake import Mistake
from ntkexp.records.folder import RunFolder
from ntkexp.shapes import Weights

# --- What is kept of a loop in memory; more may come.


@dataclass
class LoopInMemory(AbstractKeptLoop):
    """The events that were `taken`, of which some `begin` a step, and what was `kept` before those at the `ends` of
    segments; all of it takes `held` bytes."""

    taken: list[Event] = field(default_factory=list)
    begin: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    kept: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    held: int = 0
    left: Outside = field(default_factory=Outside)

    @property
    def outside(self) -> Outside:
        return self.left

    @property
    def events(self) -> Sequence[Event]:
        return self.taken

    @property
    def firsts(self) -> Sequence[int]:
        return self.begin

    @property
    def borders(self) -> Sequence[int]:
        return self.ends

    def put(self, event: Event) -> None:
        """Put an event behind the others."""
        place = len(self.taken)
        if not self.taken or self.taken[-1]["step"] < event["step"]:
            self.begin.append(place)
            self.ends += [place] if place in self.kept else []
        self.taken.append(event)
        self.held += sum(map(bytes_of, event["calls"])) + bytes_in([event["whole"], event["gradient"], event["after"]])

    def keep(self, content: Mapping[str, Any]) -> None:
        """Keep this before the next event."""
        self.kept[len(self.taken)] = content
        self.held += bytes_in(content)

    def weights(self, event: int, device: torch.device) -> Mapping[str, Any] | None:
        return self.kept.get(event)

    def calls(self, event: Event, device: torch.device) -> tuple[ModelCall, ...]:
        return tuple(event["calls"])

    def names(self, event: Event) -> Iterator[str]:
        return (name for call in event["calls"] for name in call.names)

    def autocasts(self, event: Event) -> Iterator[Autocast | None]:
        return (call.how.autocast for call in event["calls"])


def bytes_of(call: ModelCall) -> int:
    """What a call takes in memory."""
    return bytes_in([tensors(call.inputs), call.gradient, call.signed, list(call.how.states.values())])


def bytes_in(content: object) -> int:
    """What the tensors of some content take in memory.

    >>> bytes_in({"a": torch.ones(2), "b": [1, torch.ones(1)]})
    12
    """
    return sum(part.nbytes for part in tree_iter(content) if isinstance(part, Tensor))


# --- Steps are kept in memory, as they are on disk: some of their weights, and what the steps between took in.


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
