"""What is kept of a loop, in memory or on disk: an event for every step, and the weights before some of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ntkexp.foreign_loop.calls import Autocast, Circumstances, ModelCall
from ntkexp.foreign_loop.outside import Outside
from ntkexp.foreign_loop.rule import IDLE, Signed
from ntkexp.foreign_loop.step import FollowedStep
from ntkexp.kernel.record.tape import map_tensors
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
