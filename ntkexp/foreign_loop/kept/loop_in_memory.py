"""What is kept of a loop in memory; more may come."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter

from ntkexp.foreign_loop.autocast import Autocast
from ntkexp.foreign_loop.kept.kept_loop import AbstractKeptLoop, Event
from ntkexp.foreign_loop.model_call import ModelCall
from ntkexp.foreign_loop.outside import Outside
from ntkexp.kernel.record.inputs import tensors


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
