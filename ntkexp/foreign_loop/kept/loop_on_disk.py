"""What is kept of a loop in the folder of its trace."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ntkexp.foreign_loop.autocast import Autocast
from ntkexp.foreign_loop.circumstances import Circumstances
from ntkexp.foreign_loop.kept.event import names_of_kept, read_calls
from ntkexp.foreign_loop.kept.kept_loop import AbstractKeptLoop, Event
from ntkexp.foreign_loop.kept.shards import Shards
from ntkexp.foreign_loop.kept.trace_folder import TraceFolder
from ntkexp.foreign_loop.model_call import ModelCall
from ntkexp.foreign_loop.outside import Outside
from ntkexp.records.seal import Damaged


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
