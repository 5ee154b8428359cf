"""Steps between checkpoints are taken again, by the optimizer's own code, and compared with what was recorded."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf, sqrt
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ntkexp.foreign_loop.call import Autocast, ModelCall, facts_of
from ntkexp.foreign_loop.clipping import SUM_EPS, factors_between
from ntkexp.foreign_loop.host_reads import read_numbers
from ntkexp.foreign_loop.model_function import CalledModule
from ntkexp.foreign_loop.outside import Outside
from ntkexp.foreign_loop.rule import STEP_EPS, Signatures, StepInput, distance, p_of
from ntkexp.foreign_loop.step import AbstractSteps, FollowedStep
from ntkexp.foreign_loop.store.files import Event, StoredLoop
from ntkexp.foreign_loop.torch_rules import KnownOptimizer
from ntkexp.mistake import Mistake
from ntkexp.optimizer.base import IDLE, LinearStep
from ntkexp.shapes import Weights

# --- How often there is a checkpoint: after every few steps, and more seldom when they take more than their share.
#
# Whenever the share of the disk is used up, every second checkpoint is dropped, and so the trace of a loop of any
# length fits.


SHARE, MOST = 0.25, 50e9  # of what is free on the disk, and in bytes
FIRST = 8  # steps: to seal and write a checkpoint costs more time than a small step of training
IN_MEMORY = (
    3  # copies of the weights that a replayed step takes: itself, its gradient, scales of elements
)


@dataclass
class CheckpointPlan:
    """A checkpoint of `size` bytes after `every` steps; `most` is the largest such number that memory is enough for
    when the steps between are replayed."""

    every: int
    fixed: bool
    most: int
    size: float
    share: float

    @classmethod
    def of(
        cls, every: int | None, weights: float, size: float, free: float, memory_gb: float
    ) -> CheckpointPlan:
        """The plan for weights of this many bytes, `size` with the optimizers' states.

        >>> CheckpointPlan.of(None, 1e6, 3e6, free=1e9, memory_gb=0.03).most
        10
        """
        most = int(1e9 * memory_gb / (IN_MEMORY * weights)) if weights else 1
        return cls(
            every or max(1, min(FIRST, most)),
            every is not None,
            most,
            size,
            min(SHARE * free, MOST),
        )

    def too_many(self, count: int) -> bool:
        """Whether every second checkpoint has to be dropped."""
        return (
            not self.fixed
            and 2 * self.every <= self.most
            and count > 2
            and count * self.size > self.share
        )


# --- What optimizers remember of the parameters of a model, by the names of these.


OptimizerState: TypeAlias = dict[str, dict[str, Any]]
COUNT = "step"  # what PyTorch's optimizers call the number of steps that a parameter has taken


def optimizer_states(
    optimizers: Sequence[torch.optim.Optimizer], names: Mapping[int, str]
) -> list[OptimizerState]:
    """Copies of what they remember."""
    return [
        {names[id(weight)]: copied(state) for weight, state in each.state.items()}
        for each in optimizers
    ]


def copied(state: Mapping[str, Any]) -> dict[str, Any]:
    """What is remembered of a parameter, to be written to."""
    return {
        key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()
    }


def memories_on(
    memories: Sequence[OptimizerState] | None, device: torch.device
) -> list[OptimizerState] | None:
    """Return what optimizers remember on a device; counts of steps, which they mostly read, stay on the processor."""
    if memories is None:
        return None
    return [
        {
            name: {
                key: value.to(device) if isinstance(value, Tensor) and key != COUNT else value
                for key, value in state.items()
            }
            for name, state in memory.items()
        }
        for memory in memories
    ]


def placed_state(
    state: dict[str, Any], settings: Mapping[str, Any], device: torch.device
) -> dict[str, Any]:
    """Return the state with its count of steps on the device, if the optimizer's kernels read it there."""
    on_device = settings.get("capturable") or settings.get("fused")
    if on_device and isinstance(count := state.get(COUNT), Tensor):
        return {**state, COUNT: count.to(device)}
    return state


def states_at_end(checkpoint: Mapping[str, Any]) -> Any:
    """The optimizers' states after the event before a checkpoint, where a loop was resumed there with others."""
    return checkpoint.get("ended", checkpoint["memories"])


# --- Steps between checkpoints are taken again, by the optimizer's own code, and compared with what was recorded.
#
#     gradient   Σᵢ Jᵢᵀℓ′ᵢ of the recorded calls, times the factors that its signature tells: proof (a)
#     step       by the optimizer, with its settings of then; the signature of the weights after it has to be the same
#
# Where there is a checkpoint on both sides of a step, nothing of it is taken again but the gradient.


NEARBY = (0, 1, -1, 2, -2, 3, -3, 4, -4)  # units in the last place of a factor that are tried


@dataclass
class ReplayedLoop:
    """The loop as it was before an event: its weights, and the states of its optimizers, whose rules are `known`."""

    called: CalledModule
    known: Sequence[KnownOptimizer]
    weights: Weights
    states: list[OptimizerState]
    signatures: Signatures
    events: int = 0  # since the checkpoint
    exact: bool = True  # whether the weights have the loop's own bits

    def replay(
        self, event: Event, calls: Sequence[ModelCall], start: Weights, then: Any | None
    ) -> FollowedStep:
        """Replay the next event, of a step that began at `start`; where the checkpoint `then` after it is given,
        weights and states are those from there."""
        rule = self.known[event["optimizer"]].rule
        settings = {name: group["settings"] for group in event["groups"] for name in group["names"]}
        before = self.states[event["optimizer"]]
        has_momentum = {
            n for n in before if n in settings and rule.momentum(settings[n], before[n]) is not None
        }
        exact = self.exact

        # the gradient, and the weights after the step
        gradient, error = self.gradient(event, calls, start), 0.0
        if then is not None:
            self.weights, self.states = then["weights"], states_at_end(then)
        else:
            self.step(event, gradient)
            self.events += 1
            after = self.signatures.of({name: self.weights[name] for name in settings})
            error = distance(after, event["after"])
            self.refuse_astray(event["step"], error, after)
            self.exact &= all(
                torch.equal(part, event["after"][name]) for name, part in after.items()
            )

        # the linear map of each parameter, from its settings and state after the step
        linear = dict.fromkeys(settings, IDLE)
        for name in linear.keys() - event["idle"]:
            state = self.states[event["optimizer"]].get(name, {})
            taken = StepInput(
                gradient[name], start[name], int(name in has_momentum), before.get(name, {})
            )
            step = rule.step(settings[name], state, taken).divided()
            if rule.rounds:
                memory = rule.momentum(settings[name], state)
                step = replace(step, residual=residual_of(step, taken, memory, self.weights[name]))
            linear[name] = step if name in has_momentum else replace(step, momentum_decay=0.0)
        return FollowedStep(
            index=event["step"],
            calls=tuple(calls),
            start=start,
            gradient=gradient,
            linear=linear,
            without_grad=frozenset(event["silent"]),
            settings=settings,
            rule_error=max(event["rule_error"], error),
            statistics=event.get("statistics"),
            exact=exact,
        )

    def remembered(self, event: Event) -> Weights:
        """m of each parameter before an event, of those that the optimizer remembers anything of."""
        read, state = self.known[event["optimizer"]].rule.momentum, self.states[event["optimizer"]]
        settings = {name: group["settings"] for group in event["groups"] for name in group["names"]}
        found = {name: read(settings[name], state[name]) for name in settings if name in state}
        return {name: momentum for name, momentum in found.items() if momentum is not None}

    def gradient(self, event: Event, calls: Sequence[ModelCall], start: Weights) -> Weights:
        """The gradient that was consumed, and zeros where there was none: as it was stored, or that of the calls, times
        the factors between its signature and the stored one."""
        whole, signature = event["whole"], event["gradient"]
        zeros = {
            name: torch.zeros_like(self.weights[name])
            for group in event["groups"]
            for name in group["names"]
        }
        stored = {name: part.to(zeros[name]) for name, part in whole.items()}
        if signature.keys() <= whole.keys():
            return zeros | stored
        gradient = zeros | self.called.gradient(calls, [start] * len(calls))
        found = {name: gradient[name] for name in signature}
        ours, room = self.signatures.of(found), self.called.room_of(calls, exact=self.exact)

        def noise() -> Weights:
            moved = self.called.noise(calls, [start] * len(calls))
            return self.signatures.of(
                {name: part for name, part in moved.items() if name in signature}
            )

        factors, _ = factors_between(ours, signature, event["step"], facts_of(calls), room, noise)
        if any(not torch.equal(ours[name], signature[name]) for name in signature):
            found = self.multiplied(found, factors, signature)
        return zeros | found | stored

    def multiplied(
        self, found: Weights, factors: Mapping[str, float], signature: Weights
    ) -> Weights:
        """Gradients times their factors, to the bit of what was consumed where that can be.

        The factors are read of rounded sums, and may be some units in the last place from those that the loop took.
        """
        products, left = dict[str, Tensor](), dict(found)
        for unit in NEARBY:
            # the first factor near by that gives the signature of what was consumed, in every bit
            tried = {
                name: part * moved_by_units(factors[name], unit, part.dtype)
                for name, part in left.items()
            }
            signed = self.signatures.of(tried)
            products |= {
                name: part
                for name, part in tried.items()
                if torch.equal(signed[name], signature[name])
            }
            left = {name: part for name, part in left.items() if name not in products}
            if not left:
                return {name: products[name] for name in found}
        # the loop did something else than to multiply: to rounding, this is it
        return {name: factors[name] * gradient for name, gradient in found.items()}

    def step(self, event: Event, gradient: Weights) -> None:
        """Let the optimizer take its step."""
        state, groups = self.states[event["optimizer"]], event["groups"]
        moved = {
            name: nn.Parameter(self.weights[name].clone())
            for group in groups
            for name in group["names"]
        }
        for name in moved.keys() - event["idle"]:
            moved[name].grad = gradient[name].clone()
        known = self.known[event["optimizer"]]
        optimizer = known.made(
            [{**each["settings"], "params": [moved[n] for n in each["names"]]} for each in groups]
        )
        settings = {name: group["settings"] for group in groups for name in group["names"]}
        for name, weight in moved.items():
            if name in state:
                optimizer.state[weight] = placed_state(
                    copied(state[name]), settings[name], weight.device
                )
        optimizer.step()
        self.states[event["optimizer"]] = state | {
            name: dict(optimizer.state[weight])
            for name, weight in moved.items()
            if weight in optimizer.state
        }
        self.weights = self.weights | {name: weight.detach() for name, weight in moved.items()}

    def meet(self, step: int, then: Any) -> float:
        """Compare weights and states with the checkpoint that follows; how far the weights are off."""
        error = distance(self.weights, then["weights"])
        self.refuse_astray(step, error, then["weights"])
        for known, here, there in zip(
            self.known, self.states, then["memories"] or (), strict=False
        ):
            read = known.rule.momentum
            found = [(n, read({}, here[n]), read({}, there[n])) for n in here if n in there]
            pairs = [
                (name, one, other)
                for name, one, other in found
                if one is not None and other is not None
            ]

            # to rounding of itself, or of what is typical of all (the root of the mean square of their elements), as a
            # gradient that is zero by symmetry, such as that of the keys' bias in attention, holds nothing else
            norms = read_numbers(
                [size for _, one, other in pairs for size in (other.norm(), (one - other).norm())]
            )
            squares = sum(size**2 for size in norms[::2])
            typical = sqrt(squares / max(1, sum(other.numel() for _, _, other in pairs)))
            for (name, one, other), size, gap in zip(pairs, norms[::2], norms[1::2], strict=True):
                rounds = torch.finfo(one.dtype).eps * max(1, self.events)
                bound = SUM_EPS * size + STEP_EPS * typical * sqrt(other.numel())
                if not gap <= rounds * bound:
                    raise Mistake(
                        f"step {step}: what the optimizer remembers of '{name}' is not what it remembered there before "
                        "the loop was resumed; load its state with the weights, or follow the loop again"
                    )
        return error

    def refuse_astray(self, step: int, error: float, like: Mapping[str, Tensor]) -> None:
        """Refuse a replay that leads to other weights, but for the rounding of the events since the checkpoint."""
        eps = max(torch.finfo(part.dtype).eps for part in like.values())
        if not error <= SUM_EPS * eps * max(1, self.events):
            raise Mistake(
                f"step {step}: the steps replayed up to here lead to other weights than those that were trained, off "
                f"by {error:.2g} of them; replay on the machine and with the threads of the training, or follow with "
                "every=1"
            )


def moved_by_units(factor: float, units: int, kind: torch.dtype) -> float:
    """The number that is `units` units in the last place from a factor, among those of this kind.

    >>> moved_by_units(1.0, 2, torch.float32) == 1 + 2 * torch.finfo(torch.float32).eps
    True
    """
    near, toward = (
        torch.tensor(factor, dtype=kind),
        torch.tensor(inf if units > 0 else -inf, dtype=kind),
    )
    for _ in range(abs(units)):
        near = torch.nextafter(near, toward)
    return near.item()


def residual_of(step: LinearStep, taken: StepInput, memory: Tensor | None, after: Tensor) -> Tensor:
    """r, what moved a weight and is not the linear map's: θ₊ = (1 − d)θ − M(S ⊙ m + N ⊙ p) − r."""
    p = p_of(step, taken)
    moved = (
        step.momentum_scale * (step.momentum_gain * p if memory is None else memory)
        + step.gradient_scale * p
    )
    moved = moved if step.mixing is None else step.mixing.of(moved)
    return (1 - step.decoupled_decay) * taken.weight - moved - after


# --- The steps of a stored loop, a segment between checkpoints at a time.


Segment: TypeAlias = list[tuple[FollowedStep, Weights]]
"""Steps, each with the weights after it."""


@dataclass
class ReplayedSteps(AbstractSteps):
    """The steps of a stored loop, of a module of this kind; segments go by the events at their ends."""

    loop: StoredLoop
    module: nn.Module
    output: str | int | None
    known: Sequence[KnownOptimizer]
    same_kernels: bool = False
    segments: dict[tuple[int, int], Segment] = field(default_factory=dict)
    begins: frozenset[int] = (
        frozenset()
    )  # the steps before which what optimizers remember is asked for
    signatures: Signatures = field(default_factory=Signatures)

    @cached_property
    def called(self) -> CalledModule:
        """The module as the calls had it."""
        return CalledModule(self.module, self.output, same_kernels=self.same_kernels)

    @property
    def outside(self) -> Outside:
        return self.loop.outside

    @property
    def processes(self) -> int:
        return self.loop.processes

    def refresh(self) -> None:
        self.loop.refresh()
        self.segments.clear()

    def __len__(self) -> int:
        return len(self.loop.firsts)

    @property
    def first(self) -> int:
        """The number of the first step."""
        return int(self.loop.events[0]["step"]) if self.loop.events else 0

    @property
    def end(self) -> Weights:
        return self.segment(len(self.loop.checkpoints) - 1)[-1][1]

    def names(self) -> Iterator[str]:
        calls = (
            call
            for first in self.loop.firsts
            for call in self.loop.names_and_casts(self.loop.events[first])
        )
        return (name for names, _ in calls for name in names)

    def calls(self) -> Iterator[tuple[ModelCall, ...]]:
        device = next(self.module.parameters()).device
        return (self.loop.calls(self.loop.events[first], device) for first in self.loop.firsts)

    def most_examples(self) -> int:
        steps = (self.loop.names_and_casts(self.loop.events[first]) for first in self.loop.firsts)
        return max((sum(len(names) for names, _ in calls) for calls in steps), default=0)

    @property
    def autocast(self) -> Autocast | None:
        found = (
            casts for event in self.loop.events for _, casts in self.loop.names_and_casts(event)
        )
        return next((each for each in found if each is not None), None)

    def statistics(self, index: int) -> Weights:
        known = [
            (event["step"], event["statistics"])
            for event in self.loop.events
            if event.get("statistics")
        ]
        if not known:
            return {}
        device = next(self.module.parameters()).device
        before = next((both[0] for step, both in known if step >= index), known[-1][1][1])
        return {name: each.to(device) for name, each in before.items()}

    def start(self, index: int) -> Weights:
        if index >= self.first + len(self):
            return self.end
        place = bisect_right(self.loop.checkpoints, self.loop.firsts[index - self.first]) - 1
        return next(step.start for step, _ in self.segment(place) if step.index == index)

    def forwards(self) -> Iterator[tuple[FollowedStep, Weights]]:
        return (
            found for place in range(len(self.loop.checkpoints)) for found in self.segment(place)
        )

    def backwards(self, before: int | None = None) -> Iterator[tuple[FollowedStep, Weights]]:
        count = len(self) if before is None else before - self.first
        stop = self.first + count
        places = (
            range(bisect_right(self.loop.checkpoints, self.loop.firsts[count - 1]))
            if count
            else range(0)
        )
        found = (each for place in reversed(places) for each in reversed(self.segment(place)))
        return (each for each in found if each[0].index < stop)

    def segment(self, place: int) -> Segment:
        """The steps from one checkpoint to the next, replayed."""
        begin, stop = [*self.loop.checkpoints, len(self.loop.events)][place : place + 2]
        if (begin, stop) not in self.segments:
            self.segments.clear()  # of a large model there is no memory for two
            self.segments[begin, stop] = self.replayed(begin, stop)
        return self.segments[begin, stop]

    def replayed(self, begin: int, stop: int) -> Segment:
        """Replay a segment, up to the checkpoint at its end, if there is one."""
        device = next(self.module.parameters()).device
        first, then = (self.loop.checkpoint(event, device) for event in (begin, stop))
        assert first is not None
        loop = ReplayedLoop(
            self.called, self.known, first["weights"], list(first["memories"]), self.signatures
        )
        only = stop - begin == 1 and then is not None and states_at_end(then) is not None
        steps: list[FollowedStep] = []
        for event in self.loop.events[begin:stop]:
            joins = (
                bool(steps) and steps[-1].index == event["step"]
            )  # another optimizer's part of the same step
            calls = steps[-1].calls if joins else self.loop.calls(event, device)
            start = steps[-1].start if joins else loop.weights
            remembered = loop.remembered(event) if event["step"] in self.begins else {}
            step = replace(
                loop.replay(event, calls, start, then if only else None), remembered=remembered
            )
            steps = [*steps[:-1], steps[-1].joined(step)] if joins else [*steps, step]
        end = loop.weights
        if then is not None:
            last, end = steps[-1], then["weights"]
            steps[-1] = replace(
                last, rule_error=max(last.rule_error, loop.meet(last.index + 1, then))
            )
        return list(zip(steps, [*(step.start for step in steps[1:]), end], strict=True))
