"""A training loop is watched: hooks on the model and its optimizers record calls and steps, prove each step, and change
nothing. The whole algorithm of following is here; what is recorded goes to a store (`store/`), which replays it later.

    call        `on_call` records a copy of the inputs; the step at whose weights it is made; the modes of layers, the
                states of the generators that it drew from, autocast; and a signature of its outputs
    backward    `on_gradient` records ∂L/∂f of each example, which holds reduction, accumulation and loss scale already:
                no loss function is asked for, and none can be misread
    step        `on_step_begin` compares the weights, to the bit, with those that the last step left
                `on_step_end` reads the gradient g that was consumed, and from the optimizer's settings and state after
                the step the linear map that it was, for each parameter:
                    p = g + λθ        m ← βm + αp        θ ← (1 − d)θ − S ⊙ m − N p

What is proved, each to rounding:

    (a)  Σᵢ Jᵢᵀℓ′ᵢ over the recorded calls is g, up to a factor: `FirstStepProof` after the first step, so that a loop
         that cannot be explained is refused before its second; of all steps when they are replayed and attributed
    (b)  the linear map leads from the weights before to those after: `rule.RuleProof`, at every step as it happens
    (c)  the secant explains the change of the outputs at the queries: `attribution`

What is refused: weights or buffers that something else than the optimizers moved, batch statistics, sparse gradients,
a model that gives no row for each example, an optimizer whose rule is not known.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from numbers import Real
from typing import Any, TypeAlias
from weakref import ReferenceType, WeakSet, ref

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import unserializable_hook

from ntkexp.foreign_loop.arguments import (
    NEVER_CALLED,
    ONE_NUMBER,
    ParameterGroups,
    called_model,
    common_submodule,
    unwrapped_model,
)
from ntkexp.foreign_loop.batch_norm import RunningStatistics, refuse_instance_statistics
from ntkexp.foreign_loop.call import (
    Autocast,
    Circumstances,
    LayerModes,
    ModelCall,
    call_inputs,
    facts_of,
    forbidden_kernels,
    generator_states,
)
from ntkexp.foreign_loop.clipping import factors_between
from ntkexp.foreign_loop.example_names import Ids, names_of
from ntkexp.foreign_loop.hooks import FollowHook
from ntkexp.foreign_loop.model_function import CalledModule, left_alone, signature
from ntkexp.foreign_loop.outside import (
    FrozenTensors,
    LatestWeights,
    Outside,
    named_tensors,
    release_memory,
)
from ntkexp.foreign_loop.rule import (
    AbstractOptimizerRule,
    PendingProof,
    RuleProof,
    Signed,
    StepInput,
)
from ntkexp.foreign_loop.step import AbstractStore, FollowedStep
from ntkexp.foreign_loop.step_log import StepLog
from ntkexp.foreign_loop.store.replay import copied
from ntkexp.foreign_loop.store.shards import current_processes
from ntkexp.foreign_loop.torch_rules import KnownOptimizer
from ntkexp.foreign_loop.user_loss import Weighing
from ntkexp.kernel.record.tape import as_inputs, examples, map_tensors, part, tensors
from ntkexp.kernel.record.taping import columns
from ntkexp.mistake import Mistake
from ntkexp.model.functional import choose_output, parts_of
from ntkexp.optimizer.base import IDLE, LinearStep
from ntkexp.shapes import Inputs, Weights

LOG = logging.getLogger("ntkexp.follow")

FOLLOWED: WeakSet[torch.optim.Optimizer] = WeakSet()
"""The optimizers whose steps are being followed."""


def refuse_followed(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Refuse optimizers that are followed already."""
    if any(optimizer in FOLLOWED for optimizer in optimizers):
        raise Mistake("the optimizer is followed already; one trace holds all of its steps")


@dataclass
class Watch:
    """The hooks on a loop, and what they have seen so far."""

    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    known: Sequence[KnownOptimizer]  # the rules of these
    output: str | int | None
    ids: Ids
    store: AbstractStore
    frozen: FrozenTensors
    weighing: Weighing | None = None  # of examples of a loop that is carried out again
    first: FirstStepProof | None = None
    log: StepLog | None = None
    hooks: list[Any] = field(default_factory=list)

    # calls, as long as a step may consume their gradients
    calls: list[ModelCall] = field(default_factory=list)
    count: int = 0  # calls recorded
    under_way: list[int] = field(
        default_factory=list
    )  # the count when each of the nested calls under way began
    generators: Mapping[str, Tensor] = field(
        default_factory=dict
    )  # their states before the latest call
    forbidden: frozenset[str] = frozenset()  # the kernels that the latest call could not choose
    autocast: Autocast | None = None  # in which it was made
    first_layer: bool = True  # whether it has come to none of its layers yet
    consumed_calls: list[ModelCall] = field(
        default_factory=list
    )  # those that the latest step consumed
    consumed_tensors: list[ReferenceType[Tensor]] = field(
        default_factory=list
    )  # the `grad`s that it consumed

    # steps
    latest: LatestWeights = field(default_factory=LatestWeights)
    proof: RuleProof = field(default_factory=RuleProof)
    scratch: dict[tuple[torch.dtype, torch.device], Tensor] = field(default_factory=dict)
    states_before: dict[str, dict[str, Any]] = field(
        default_factory=dict
    )  # what rules need of them, before the step
    stepping: set[int] = field(
        default_factory=set
    )  # the optimizers that have begun a step, and not ended it
    passed: bool = False  # whether the latest step was passed over

    # --- Begin and end

    def begin(self) -> None:
        """Put up the hooks, at weights that no step has moved yet."""
        self.rules = {
            id(each): known.rule for each, known in zip(self.optimizers, self.known, strict=True)
        }
        self.inner = unwrapped_model(self.model)
        self.parameters = ParameterGroups(self.inner, self.optimizers)
        self.statistics = RunningStatistics(self.inner, current_processes().world)
        for name, weight in self.parameters:
            self.latest.copy_in({name: weight})
            self.proof.begin(name, weight)
        self.store.begin(dict(self.latest.weights), self.optimizers, self.parameters.names)

        # what the optimizers remember is taken over, if the trace goes on with the steps that they have taken
        for optimizer in self.optimizers:
            if not self.store.count and any(map(has_moved, optimizer.state.values())):
                raise Mistake(
                    "the optimizer has taken steps already, which were not followed; follow it from its first step"
                )
            self.remember(optimizer)

        FOLLOWED.update(self.optimizers)
        for optimizer in self.optimizers:
            self.hooks.append(
                optimizer.register_step_pre_hook(FollowHook(optimizer, self.on_step_begin))
            )
            self.hooks.append(
                optimizer.register_step_post_hook(FollowHook(optimizer, self.on_step_end))
            )
        self.hooks.append(register_optimizer_step_post_hook(self.on_other_step))
        called = called_model(self.model)
        self.hooks.append(called.register_forward_pre_hook(FollowHook(called, self.on_call_begin)))
        self.hooks.append(
            called.register_forward_hook(FollowHook(called, self.on_call), with_kwargs=True)
        )
        for layer in self.model.modules():  # libraries put autocast between a model and its layers
            if list(layer.parameters(recurse=False)):
                self.hooks.append(layer.register_forward_pre_hook(FollowHook(layer, self.on_layer)))

    def remember(self, optimizer: torch.optim.Optimizer) -> None:
        """Take over what an optimizer remembers of its steps so far."""
        rule = self.rules[id(optimizer)]
        for group, members in self.parameters.groups(optimizer):
            for name, weight in members.items():
                if not has_moved(optimizer.state.get(weight, {})):
                    continue
                self.proof.moved[name] = 1
                if (momentum := rule.momentum(group, optimizer.state[weight])) is not None:
                    self.proof.remember(name, momentum)

    def catch_up(self) -> None:
        """Take over the weights, and what the optimizers remember, after steps that were passed over."""
        if not self.passed:
            return
        self.passed = False
        self.latest.copy_in(dict(self.parameters))
        for name, weight in self.parameters:
            self.proof.begin(name, weight)
        for optimizer in self.optimizers:
            self.remember(optimizer)
        self.calls, self.consumed_calls, self.consumed_tensors = [], [], []
        self.store.go_on(dict(self.latest.weights))

    def end(self, *, whole: bool) -> None:
        """Take the hooks down, if they were put up; the loop is `whole`, or was broken off."""
        outside = Outside()
        if self.hooks:
            self.catch_up()
            FOLLOWED.difference_update(self.optimizers)
            outside = self.changed_outside() if whole else outside
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()
        self.store.end(outside, whole=whole)
        if self.log is not None:
            self.log.flush()

    def changed_outside(self) -> Outside:
        """What changed after the last step: an average of weights that was loaded, a clamp."""
        known = self.latest.weights | self.statistics.at_step
        names, now = list(self.frozen.differences(known)), named_tensors(self.frozen.model)
        shapes = {name: tensor.shape for name, tensor in named_tensors(self.frozen.copy).items()}
        changed = {
            n: now[n].detach().clone() for n in names if n in now and now[n].shape == shapes[n]
        }
        outside = Outside(tuple(names), changed)
        if names:
            LOG.warning(
                "ntkexp: %s changed outside the steps; %s",
                outside.named,
                "attribute() gives what that changed as `outside`"
                if len(changed) == len(names)
                else "the model is attributed without that change",
            )
        return outside

    # --- Calls

    def on_call_begin(self, *_: object) -> None:
        """Note where generators stand before the call, which may draw random numbers, and what kernels it may use."""
        self.under_way.append(self.count)
        if not self.store.takes_next:
            return
        self.statistics.begin_call(self.store.count, with_gradients=torch.is_grad_enabled())
        if torch.is_grad_enabled():
            self.generators, self.autocast, self.first_layer = (
                generator_states(self.inner),
                None,
                True,
            )
            self.forbidden = forbidden_kernels()

    def on_layer(self, layer: nn.Module, *_: object) -> None:
        """Note the autocast of a call, in the first layer that it comes to or a later one."""
        if torch.is_grad_enabled() and self.autocast is None:
            self.autocast = Autocast.now(
                next(layer.parameters()).device.type, whole=self.first_layer
            )
        self.first_layer = False

    def on_call(
        self, _: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], answer: object
    ) -> None:
        """Record a call that may be differentiated."""
        within = self.under_way.pop() < self.count
        if not self.store.takes_next:
            return
        statistics = self.statistics.end_call()
        # a call around others is a library's, with the loop's own code in it
        if within or not torch.is_grad_enabled():
            return
        output, step = choose_output(answer, self.output), self.store.count
        if not output.requires_grad or not output.numel():  # of no examples
            return

        if statistics is not None and self.store.chooses:
            raise Mistake(
                f"step {step}: BatchNorm in training mode moves statistics at every step, of which steps= leaves some "
                "out; put it in eval(), or follow all steps"
            )

        # the model is as the step under way began with it
        self.latest.refuse_writes(step, self.parameters)
        refuse_instance_statistics(step, self.model)
        self.frozen.refuse_writes(step, self.moving)

        # one row of outputs for each example
        if not output.dim():
            raise Mistake(f"step {step}: {ONE_NUMBER}")
        inputs = map_tensors(torch.clone, as_inputs(call_inputs(args, kwargs)))
        if len(output) != examples(inputs):
            raise Mistake(
                f"step {step}: the model gives {len(output)} rows for {examples(inputs)} examples; follow "
                "one whose outputs have the examples as their first axis"
            )

        # its circumstances, with the generators that it drew from; what it gave; and what is to come back to that
        after = generator_states(self.inner)
        drawn_from = {
            place: state
            for place, state in self.generators.items()
            if not torch.equal(state, after[place])
        }
        how = Circumstances(LayerModes.of(self.inner), drawn_from, self.autocast, self.forbidden)
        named, signed = names_of(inputs, self.ids), signature(output)
        call = ModelCall(
            step,
            inputs,
            named,
            how,
            signed=signed,
            shape=tuple(output.shape),
            statistics=statistics,
        )
        counts = None if self.weighing is None else self.weighing.counts(output, call)
        if self.log is not None:
            call.sums_of_loss = self.log.sums_of_loss(output, call)
        listener = partial(self.on_gradient, call, counts)
        unserializable_hook(listener)  # type: ignore[no-untyped-call]  # or torch.save(output) warns of it
        listen(output, listener, past_casts=self.autocast is not None)
        if self.first is not None:
            listen_to_others(answer, output, call)
        self.calls.append(call)
        self.count += 1

    def on_gradient(
        self, call: ModelCall, counts: Tensor | None, gradient: Tensor | None
    ) -> Tensor | None:
        """Record what comes back to the outputs of a call; it is weighed where the loop is carried out again otherwise,
        where examples may count otherwise in a mean."""
        if gradient is None:  # of one part of a split tensor, if a loss uses the other parts alone
            return None
        # Where all gradients are zero now, what came back before was thrown away (zero_grad), but in this same backward
        # pass, or where all examples of a call weigh nothing.
        backward = torch._C._current_graph_task_id()
        if all(weight.grad is None or not weight.grad.any() for _, weight in self.parameters):
            for each in self.calls:
                silenced = (
                    self.weighing is not None
                    and each.at == self.store.count
                    and self.weighing.silences(each.names)
                )
                if each.backward != backward and not silenced:
                    each.gradient = None
            self.calls = [
                c for c in self.calls if c.gradient is not None or c.backward < 0 or c is call
            ]
        if self.weighing is None:
            call.add_gradient(gradient, backward)
            return None
        factors = self.weighing.factors(call.names, counts).to(gradient)
        weighed = gradient * factors.view(-1, *[1] * (gradient.dim() - 1))
        call.add_gradient(weighed, backward)
        return weighed

    def drop_replaced(self, moved: Iterable[Tensor]) -> None:
        """Drop calls that an earlier step consumed, if none of the gradient tensors is left that it read: autograd adds
        to these in place; an assignment of others (`p.grad = …`) adds nothing."""
        now = [weight.grad for weight in moved if weight.grad is not None]
        left = {id(tensor) for each in self.consumed_tensors if (tensor := each()) is not None}
        if any(
            here.requires_grad or id(here) in left for here in now
        ):  # with create_graph=True sums are new tensors
            return
        for call in self.consumed_calls:
            call.gradient = None
        self.calls = [
            call for call in self.calls if all(call is not each for each in self.consumed_calls)
        ]

    # --- Steps

    def on_step_begin(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Check that nothing moved the weights since the last step, and that the rule knows this kind of gradient; copy
        the entries of the optimizer's state that the rule needs as they were."""
        if not self.store.takes_next:
            self.stepping.add(id(optimizer))
            return
        moved = self.parameters.of(optimizer)
        for name, weight in moved.items():
            if (
                weight.grad is not None and weight.grad.is_sparse
            ):  # of some rows alone: rules make something else of it
                raise Mistake(
                    f"step {self.store.count}: the gradient of '{name}' is sparse, and such steps are not followed; "
                    "build its layer with sparse=False"
                )
        self.latest.refuse_writes(self.store.count, moved.items(), closely=True)
        self.statistics.refuse_writes(self.store.count)
        self.frozen.refuse_writes(self.store.count, self.moving)
        self.stepping.add(id(optimizer))
        for name, weight in moved.items() if (needs := self.rules[id(optimizer)].needs) else ():
            state = optimizer.state.get(weight, {})
            self.states_before[name] = copied({key: state[key] for key in needs if key in state})

    def on_step_end(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Record a step that was taken, and prove that it is the optimizer's."""
        # a class that calls the step of the one that it is derived from ends it twice, and has nothing to add to it
        index, rule = self.store.count, self.rules[id(optimizer)]
        if not self.store.takes_next:
            self.on_passed_step(optimizer)
            return
        if id(optimizer) not in self.stepping:
            self.latest.refuse_writes(index, self.parameters.of(optimizer).items(), closely=True)
            return
        self.stepping.discard(id(optimizer))
        moved, before = self.parameters.of(optimizer), dict(self.latest.weights)

        # g and θ after the step, and a signature of each
        gradient = {
            name: torch.zeros_like(w) if w.grad is None else w.grad.detach()
            for name, w in moved.items()
        }
        self.latest.copy_in(moved)
        sign = self.proof.signatures.on_device
        signed = Signed.of(sign(gradient), sign(moved))

        # the linear map of each parameter, from settings and state after the step; proof (b) that it leads there
        linear, settings, without_grad = (
            dict[str, LinearStep](),
            dict[str, Mapping[str, Any]](),
            set[str](),
        )
        proofs = list[PendingProof]()
        for group, members in self.parameters.groups(optimizer):
            group_settings = {
                key: copied_setting(value) for key, value in group.items() if key != "params"
            }
            for name, weight in members.items():
                state, step, room = optimizer.state.get(weight, {}), IDLE, self.scratch_like(weight)
                times, where = self.proof.moved.get(name, 0), f"step {index}: '{name}'"
                taken = StepInput(
                    gradient[name], before[name], times, self.states_before.get(name, {})
                )
                if weight.grad is not None:
                    self.proof.moved[name] = times + 1
                    step = read_step(rule, group, state, taken, room, where)
                    step = step if name in self.proof.memory else replace(step, momentum_decay=0.0)
                seen = signed.gradient[name], signed.after[name]
                momentum = rule.momentum(group, state) if state else None
                proofs.append(self.proof.hold(where, name, step, seen, taken, momentum, room))
                linear[name], settings[name] = step, group_settings
                if weight.grad is None or not weight.requires_grad:
                    without_grad.add(name)

        error = max(self.proof.settle(proofs), default=0.0)

        # the calls whose gradients went into g
        if len(self.optimizers) == 1:
            self.drop_replaced(moved.values())
        self.consumed_calls = [call for call in self.calls if call.gradient is not None]
        self.consumed_tensors = [
            ref(weight.grad) for weight in moved.values() if weight.grad is not None
        ]
        calls = tuple(copy(call) for call in self.consumed_calls)

        # stored, before the next step begins; and proof (a), of the first
        statistics = self.statistics.end_step()
        followed = FollowedStep(
            index,
            calls,
            before,
            gradient,
            linear,
            frozenset(without_grad),
            settings,
            error,
            statistics,
        )
        self.store.add(
            followed, self.optimizers.index(optimizer), dict(self.latest.weights), signed
        )
        first, self.first = self.first, None
        if first is not None:
            first.prove(followed, {name for call in self.calls for name in call.other_outputs})
            release_memory(moved.values())
        self.latest.release(before)
        if self.log is not None:
            self.log.add(self.store.count - 1, followed, moved)

    def on_other_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Note which of the weights an optimizer moves that is not followed, for the message that refuses them."""
        if any(optimizer is each for each in self.optimizers):
            return
        for weight in (each for group in optimizer.param_groups for each in group["params"]):
            if weight.grad is not None and id(weight) in self.parameters.names:
                self.latest.strangers[self.parameters.names[id(weight)]] = type(optimizer).__name__

    def on_passed_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Pass over a step that was not chosen; before one that was, take over what this one left."""
        if id(optimizer) not in self.stepping:  # of a class that calls the step of another
            return
        self.stepping.discard(id(optimizer))
        self.passed = True
        self.store.pass_over()
        if self.store.takes_next:
            self.catch_up()

    @property
    def moving(self) -> Weights:
        """What optimizers move, and calls."""
        return (
            self.latest.weights | self.statistics.latest
            if self.statistics.moves
            else self.latest.weights
        )

    def scratch_like(self, weight: Tensor) -> Tensor:
        """Memory in which elements are formed: to fill fresh memory costs more than they do."""
        key = (weight.dtype, weight.device)
        if key not in self.scratch or self.scratch[key].numel() < weight.numel():
            self.scratch[key] = (
                torch.empty_like(weight, memory_format=torch.contiguous_format).flatten().detach()
            )
        return self.scratch[key][: weight.numel()].view(weight.shape)


def has_moved(state: Mapping[str, Any]) -> bool:
    """Whether an optimizer has taken a step with a parameter of this state; some have one before the first.

    >>> has_moved({}), has_moved({"step": torch.tensor(0.0)}), has_moved({"momentum_buffer": torch.zeros(1)})
    (False, False, True)
    """
    return bool(state) and float(state.get("step", 1)) > 0


def read_step(
    rule: AbstractOptimizerRule,
    group: Mapping[str, Any],
    state: Mapping[str, Any],
    taken: StepInput,
    room: Tensor,
    where: str,
) -> LinearStep:
    """The step by the rule, whose class may remember other things than the one that it is derived from."""
    try:
        return rule.watched(group, state, taken, room)
    except KeyError as error:
        raise Mistake(
            f"{where}: its optimizer has no {error}, which {type(rule).__name__} reads; give its own, rules=[…]"
        ) from error


def copied_setting(value: object) -> object:
    """A setting as a copy, of Python's own kind where it is a number; a tensor stays one, for its precision.

    >>> copied_setting(torch.tensor(0.5)), copied_setting((0.9, 0.99))
    (tensor(0.5000), (0.9, 0.99))
    """
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, list | tuple):
        return tuple(map(copied_setting, value))
    return float(value) if isinstance(value, Real) and not isinstance(value, bool | int) else value


# --- Proof (a) of the first step, right after it.


@dataclass(frozen=True)
class FirstStepProof:
    """What is no gradient of the examples seen is refused before the second step, and not when all are attributed.

    Steps of a loop that lies in several processes are looked at then: here are the calls of one alone.
    """

    called: CalledModule
    queries: Inputs

    def prove(self, step: FollowedStep, others: Collection[str] = ()) -> None:
        """Compare the gradient that was consumed with that of the calls; gradients came to these `others` of their
        outputs, too."""
        if not step.calls and any(bool(step.gradient[name].any()) for name in step.with_grad):
            if others:
                raise Mistake(
                    f"step {step.index}: no gradient came back to the output that is followed, but to "
                    f"{' and '.join(sorted(others))}; name the one that the loss uses, output=…"
                )
            submodule = common_submodule(step.with_grad)
            perhaps = f", perhaps its part '{submodule}'" if submodule else ""
            raise Mistake(f"step {step.index}: {NEVER_CALLED}{perhaps}")
        for call in step.calls:
            self.refuse_other_axes(call)
        if all(call.at == step.index for call in step.calls):
            nothing = {name: torch.zeros_like(step.start[name]) for name in step.with_grad}
            found = nothing | self.called.gradient(step.calls, [step.start] * len(step.calls))
            room = self.called.room_of(step.calls)
            consumed = {name: step.gradient[name] for name in step.with_grad}
            noise = partial(self.called.noise, step.calls, [step.start] * len(step.calls))
            factors_between(found, consumed, step.index, facts_of(step.calls), room, noise)
        self.called.twins.clear()

    def refuse_other_axes(self, call: ModelCall) -> None:
        """Refuse queries that have other axes than what the loop calls the model with, and are answered with other
        outputs: an axis of theirs may be taken for that of the examples. Of as many axes any lengths are fine, and any
        axes to which the model gives the same outputs."""

        def axes(inputs: Inputs) -> dict[object, int]:
            pairs = inputs.items() if isinstance(inputs, Mapping) else enumerate(tensors(inputs))
            return {key: value.dim() for key, value in pairs if isinstance(value, Tensor)}

        def counted(found: Mapping[object, int]) -> str:
            numbers = " and ".join(map(str, found.values()))
            return f"{numbers} axis" if numbers == "1" else f"{numbers} axes"

        ours, theirs = axes(self.queries), axes(call.inputs)
        if ours.keys() != theirs.keys() or ours == theirs:
            return
        weights = {name: weight.detach() for name, weight in self.called.module.named_parameters()}
        with torch.no_grad(), left_alone(self.called.module):
            outputs = columns(self.called.outputs, weights, part(self.queries, slice(1))).shape[1]
        assert call.gradient is not None
        if outputs != (given := call.gradient.shape[1]):
            raise Mistake(
                f"queries=: they have {counted(ours)}, which the model answers with {outputs} outputs each, and the "
                f"loop calls it with {counted(theirs)}, answered with {given}; give queries with the axes of a batch, "
                "also if there is only one"
            )


# --- Listening to the gradient that comes back to an output.
#
# Under autocast libraries cast outputs once more, after a loss was formed of them inside the model: nothing comes
# back to what they hand out, and all of it to what they cast.


CAST = "ToCopyBackward0"
"""What torch calls the way back through a cast."""

Listener: TypeAlias = Callable[[Tensor], Tensor | None]
"""Hears a gradient, and may give another in its place."""


def listen(output: Tensor, listener: Listener, *, past_casts: bool) -> None:
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
        output.register_hook(listener)  # type: ignore[no-untyped-call]  # torch's own
        return
    while node is not None and node.name() == CAST:
        node, place = node.next_functions[0]

    def at_node(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
        came = gradients[place]
        instead = None if came is None else listener(came)
        return None if instead is None else (*gradients[:place], instead, *gradients[place + 1 :])

    assert node is not None
    node.register_prehook(at_node)


def listen_to_others(answer: object, output: Tensor, call: ModelCall) -> None:
    """Note to which other outputs of the model a gradient comes back, for the message that refuses the step."""

    def note(name: str, gradient: Tensor | None) -> None:
        if gradient is not None and name not in call.other_outputs and bool(gradient.any()):
            call.other_outputs.append(name)

    for name, other in parts_of(answer).items():
        if not isinstance(other, Tensor) or other is output or not other.requires_grad:
            continue
        if other.dim() and len(other) == len(output):
            listener = partial(note, repr(name))
            unserializable_hook(listener)  # type: ignore[no-untyped-call]
            other.register_hook(listener)  # type: ignore[no-untyped-call]
