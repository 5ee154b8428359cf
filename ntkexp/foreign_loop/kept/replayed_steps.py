"""The steps of what is kept of a loop, a segment between kept weights at a time."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeAlias

import torch
from torch import nn

from ntkexp.foreign_loop.autocast import Autocast
from ntkexp.foreign_loop.called_module import CalledModule
from ntkexp.foreign_loop.kept.kept_loop import AbstractKeptLoop
from ntkexp.foreign_loop.kept.replay import ReplayedLoop, ended
from ntkexp.foreign_loop.kept.signature import Signatures
from ntkexp.foreign_loop.outside import Outside
from ntkexp.foreign_loop.step import FollowedStep
from ntkexp.foreign_loop.steps import AbstractSteps
from ntkexp.shapes import Weights

Segment: TypeAlias = list[tuple[FollowedStep, Weights]]
"""Steps, each with the weights after it."""

LATEST = 2
"""How many segments are held: the one that is asked for, and one with calls that it used."""


@dataclass
class ReplayedSteps(AbstractSteps):
    """The steps of a loop that is kept, of a module of this kind; segments go by the events at their ends."""

    kept: AbstractKeptLoop
    module: nn.Module
    output: str | int | None
    kinds: Sequence[str]
    held: dict[tuple[int, int], Segment] = field(default_factory=dict)
    signatures: Signatures = field(default_factory=Signatures)

    @cached_property
    def called(self) -> CalledModule:
        """The module as the calls had it."""
        return CalledModule(self.module, self.output)

    @property
    def device(self) -> torch.device:
        """Where the steps are taken again."""
        return next(self.module.parameters()).device

    @property
    def outside(self) -> Outside:
        return self.kept.outside

    @property
    def processes(self) -> int:
        return self.kept.processes

    def refresh(self) -> None:
        self.kept.refresh()
        self.held.clear()

    def __len__(self) -> int:
        return len(self.kept.firsts)

    @property
    def end(self) -> Weights:
        return self.segment(len(self.kept.borders) - 1)[-1][1]

    def names(self) -> Iterator[str]:
        return (name for first in self.kept.firsts for name in self.kept.names(self.kept.events[first]))

    @property
    def autocast(self) -> Autocast | None:
        found = (each for event in self.kept.events for each in self.kept.autocasts(event))
        return next((each for each in found if each is not None), None)

    def start(self, index: int) -> Weights:
        if index >= len(self):
            return self.end
        place = bisect_right(self.kept.borders, self.kept.firsts[index]) - 1
        return next(step.start for step, _ in self.segment(place) if step.index == index)

    def forwards(self) -> Iterator[tuple[FollowedStep, Weights]]:
        return (found for place in range(len(self.kept.borders)) for found in self.segment(place))

    def backwards(self, before: int | None = None) -> Iterator[tuple[FollowedStep, Weights]]:
        stop = len(self) if before is None else before
        places = range(bisect_right(self.kept.borders, self.kept.firsts[stop - 1])) if stop else range(0)
        found = (each for place in reversed(places) for each in reversed(self.segment(place)))
        return (each for each in found if each[0].index < stop)

    def segment(self, place: int) -> Segment:
        """The steps from one border to the next, replayed."""
        begin, stop = [*self.kept.borders, len(self.kept.events)][place : place + 2]
        if (begin, stop) not in self.held:
            self.held[begin, stop] = self.replayed(begin, stop)
            for oldest in list(self.held)[:-LATEST]:
                del self.held[oldest]
        return self.held[begin, stop]

    def replayed(self, begin: int, stop: int) -> Segment:
        """Replay a segment, up to what is kept at its end."""
        first, then = (self.kept.weights(event, self.device) for event in (begin, stop))
        assert first is not None
        loop = ReplayedLoop(self.called, self.kinds, first["weights"], list(first["memories"]), self.signatures)
        jump = then if stop - begin == 1 and then is not None and ended(then) is not None else None
        steps: list[FollowedStep] = []
        for event in self.kept.events[begin:stop]:
            joins = bool(steps) and steps[-1].index == event["step"]
            calls = steps[-1].calls if joins else self.kept.calls(event, self.device)
            start = steps[-1].start if joins else loop.weights
            step = loop.take(event, calls, start) if jump is None else loop.pass_over(event, calls, start, jump)
            steps = [*steps[:-1], steps[-1].joined(step)] if joins else [*steps, step]
        end = loop.weights
        if then is not None:
            steps[-1], end = (
                replace(steps[-1], rule_error=max(steps[-1].rule_error, loop.meet(steps[-1].index + 1, then))),
                then["weights"],
            )
        return list(zip(steps, [*(step.start for step in steps[1:]), end], strict=True))
