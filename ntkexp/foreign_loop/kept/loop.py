"""What is kept of a loop, in memory or on disk: an event for every step, and the weights before some of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter, tree_map_only

from ntkexp.foreign_loop.calls import Autocast, Circumstances, ModelCall, digests
from ntkexp.foreign_loop.kept.shards import Shards
from ntkexp.foreign_loop.kept.trace_folder import TraceFolder
from ntkexp.foreign_loop.outside import Outside
from ntkexp.foreign_loop.rule import Signed
from ntkexp.foreign_loop.step import FollowedStep
from ntkexp.kernel.record.tape import map_tensors, tensors
from ntkexp.optimizer.base import IDLE
from ntkexp.records.atomic import Damaged
from ntkexp.shapes import Inputs

# --- What is kept of a step of one optimizer: what it took in, its settings, and signatures of all that is large.


@dataclass(frozen=True)
class EventPlace:
    """Which step it was, in order; the `which`-th optimizer's; and its groups of parameters, by their names."""

    index: int
    which: int
    groups: Sequence[Sequence[str]]


def event_of(step: FollowedStep, taken: EventPlace, signed: Signed) -> dict[str, Any]:
    """What is to be kept of a step besides its calls; gradients in it are those that the loop has."""
    heard = set(step.heard)
    stale = any(call.at != taken.index for call in step.calls)
    left = {name: part for name, part in step.gradient.items() if name not in heard and bool(part.any())}
    groups = [{"names": list(names), "settings": dict(step.settings[names[0]])} for names in taken.groups if names]
    return {
        "step": taken.index,
        "optimizer": taken.which,
        "groups": groups,
        "idle": [name for name, linear in step.linear.items() if linear is IDLE],
        "silent": sorted(step.silent),
        "gradient": {name: signed.gradient[name] for name in step.heard},
        "whole": step.gradient if stale else left,
        "after": {name: signed.after[name] for name in step.linear},
        "rule_error": step.rule_error,
    }


@dataclass
class KnownCall:
    """A call that was kept, and the gradient that was kept of it."""

    key: int
    inputs: Inputs
    gradient: Tensor | None = None


@dataclass
class EventWriter:
    """Makes plain content of steps; a call and its gradient are part of the first step that uses them."""

    files: TraceFolder
    known: dict[int, KnownCall] = field(default_factory=dict)
    calls: int = 0

    def event(self, step: FollowedStep, taken: EventPlace, signed: Signed) -> dict[str, object]:
        """What is to be kept of a step."""
        used = [self.call(call) for call in step.calls]
        self.known = {id(call.inputs): self.known[id(call.inputs)] for call in step.calls}
        return {**event_of(step, taken, signed), "calls": used}

    def call(self, call: ModelCall) -> dict[str, object]:
        """What is to be kept of a call that is not kept already."""
        found = self.known.get(id(call.inputs))
        kept: dict[str, object] = {}
        if found is None:
            found = self.known[id(call.inputs)] = KnownCall(self.calls, call.inputs)
            self.calls += 1
            named = {} if call.called is None else {"names": list(call.called)}
            rows = self.files.rows.keep(digests(call.inputs), call.inputs)
            kept = {"at": call.at, "how": call.how.kept, "signed": call.signed, **rows, **named}
        if call.gradient is not found.gradient:
            found.gradient = call.gradient
            kept["gradient"] = call.gradient
        return {"key": found.key, **kept}


def read_calls(
    event: Mapping[str, Any], find: Callable[[Mapping[str, Any]], Inputs], placed: Callable[[Tensor], Tensor]
) -> tuple[ModelCall, ...]:
    """The calls of an event, of each of which all that was kept is given; `find` finds what went in, and `placed` puts
    tensors where they are used."""
    return tuple(
        ModelCall(
            at=call["at"],
            inputs=map_tensors(placed, find(call)),
            called=names_of_kept(call),
            how=Circumstances.read(call.get("how", {})),
            gradient=placed(call["gradient"].clone()),
            signed=call.get("signed"),  # traces of before have none
        )
        for call in event["calls"]
    )


def names_of_kept(call: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the examples of a call."""
    return tuple(call["names"] if "names" in call else (key.partition(" ")[0] for key in call["rows"]))


# --- What is kept of a loop, wherever that is: its events, and the weights and memories before some of them.


Event: TypeAlias = Mapping[str, Any]
"""What is kept of a step of one optimizer; several may be one step."""


class AbstractKeptLoop(ABC):
    """What steps can be taken again from."""

    def refresh(self) -> None:
        """Look again at what is kept, to which events may have come."""
        return

    @property
    def processes(self) -> int:
        """How many took these steps together."""
        return 1

    @property
    @abstractmethod
    def outside(self) -> Outside:
        """What changed after the last step."""

    @property
    @abstractmethod
    def events(self) -> Sequence[Event]:
        """What was kept of each event."""

    @property
    @abstractmethod
    def firsts(self) -> Sequence[int]:
        """The first event of every step."""

    @property
    @abstractmethod
    def borders(self) -> Sequence[int]:
        """The events, each the first of a step, before which weights and memories are kept."""

    @abstractmethod
    def weights(self, event: int, device: torch.device) -> Mapping[str, Any] | None:
        """What is kept before an event, if that is."""

    @abstractmethod
    def calls(self, event: Event, device: torch.device) -> tuple[ModelCall, ...]:
        """The calls of an event."""

    @abstractmethod
    def names(self, event: Event) -> Iterator[str]:
        """The names of the examples of its calls."""

    @abstractmethod
    def autocasts(self, event: Event) -> Iterator[Autocast | None]:
        """The casts of its calls."""


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


# --- What is kept of a loop in the folder of its trace.


@dataclass(frozen=True)
class LoopOnDisk(AbstractKeptLoop):
    """All that stood there when it was last looked at."""

    files: TraceFolder

    @cached_property
    def shards(self) -> Shards:
        """What each process wrote."""
        return Shards(self.files)

    def refresh(self) -> None:
        self.files.forget()
        for name in ("shards", "events", "firsts", "borders"):
            vars(self).pop(name, None)

    @property
    def processes(self) -> int:
        return self.files.processes

    @property
    def outside(self) -> Outside:
        if not self.files.ended.exists():
            return Outside()
        found = self.files.read(self.files.ended)
        return Outside(tuple(found["names"]), found["tensors"])

    @cached_property
    def events(self) -> Sequence[Event]:  # each with all that was kept of its calls
        return self.shards.events()

    @cached_property
    def firsts(self) -> list[int]:
        steps = [event["step"] for event in self.events]
        return [place for place, step in enumerate(steps) if place == 0 or steps[place - 1] < step]

    @cached_property
    def borders(self) -> list[int]:
        begin = set(self.firsts)
        found = [event for event in self.files.kept if event in begin]
        if found[:1] != self.firsts[:1]:
            raise Damaged(f"{self.files.path} is damaged: its first weights are missing; follow anew")
        return found

    def weights(self, event: int, device: torch.device) -> Mapping[str, Any] | None:
        if event not in self.files.kept:
            return None
        found = self.files.read(self.files.weights_at(event))
        return dict(tree_map_only(Tensor, lambda tensor: tensor.to(device), found))

    def calls(self, event: Event, device: torch.device) -> tuple[ModelCall, ...]:
        return read_calls(event, self.shards.find, lambda tensor: tensor.to(device))

    def names(self, event: Event) -> Iterator[str]:
        return (name for call in event["calls"] for name in names_of_kept(call))

    def autocasts(self, event: Event) -> Iterator[Autocast | None]:
        return (Circumstances.read(call.get("how", {})).autocast for call in event["calls"])
