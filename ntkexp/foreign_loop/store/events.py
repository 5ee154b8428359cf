"""What is stored of a loop, wherever that is: an event for every step, and checkpoints before some of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from ntkexp.foreign_loop.calls import Autocast, ModelCall
from ntkexp.foreign_loop.outside import Outside
from ntkexp.foreign_loop.rule import Signed
from ntkexp.foreign_loop.step import FollowedStep
from ntkexp.optimizer.base import IDLE

Event: TypeAlias = Mapping[str, Any]
"""What is stored of a step of one optimizer; several may be one step."""


def event_of(
    step: FollowedStep,
    index: int,
    which: int,
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    signed: Signed,
) -> dict[str, Any]:
    """What is stored, besides its calls, of a step that the `which`-th optimizer took, as the step `index` of the loop.

    Of the gradient and the weights after it signatures are enough, where calls give the gradient when they are
    replayed: where all were made at the weights of this very step. Gradients in it are those that the loop has.
    """
    heard = set(step.heard)
    replayable = all(call.at == index for call in step.calls)
    unheard = {name: part for name, part in step.gradient.items() if name not in heard and bool(part.any())}
    groups = [group for each in optimizer.param_groups if (group := [names[id(weight)] for weight in each["params"]])]
    return {
        "step": index,
        "optimizer": which,
        "groups": [{"names": group, "settings": dict(step.settings[group[0]])} for group in groups],
        "idle": [name for name, linear in step.linear.items() if linear is IDLE],
        "silent": sorted(step.silent),
        "gradient": {name: signed.gradient[name] for name in step.heard},
        "whole": unheard if replayable else step.gradient,
        "after": {name: signed.after[name] for name in step.linear},
        "rule_error": step.rule_error,
    }


class AbstractStoredLoop(ABC):
    """A loop as it is stored, from which its steps are replayed."""

    def refresh(self) -> None:
        """Read again, as events may have come."""
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
        """All of them, in order."""

    @property
    @abstractmethod
    def firsts(self) -> Sequence[int]:
        """The first event of every step."""

    @property
    @abstractmethod
    def checkpoints(self) -> Sequence[int]:
        """The events, each the first of a step, before which there is a checkpoint."""

    @abstractmethod
    def checkpoint(self, event: int, device: torch.device) -> Mapping[str, Any] | None:
        """The one before an event, if there is one."""

    @abstractmethod
    def calls(self, event: Event, device: torch.device) -> tuple[ModelCall, ...]:
        """The calls of an event."""

    @abstractmethod
    def names(self, event: Event) -> Iterator[str]:
        """The names of the examples of its calls."""

    @abstractmethod
    def autocasts(self, event: Event) -> Iterator[Autocast | None]:
        """The casts of its calls."""
