"""The steps of a trace on disk, a segment between kept weights at a time."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ntkexp.foreign_loop.autocast import Autocast
from ntkexp.foreign_loop.called_module import CalledModule
from ntkexp.foreign_loop.circumstances import Circumstances
from ntkexp.foreign_loop.kept.event import names_of_kept, read_calls
from ntkexp.foreign_loop.kept.replay import Event, ReplayedLoop, ended
from ntkexp.foreign_loop.kept.shards import Shards
from ntkexp.foreign_loop.kept.signature import Signatures
from ntkexp.foreign_loop.kept.trace_folder import TraceFolder
from ntkexp.foreign_loop.model_call import ModelCall
from ntkexp.foreign_loop.step import FollowedStep
from ntkexp.foreign_loop.steps import AbstractSteps
from ntkexp.records.seal import Damaged
from ntkexp.shapes import Weights

Segment: TypeAlias = list[tuple[FollowedStep, Weights]]
"""Steps, each with the weights after it."""

LATEST = 2
"""How many segments are held: the one that is asked for, and one with calls that it used."""


@dataclass
class StepsOnDisk(AbstractSteps):
    """The steps in a folder, of a module of this kind."""

    files: TraceFolder
    module: nn.Module
    output: str | int | None
    kinds: Sequence[str]
    held: dict[int, Segment] = field(default_factory=dict)
    signatures: Signatures = field(default_factory=Signatures)

    @cached_property
    def called(self) -> CalledModule:
        """The module as the calls had it."""
        return CalledModule(self.module, self.output)

    @cached_property
    def shards(self) -> Shards:
        """What each process wrote."""
        return Shards(self.files)

    @property
    def processes(self) -> int:
        return self.files.processes

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        """What was kept of each event, with all that was kept of its calls."""
        return self.shards.events()

    @cached_property
    def firsts(self) -> list[int]:
        """The first event of every step."""
        steps = [event["step"] for event in self.events]
        return [place for place, step in enumerate(steps) if place == 0 or steps[place - 1] < step]

    @cached_property
    def borders(self) -> list[int]:
        """The events before which weights and memories are kept: there segments begin."""
        found = [event for event in self.files.kept if event in set(self.firsts)]
        if found[:1] != self.firsts[:1]:
            raise Damaged(f"{self.files.path} is damaged: its first weights are missing; follow anew")
        return found

    @property
    def device(self) -> torch.device:
        """Where the steps are taken again."""
        return next(self.module.parameters()).device

    def __len__(self) -> int:
        return len(self.firsts)

    @cached_property
    def end(self) -> Weights:
        return self.segment(len(self.borders) - 1)[-1][1]

    def names(self) -> Iterator[str]:
        return (name for first in self.firsts for call in self.events[first]["calls"] for name in names_of_kept(call))

    @property
    def autocast(self) -> Autocast | None:
        found = (Circumstances.read(call.get("how", {})).autocast for event in self.events for call in event["calls"])
        return next((each for each in found if each is not None), None)

    def start(self, index: int) -> Weights:
        if index >= len(self):
            return self.end
        place = bisect_right(self.borders, self.firsts[index]) - 1
        return next(step.start for step, _ in self.segment(place) if step.index == index)

    def forwards(self) -> Iterator[tuple[FollowedStep, Weights]]:
        return (found for place in range(len(self.borders)) for found in self.segment(place))

    def backwards(self, before: int | None = None) -> Iterator[tuple[FollowedStep, Weights]]:
        stop = len(self) if before is None else before
        places = range(bisect_right(self.borders, self.firsts[stop - 1])) if stop else range(0)
        found = (each for place in reversed(places) for each in reversed(self.segment(place)))
        return (each for each in found if each[0].index < stop)

    def segment(self, place: int) -> Segment:
        """The steps from one border to the next, replayed."""
        if place not in self.held:
            self.held[place] = self.replayed(place)
            for oldest in list(self.held)[:-LATEST]:
                del self.held[oldest]
        return self.held[place]

    def replayed(self, place: int) -> Segment:
        """Replay a segment, up to what is kept at its end."""
        begin, stop = self.borders[place], [*self.borders, len(self.events)][place + 1]
        kept, then = self.read(begin), self.read(stop) if stop in self.files.kept else None
        loop = ReplayedLoop(self.called, self.kinds, kept["weights"], kept["memories"], self.signatures)
        jump = then if stop - begin == 1 and then is not None and ended(then) is not None else None
        steps: list[FollowedStep] = []
        for event in self.events[begin:stop]:
            joins = bool(steps) and steps[-1].index == event["step"]
            calls, start = (steps[-1].calls, steps[-1].start) if joins else (self.calls(event), loop.weights)
            step = loop.take(event, calls, start) if jump is None else loop.pass_over(event, calls, start, jump)
            steps = [*steps[:-1], steps[-1].joined(step)] if joins else [*steps, step]
        end = loop.weights
        if then is not None:
            steps[-1], end = (
                replace(steps[-1], rule_error=max(steps[-1].rule_error, loop.meet(steps[-1].index + 1, then))),
                then["weights"],
            )
        return list(zip(steps, [*(step.start for step in steps[1:]), end], strict=True))

    def calls(self, event: Event) -> tuple[ModelCall, ...]:
        """The calls of an event."""
        return read_calls(event, self.shards.find, self.to)

    def read(self, event: int) -> Any:
        """What is kept before an event."""
        return tree_map_only(Tensor, self.to, self.files.read(self.files.weights_at(event)))

    def to(self, tensor: Tensor) -> Tensor:
        """A tensor where the steps are taken again."""
        return tensor.to(self.device)
