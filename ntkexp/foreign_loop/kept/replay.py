"""Steps between weights that were kept are taken again, by the optimizer's own code, and held against what was seen.

    gradient   of the outputs' gradients that came back then, up to the factors that its signature tells: proof (a)
    step       by the optimizer, with its settings of then; the signature of the weights after it is looked at

Where weights and states are kept on both sides of a step, nothing of it is taken again but the gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ntkexp.foreign_loop.attribution import AGREES, factors_between
from ntkexp.foreign_loop.called_module import CalledModule
from ntkexp.foreign_loop.kept.kept_loop import Event
from ntkexp.foreign_loop.kept.signature import Signatures, distance
from ntkexp.foreign_loop.model_call import ModelCall
from ntkexp.foreign_loop.rule.base import IDLE, LinearStep
from ntkexp.foreign_loop.rule.choose import named
from ntkexp.foreign_loop.rule.proof import ROUNDING
from ntkexp.foreign_loop.step import FollowedStep
from ntkexp.mistake import Mistake
from ntkexp.shapes import Weights

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
