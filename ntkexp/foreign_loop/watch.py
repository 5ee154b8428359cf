"""Hooks on the model and its optimizers. They record the calls and steps of a loop, and prove each
step.

    call        `on_call` records a copy of the inputs, the index of the step, the circumstances of
                the call, and a signature (random projection) of its outputs. If the loop has
                moved weights since the last step, as SAM does, it copies them too. `losses` records
                a call of the user's function of `trace.losses` in the same way
    backward    `on_gradient` records ∂L/∂f of each example. It includes reduction, accumulation and
                loss scale, so the loss function need not be known
    step        `on_step_begin` compares the weights, bit by bit, with the weights after the last
                step. (Weights that were moved for a call and back may differ by rounding.)
                `on_step_end` reads the gradient g that the optimizer used. From the optimizer's
                settings and state, it computes the linear step of each parameter:
                    p = g + λθ        m ← βm + αp        θ ← (1 − d)θ − S ⊙ m − N p

Three proofs of each step, up to rounding:

    (a)  Σᵢ Jᵢᵀℓ′ᵢ over the recorded calls is g, up to a factor: `first_step` for the first step, so
         that a loop that cannot be explained fails early, and `attribution` for all steps
    (b)  the linear step maps the weights before to the weights after: `rule.RuleProof`
    (c)  the secant Jacobian explains the change of the outputs at the queries: `attribution`

An error is raised if anything but the optimizers changes weights or buffers, for batch statistics
of several processes, for sparse gradients, for a model without a row of outputs for each example,
and for an optimizer without a known rule. The hooks do not change the loop.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import nan
from numbers import Real
from typing import Any
from weakref import ReferenceType, WeakSet, ref

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from ntkexp.foreign_loop.arguments import (
    ONE_NUMBER,
    ParameterGroups,
    called_model,
    unwrapped_model,
)
from ntkexp.foreign_loop.batch_norm import (
    RunningStatistics,
    couples,
    refuse_instance_statistics,
)
from ntkexp.foreign_loop.call import (
    Autocast,
    Circumstances,
    LayerModes,
    ModelCall,
    SeveralOutputs,
    call_inputs,
    forbidden_kernels,
    generator_states,
)
from ntkexp.foreign_loop.example_losses import (
    Batch,
    LossFunction,
    copied_batch,
    refuse_other_losses,
)
from ntkexp.foreign_loop.example_names import Ids, names_of
from ntkexp.foreign_loop.first_step import FirstStepProof
from ntkexp.foreign_loop.hooks import FollowHook, listen
from ntkexp.foreign_loop.known_optimizers import KnownOptimizer
from ntkexp.foreign_loop.model_function import shortest
from ntkexp.foreign_loop.outside import (
    FrozenTensors,
    LatestWeights,
    Outside,
    named_tensors,
    release_memory,
    same_bits,
)
from ntkexp.foreign_loop.rule import (
    AbstractOptimizerRule,
    PendingProof,
    RuleProof,
    Signed,
    StepInput,
    norm_of,
)
from ntkexp.foreign_loop.signatures import signature
from ntkexp.foreign_loop.step import AbstractStore, FollowedStep
from ntkexp.foreign_loop.step_log import StepLog
from ntkexp.foreign_loop.store.checkpoints import copied_state
from ntkexp.foreign_loop.store.shards import current_processes
from ntkexp.foreign_loop.user_loss import Weighing
from ntkexp.kernel.record.tape import as_inputs, examples, map_tensors
from ntkexp.mistake import Mistake
from ntkexp.model.functional import Output, choose_output, named_outputs, with_outputs
from ntkexp.optimizer.base import IDLE, LinearStep
from ntkexp.shapes import Inputs, Weights

LOG = logging.getLogger("ntkexp.follow")

SWAP_EPS = 32  # eps: rounding error of weights that the loop moved and then moved back

FOLLOWED_OPTIMIZERS: WeakSet[torch.optim.Optimizer] = WeakSet()
"""The optimizers that are followed at the moment."""


def refuse_followed(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Raise if an optimizer is followed already."""
    if any(optimizer in FOLLOWED_OPTIMIZERS for optimizer in optimizers):
        raise Mistake("the optimizer is followed already; one trace holds all of its steps")


@dataclass
class LatestCall:
    """The circumstances of the latest call, recorded before its first layer runs."""

    generators: Mapping[str, Tensor] = field(default_factory=dict)  # random states before the call
    forbidden: frozenset[str] = frozenset()  # see `Circumstances`
    autocast: Autocast | None = None
    is_at_first_layer: bool = True


@dataclass
class Watch:
    """The hooks on a loop, and the calls and weights that they have recorded."""

    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    known: Sequence[KnownOptimizer]  # the rules of the optimizers
    output: Output
    ids: Ids
    store: AbstractStore
    frozen: FrozenTensors
    weighing: Weighing | None = None  # weights of examples in a loop that runs again
    first: FirstStepProof | None = None
    log: StepLog | None = None
    hooks: list[Any] = field(default_factory=list)

    # state that calls of the model change: first, the calls whose gradients a later step may use
    calls: list[ModelCall] = field(default_factory=list)
    count: int = 0  # number of recorded calls
    under_way: list[int] = field(default_factory=list)  # `count` at the start of each nested call
    latest_call: LatestCall = field(default_factory=LatestCall)
    in_losses: bool = False  # True inside `losses`, where calls of the model are not recorded
    is_differentiated: bool = False  # a backward pass since the latest step had create_graph=True
    consumed_calls: list[ModelCall] = field(default_factory=list)  # calls used by the latest step
    # `grad` tensors used by the latest step
    consumed_tensors: list[ReferenceType[Tensor]] = field(default_factory=list)

    # state that steps of the optimizers change
    latest: LatestWeights = field(default_factory=LatestWeights)
    proof: RuleProof = field(default_factory=RuleProof)
    scratch: dict[tuple[torch.dtype, torch.device], Tensor] = field(default_factory=dict)
    # by parameter: the optimizer's state before the step, with only the entries in `rule.needs`
    states_before: dict[str, dict[str, Any]] = field(default_factory=dict)
    # if there are several optimizers: the index of the optimizer that moved each parameter last, and
    # the number of steps of each parameter by each optimizer
    movers: dict[str, int] = field(default_factory=dict)
    times_moved: dict[tuple[int, str], int] = field(default_factory=dict)
    moved: Weights = field(default_factory=dict)  # weights that the loop moved before a call
    moved_at: int = -1  # index of the step after that call
    gradients_before: Weights = field(default_factory=dict)  # copies, if steps overwrite gradients
    settings_before: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    stepping: set[int] = field(default_factory=set)  # ids of optimizers between the two step hooks
    passed: bool = False  # True if the latest step was not stored

    # --- Begin and end

    def begin(self) -> None:
        """Register the hooks before the first step."""
        self.rules = {
            id(optimizer): known.rule
            for optimizer, known in zip(self.optimizers, self.known, strict=True)
        }
        self.inner = unwrapped_model(self.model)
        self.parameters = ParameterGroups(self.inner, self.optimizers)
        self.latest.rounding_of_swaps = self.rounding_of_swaps
        self.statistics = RunningStatistics(self.inner, current_processes().world)
        for name, weight in self.parameters:
            self.latest.copy_in({name: weight})
            self.proof.begin(name, weight)
        self.store.begin(dict(self.latest.weights), self.optimizers, self.parameters.names)

        # if a trace continues, the optimizers have momenta from earlier steps
        for optimizer in self.optimizers:
            if not self.store.count and any(map(has_moved, optimizer.state.values())):
                raise Mistake(
                    "the optimizer has taken steps already, and its memory (momentum, moments) "
                    "holds their gradients, which this trace does not know; begin anew with a new "
                    "optimizer, or continue the trace that followed these steps, with its to="
                )
            self.remember(optimizer)
        FOLLOWED_OPTIMIZERS.update(self.optimizers)
        self.register_hooks()

    def register_hooks(self) -> None:
        """Register hooks on the optimizers, the model, and each of its layers with parameters."""
        for optimizer in self.optimizers:
            before = FollowHook(optimizer, self.on_step_begin)
            after = FollowHook(optimizer, self.on_step_end)
            self.hooks.append(optimizer.register_step_pre_hook(before))
            self.hooks.append(optimizer.register_step_post_hook(after))
        self.hooks.append(register_optimizer_step_post_hook(self.on_other_step))
        model = called_model(self.model)
        begin = FollowHook(model, self.on_call_begin)
        end = FollowHook(model, self.on_call)
        self.hooks.append(model.register_forward_pre_hook(begin))
        self.hooks.append(model.register_forward_hook(end, with_kwargs=True))
        # libraries may enter autocast between a model and its layers
        for layer in self.model.modules():
            if list(layer.parameters(recurse=False)):
                self.hooks.append(layer.register_forward_pre_hook(FollowHook(layer, self.on_layer)))

    def remember(self, optimizer: torch.optim.Optimizer) -> None:
        """Store the momenta of an optimizer, which proof (b) needs."""
        rule = self.rules[id(optimizer)]
        for group, members in self.parameters.groups(optimizer):
            for name, weight in members.items():
                if not has_moved(optimizer.state.get(weight, {})):
                    continue
                self.proof.moved[name] = 1
                self.movers[name] = id(optimizer)
                self.times_moved[id(optimizer), name] = 1
                momentum = rule.momentum_at(group, optimizer.state[weight], weight.detach())
                if momentum is not None:
                    self.proof.remember(name, momentum)

    def catch_up(self) -> None:
        """Store the present weights and momenta, after steps that were not stored."""
        if not self.passed:
            return
        self.passed = False
        self.latest.copy_in(dict(self.parameters))
        for name, weight in self.parameters:
            self.proof.begin(name, weight)
        for optimizer in self.optimizers:
            self.remember(optimizer)
        self.calls = []
        self.consumed_calls = []
        self.consumed_tensors = []
        self.store.go_on(dict(self.latest.weights))

    def end(self, *, whole: bool) -> None:
        """Remove the hooks. `whole` is False if the loop was interrupted."""
        outside = Outside()
        if self.hooks:
            self.catch_up()
            FOLLOWED_OPTIMIZERS.difference_update(self.optimizers)
            if whole:
                outside = self.changed_outside()
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()
        self.store.end(outside, whole=whole)
        if self.log is not None:
            self.log.flush()

    def changed_outside(self) -> Outside:
        """Return the changes after the last step, such as a clamp or a loaded average of weights.

        Log a warning if there are any.
        """
        after_last_step = self.latest.weights | self.statistics.at_step
        names = list(self.frozen.differences(after_last_step))
        if not names:
            return Outside()
        now = named_tensors(self.frozen.model)
        before = named_tensors(self.frozen.copy)
        tensors: Weights = {}
        for name in names:
            if name in now and now[name].shape == before[name].shape:
                tensors[name] = now[name].detach().clone()
        outside = Outside(tuple(names), tensors)
        consequence = "the model is attributed without that change"
        if len(tensors) == len(names):
            consequence = "attribute() gives what that changed as `outside`"
        LOG.warning("ntkexp: %s changed outside the steps; %s", outside.named, consequence)
        return outside

    # --- Calls

    def on_call_begin(self, *_: object) -> None:
        """Record the circumstances of a call, before its first layer runs."""
        if self.in_losses or is_transformed():
            return
        self.under_way.append(self.count)
        if not self.store.takes_next:
            return
        self.statistics.begin_call(self.store.count, with_gradients=torch.is_grad_enabled())
        if torch.is_grad_enabled():
            self.latest_call = LatestCall(generator_states(self.inner), forbidden_kernels())

    def on_layer(self, layer: nn.Module, *_: object) -> None:
        """Record the autocast context of a call, which may begin at its first layer or later."""
        call = self.latest_call
        if torch.is_grad_enabled() and call.autocast is None:
            device = next(layer.parameters()).device.type
            call.autocast = Autocast.now(device, whole=call.is_at_first_layer)
        call.is_at_first_layer = False

    def on_call(
        self, _: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], answer: object
    ) -> object:
        """Record a call with gradients enabled.

        If the model returns several tensors, return aliases of them to the loop. Otherwise return
        None, which leaves the model's answer unchanged.
        """
        if self.in_losses or is_transformed():
            return None
        contains_calls = self.under_way.pop() < self.count  # for example a library's outer wrapper
        if not self.store.takes_next:
            return None
        statistics = self.statistics.end_call()
        if contains_calls or not torch.is_grad_enabled():
            return None
        output = choose_output(answer, self.output)
        tensors = differentiable_outputs(answer, output)
        if not tensors or not output.numel():  # no examples
            return None
        weights = self.moved_weights()
        self.refuse_other_weights(moves_statistics=statistics is not None)
        inputs = self.copied_inputs(output, args, kwargs)

        call = ModelCall(
            at=self.store.count,
            inputs=inputs,
            how=self.circumstances(),
            given_names=names_of(inputs, self.ids),
            signed=signature(output),
            shape=tuple(output.shape),
            statistics=statistics,
            weights=weights,
        )
        counts = None if self.weighing is None else self.weighing.counts(output, call)
        if self.log is not None:
            call.sums_of_loss = self.log.sums_of_loss(output, call)
        followed = [name for name, tensor in tensors.items() if tensor is output]
        if followed:
            past_casts = call.how.autocast is not None
            listen(output, partial(self.on_gradient, call, counts), past_casts=past_casts)
        self.calls.append(call)
        self.count += 1
        if len(followed) == len(tensors):
            return None
        aliases = self.listen_to_several(call, counts, tensors, next(iter(followed), ""))
        return with_outputs(answer, aliases) if aliases else None

    def losses(self, function: LossFunction, batch: Batch) -> Tensor:
        """Return the losses `function(model, *batch)`, and record the call if gradients are
        enabled."""
        if self.in_losses:
            return function(self.model, *batch)
        refuse_unfollowed_losses(self)
        records = self.store.takes_next and torch.is_grad_enabled()
        inputs: Batch = ()
        weights: Weights | None = None
        if records:
            weights = self.moved_weights()
            self.refuse_other_weights(moves_statistics=False)
            inputs = copied_batch(batch)
            self.store.hold_function(function)
        modes = LayerModes.of(self.inner)
        self.latest_call = LatestCall(generator_states(self.inner), forbidden_kernels())

        self.in_losses = True
        try:
            losses = function(self.model, *batch)
        finally:
            self.in_losses = False
        if not records:
            return losses
        refuse_other_losses(losses, inputs)
        if self.latest_call.autocast is not None:
            raise Mistake(f"step {self.store.count}: {IN_AUTOCAST}")
        if losses.requires_grad:
            call = ModelCall(
                at=self.store.count,
                inputs=inputs,
                how=replace(self.circumstances(), modes=modes),
                given_names=names_of(inputs, self.ids, len(losses)),
                signed=signature(losses),
                shape=tuple(losses.shape),
                losses=function,
                weights=weights,
            )
            listen(losses, partial(self.on_gradient, call, None), past_casts=False)
            self.calls.append(call)
            self.count += 1
        return losses

    def listen_to_several(
        self, call: ModelCall, counts: Tensor | None, tensors: Mapping[str, Tensor], followed: str
    ) -> dict[str, Tensor]:
        """Register hooks on the gradients of all outputs of a call.

        If the loss may use other outputs than the followed one, return an alias of each output.
        """
        rows = examples(call.inputs)
        with_rows = {
            name: tensor for name, tensor in tensors.items() if tensor.dim() and len(tensor) == rows
        }
        for name in tensors.keys() - with_rows.keys():
            listen(tensors[name], partial(self.on_inner_loss, call, name), past_casts=False)
        if list(with_rows) == [followed]:
            return {}

        signatures = {
            name: signature(tensor) for name, tensor in with_rows.items() if name != followed
        }
        if followed in with_rows and call.signed is not None:
            signatures[followed] = call.signed
        shapes = {name: tuple(tensor.shape) for name, tensor in with_rows.items()}
        call.several = SeveralOutputs(followed, shapes, signatures)
        aliases = {name: tensor.view_as(tensor) for name, tensor in with_rows.items()}
        for name, alias in aliases.items():
            listen(alias, partial(self.on_direct_gradient, call, counts, name), past_casts=False)
        return aliases

    def refuse_other_weights(self, *, moves_statistics: bool) -> None:
        """Raise if something other than a followed optimizer or call has changed weights, buffers
        or normalisation layers.
        """
        step = self.store.count
        if moves_statistics and self.store.chooses:
            raise Mistake(
                f"step {step}: BatchNorm in training mode moves statistics at every step, of which "
                "steps= leaves some out; put it in eval(), or follow all steps"
            )
        refuse_instance_statistics(step, self.model)
        self.frozen.refuse_writes(step, self.moving)

    def moved_weights(self) -> Weights | None:
        """Return the weights that the loop has moved since the latest step, or None.

        SAM moves weights after a first gradient, before its second one. `on_step_begin` raises if
        they are not moved back. Calls at the same weights share one copy.
        """
        step = self.store.count
        closely = any(call.at == step and call.has_gradient for call in self.calls)
        changed = self.latest.changed(step, self.parameters, closely=closely)
        if not changed:
            return None
        for name in changed:
            if name in self.latest.strangers:
                self.latest.refuse_change(step, name)
        if self.moved_at == step and changed.keys() == self.moved.keys():
            pairs = [(weight.detach(), self.moved[name]) for name, weight in changed.items()]
            if all(same_bits(pairs)):
                return self.moved
        self.moved = {name: weight.detach().clone() for name, weight in changed.items()}
        self.moved_at = step
        return self.moved

    def copied_inputs(
        self, output: Tensor, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> Inputs:
        """Copy the inputs of a call, or raise if its output has no row for each example."""
        step = self.store.count
        if not output.dim():
            raise Mistake(f"step {step}: {ONE_NUMBER}")
        inputs = map_tensors(torch.clone, as_inputs(call_inputs(args, kwargs)))
        if len(output) != examples(inputs):
            raise Mistake(
                f"step {step}: the model gives {len(output)} rows for {examples(inputs)} examples; "
                "follow one whose outputs have the examples as their first axis"
            )
        return inputs

    def circumstances(self) -> Circumstances:
        """Return the circumstances of the latest call.

        They include the random states of those generators that the call used.
        """
        call = self.latest_call
        after = generator_states(self.inner)
        used = {
            device: state
            for device, state in call.generators.items()
            if not torch.equal(state, after[device])
        }
        return Circumstances(LayerModes.of(self.inner), used, call.autocast, call.forbidden)

    def on_gradient(
        self, call: ModelCall, counts: Tensor | None, gradient: Tensor | None
    ) -> Tensor | None:
        """Record the total ∂L/∂f of a call.

        In a loop that runs again, return the gradient times the weights of the examples. Otherwise
        return None, which leaves the gradient unchanged.
        """
        if gradient is None:  # one part of a split tensor, if the loss uses only the other parts
            return None
        backward = self.begin_backward(call)
        weighed = None
        if call.several is None or call.several.has_inner_loss:
            weighed = self.weighed(call, counts, gradient)
        call.add_gradient(gradient if weighed is None else weighed, backward)
        return weighed

    def on_direct_gradient(
        self, call: ModelCall, counts: Tensor | None, name: str, gradient: Tensor | None
    ) -> Tensor | None:
        """Record the gradient of the alias of one of several outputs. See `on_gradient`."""
        if gradient is None or call.several is None:
            return None
        call.backward = self.begin_backward(call)
        weighed = None
        if not call.several.has_inner_loss:
            weighed = self.weighed(call, counts, gradient)
        call.several.add_gradient(name, gradient if weighed is None else weighed)
        return weighed

    def on_inner_loss(self, call: ModelCall, name: str, gradient: Tensor | None) -> None:
        """Record that a gradient reached a tensor without a row for each example, such as a loss
        that the model computes."""
        if gradient is None or not bool(gradient.any()):
            return
        if call.several is not None:
            call.several.has_inner_loss = True
        if repr(name) not in call.other_outputs:
            call.other_outputs.append(repr(name))

    def begin_backward(self, call: ModelCall) -> int:
        """Drop gradients that the loop has zeroed. Return the id of the backward pass that is
        running."""
        backward = torch._C._current_graph_task_id()
        self.is_differentiated |= torch.is_grad_enabled()
        if all(weight.grad is None or not weight.grad.any() for _, weight in self.parameters):
            self.drop_zeroed(call, backward)
        return backward

    def weighed(self, call: ModelCall, counts: Tensor | None, gradient: Tensor) -> Tensor | None:
        """Return the gradient times the weights of the examples, or None in a loop without such
        weights."""
        if self.weighing is None:
            return None
        factors = self.weighing.factors(call.names, counts).to(gradient)
        return gradient * factors.view(-1, *[1] * (gradient.dim() - 1))

    def drop_zeroed(self, latest: ModelCall, backward: int) -> None:
        """Drop gradients that the loop has discarded by `zero_grad`. Call this if all `grad`
        tensors are zero.

        Keep the gradients of the present backward pass, and calls whose examples all have weight 0.
        """
        for call in self.calls:
            has_no_weight = (
                self.weighing is not None
                and call.at == self.store.count
                and self.weighing.silences(call.names)
            )
            if call.backward != backward and not has_no_weight:
                call.drop_gradient()
        self.calls = [
            call for call in self.calls if call.has_gradient or call.backward < 0 or call is latest
        ]

    def drop_replaced(self, moved: Iterable[Tensor]) -> None:
        """Drop the calls that the previous step used, if all of its `grad` tensors were replaced.

        Autograd adds to existing `grad` tensors in place, so that they contain earlier gradients.
        New tensors (`p.grad = …`) do not.
        """
        now = [weight.grad for weight in moved if weight.grad is not None]
        consumed = {id(tensor()) for tensor in self.consumed_tensors if tensor() is not None}
        if any(grad.requires_grad or id(grad) in consumed for grad in now):
            return  # with create_graph=True, accumulated gradients are new tensors, too
        for call in self.consumed_calls:
            call.drop_gradient()
        dropped = {id(call) for call in self.consumed_calls}
        self.calls = [call for call in self.calls if id(call) not in dropped]

    # --- Steps

    def on_step_begin(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Raise if weights have changed since the last step. Copy the optimizer state that the rule
        needs from before the step."""
        if not self.store.takes_next:
            self.stepping.add(id(optimizer))
            return
        step = self.store.count
        moved = self.parameters.of(optimizer)
        for name, weight in moved.items():
            # rules do not handle sparse gradients
            if weight.grad is not None and weight.grad.is_sparse:
                raise Mistake(
                    f"step {step}: the gradient of '{name}' is sparse, and such steps are not "
                    "followed; build its layer with sparse=False"
                )
        self.latest.refuse_writes(step, moved.items(), closely=True)
        self.statistics.refuse_writes(step)
        self.frozen.refuse_writes(step, self.moving)
        self.stepping.add(id(optimizer))
        rule = self.rules[id(optimizer)]
        if rule.changes_settings:
            for group, members in self.parameters.groups(optimizer):
                self.settings_before |= dict.fromkeys(members, settings_of(group))
        if rule.overwrites_gradient:
            for name, weight in moved.items():
                if weight.grad is not None:
                    self.gradients_before[name] = weight.grad.detach().clone()
        needs = rule.needs
        if needs:
            for name, weight in moved.items():
                state = optimizer.state.get(weight, {})
                self.states_before[name] = copied_state(
                    {key: state[key] for key in needs if key in state}
                )

    def on_step_end(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Record a step, and prove that the optimizer's rule explains it."""
        if not self.store.takes_next:
            self.on_passed_step(optimizer)
            return
        index = self.store.count
        moved = self.parameters.of(optimizer)
        if id(optimizer) not in self.stepping:
            # if a subclass calls its base class's `step`, this hook runs twice, and the weights
            # must not change in between
            self.latest.refuse_writes(index, moved.items(), closely=True)
            return
        self.stepping.discard(id(optimizer))
        before = dict(self.latest.weights)

        # g, θ after the step, and the signature of each
        gradient: Weights = {}
        for name, weight in moved.items():
            if weight.grad is None:
                gradient[name] = torch.zeros_like(weight)
            else:
                gradient[name] = self.gradients_before.pop(name, weight.grad.detach())
        self.latest.copy_in(moved)
        sign = self.proof.signatures.on_device
        signed = Signed.of(sign(gradient), sign(moved))

        # the linear step of each parameter, and proof (b)
        step = self.linear_steps(optimizer, gradient, before, signed)

        # the calls whose gradients add up to g
        if len(self.optimizers) == 1:
            self.drop_replaced(moved.values())
        self.consumed_calls = [call for call in self.calls if call.has_gradient]
        for call in self.consumed_calls:
            call.is_differentiated |= self.is_differentiated
        self.is_differentiated = False
        self.consumed_tensors = [
            ref(weight.grad) for weight in moved.values() if weight.grad is not None
        ]
        followed = replace(
            step,
            calls=tuple(call.consumed() for call in self.consumed_calls),
            statistics=self.statistics.end_step(),
        )

        # store the step, and run proof (a) of the first step
        which = self.optimizers.index(optimizer)
        self.store.add(followed, which, dict(self.latest.weights), signed)
        if self.first is not None:
            first = self.first
            self.first = None
            others = {name for call in self.calls for name in call.other_outputs}
            first.prove(followed, others)
            release_memory(moved.values())
        self.latest.release(before)
        if self.log is not None:
            self.log.add(self.store.count - 1, followed, moved)

    def linear_steps(
        self,
        optimizer: torch.optim.Optimizer,
        gradient: Weights,
        before: Weights,
        signed: Signed,
    ) -> FollowedStep:
        """Return the linear step of each parameter by the optimizer's rule, and run proof (b).

        `gradient` is the gradient that the optimizer used, `before` are the weights before the
        step, and `signed` are the signatures of the gradient and of the weights after the step.
        """
        index = self.store.count
        rule = self.rules[id(optimizer)]
        linear: dict[str, LinearStep] = {}
        settings: dict[str, Mapping[str, Any]] = {}
        without_grad = set[str]()
        proofs = list[PendingProof]()
        norm = norm_of(gradient.values()) if rule.reads_norm else nan
        for group, members in self.parameters.groups(optimizer):
            group_settings = settings_of(group)
            for name, weight in members.items():
                where = f"step {index}: '{name}'"
                state = optimizer.state.get(weight, {})
                scratch = self.scratch_like(weight)
                if len(self.optimizers) > 1 and weight.grad is not None:
                    momentum = rule.momentum_at(group, state, weight.detach()) if state else None
                    remembers = momentum is not None
                    self.change_mover(optimizer, name, index, remembers=remembers)
                times = self.proof.moved.get(name, 0)
                states_before = self.states_before.get(name, {})
                step_input = StepInput(gradient[name], before[name], times, states_before, norm)

                step = IDLE
                if weight.grad is not None:
                    self.proof.moved[name] = times + 1
                    step = read_step(rule, group, state, step_input, scratch, where)
                    if name not in self.proof.memory:
                        step = step.changed(momentum_decay=0.0)
                if weight.grad is None or not weight.requires_grad:
                    without_grad.add(name)
                linear[name] = step
                settings[name] = group_settings

                signatures = (signed.gradient[name], signed.after[name])
                momentum = None
                if state:
                    momentum = rule.momentum_at(group, state, weight.detach())
                held = self.proof.hold(where, name, step, signatures, step_input, momentum, scratch)
                proofs.append(held)
        return FollowedStep(
            index=index,
            calls=(),
            start=before,
            gradient=gradient,
            linear=linear,
            without_grad=frozenset(without_grad),
            settings=settings,
            settings_before={
                name: self.settings_before[name] for name in settings if rule.changes_settings
            },
            rule_error=max(self.proof.settle(proofs), default=0.0),
        )

    def change_mover(
        self, optimizer: torch.optim.Optimizer, name: str, step: int, *, remembers: bool
    ) -> None:
        """Forget the momentum of another optimizer that moved a parameter in an earlier stage.

        Raise if optimizers take turns: the momentum of each would contain gradients from before the
        steps of the other.
        """
        key = (id(optimizer), name)
        times = self.times_moved.get(key, 0)
        self.times_moved[key] = times + 1
        last = self.movers.get(name)
        self.movers[name] = id(optimizer)
        if last is None or last == id(optimizer):
            return
        if times and remembers:
            raise Mistake(
                f"step {step}: '{name}' was moved by another optimizer since "
                f"{type(optimizer).__name__} moved it, and its momentum is from before that; let "
                "one stage end before the next begins, or give each optimizer other parameters"
            )
        self.proof.memory.pop(name, None)
        self.proof.made.pop(name, None)
        self.proof.moved[name] = times

    def on_other_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Record the parameters that an unfollowed optimizer moves, for an error message."""
        base = getattr(optimizer, "base_optimizer", None)  # of SAM
        if any(followed in (optimizer, base) for followed in self.optimizers):
            return
        for group in optimizer.param_groups:
            for weight in group["params"]:
                if weight.grad is not None and id(weight) in self.parameters.names:
                    name = self.parameters.names[id(weight)]
                    self.latest.strangers[name] = type(optimizer).__name__

    def on_passed_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Count a step without storing it. If the next step is stored, store the weights after this
        step.
        """
        if id(optimizer) not in self.stepping:  # a subclass calls its base class's `step`
            return
        self.stepping.discard(id(optimizer))
        self.passed = True
        self.store.pass_over()
        if self.store.takes_next:
            self.catch_up()

    def rounding_of_swaps(self, name: str) -> Tensor | None:
        """Return the largest rounding error of each element of a weight that the loop has moved and
        then moved back, or None if the weight must have the same bits.

        SAM moves weights before its second gradient. Schedule-free optimizers move them to an average.
        """
        weight_before = self.latest.weights[name]
        eps = torch.finfo(weight_before.dtype).eps
        if self.moved_at == self.store.count:
            size = weight_before.abs() + self.moved.get(name, weight_before).abs()
            return size * (SWAP_EPS * eps)
        for optimizer in self.optimizers:
            weight = self.parameters.of(optimizer).get(name)
            if weight is None or not self.rules[id(optimizer)].swaps_weights:
                continue
            average = optimizer.state.get(weight, {}).get("z")
            if isinstance(average, Tensor):
                return (weight_before.abs() + average.abs()) * (SWAP_EPS * eps)
        return None

    @property
    def moving(self) -> Weights:
        """The weights that optimizers update, and the running statistics that calls update."""
        if not self.statistics.moves:
            return self.latest.weights
        return self.latest.weights | self.statistics.latest

    def scratch_like(self, weight: Tensor) -> Tensor:
        """Return a reused buffer of the weight's shape. Allocating new memory would take longer
        than the arithmetic."""
        key = (weight.dtype, weight.device)
        if key not in self.scratch or self.scratch[key].numel() < weight.numel():
            contiguous = torch.empty_like(weight, memory_format=torch.contiguous_format)
            self.scratch[key] = contiguous.flatten().detach()
        return self.scratch[key][: weight.numel()].view(weight.shape)


IN_AUTOCAST = (
    "trace.losses: losses under autocast are not followed; compute them with "
    "torch.autocast(…, enabled=False)"
)


def refuse_unfollowed_losses(watch: Watch) -> None:
    """Raise if a call of `trace.losses` cannot be followed in this loop."""
    step = watch.store.count
    if is_transformed():
        raise Mistake(
            f"step {step}: trace.losses: it was called inside a transform of torch.func; call it "
            "outside, and take the derivatives inside the function"
        )
    if watch.weighing is not None:
        raise Mistake(
            "again=: trace.losses cannot leave examples out of the loop; run the loop without them"
        )
    if current_processes().world > 1:
        raise Mistake(
            f"step {step}: trace.losses: losses of several processes are not followed; train in one"
        )
    if couples(watch.inner):
        raise Mistake(
            f"step {step}: trace.losses: BatchNorm in training mode is not followed there; put "
            "these layers in eval(), or take another norm"
        )
    weight = next(watch.inner.parameters())
    if torch.is_autocast_enabled(weight.device.type):
        raise Mistake(f"step {step}: {IN_AUTOCAST}")
    if shortest(watch.inner) is not None:
        raise Mistake(
            f"step {step}: trace.losses: frozen weights in half precision are not followed there; "
            "convert them to the precision of the trained weights"
        )


def is_transformed() -> bool:
    """Return True inside a transform of torch.func. Its tensors cannot be recorded.

    >>> torch.func.vmap(lambda x: x * is_transformed())(torch.ones(1)), is_transformed()
    (tensor([1.]), False)
    """
    # torch.compile traces hooks, and the traced call below would always return an object
    if torch.compiler.is_compiling():
        return False
    return torch._C._functorch.peek_interpreter_stack() is not None


def differentiable_outputs(answer: object, followed: Tensor) -> dict[str, Tensor]:
    """Return the tensors in the model's answer that require gradients, by name."""
    if isinstance(answer, Tensor):
        return {"": followed} if followed.requires_grad else {}
    return {name: tensor for name, tensor in named_outputs(answer).items() if tensor.requires_grad}


def has_moved(state: Mapping[str, Any]) -> bool:
    """Return True if the optimizer state of a parameter shows an earlier step.

    Some optimizers have a state before their first step.

    >>> has_moved({}), has_moved({"step": torch.tensor(0.0)})
    (False, False)
    >>> has_moved({"momentum_buffer": torch.zeros(1)})
    True
    """
    return bool(state) and float(state.get("step", 1)) > 0


def read_step(
    rule: AbstractOptimizerRule,
    group: Mapping[str, Any],
    state: Mapping[str, Any],
    step_input: StepInput,
    scratch: Tensor,
    where: str,
) -> LinearStep:
    """Return the linear step by the optimizer's rule. Raise if a subclass of the optimizer lacks a
    state entry that the rule reads.
    """
    try:
        return rule.watched(group, state, step_input, scratch)
    except KeyError as error:
        raise Mistake(
            f"{where}: its optimizer has no {error}, which {type(rule).__name__} reads; give its "
            "own, rules=[…]"
        ) from error


def settings_of(group: Mapping[str, Any]) -> dict[str, object]:
    """Copy the settings of a parameter group."""
    return {key: copied_setting(value) for key, value in group.items() if key != "params"}


def copied_setting(value: object) -> object:
    """Copy a setting of a parameter group.

    Numbers are converted to Python floats. A tensor stays a tensor, because its dtype matters.

    >>> copied_setting(torch.tensor(0.5)), copied_setting((0.9, 0.99))
    (tensor(0.5000), (0.9, 0.99))
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, list | tuple):
        return tuple(map(copied_setting, value))
    if isinstance(value, Real) and not isinstance(value, bool | int):
        return float(value)
    return value
