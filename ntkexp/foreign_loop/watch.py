"""Hooks on the model and its optimizers. They record the calls and steps of a loop, and
prove each step. They do not change the loop.

    call        `call_recorder` records the inputs and the circumstances of each call
    backward    `pending_calls` records ∂L/∂f of each example
    step        `step_recorder` records the gradient that the optimizer used, and its linear step

Three proofs of each step, up to rounding:

    (a)  Σᵢ Jᵢᵀℓ′ᵢ over the recorded calls is the recorded gradient, up to a factor:
         `attribution` checks all steps. `first_step` checks the first step at once, so
         that a loop that cannot be explained fails early
    (b)  the linear step maps the weights before to the weights after: `rule_proof.RuleProof`
    (c)  the secant Jacobian explains the change of the outputs at the queries: `attribution`

The hooks raise an error if anything but the optimizers changes weights or buffers. They
also refuse batch statistics of several processes, sparse gradients, models without a
row of outputs for each example, and optimizers without a known rule."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ntkexp.foreign_loop.arguments import called_model
from ntkexp.foreign_loop.call_recorder import CallRecorder
from ntkexp.foreign_loop.example_names import Ids
from ntkexp.foreign_loop.first_step import FirstStepProof
from ntkexp.foreign_loop.hooks import FollowHook
from ntkexp.foreign_loop.outside import Outside
from ntkexp.foreign_loop.pending_calls import PendingCalls
from ntkexp.foreign_loop.running_loop import RunningLoop
from ntkexp.foreign_loop.step_log import StepLog
from ntkexp.foreign_loop.step_recorder import StepRecorder
from ntkexp.foreign_loop.user_loss import Weighing
from ntkexp.mistake import Mistake
from ntkexp.model.functional import Output

FOLLOWED_OPTIMIZERS: WeakSet[torch.optim.Optimizer] = WeakSet()
"""The optimizers that are followed at the moment."""


def refuse_followed(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Raise if an optimizer is followed already."""
    if any(optimizer in FOLLOWED_OPTIMIZERS for optimizer in optimizers):
        raise Mistake(
            "the optimizer is followed already; one trace holds all of its steps"
        )


@dataclass
class Watch:
    """The hooks on a loop, with the two recorders that they call:
    one for calls, one for steps."""

    loop: RunningLoop
    output: Output
    ids: Ids
    weighing: Weighing | None = None  # weights of examples in a loop that runs again
    first: FirstStepProof | None = None
    log: StepLog | None = None
    hooks: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        pending = PendingCalls(self.loop, self.weighing)
        self.calls = CallRecorder(self.loop, pending, self.output, self.ids, self.log)
        self.steps = StepRecorder(self.loop, pending, self.first, self.log)

    def begin(self) -> None:
        """Register the hooks before the first step."""
        self.steps.begin()
        FOLLOWED_OPTIMIZERS.update(self.loop.optimizers)
        self.register_hooks()

    def register_hooks(self) -> None:
        """Register hooks on the optimizers, the model,
        and each of its layers with parameters."""
        for optimizer in self.loop.optimizers:
            before = FollowHook(optimizer, self.steps.on_begin)
            after = FollowHook(optimizer, self.steps.on_end)
            self.hooks.append(optimizer.register_step_pre_hook(before))
            self.hooks.append(optimizer.register_step_post_hook(after))
        self.hooks.append(register_optimizer_step_post_hook(self.steps.on_other_step))
        model = called_model(self.loop.model)
        begin = FollowHook(model, self.calls.on_begin)
        end = FollowHook(model, self.calls.on_end)
        self.hooks.append(
            model.register_forward_pre_hook(begin, prepend=True, with_kwargs=True)
        )
        self.hooks.append(
            model.register_forward_hook(end, with_kwargs=True, always_call=True)
        )
        # libraries may enter autocast between a model and its layers, so hook the
        # layers too
        for layer in self.loop.model.modules():
            if list(layer.parameters(recurse=False)):
                self.hooks.append(
                    layer.register_forward_pre_hook(
                        FollowHook(layer, self.calls.on_layer)
                    )
                )

    def end(self, *, whole: bool) -> None:
        """Remove the hooks, and end the store. If the loop ended without an error
        (`whole`), also record what changed after the last step."""
        outside = Outside()
        if self.hooks:
            self.steps.catch_up()
            FOLLOWED_OPTIMIZERS.difference_update(self.loop.optimizers)
            if whole:
                outside = self.loop.changed_outside()
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()
        self.loop.store.end(outside, whole=whole)
        if self.log is not None:
            self.log.flush()
