"""Watching a loop: hooks on the model and its optimizers note calls, gradients and steps, and change nothing.

forward     the inputs of a call, the weights' step at which it was made, and from where its random numbers come
backward    ∂L/∂f of its outputs; calls whose gradients were thrown away before are forgotten
step        the gradient that was consumed, and proof (b): the rule of the optimizer leads to the weights after it
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from numbers import Real
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from ntkexp.foreign_loop.autocast import Autocast
from ntkexp.foreign_loop.circumstances import Circumstances
from ntkexp.foreign_loop.generators import states_for
from ntkexp.foreign_loop.keeper import AbstractKeeper
from ntkexp.foreign_loop.listen import listen
from ntkexp.foreign_loop.members import Members, refuse_short
from ntkexp.foreign_loop.model_call import Ids, ModelCall, given, names_of
from ntkexp.foreign_loop.rule.base import IDLE, AbstractRule, LinearStep
from ntkexp.foreign_loop.rule.choose import rule_of
from ntkexp.foreign_loop.rule.proof import RuleProof
from ntkexp.foreign_loop.step import FollowedStep
from ntkexp.foreign_loop.unmoved import Unmoved
from ntkexp.foreign_loop.untouched import Untouched
from ntkexp.foreign_loop.unwrapped import unwrapped_model
from ntkexp.foreign_loop.weighing import Weighing
from ntkexp.kernel.record.inputs import as_inputs, map_tensors
from ntkexp.mistake import Mistake
from ntkexp.model.foreign.chosen_output import choose_output
from ntkexp.model.functional import batch_statistics
from ntkexp.shapes import Weights

FOLLOWED: WeakSet[torch.optim.Optimizer] = WeakSet()
"""The optimizers whose steps are being followed."""


@dataclass
class Watch:
    """What was seen so far."""

    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    output: str | int | None
    ids: Ids
    keeper: AbstractKeeper
    unmoved: Unmoved
    weighing: Weighing | None = None  # of examples of a loop that is carried out again
    calls: list[ModelCall] = field(default_factory=list)
    untouched: Untouched = field(default_factory=Untouched)
    proof: RuleProof = field(default_factory=RuleProof)
    hooks: list[Any] = field(default_factory=list)
    generators: Mapping[str, Tensor] = field(default_factory=dict)  # their states before the latest call
    autocast: Autocast | None = None  # in which the latest call was made

    def begin(self) -> None:
        """Put up the hooks, at weights that no step has moved yet."""
        self.rules = {id(optimizer): rule_of(optimizer) for optimizer in self.optimizers}
        self.inner = unwrapped_model(self.model)
        self.members = Members(self.inner, self.optimizers)
        self.refuse_followed()
        for name, weight in self.members:
            refuse_short(name, weight)
            self.untouched.keep(name, weight)
        self.keeper.begin(self.weights, self.optimizers, self.members.names)
        self.remember()
        FOLLOWED.update(self.optimizers)
        for optimizer in self.optimizers:
            self.hooks.append(optimizer.register_step_pre_hook(self.on_start))
            self.hooks.append(optimizer.register_step_post_hook(self.on_step))
        self.hooks.append(self.model.register_forward_pre_hook(self.on_begin))
        self.hooks.append(self.model.register_forward_hook(self.on_call, with_kwargs=True))
        inside = [layer for layer in self.model.modules() if list(layer.parameters(recurse=False))]
        for layer in inside:  # libraries put autocast between a model and its layers
            self.hooks.append(layer.register_forward_pre_hook(partial(self.on_casts, layer is inside[0])))

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
            for group, members in self.members.groups(optimizer):
                for name, weight in members.items():
                    if weight not in optimizer.state:
                        continue
                    self.proof.moved[name] = 1
                    if (kept := rule.remembered(group, optimizer.state[weight])) is not None:
                        self.proof.memory[name] = kept.detach().clone()

    def end(self) -> None:
        """Take the hooks down, if they were put up."""
        if self.hooks:
            FOLLOWED.difference_update(self.optimizers)
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()
        self.keeper.end()

    @property
    def weights(self) -> Weights:
        """Those after the latest step."""
        return dict(self.untouched.weights)

    def on_casts(self, first: bool, layer: nn.Module, *_: object) -> None:
        """Note the casts of a call, in its first layer or a later one."""
        if torch.is_grad_enabled() and self.autocast is None:
            self.autocast = Autocast.now(next(layer.parameters()).device.type, whole=first)

    def on_begin(self, *_: object) -> None:
        """A call begins, which may draw random numbers."""
        if torch.is_grad_enabled():
            self.generators, self.autocast = states_for(self.inner), None

    def on_call(self, _: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], answer: object) -> None:
        """Note a call that may be differentiated."""
        if not torch.is_grad_enabled():
            return
        output = choose_output(answer, self.output)
        if not output.requires_grad:
            return
        self.untouched.refuse_writes(self.keeper.count, self.members)
        if reason := next(batch_statistics(self.model), None):
            raise Mistake(
                f"step {self.keeper.count}: {reason}, which is not followed; put that layer in eval(), or another there"
            )
        self.unmoved.refuse_writes(self.keeper.count, self.untouched.weights)
        inputs = map_tensors(torch.clone, as_inputs(given(args, kwargs)))
        how = Circumstances.of(self.inner, self.generators, self.autocast)
        call = ModelCall(self.keeper.count, inputs, names_of(inputs, self.ids), how)
        listen(output, partial(self.on_gradient, call), past_casts=self.autocast is not None)
        self.calls.append(call)

    def on_gradient(self, call: ModelCall, gradient: Tensor) -> Tensor | None:
        """Note what comes back to the outputs of a call, and weigh it; gradients that are zero now were not
        accumulated, but for calls of which nothing was left."""
        way = torch._C._current_graph_task_id()
        if all(weight.grad is None or not weight.grad.any() for _, weight in self.members):
            for each in self.calls:
                if each.way != way and not self.silenced(each):
                    each.forget()
            self.calls = [each for each in self.calls if each.gradient is not None or each.way < 0 or each is call]
        if self.weighing is None:
            call.receive(gradient, way)
            return None
        factors = self.weighing.factors(call.names).to(gradient)
        weighed = gradient * factors.view(-1, *[1] * (gradient.dim() - 1))
        call.receive(weighed, way)
        return weighed

    def silenced(self, call: ModelCall) -> bool:
        """Whether a call of this step adds zero, as nothing is left of it."""
        return self.weighing is not None and call.at == self.keeper.count and self.weighing.silences(call.names)

    def on_start(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """A step begins: nobody else has moved its weights since the last one."""
        members = self.members.of(optimizer)
        self.refuse_sparse(members)
        self.untouched.refuse_writes(self.keeper.count, members.items())
        self.unmoved.refuse_writes(self.keeper.count, self.untouched.weights)

    def refuse_sparse(self, members: Mapping[str, nn.Parameter]) -> None:
        """Refuse gradients of some rows alone, of which rules of optimizers make something else."""
        for name, weight in members.items():
            if weight.grad is not None and weight.grad.is_sparse:
                raise Mistake(
                    f"step {self.keeper.count}: the gradient of '{name}' is sparse, and such steps are not followed; "
                    "build its layer with sparse=False"
                )

    def on_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Note a step that was taken, and prove that it is the optimizer's."""
        rule, linear, consumed, silent = self.rules[id(optimizer)], {}, {}, set()
        before, settings, missed = self.weights, {}, 0.0
        for group, members in self.members.groups(optimizer):
            used = settings_of(group)
            for name, weight in members.items():
                state = optimizer.state.get(weight, {})
                linear[name] = self.linear(rule, group, state, name, weight.grad is None)
                consumed[name] = torch.zeros_like(weight) if weight.grad is None else self.keeper.consumed(weight.grad)
                self.untouched.keep(name, weight)
                place, ends = f"step {self.keeper.count}: '{name}'", (before[name], self.untouched.weights[name])
                kept = rule.remembered(group, state)
                missed = max(missed, self.proof.hold(place, name, linear[name], consumed[name], ends, kept))
                settings[name] = used
                if weight.grad is None or not weight.requires_grad:
                    silent.add(name)
        calls = tuple(copy(call) for call in self.calls if call.gradient is not None)
        step = FollowedStep(self.keeper.count, calls, before, consumed, linear, frozenset(silent), settings, missed)
        self.keeper.take(step, self.optimizers.index(optimizer), self.weights)

    def linear(
        self, rule: AbstractRule, group: Mapping[str, Any], state: Mapping[str, Any], name: str, idle: bool
    ) -> LinearStep:
        """How a parameter's gradient was taken in."""
        if idle:
            return IDLE
        times = self.proof.moved[name] = self.proof.moved.get(name, 0) + 1
        linear = rule.step(group, state, times - 1)
        return linear if name in self.proof.memory else replace(linear, carry=0.0)


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
