"""What is kept of a loop, wherever that is: its events, and the weights and memories before some of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from ntkexp.foreign_loop.autocast import Autocast
from ntkexp.foreign_loop.model_call import ModelCall
from ntkexp.foreign_loop.outside import Outside

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
