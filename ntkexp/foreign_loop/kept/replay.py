"""Steps between weights that were kept are taken again, by the optimizer's own code, and held against what was seen."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import sqrt
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ntkexp.foreign_loop.attribution import AGREES, factors_between
from ntkexp.foreign_loop.called_module import CalledModule
from ntkexp.foreign_loop.calls import Autocast, ModelCall
from ntkexp.foreign_loop.kept.loop import AbstractKeptLoop, Event
from ntkexp.foreign_loop.outside import Outside
from ntkexp.foreign_loop.rule import ROUNDING, Signatures, distance, named
from ntkexp.foreign_loop.step import AbstractSteps, FollowedStep
from ntkexp.mistake import Mistake
from ntkexp.optimizer.base import IDLE, LinearStep
from ntkexp.shapes import Weights

# --- What optimizers hold of the parameters of a model, by the names of these.


def groups_of(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> list[list[str]]:
    """The parameters of each group.

    >>> weight = torch.ones(1, requires_grad=True)
    >>> groups_of(torch.optim.SGD([weight]), {id(weight): "w"})
    [['w']]
    """
    return [[names[id(weight)] for weight in group["params"]] for group in optimizer.param_groups]


def memories_of(optimizers: Sequence[torch.optim.Optimizer], names: Mapping[int, str]) -> list[Memories]:
    """Copies of what they remember."""
    return [{names[id(weight)]: copied(kept) for weight, kept in each.state.items()} for each in optimizers]


def copies_of(optimizer: torch.optim.Optimizer) -> int:
    """How many numbers an optimizer may remember for each weight."""
    return 0 if isinstance(optimizer, torch.optim.SGD) and not any(g["momentum"] for g in optimizer.param_groups) else 2


# --- Steps between weights that were kept are taken again, by the optimizer's own code, and held against what was
# seen.
#
#     gradient   of the outputs' gradients that came back then, up to the factors that its signature tells: proof (a)
#     step       by the optimizer, with its settings of then; the signature of the weights after it is looked at
#
# Where weights and states are kept on both sides of a step, nothing of it is taken again but the gradient.


Memories: TypeAlias = dict[str, dict[str, Any]]
"""What an optimizer remembers of each parameter."""


@dataclass
class ReplayedLoop:
    """The loop as it was before an event: its weights, and the memories of its optimizers, of these `kinds`."""

    called: CalledModule
    kinds: Sequence[str]
    weights: Weights
    memories: list[Memories]
    signatures: Signatures
    events: int = 0  # since weights were kept

    def take(self, event: Event, calls: Sequence[ModelCall], start: Weights) -> FollowedStep:
        """Take the next event, of a step that began at `start`."""
        gradient = self.gradient(event, calls, start)
        before = self.remembered(event)
        self.step(event, gradient)
        self.events += 1
        missed = self.prove(event)
        return self.seen(event, calls, start, gradient, before, missed)

    def pass_over(self, event: Event, calls: Sequence[ModelCall], start: Weights, then: Any) -> FollowedStep:
        """Take the next event, after which weights and memories were kept."""
        gradient = self.gradient(event, calls, start)
        before = self.remembered(event)
        self.weights, self.memories = then["weights"], ended(then)
        return self.seen(event, calls, start, gradient, before, 0.0)

    def seen(
        self,
        event: Event,
        calls: Sequence[ModelCall],
        start: Weights,
        gradient: Weights,
        before: frozenset[str],
        missed: float,
    ) -> FollowedStep:
        """The event as whoever watched it saw it."""
        settings = {name: group["settings"] for group in event["groups"] for name in group["names"]}
        return FollowedStep(
            index=event["step"],
            calls=tuple(calls),
            start=start,
            gradient=gradient,
            linear={name: self.linear(event, name, settings[name], name in before) for name in settings},
            silent=frozenset(event["silent"]),
            settings=settings,
            rule_error=max(event["rule_error"], missed),
        )

    def gradient(self, event: Event, calls: Sequence[ModelCall], start: Weights) -> Weights:
        """What was consumed, and zeros where nothing was."""
        whole, signature = event["whole"], event["gradient"]
        zeros = {name: torch.zeros_like(self.weights[name]) for name in names_of(event)}
        if signature.keys() <= whole.keys():
            return zeros | {name: part.to(zeros[name]) for name, part in whole.items()}
        found = zeros | self.called.gradient(calls, [start] * len(calls))
        ours = self.signatures.of({name: found[name] for name in signature})
        factors, _ = factors_between(ours, signature, event["step"], calls)
        if all(torch.equal(ours[name], signature[name]) for name in signature):
            factors = dict.fromkeys(signature, 1.0)
        scaled = {name: factors[name] * found[name] for name in signature}
        return zeros | {name: part.to(zeros[name]) for name, part in whole.items()} | scaled

    def step(self, event: Event, gradient: Weights) -> None:
        """Let the optimizer take its step."""
        _, kind = named(self.kinds[event["optimizer"]])
        memory = self.memories[event["optimizer"]]
        moved = {name: nn.Parameter(self.weights[name].clone()) for name in names_of(event)}
        for name in moved.keys() - event["idle"]:
            moved[name].grad = gradient[name].clone()
        optimizer = kind([{**g["settings"], "params": [moved[name] for name in g["names"]]} for g in event["groups"]])
        optimizer.state.update({moved[name]: copied(kept) for name, kept in memory.items() if name in moved})
        optimizer.step()
        self.memories[event["optimizer"]] = memory | {
            name: dict(optimizer.state[weight]) for name, weight in moved.items() if weight in optimizer.state
        }
        self.weights = self.weights | {name: weight.detach() for name, weight in moved.items()}

    def prove(self, event: Event) -> float:
        """Hold the weights against their signature; how far they are off, relative to them."""
        after = self.signatures.of({name: self.weights[name] for name in names_of(event)})
        missed = distance(after, event["after"])
        self.refuse(event["step"], missed, after)
        return missed

    def meet(self, step: int, then: Any) -> float:
        """Hold weights and memories against those that were kept here; how far the weights are off."""
        missed = distance(flat(self.weights), flat(then["weights"]))
        self.refuse(step, missed, then["weights"])
        for kind, ours, theirs in zip(self.kinds, self.memories, then["memories"] or (), strict=False):
            rule, _ = named(kind)
            both = [name for name in ours if name in theirs]
            found = [(name, rule.remembered({}, ours[name]), rule.remembered({}, theirs[name])) for name in both]
            pairs = [(name, here, there) for name, here, there in found if here is not None and there is not None]
            typical = root_mean_square(there for _, _, there in pairs)
            for name, here, there in pairs:
                if not self.agree(here, there, typical):
                    raise Mistake(
                        f"step {step}: what the optimizer remembers of '{name}' is not what it remembered there before "
                        "the loop was resumed; load its state with the weights, or follow anew"
                    )
        return missed

    def agree(self, here: Tensor, there: Tensor, typical: float) -> bool:
        """Whether two tensors are the same but for rounding: of themselves, or of what is typical of all, as a gradient
        that is zero by symmetry, such as that of the keys' bias in attention, holds nothing else."""
        rounds = torch.finfo(here.dtype).eps * max(1, self.events)
        bound = AGREES * float(there.norm()) + ROUNDING * typical * sqrt(there.numel())
        return float((here - there).norm()) <= rounds * bound

    def refuse(self, step: int, missed: float, like: Mapping[str, Tensor]) -> None:
        """Refuse a replay that has gone astray."""
        eps = max(torch.finfo(part.dtype).eps for part in like.values())
        if not missed <= AGREES * eps * max(1, self.events):
            raise Mistake(
                f"step {step}: the steps replayed up to here lead to other weights than those that were trained, off "
                f"by {missed:.2g} of them; replay on the machine and with the threads of the training, or follow with "
                "every=1"
            )

    def remembered(self, event: Event) -> frozenset[str]:
        """The parameters of which the optimizer remembers gradients."""
        rule, _ = named(self.kinds[event["optimizer"]])
        memory = self.memories[event["optimizer"]]
        settings = {name: group["settings"] for group in event["groups"] for name in group["names"]}
        return frozenset(
            name
            for name, kept in memory.items()
            if name in settings and rule.remembered(settings[name], kept) is not None
        )

    def linear(self, event: Event, name: str, settings: Mapping[str, Any], remembered: bool) -> LinearStep:
        """How a parameter's gradient was taken in."""
        if name in event["idle"]:
            return IDLE
        rule, _ = named(self.kinds[event["optimizer"]])
        linear = rule.step(settings, self.memories[event["optimizer"]].get(name, {}), int(remembered))
        return linear if remembered else replace(linear, carry=0.0)


def root_mean_square(tensors: Iterable[Tensor]) -> float:
    """The root of the mean square of all elements.

    >>> root_mean_square([torch.tensor([3.0, -3.0]), torch.tensor([3.0])])
    3.0
    """
    found = [(float(each.square().sum()), each.numel()) for each in tensors]
    return sqrt(sum(square for square, _ in found) / max(1, sum(count for _, count in found)))


def names_of(event: Event) -> list[str]:
    """The parameters that an event may move."""
    return [name for group in event["groups"] for name in group["names"]]


def flat(weights: Weights) -> Weights:
    """The weights, each as one row of numbers."""
    return {name: weight.flatten() for name, weight in weights.items()}


def copied(memory: Mapping[str, Any]) -> dict[str, Any]:
    """What is remembered of a parameter, to be written to."""
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in memory.items()}


def ended(kept: Mapping[str, Any]) -> Any:
    """What the optimizers remembered when they came to where something is kept, before a loop was resumed there."""
    return kept.get("ended", kept["memories"])


# --- The steps of what is kept of a loop, a segment between kept weights at a time.


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
