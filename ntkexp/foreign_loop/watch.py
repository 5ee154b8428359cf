"""Watching a loop: hooks on the model and its optimizers note calls and steps, and change nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from numbers import Real
from typing import Any, TypeAlias
from weakref import ReferenceType, WeakSet, ref

import torch
from torch import Tensor, nn

from ntkexp.foreign_loop.again import Weighing
from ntkexp.foreign_loop.asked import ONE_NUMBER, FirstStep
from ntkexp.foreign_loop.calls import Autocast, Circumstances, Ids, ModelCall, given, names_of, states_for
from ntkexp.foreign_loop.moved import (
    Members,
    Unmoved,
    Untouched,
    called_model,
    named_tensors,
    refuse_short,
    unwrapped_model,
)
from ntkexp.foreign_loop.outside import Outside
from ntkexp.foreign_loop.rule import AbstractRule, RuleProof, Signed, numbers, rule_of
from ntkexp.foreign_loop.signed_outputs import signature
from ntkexp.foreign_loop.step import AbstractKeeper, FollowedStep
from ntkexp.kernel.record.tape import as_inputs, examples, map_tensors
from ntkexp.mistake import Mistake
from ntkexp.model.functional import batch_statistics, choose_output
from ntkexp.optimizer.base import IDLE, LinearStep
from ntkexp.shapes import Weights

# --- Listening to what comes back to an output, which it may be replaced by.
#
# Under autocast libraries cast outputs once more, after a loss was formed of them inside the model: nothing comes
# back to what they hand out, and all of it to what they cast.


Listener: TypeAlias = Callable[[Tensor], Tensor | None]


def listen(output: Tensor, heard: Listener, *, past_casts: bool) -> None:
    """Let a listener hear what comes back to the output, or to what it was cast from.

    >>> import torch
    >>> found, hidden = [], torch.ones(2, requires_grad=True) * 3
    >>> listen(hidden.double(), found.append, past_casts=True)
    >>> hidden.sum().backward()
    >>> found
    [tensor([1., 1.])]
    """
    node, place = output.grad_fn, output.output_nr
    if not past_casts or node is None or node.name() != CAST:
        output.register_hook(heard)  # type: ignore[no-untyped-call]  # torch's own
        return
    while node is not None and node.name() == CAST:
        node, place = node.next_functions[0]

    def at_node(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
        came = gradients[place]
        instead = None if came is None else heard(came)
        return None if instead is None else (*gradients[:place], instead, *gradients[place + 1 :])

    assert node is not None
    node.register_prehook(at_node)


CAST = "ToCopyBackward0"
"""What torch calls the way back through a cast."""


# --- Watching the calls of a model: what goes in, under which circumstances, and what comes back.
#
# forward     the inputs of a call, the weights' step at which it was made, and from where its random numbers come
# backward    ∂L/∂f of its outputs; calls whose gradients were thrown away before are forgotten


@dataclass
class WatchedCalls:
    """The calls whose gradients may still be consumed."""

    model: nn.Module
    output: str | int | None
    ids: Ids
    members: Members
    keeper: AbstractKeeper
    refuse_writes: Callable[[], None]  # refuses a model that is not as the step under way began with it
    weighing: Weighing | None = None  # of examples of a loop that is carried out again
    calls: list[ModelCall] = field(default_factory=list)
    seen: int = 0  # calls
    begun: list[int] = field(default_factory=list)  # how many had been seen when those began that are under way
    generators: Mapping[str, Tensor] = field(default_factory=dict)  # their states before the latest call
    autocast: Autocast | None = None  # in which the latest call was made
    taken: list[ModelCall] = field(default_factory=list)  # the calls whose gradients the latest step consumed
    gradients: list[ReferenceType[Tensor]] = field(default_factory=list)  # as tensors, that it consumed

    def hooks(self) -> Iterator[Any]:
        """Put up what hears of calls."""
        self.inner = unwrapped_model(self.model)
        yield called_model(self.model).register_forward_pre_hook(self.on_begin)
        yield called_model(self.model).register_forward_hook(self.on_call, with_kwargs=True)
        inside = [layer for layer in self.model.modules() if list(layer.parameters(recurse=False))]
        for layer in inside:  # libraries put autocast between a model and its layers
            yield layer.register_forward_pre_hook(partial(self.on_casts, layer is inside[0]))

    @property
    def consumed(self) -> tuple[ModelCall, ...]:
        """Those whose gradients a step consumes now."""
        return tuple(copy(call) for call in self.calls if call.gradient is not None)

    def remember(self, moved: Iterable[Tensor]) -> None:
        """A step was taken by these parameters."""
        self.taken = [call for call in self.calls if call.gradient is not None]
        self.gradients = [ref(weight.grad) for weight in moved if weight.grad is not None]

    def forget_replaced(self, moved: Iterable[Tensor]) -> None:
        """Forget calls whose gradients an earlier step consumed, if none of the tensors is left that it did it from:
        autograd adds to them in place, and whoever assigns others (`p.grad = …`) adds nothing."""
        now = [weight.grad for weight in moved if weight.grad is not None]
        left = {id(known) for each in self.gradients if (known := each()) is not None}
        if any(here.requires_grad or id(here) in left for here in now):  # with create_graph=True sums are new tensors
            return
        for call in self.taken:
            call.forget()
        self.calls = [call for call in self.calls if all(call is not each for each in self.taken)]

    def on_begin(self, *_: object) -> None:
        """A call begins, which may draw random numbers."""
        self.begun.append(self.seen)
        if torch.is_grad_enabled():
            self.generators, self.autocast = states_for(self.inner), None

    def on_casts(self, first: bool, layer: nn.Module, *_: object) -> None:
        """Note the casts of a call, in its first layer or a later one."""
        if torch.is_grad_enabled() and self.autocast is None:
            self.autocast = Autocast.now(next(layer.parameters()).device.type, whole=first)

    def on_call(self, _: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], answer: object) -> None:
        """Note a call that may be differentiated; one around others is a library's, with the loop's code in it."""
        if self.begun.pop() < self.seen or not torch.is_grad_enabled():
            return
        output = choose_output(answer, self.output)
        if not output.requires_grad or not output.numel():  # of no examples
            return
        self.refuse_writes()
        if not output.dim():
            raise Mistake(f"step {self.keeper.count}: {ONE_NUMBER}")
        inputs = map_tensors(torch.clone, as_inputs(given(args, kwargs)))
        if len(output) != examples(inputs):
            raise Mistake(
                f"step {self.keeper.count}: the model gives {len(output)} rows for {examples(inputs)} examples; follow "
                "one whose outputs have the examples as their first axis"
            )
        how = Circumstances.of(self.inner, self.generators, self.autocast)
        call = ModelCall(self.keeper.count, inputs, names_of(inputs, self.ids), how, signed=signature(output))
        listen(output, partial(self.on_gradient, call), past_casts=self.autocast is not None)
        self.calls.append(call)
        self.seen += 1

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


# --- Watching a loop: hooks on the model and its optimizers note calls and steps, and change nothing.
#
# Of a step the gradient that was consumed is noted, and proof (b): the rule of the optimizer leads to the weights
# after it.


LOG = logging.getLogger("ntkexp.follow")

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
    first: FirstStep | None = None
    untouched: Untouched = field(default_factory=Untouched)
    proof: RuleProof = field(default_factory=RuleProof)
    hooks: list[Any] = field(default_factory=list)
    place: dict[tuple[torch.dtype, torch.device], Tensor] = field(default_factory=dict)

    def begin(self) -> None:
        """Put up the hooks, at weights that no step has moved yet."""
        self.rules = {id(optimizer): rule_of(optimizer) for optimizer in self.optimizers}
        self.members = Members(unwrapped_model(self.model), self.optimizers)
        self.calls = WatchedCalls(
            self.model, self.output, self.ids, self.members, self.keeper, self.refuse_writes, self.weighing
        )
        for name, weight in self.members:
            refuse_short(name, weight)
            self.untouched.keep({name: weight})
            self.proof.begin(name, weight)
        self.keeper.begin(self.weights, self.optimizers, self.members.names)
        self.remember()
        FOLLOWED.update(self.optimizers)
        for optimizer in self.optimizers:
            self.hooks.append(optimizer.register_step_pre_hook(self.on_start))
            self.hooks.append(optimizer.register_step_post_hook(self.on_step))
        self.hooks.extend(self.calls.hooks())

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
                        self.proof.remember(name, kept)

    def end(self, *, whole: bool) -> None:
        """Take the hooks down, if they were put up; the loop is `whole`, or was broken off."""
        outside = self.outside() if self.hooks and whole else Outside()
        if self.hooks:
            FOLLOWED.difference_update(self.optimizers)
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()
        self.keeper.end(outside, whole=whole)

    def outside(self) -> Outside:
        """What changed after the last step."""
        names, now = list(self.unmoved.otherwise(self.untouched.weights)), named_tensors(self.unmoved.model)
        shapes = {name: tensor.shape for name, tensor in named_tensors(self.unmoved.copy).items()}
        tensors = {
            name: now[name].detach().clone() for name in names if name in now and now[name].shape == shapes[name]
        }
        found = Outside(tuple(names), tensors)
        if names:
            LOG.warning(
                "ntkexp: %s changed, and no step did it; %s",
                found.named,
                "attribute() tells what came of that, as `outside`"
                if len(tensors) == len(names)
                else "what is attributed is the model without that",
            )
        return found

    @property
    def weights(self) -> Weights:
        """Those after the latest step."""
        return dict(self.untouched.weights)

    def refuse_writes(self) -> None:
        """Refuse a model that is not as the step under way began with it."""
        self.untouched.refuse_writes(self.keeper.count, self.members)
        if reason := next(batch_statistics(self.model), None):
            raise Mistake(
                f"step {self.keeper.count}: {reason}, which is not followed; put that layer in eval(), or another there"
            )
        self.unmoved.refuse_writes(self.keeper.count, self.untouched.weights)

    def on_start(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """A step begins: nobody else has moved its weights since the last one."""
        members = self.members.of(optimizer)
        self.refuse_sparse(members)
        self.untouched.refuse_writes(self.keeper.count, members.items(), closely=True)
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
        rule, linear, silent = self.rules[id(optimizer)], {}, set()
        before, settings, missed, moved = self.weights, {}, 0.0, self.members.of(optimizer)
        consumed = {name: torch.zeros_like(w) if w.grad is None else w.grad.detach() for name, w in moved.items()}
        self.untouched.keep(moved)
        of = self.proof.signatures.of
        signed = Signed(of(consumed), of(moved))
        came, ends = numbers(signed.gradient), numbers(signed.after)
        for group, members in self.members.groups(optimizer):
            used = settings_of(group)
            for name, weight in members.items():
                state = optimizer.state.get(weight, {})
                linear[name] = self.linear(rule, group, state, name, weight.grad is None)
                kept = rule.remembered(group, state)
                below = None if kept is None else rule.below(group, state, self.there(weight))
                place, seen = f"step {self.keeper.count}: '{name}'", (came[name], ends[name])
                missed = max(missed, self.proof.hold(place, name, linear[name], seen, weight, kept, below))
                settings[name] = used
                if weight.grad is None or not weight.requires_grad:
                    silent.add(name)
        if len(self.optimizers) == 1:
            self.calls.forget_replaced(moved.values())
        calls, left = self.calls.consumed, frozenset(silent)
        step = FollowedStep(self.keeper.count, calls, before, consumed, linear, left, settings, missed)
        self.calls.remember(moved.values())
        self.keeper.take(step, self.optimizers.index(optimizer), self.weights, signed)
        if self.first is not None:
            self.first.prove(step)
        self.untouched.forget(before)

    def there(self, like: Tensor) -> Tensor:
        """Where elements are formed: fresh memory for them costs more than they do."""
        key = (like.dtype, like.device)
        if key not in self.place or self.place[key].numel() < like.numel():
            self.place[key] = torch.empty_like(like, memory_format=torch.contiguous_format).flatten().detach()
        return self.place[key][: like.numel()].view(like.shape)

    def linear(
        self, rule: AbstractRule, group: Mapping[str, Any], state: Mapping[str, Any], name: str, idle: bool
    ) -> LinearStep:
        """How a parameter's gradient was taken in."""
        if idle:
            return IDLE
        times = self.proof.moved[name] = self.proof.moved.get(name, 0) + 1
        linear = rule.common(group, state, times - 1)
        return linear if name in self.proof.memory else replace(linear, carry=0.0)


def refuse_followed(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Refuse optimizers that somebody follows already."""
    if any(optimizer in FOLLOWED for optimizer in optimizers):
        raise Mistake("the optimizer is followed already; one trace tells all of its steps")


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a group of parameters as they are now."""
    return {key: plain(value) for key, value in group.items() if key != "params"}


def plain(value: object) -> object:
    """A setting as a copy, of Python's own kind where it is a number; a tensor stays one, for its precision.

    >>> plain(torch.tensor(0.5)), plain((0.9, 0.99))
    (tensor(0.5000), (0.9, 0.99))
    """
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, list | tuple):
        return tuple(map(plain, value))
    return float(value) if isinstance(value, Real) and not isinstance(value, bool | int) else value
