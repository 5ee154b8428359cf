"""Watching a loop: hooks on the model and its optimizers note calls and steps, and change nothing.

Of a step the gradient that was consumed is noted, and proof (b): the rule of the optimizer leads to the weights after
it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from ntkexp.foreign_loop.asked import FirstStep
from ntkexp.foreign_loop.keeper import AbstractKeeper
from ntkexp.foreign_loop.kept.signature import Signed
from ntkexp.foreign_loop.members import Members, refuse_short
from ntkexp.foreign_loop.model_call import Ids
from ntkexp.foreign_loop.outside import Outside
from ntkexp.foreign_loop.rule.base import IDLE, AbstractRule, LinearStep
from ntkexp.foreign_loop.rule.choose import rule_of
from ntkexp.foreign_loop.rule.proof import RuleProof, numbers
from ntkexp.foreign_loop.step import FollowedStep
from ntkexp.foreign_loop.unmoved import Unmoved, named_tensors
from ntkexp.foreign_loop.untouched import Untouched
from ntkexp.foreign_loop.unwrapped import unwrapped_model
from ntkexp.foreign_loop.watched_calls import WatchedCalls
from ntkexp.foreign_loop.weighing import Weighing
from ntkexp.mistake import Mistake
from ntkexp.model.functional import batch_statistics
from ntkexp.shapes import Weights

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
