"""Replay of the steps between checkpoints. Each step is compared
with the recorded step.

    gradient   Σᵢ Jᵢᵀℓ′ᵢ of the recorded model calls, times the factors that proof (a) finds from
               the recorded signature (random projection) of the gradient
    step       computed by the code of the optimizer, with the recorded settings. The weights after
               the step must have the recorded signature

If there is a checkpoint before and after a step, only the gradient is replayed.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import nan, sqrt
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ntkexp.foreign_loop.call import Autocast, ModelCall, weights_of_calls
from ntkexp.foreign_loop.clipping import (
    SUM_EPS,
    UNITS,
    FactorFit,
    bound_of,
    fit_factors,
    moved_by_units,
    unexplained,
)
from ntkexp.foreign_loop.host_reads import norm_of, read_numbers
from ntkexp.foreign_loop.known_optimizers import KnownOptimizer
from ntkexp.foreign_loop.model_function import CalledModule
from ntkexp.foreign_loop.outside import Outside
from ntkexp.foreign_loop.rule import StepInput, p_of
from ntkexp.foreign_loop.rule_proof import STEP_EPS
from ntkexp.foreign_loop.signatures import Signatures, distance
from ntkexp.foreign_loop.step import AbstractSteps, FollowedStep
from ntkexp.foreign_loop.store.checkpoints import (
    OptimizerState,
    copied_state,
    placed_state,
    states_at_end,
)
from ntkexp.foreign_loop.store.files import Event, StoredLoop
from ntkexp.foreign_loop.value_clipping import ClipSearch, ValueClip
from ntkexp.mistake import Mistake
from ntkexp.model.functional import Output
from ntkexp.optimizer.base import IDLE, LinearStep
from ntkexp.shapes import Weights

# number of earlier clippings by value (scale, bound) that are tried first at a step
MAX_KNOWN_CLIPS = 4


# --- Replay of the events (steps of one optimizer), one after another.


@dataclass
class ReplayedLoop:
    """A loop that is replayed one event at a time: its present weights and optimizer
    states."""

    called: CalledModule
    known: Sequence[KnownOptimizer]
    weights: Weights
    states: list[OptimizerState]
    signatures: Signatures
    events: int = 0  # number of events replayed since the checkpoint
    exact: bool = True  # True if the weights have the same bits as in the loop
    # clipping by value in the steps so far
    clips: list[ValueClip] = field(default_factory=list)

    def replay(
        self, event: Event, calls: Sequence[ModelCall], start: Weights, then: Any | None
    ) -> FollowedStep:
        """Replay the next event, and return its step.

        Args:
            event: stored event.
            calls: recorded model calls of the step.
            start: weights before the step.
            then: checkpoint after the event, from which weights and states are read. If
                None, the optimizer takes its step.
        """
        # the step reads weights, states and momenta from before it
        states_before = self.states[event["optimizer"]]
        momentum_before = self.remembered(event)
        exact_before = self.exact
        gradient, repeats_gradient = self.gradient(event, calls, start)
        error = self.advance(event, gradient, then)

        # the linear step of each parameter, from its settings and state after the step
        settings = settings_of(event)
        linear = dict.fromkeys(settings, IDLE)
        rule = self.known[event["optimizer"]].rule
        norm = norm_of(gradient.values()) if rule.reads_norm else nan
        for name in linear.keys() - event["idle"]:
            step_input = StepInput(
                gradient[name],
                start[name],
                int(name in momentum_before),
                states_before.get(name, {}),
                norm,
            )
            linear[name] = self.linear_step(event, name, settings[name], step_input)
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
            exact=exact_before,
            repeats_gradient=repeats_gradient,
            square_outside=event.get("square_outside", 0.0),
        )

    def advance(self, event: Event, gradient: Weights, then: Any | None) -> float:
        """Set the weights and optimizer states to those after the event: read them from
        the checkpoint `then`, or let the optimizer take its step.

        Return the relative distance of the weights from the recorded weights. Raise if
        it is larger than rounding."""
        if then is not None:
            self.weights = then["weights"]
            self.states = states_at_end(then)
            return 0.0
        self.step(event, gradient)
        self.events += 1
        names = settings_of(event)
        after = self.signatures.of({name: self.weights[name] for name in names})
        if same_signatures(after, event["after"]):
            return 0.0
        self.exact = False
        error = distance(after, event["after"])
        self.refuse_astray(event["step"], error, after)
        return error

    def linear_step(
        self,
        event: Event,
        name: str,
        settings: Mapping[str, Any],
        step_input: StepInput,
    ) -> LinearStep:
        """Return the linear step of a parameter by its optimizer's rule."""
        rule = self.known[event["optimizer"]].rule
        state = self.states[event["optimizer"]].get(name, {})
        step = rule.step(settings, state, step_input).divided()
        if rule.rounds:
            momentum = rule.momentum(settings, state)
            residual = residual_of(step, step_input, momentum, self.weights[name])
            step = step.changed(residual=residual)
        return step if step_input.earlier_steps else step.changed(momentum_decay=0.0)

    def remembered(self, event: Event) -> Weights:
        """Return the momenta of the event's parameters,
        as they were before the event."""
        rule = self.known[event["optimizer"]].rule
        states = self.states[event["optimizer"]]
        momenta: Weights = {}
        for name, settings in settings_of(event).items():
            if name in states:
                momentum = rule.momentum_at(settings, states[name], self.weights[name])
                if momentum is not None:
                    momenta[name] = momentum
        return momenta

    # --- The gradient that the optimizer used

    def gradient(
        self, event: Event, calls: Sequence[ModelCall], start: Weights
    ) -> tuple[Weights, bool]:
        """Return the gradient that the optimizer used. Also return True if proof (a)
        can use this gradient as the gradient of the calls.

        The event stores the gradients of some parameters. Recompute the gradients of
        the other parameters from the calls, and multiply each by a factor. The recorded
        signature of a gradient determines its factor. Parameters without a gradient get
        zeros.

        If all factors are 1, the result is the gradient of the calls. Proof (a) uses it
        only if BatchNorm coupled the calls."""
        stored = {
            name: part.to(self.weights[name]) for name, part in event["whole"].items()
        }
        recorded = event["gradient"]  # signatures
        if recorded.keys() <= stored.keys():
            return self.with_zeros(stored, settings_of(event)), False
        begun = weights_of_calls(calls, [start] * len(calls))
        of_calls = self.called.gradient(calls, begun)
        gradient = self.with_zeros(of_calls, recorded)
        signature = self.signatures.of(gradient)
        if same_signatures(signature, recorded):  # the factor of all parameters is 1
            received = {name: stored[name] for name in stored if name in gradient}
            used = self.with_zeros(gradient | stored, settings_of(event))
            is_coupled = any(call.statistics is not None for call in calls)
            return used, is_coupled and same_signatures(gradient, received)

        def noise() -> Weights:
            change = self.called.noise(calls, begun)
            return self.signatures.of(
                {name: part for name, part in change.items() if name in recorded}
            )

        # Find one factor c for each parameter. If these factors do not explain the
        # recorded signatures, try clipping by value.
        cast_eps = self.called.cast_eps(calls, exact=self.exact)
        fit = fit_factors(signature, recorded, cast_eps, noise)
        factors = dict(fit.factors)
        if not fit.explains:
            rounding = bound_of(recorded, cast_eps)
            clipped = self.clipped_by_value(gradient, recorded, stored, fit, rounding)
            if clipped is None:
                facts = self.called.facts_of(calls, begun)
                raise unexplained(fit, event["step"], facts)
            gradient |= clipped
            signature |= self.signatures.of(clipped)
            factors |= dict.fromkeys(clipped, 1.0)
        if any(not torch.equal(signature[name], recorded[name]) for name in recorded):
            gradient = self.multiplied(gradient, factors, recorded)
        return self.with_zeros(gradient | stored, settings_of(event)), False

    def with_zeros(self, gradient: Weights, names: Iterable[str]) -> Weights:
        """Return the gradients of the named parameters. If a parameter has no gradient,
        return zeros for it."""
        return {
            name: gradient[name]
            if name in gradient
            else torch.zeros_like(self.weights[name])
            for name in names
        }

    def clipped_by_value(
        self,
        gradient: Weights,
        recorded: Weights,
        stored: Weights,
        fit: FactorFit,
        rounding: float,
    ) -> Weights | None:
        """Clip by value the gradients that no factor explains (`fit.failing`). Return
        None if the result does not have the recorded signatures.

        Try the bound of an earlier step first. Else compute the bound from the recorded
        signatures and the largest elements of the stored gradients."""
        search = ClipSearch(
            gradient={name: gradient[name] for name in fit.failing},
            recorded={name: recorded[name] for name in fit.failing},
            sign=self.signatures.of,
            rounding=rounding,
            noise=fit.noise,
            largest=read_numbers(
                [part.abs().max() for part in stored.values() if part.numel()]
            ),
        )
        clip = search.find(self.clips)
        if clip is None:
            return None
        if clip not in self.clips:
            self.clips[:] = [clip, *self.clips][:MAX_KNOWN_CLIPS]
        return clip.of(search.gradient)

    def multiplied(
        self, gradient: Weights, factors: Mapping[str, float], recorded: Weights
    ) -> Weights:
        """Return each gradient times its factor, with the bits that the loop had, if
        possible.

        A factor is computed from rounded sums, so it may be wrong by some units in the
        last place. Try nearby factors until the signature of the product equals the
        signature that the loop has recorded."""
        products: Weights = {}
        for unit in UNITS:
            trial = {
                name: part * moved_by_units(factors[name], unit, part.dtype)
                for name, part in gradient.items()
                if name not in products
            }
            signature = self.signatures.of(trial)
            for name, part in trial.items():
                if torch.equal(signature[name], recorded[name]):
                    products[name] = part
            if len(products) == len(gradient):
                return {name: products[name] for name in gradient}
        # no factor gives the recorded bits; return the gradient up to rounding
        return {name: factors[name] * part for name, part in gradient.items()}

    # --- The step of the optimizer

    def step(self, event: Event, gradient: Weights) -> None:
        """Take the step with the optimizer's own code,
        and update weights and optimizer states."""
        known = self.known[event["optimizer"]]
        states = self.states[event["optimizer"]]
        settings = settings_of(event)

        # the parameters with their gradients, in the recorded groups
        parameters = {
            name: nn.Parameter(self.weights[name].clone()) for name in settings
        }
        for name in parameters.keys() - event["idle"]:
            parameters[name].grad = gradient[name].clone()
        groups = [
            {
                **copied_state(group.get("before", group["settings"])),
                "params": [parameters[name] for name in group["names"]],
            }
            for group in event["groups"]
        ]

        # an optimizer with the state before the step
        optimizer = known.made(groups)
        for name, weight in parameters.items():
            if name in states:
                state = placed_state(
                    copied_state(states[name]), settings[name], weight.device
                )
                optimizer.state[weight] = state
        optimizer.step()
        states_after = {
            name: dict(optimizer.state[weight])
            for name, weight in parameters.items()
            if weight in optimizer.state
        }
        self.states[event["optimizer"]] = states | states_after
        self.weights = self.weights | {
            name: each.detach() for name, each in parameters.items()
        }

    # --- Comparison with the loop

    def meet(self, step: int, then: Any) -> float:
        """Compare the replayed weights and momenta with the checkpoint `then`. Return
        the relative distance of the weights. Raise if a distance is larger than
        rounding."""
        error = distance(self.weights, then["weights"])
        self.refuse_astray(step, error, then["weights"])
        for known, here, there in zip(
            self.known, self.states, then["memories"] or (), strict=False
        ):
            self.refuse_other_momenta(
                step, momenta_of(known, here), momenta_of(known, there)
            )
        return error

    def refuse_other_momenta(self, step: int, here: Weights, there: Weights) -> None:
        """Raise if the momentum of a parameter differs from the checkpoint
        by more than rounding.

        The bound on the rounding error is relative to the norm of the momentum, plus
        the root mean square of all momenta. The second term matters for parameters
        whose gradient is zero by symmetry, such as the bias of the keys in attention.
        The momentum of such a parameter is only a rounding error."""
        names = [name for name in here if name in there]
        norms = list[Tensor]()
        for name in names:
            norms += [there[name].norm(), (here[name] - there[name]).norm()]
        numbers = read_numbers(norms)
        sizes = numbers[::2]
        gaps = numbers[1::2]
        elements = sum(there[name].numel() for name in names)
        typical = sqrt(sum(size**2 for size in sizes) / max(1, elements))
        for name, size, gap in zip(names, sizes, gaps, strict=True):
            bound = SUM_EPS * size + STEP_EPS * typical * sqrt(there[name].numel())
            eps = torch.finfo(here[name].dtype).eps
            if not gap <= eps * max(1, self.events) * bound:
                raise Mistake(
                    f"step {step}: the optimizer's momentum of '{name}' is not the one "
                    "it had before the loop was resumed; load the optimizer's state "
                    "with the weights, or follow the loop again"
                )

    def refuse_astray(
        self, step: int, error: float, like: Mapping[str, Tensor]
    ) -> None:
        """Raise if the replayed weights differ from the recorded ones by more than the
        rounding error of all events since the checkpoint.

        `error` is the relative distance from the recorded weights, and `like` are
        tensors with the dtypes of the weights."""
        eps = max(torch.finfo(part.dtype).eps for part in like.values())
        if not error <= SUM_EPS * eps * max(1, self.events):
            raise Mistake(
                f"step {step}: the replayed steps lead to other weights than training "
                f"did (relative difference {error:.2g}); replay on the machine and with "
                "the threads of the training, or follow with every=1"
            )


def same_signatures(ours: Mapping[str, Tensor], recorded: Mapping[str, Tensor]) -> bool:
    """Return True if the signatures in `recorded` have the same values as in `ours`."""
    return all(
        torch.equal(ours[name], signature) for name, signature in recorded.items()
    )


def settings_of(event: Event) -> dict[str, Mapping[str, Any]]:
    """Return the settings of each parameter's group, by parameter."""
    return {
        name: group["settings"] for group in event["groups"] for name in group["names"]
    }


def momenta_of(known: KnownOptimizer, states: OptimizerState) -> Weights:
    """Return the momenta in the states of an optimizer."""
    momenta: Weights = {}
    for name, state in states.items():
        momentum = known.rule.momentum({}, state)
        if momentum is not None:
            momenta[name] = momentum
    return momenta


def residual_of(
    step: LinearStep, step_input: StepInput, momentum: Tensor | None, after: Tensor
) -> Tensor:
    """Return the residual r of a linear step. θ₊ = `after` are the weights after the
    step:

    θ₊ = (1 − d)θ − M(S ⊙ m + N ⊙ p) − r
    """
    p = p_of(step, step_input)
    m = step.momentum_gain * p if momentum is None else momentum
    change = step.momentum_scale * m + step.gradient_scale * p
    if step.mixing is not None:
        change = step.mixing.of(change)
    return (1 - step.decoupled_decay) * step_input.weight - change - after


# --- The steps of a stored loop. One segment (the steps between two checkpoints) is
# replayed at a time.


Segment: TypeAlias = list[tuple[FollowedStep, Weights]]
"""A list of steps, each with the weights after it."""


@dataclass
class ReplayedSteps(AbstractSteps):
    """The steps of a stored loop, which are replayed when they are read. Memory holds
    the segment that was replayed last."""

    loop: StoredLoop
    module: nn.Module
    output: Output
    known: Sequence[KnownOptimizer]
    same_kernels: bool = False
    # indices of the steps that get `remembered`, the momentum before the step
    begins: frozenset[int] = frozenset()
    # The replayed segment in memory (at most one). Its key is the index of its first
    # event, and the index after its last event.
    segments: dict[tuple[int, int], Segment] = field(default_factory=dict)
    signatures: Signatures = field(default_factory=Signatures)
    # clipping by value in the steps so far
    clips: list[ValueClip] = field(default_factory=list)

    @cached_property
    def called(self) -> CalledModule:
        """The model as a function that repeats each recorded call."""
        return CalledModule(self.module, self.output, same_kernels=self.same_kernels)

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    @property
    def outside(self) -> Outside:
        return self.loop.outside

    @property
    def processes(self) -> int:
        return self.loop.processes

    def refresh(self) -> None:
        self.loop.refresh()
        self.segments.clear()
        vars(self).pop("with_statistics", None)
        vars(self).pop("admitted", None)

    def __len__(self) -> int:
        return len(self.loop.firsts)

    @property
    def first(self) -> int:
        """The index of the first step."""
        return int(self.loop.events[0]["step"]) if self.loop.events else 0

    # --- Read without a replay

    @property
    def shared(self) -> str | None:
        movers: dict[str, int] = {}
        for event in self.loop.events:
            names: set[str] = settings_of(event).keys() - set(event["idle"])
            for name in names:
                if movers.setdefault(name, event["optimizer"]) != event["optimizer"]:
                    return name
        return None

    def first_events(self) -> Iterator[Event]:
        """Yield the first event of each step, which stores the calls of the step."""
        return (self.loop.events[first] for first in self.loop.firsts)

    def names(self) -> Iterator[str]:
        for event in self.first_events():
            for names, _ in self.loop.names_and_casts(event):
                yield from names

    def calls(self) -> Iterator[tuple[ModelCall, ...]]:
        device = self.device
        return (self.loop.calls(event, device) for event in self.first_events())

    def uses_setting(self, name: str) -> bool:
        groups = (group for event in self.loop.events for group in event["groups"])
        return any(group["settings"].get(name) for group in groups)

    def most_examples(self) -> int:
        counts = (
            sum(len(names) for names, _ in self.loop.names_and_casts(event))
            for event in self.first_events()
        )
        return max(counts, default=0)

    @property
    def autocast(self) -> Autocast | None:
        for event in self.loop.events:
            for _, casts in self.loop.names_and_casts(event):
                if casts is not None:
                    return casts
        return None

    def statistics(self, index: int) -> Weights:
        if not self.with_statistics:
            return {}
        latest = bisect_left(
            self.with_statistics, index, key=lambda event: event["step"]
        )
        if latest < len(self.with_statistics):
            wanted, _ = self.with_statistics[latest]["statistics"]
        else:
            _, wanted = self.with_statistics[-1]["statistics"]
        return {name: value.to(self.device) for name, value in wanted.items()}

    @cached_property
    def with_statistics(self) -> list[Event]:
        """The events that store running statistics."""
        return [event for event in self.loop.events if event.get("statistics")]

    # --- Read by a replay

    @property
    def end(self) -> Weights:
        _, weights = self.segment(len(self.loop.checkpoints) - 1)[-1]
        return weights

    def start(self, index: int) -> Weights:
        if index >= self.first + len(self):
            return self.end
        segment = self.segment(self.segments_before(index) - 1)
        return next(step.start for step, _ in segment if step.index == index)

    def segments_before(self, index: int) -> int:
        """Return the number of segments that begin at step `index` or before it."""
        return bisect_right(self.loop.checkpoints, self.loop.firsts[index - self.first])

    def forwards(self) -> Iterator[tuple[FollowedStep, Weights]]:
        for number in range(len(self.loop.checkpoints)):
            yield from self.segment(number)

    def backwards(
        self, before: int | None = None
    ) -> Iterator[tuple[FollowedStep, Weights]]:
        stop = self.first + len(self) if before is None else before
        if stop <= self.first:
            return
        for number in reversed(range(self.segments_before(stop - 1))):
            for step, after in reversed(self.segment(number)):
                if step.index < stop:
                    yield step, after

    def segment(self, number: int) -> Segment:
        """Return the steps between checkpoint `number` and the next checkpoint."""
        begin, stop = [*self.loop.checkpoints, len(self.loop.events)][
            number : number + 2
        ]
        if (begin, stop) not in self.segments:
            # memory may not suffice for two segments of a large model
            self.segments.clear()
            self.segments[begin, stop] = self.replayed(begin, stop)
        return self.segments[begin, stop]

    @cached_property
    def admitted(self) -> Weights:
        """The weights that the loop has added to an optimizer,
        with their values before."""
        weights: Weights = {}
        for event in self.loop.events:
            weights |= event.get("admitted", {})
        return {name: weight.to(self.device) for name, weight in weights.items()}

    def checkpoint(self, event: int) -> Mapping[str, Any] | None:
        """Return the checkpoint before an event, or None. It holds all weights that the
        loop ever updates."""
        content = self.loop.checkpoint(event, self.device)
        if content is None or not self.admitted:
            return content
        return {**content, "weights": self.admitted | content["weights"]}

    def replayed(self, begin: int, stop: int) -> Segment:
        """Replay the events from `begin` to `stop`. Compare the result with the
        checkpoint at `stop`, if there is one."""
        device = self.device
        first = self.checkpoint(begin)
        then = self.checkpoint(stop)
        assert first is not None
        loop = ReplayedLoop(
            self.called,
            self.known,
            first["weights"],
            list(first["memories"]),
            self.signatures,
            clips=self.clips,
        )
        # If there is only one event between two checkpoints, the weights after the
        # event are read, not replayed.
        is_single = (
            stop - begin == 1 and then is not None and states_at_end(then) is not None
        )

        steps = list[FollowedStep]()
        for event in self.loop.events[begin:stop]:
            # another optimizer's event of the same step
            joins = bool(steps) and steps[-1].index == event["step"]
            calls = steps[-1].calls if joins else self.loop.calls(event, device)
            start = steps[-1].start if joins else loop.weights
            remembered = loop.remembered(event) if event["step"] in self.begins else {}
            step = loop.replay(event, calls, start, then if is_single else None)
            step = replace(step, remembered=remembered)
            if joins:
                steps[-1] = steps[-1].joined(step)
            else:
                steps.append(step)

        end = loop.weights
        if then is not None:
            error = loop.meet(steps[-1].index + 1, then)
            steps[-1] = replace(steps[-1], rule_error=max(steps[-1].rule_error, error))
            end = then["weights"]
        ends = [*(step.start for step in steps[1:]), end]
        return list(zip(steps, ends, strict=True))
