"""Watching a loop: hooks on the model and its optimizers note calls, gradients and steps, and change nothing.

forward     the inputs of a call, and the weights' step at which it was made
backward    ∂L/∂f of its outputs; calls whose gradients were thrown away before are forgotten
step        the gradient that was consumed, and proof (b): the rule of the optimizer leads to the weights after it
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from numbers import Real
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from ntkexp.foreign_loop.keeper import AbstractKeeper
from ntkexp.foreign_loop.model_call import Ids, ModelCall, given, names_of
from ntkexp.foreign_loop.rule.base import IDLE, AbstractRule, LinearStep, refuse_unexplained
from ntkexp.foreign_loop.rule.choose import rule_of
from ntkexp.foreign_loop.step import FollowedStep
from ntkexp.kernel.record.inputs import as_inputs, map_tensors
from ntkexp.mistake import Mistake
from ntkexp.model.foreign.chosen_output import choose_output
from ntkexp.model.functional import training_modes
from ntkexp.shapes import Weights

FOLLOWED: WeakSet[torch.optim.Optimizer] = WeakSet()
"""The optimizers whose steps are being followed."""


@dataclass
class Watch:
    """What was seen so far; `weights` are those after the latest step."""

    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    output: str | int | None
    ids: Ids
    keeper: AbstractKeeper
    weights: Weights = field(default_factory=dict)
    calls: list[ModelCall] = field(default_factory=list)
    memory: dict[str, Tensor] = field(default_factory=dict)
    moved: dict[str, int] = field(default_factory=dict)
    hooks: list[Any] = field(default_factory=list)

    def begin(self) -> None:
        """Put up the hooks, at weights that no step has moved yet."""
        self.rules = {id(optimizer): rule_of(optimizer) for optimizer in self.optimizers}
        self.names = {id(weight): name for name, weight in self.model.named_parameters()}
        self.refuse_followed()
        self.weights = self.now()
        self.keeper.begin(self.weights, self.optimizers, self.names)
        self.remember()
        FOLLOWED.update(self.optimizers)
        for optimizer in self.optimizers:
            self.hooks.append(optimizer.register_step_pre_hook(self.on_start))
            self.hooks.append(optimizer.register_step_post_hook(self.on_step))
        self.hooks.append(self.model.register_forward_hook(self.on_call, with_kwargs=True))

    def refuse_followed(self) -> None:
        """Refuse optimizers that somebody follows already."""
        if any(optimizer in FOLLOWED for optimizer in self.optimizers):
            raise Mistake("the optimizer is followed already; one trace tells all of its steps")

    def remember(self) -> None:
        """Take over what the optimizers remember, if somebody followed the steps that they have taken."""
        for optimizer in self.optimizers:
            if optimizer.state and not self.keeper.count:
                raise Mistake(
                    "the optimizer has taken steps already, which nobody followed; follow it from its first on"
                )
            rule = self.rules[id(optimizer)]
            for group, members in self.groups(optimizer):
                for name, weight in members.items():
                    if weight not in optimizer.state:
                        continue
                    self.moved[name] = 1
                    if (kept := rule.remembered(group, optimizer.state[weight])) is not None:
                        self.memory[name] = kept.detach().clone()

    def end(self) -> None:
        """Take the hooks down."""
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()
        FOLLOWED.difference_update(self.optimizers)
        self.keeper.end()

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Those that the optimizers move, by their names."""
        found = {}
        for optimizer in self.optimizers:
            for _, members in self.groups(optimizer):
                found.update(members)
        return found

    def groups(self, optimizer: torch.optim.Optimizer) -> list[tuple[Mapping[str, Any], dict[str, nn.Parameter]]]:
        """The settings and parameters of each group."""
        for group in optimizer.param_groups:
            for weight in group["params"]:
                if id(weight) not in self.names:
                    raise Mistake(
                        f"the optimizer moves a tensor of shape {list(weight.shape)} that is no parameter of the "
                        "model; follow the module that holds all of them"
                    )
        return [
            (group, {self.names[id(weight)]: weight for weight in group["params"]}) for group in optimizer.param_groups
        ]

    def now(self) -> Weights:
        """The weights of this moment, as copies."""
        return {name: weight.detach().clone() for name, weight in self.parameters.items()}

    def on_call(self, _: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], answer: object) -> None:
        """Note a call that may be differentiated."""
        if not torch.is_grad_enabled():
            return
        output = choose_output(answer, self.output)
        if not output.requires_grad:
            return
        self.refuse_foreign_changes()
        if reasons := list(training_modes(self.model)):
            raise Mistake(f"step {self.keeper.count}: {reasons[0]}, which is not followed; train with model.eval()")
        inputs = map_tensors(torch.clone, as_inputs(given(args, kwargs)))
        call = ModelCall(self.keeper.count, inputs, names_of(inputs, self.ids))
        output.register_hook(partial(self.on_gradient, call))  # type: ignore[no-untyped-call]  # torch's own
        self.calls.append(call)

    def on_gradient(self, call: ModelCall, gradient: Tensor) -> None:
        """Note what comes back to the outputs of a call; gradients that are zero now were not accumulated."""
        way = torch._C._current_graph_task_id()
        if all(weight.grad is None or not weight.grad.any() for weight in self.parameters.values()):
            for each in self.calls:
                if each.way != way:
                    each.forget()
            self.calls = [each for each in self.calls if each.gradient is not None or each.way < 0 or each is call]
        call.receive(gradient, way)

    def on_start(self, *_: object) -> None:
        """A step begins: nobody else has moved the weights since the last one."""
        self.refuse_foreign_changes()

    def refuse_foreign_changes(self) -> None:
        """Refuse weights that something else than the optimizers has moved."""
        for name, weight in self.parameters.items():
            if name not in self.weights:
                raise Mistake(f"step {self.keeper.count}: '{name}' was given to the optimizer during training")
            if not torch.equal(weight.detach(), self.weights[name]):
                raise Mistake(
                    f"step {self.keeper.count}: '{name}' was changed by something else than the optimizer since the "
                    "last step (a clamp, an average that was copied back, a load?); what changed it is not followed"
                )

    def on_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Note a step that was taken, and prove that it is the optimizer's."""
        rule, linear, consumed, silent = self.rules[id(optimizer)], {}, {}, set()
        before, after, settings, missed = self.weights, self.now(), {}, 0.0
        for group, members in self.groups(optimizer):
            used = settings_of(group)
            for name, weight in members.items():
                state = optimizer.state.get(weight, {})
                linear[name] = self.linear(rule, group, state, name, weight.grad is None)
                consumed[name] = torch.zeros_like(weight) if weight.grad is None else weight.grad.detach().clone()
                kept = rule.remembered(group, state)
                missed = max(missed, self.prove(linear[name], name, consumed[name], after[name], kept))
                settings[name] = used
                if weight.grad is None or not weight.requires_grad:
                    silent.add(name)
        if any(not torch.equal(after[name], before[name]) for name in after if name not in linear):
            raise Mistake(f"step {self.keeper.count}: a step of one optimizer moved weights of another")
        calls = tuple(replace(call) for call in self.calls if call.gradient is not None)
        step = FollowedStep(self.keeper.count, calls, before, consumed, linear, frozenset(silent), settings, missed)
        self.keeper.take(step, self.optimizers.index(optimizer), after)
        self.weights = after

    def linear(
        self, rule: AbstractRule, group: Mapping[str, Any], state: Mapping[str, Any], name: str, idle: bool
    ) -> LinearStep:
        """How a parameter's gradient was taken in."""
        if idle:
            return IDLE
        self.moved[name] = self.moved.get(name, 0) + 1
        linear = rule.step(group, state, self.moved[name] - 1)
        return linear if name in self.memory else replace(linear, carry=0.0)

    def prove(self, linear: LinearStep, name: str, gradient: Tensor, after: Tensor, kept: Tensor | None) -> float:
        """Proof (b): what the rule makes of the gradient is what the optimizer made of it."""
        before = self.weights[name]
        memory = linear.memory(gradient, before, self.memory.get(name))
        expected = linear.after(gradient, before, memory)
        place = f"step {self.keeper.count}: '{name}'"
        missed = refuse_unexplained(place, after, expected, before.abs() + (expected - before).abs())
        if kept is not None:
            refuse_unexplained(place, kept, memory, self.memory.get(name, memory).abs() + gradient.abs() + memory.abs())
            self.memory[name] = kept.detach().clone()
        return missed


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a group of parameters as they are now."""
    return {key: plain(value) for key, value in group.items() if key != "params"}


def plain(value: object) -> object:
    """A setting as a copy of Python's own kind, where it is a number.

    >>> plain(torch.tensor(0.5)), plain((0.9, 0.99))
    (0.5, (0.9, 0.99))
    """
    if isinstance(value, Tensor):
        return value.item()
    if isinstance(value, list | tuple):
        return tuple(map(plain, value))
    return float(value) if isinstance(value, Real) and not isinstance(value, bool | int) else value
