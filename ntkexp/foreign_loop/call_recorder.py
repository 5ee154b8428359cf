"""The hooks at the calls of a followed model. They record the inputs of each call and
its circumstances (see `call`).

    begin     the arguments, the states of random number generators, and the forbidden kernels
    layer     autocast, entered by the loop or by the model
    end       a copy of the inputs, the modes of the layers, the index of the step, a fingerprint
              (random projection) of the outputs, and the weights if the loop has moved them since
              the latest step, as SAM does

`losses` records a call of the user's function of `trace.losses` in the same way.

Only the followed optimizers may change weights, and only the recorded calls may change
buffers. The hooks raise an error if anything else has changed weights or buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ntkexp.foreign_loop.arguments import ONE_NUMBER
from ntkexp.foreign_loop.batch_norm import couples
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
from ntkexp.foreign_loop.cross_entropy import Logits
from ntkexp.foreign_loop.example_losses import (
    Batch,
    LossFunction,
    copied_batch,
    refuse_other_losses,
)
from ntkexp.foreign_loop.example_names import Ids, names_of
from ntkexp.foreign_loop.fingerprints import fingerprint
from ntkexp.foreign_loop.hooks import listen
from ntkexp.foreign_loop.model_function import shortest
from ntkexp.foreign_loop.pending_calls import PendingCalls
from ntkexp.foreign_loop.running_loop import RunningLoop
from ntkexp.foreign_loop.step_log import StepLog
from ntkexp.foreign_loop.store.shards import current_processes
from ntkexp.kernel.record.tape import as_inputs, examples, map_tensors
from ntkexp.mistake import Mistake
from ntkexp.model.functional import (
    Output,
    choose_output,
    named_layers,
    named_outputs,
    with_outputs,
)
from ntkexp.shapes import Inputs, Weights


@dataclass
class LatestCall:
    """The circumstances of the latest call, recorded before and while it runs."""

    # random states before the call
    generators: Mapping[str, Tensor] = field(default_factory=dict)
    forbidden: frozenset[str] = frozenset()  # see `Circumstances`
    autocast: Autocast | None = None
    is_at_first_layer: bool = True


@dataclass(frozen=True)
class RunningCall:
    """A call that has begun and not ended. The arguments are those of the loop, before
    other forward pre-hooks change them. A replay runs these hooks again."""

    module: nn.Module
    # `module.forward`. Lightning replaces it by a function that calls the module again.
    forward: Callable[..., Any]
    args: tuple[object, ...]
    kwargs: dict[str, object]
    count: int  # number of recorded calls at the start of this call


@dataclass
class CallRecorder:
    """A recorder of the calls of a running loop. It adds each call to `pending`."""

    loop: RunningLoop
    pending: PendingCalls
    output: Output
    ids: Ids
    log: StepLog | None
    count: int = 0  # number of recorded calls
    # the calls that are running. There are several if calls contain calls.
    under_way: list[RunningCall] = field(default_factory=list)
    latest_call: LatestCall = field(default_factory=LatestCall)
    # True inside `losses`, where calls of the model are not recorded
    in_losses: bool = False

    def on_begin(
        self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> None:
        """Record the circumstances of a call, before its first layer runs."""
        if self.in_losses or is_transformed():
            return
        begun = RunningCall(module, module.forward, args, kwargs, self.count)
        is_inner = self.is_inner(begun)
        self.under_way.append(begun)
        if is_inner or not self.loop.store.takes_next:
            return
        self.loop.statistics.begin_call(
            self.loop.store.count, with_gradients=torch.is_grad_enabled()
        )
        if torch.is_grad_enabled():
            self.latest_call = LatestCall(
                generator_states(self.loop.inner), forbidden_kernels()
            )

    def is_inner(self, call: RunningCall) -> bool:
        """Return True if `forward` of the module has called the module again. Such a
        call is a part of the outer call, which is recorded as a whole."""
        return any(
            outer.module is call.module and outer.forward == call.forward
            for outer in self.under_way
        )

    def on_layer(self, layer: nn.Module, *_: object) -> None:
        """Record the autocast context of a call. Autocast may
        begin at the first layer or later."""
        call = self.latest_call
        if torch.is_grad_enabled() and call.autocast is None:
            # prefer the layer's own parameters, because `layer.parameters()` would
            # dominate the cost of this hook
            own = [
                weight for weight in layer._parameters.values() if weight is not None
            ]
            device = next(iter(own or layer.parameters())).device.type
            call.autocast = Autocast.now(device, whole=call.is_at_first_layer)
        call.is_at_first_layer = False

    def on_end(
        self,
        _: nn.Module,
        _args: tuple[object, ...],
        _kwargs: dict[str, object],
        answer: object,
    ) -> object:
        """Record a call if gradients are enabled. `answer` is the return value of
        `forward`, or None if `forward` raised an error.

        If the model returns several tensors, return the answer with aliases of these
        tensors, which the loop then receives. Otherwise return None, so that the loop
        receives the model's own answer."""
        if self.in_losses or is_transformed():
            return None
        running = self.under_way.pop()
        if self.is_inner(running) or not self.loop.store.takes_next:
            return None
        # a call that contains a recorded call, such as the call of a library's wrapper
        # around the model, is not recorded again
        contains_calls = running.count < self.count
        statistics = self.loop.statistics.end_call()
        if answer is None or contains_calls or not torch.is_grad_enabled():
            return None
        output = choose_output(answer, self.output)
        tensors = differentiable_outputs(answer, output)
        if not tensors or not output.numel():  # no examples
            return None

        call = self.recorded_call(output, running, statistics)
        counts: Tensor | None = None
        if self.pending.weighing is not None:
            counts = self.pending.weighing.counts(output, call)
        if self.log is not None:
            call.sums_of_loss = self.log.sums_of_loss(output, call)
        self.pending.calls.append(call)
        self.count += 1

        # listen to ∂L/∂f of the followed output, and of all others
        followed = [name for name, tensor in tensors.items() if tensor is output]
        if followed:
            if counts is None and self.repeats_outputs(call):
                call.logits = Logits.of(output)
            past_casts = call.circumstances.autocast is not None
            listener = partial(self.pending.on_gradient, call, counts)
            listen(output, listener, past_casts=past_casts)
        if len(followed) == len(tensors):
            return None
        aliases = self.listen_to_several(
            call, counts, tensors, next(iter(followed), "")
        )
        return with_outputs(answer, aliases) if aliases else None

    def recorded_call(
        self,
        output: Tensor,
        running: RunningCall,
        statistics: tuple[Weights, Weights] | None,
    ) -> ModelCall:
        """Return the record of a call. `statistics` are the running statistics before
        and after the call."""
        weights = self.loop.moved_weights(closely=self.pending.have_gradients)
        layers = named_layers(self.loop.inner)
        self.loop.refuse_changes(layers, moves_statistics=statistics is not None)
        inputs = self.copied_inputs(output, running)
        names, naming_error = self.names_of(inputs)
        return ModelCall(
            at=self.loop.store.count,
            inputs=inputs,
            circumstances=self.circumstances(LayerModes.of(layers)),
            given_names=names,
            naming_error=naming_error,
            fingerprint=fingerprint(output),
            shape=tuple(output.shape),
            statistics=statistics,
            weights=weights,
        )

    def repeats_outputs(self, call: ModelCall) -> bool:
        """Return True if a replay can return the same outputs, bit by bit: the call has
        no autocast, no BatchNorm in training mode, and no half-precision weights."""
        is_coupled = call.statistics is not None
        has_casts = call.circumstances.autocast is not None
        return not (is_coupled or has_casts or shortest(self.loop.inner) is not None)

    def losses(self, function: LossFunction, batch: Batch) -> Tensor:
        """Return the losses `function(model, *batch)`. Record
        the call if gradients are enabled."""
        if self.in_losses:
            return function(self.loop.model, *batch)
        refuse_unfollowed_losses(self.loop, weighed=self.pending.weighing is not None)
        records = self.loop.store.takes_next and torch.is_grad_enabled()
        inputs: Batch = ()
        weights: Weights | None = None
        layers = named_layers(self.loop.inner)
        if records:
            weights = self.loop.moved_weights(closely=self.pending.have_gradients)
            self.loop.refuse_changes(layers, moves_statistics=False)
            inputs = copied_batch(batch)
            self.loop.store.store_function(function)
        modes = LayerModes.of(layers)
        self.latest_call = LatestCall(
            generator_states(self.loop.inner), forbidden_kernels()
        )

        self.in_losses = True
        try:
            losses = function(self.loop.model, *batch)
        finally:
            self.in_losses = False
        if not records:
            return losses
        refuse_other_losses(losses, inputs)
        if self.latest_call.autocast is not None:
            raise Mistake(f"step {self.loop.store.count}: {IN_AUTOCAST}")
        if losses.requires_grad:
            call = ModelCall(
                at=self.loop.store.count,
                inputs=inputs,
                circumstances=self.circumstances(modes),
                given_names=names_of(inputs, self.ids, len(losses)),
                fingerprint=fingerprint(losses),
                shape=tuple(losses.shape),
                losses=function,
                weights=weights,
            )
            listener = partial(self.pending.on_gradient, call, None)
            listen(losses, listener, past_casts=False)
            self.pending.calls.append(call)
            self.count += 1
        return losses

    def listen_to_several(
        self,
        call: ModelCall,
        counts: Tensor | None,
        tensors: Mapping[str, Tensor],
        followed: str,
    ) -> dict[str, Tensor]:
        """Register hooks on the gradients of all outputs of a call.

        If the loss may use other outputs than the followed one, return an alias of each
        output that has a row for each example. Otherwise return an empty dict."""
        rows = examples(call.inputs)
        with_rows = {
            name: tensor
            for name, tensor in tensors.items()
            if tensor.dim() and len(tensor) == rows
        }
        for name in tensors.keys() - with_rows.keys():
            inner_listener = partial(self.pending.on_inner_loss, call, name)
            listen(tensors[name], inner_listener, past_casts=False)
        if list(with_rows) == [followed]:
            return {}

        fingerprints = {
            name: fingerprint(tensor)
            for name, tensor in with_rows.items()
            if name != followed
        }
        if followed in with_rows and call.fingerprint is not None:
            fingerprints[followed] = call.fingerprint
        shapes = {name: tuple(tensor.shape) for name, tensor in with_rows.items()}
        call.several = SeveralOutputs(followed, shapes, fingerprints)
        aliases = {name: tensor.view_as(tensor) for name, tensor in with_rows.items()}
        for name, alias in aliases.items():
            listener = partial(self.pending.on_direct_gradient, call, counts, name)
            listen(alias, listener, past_casts=False)
        return aliases

    def copied_inputs(self, output: Tensor, running: RunningCall) -> Inputs:
        """Copy the inputs of a call. Raise if the output of the call does not have one
        row for each example."""
        step = self.loop.store.count
        args, kwargs = running.args, running.kwargs
        if not output.dim():
            raise Mistake(f"step {step}: {ONE_NUMBER}")
        inputs: Inputs
        first = args[0] if len(args) == 1 and not kwargs else None
        # the most frequent case, handled with the fewest Python calls
        if isinstance(first, Tensor) and first.dim():
            inputs = first.detach().clone()
            rows = len(first)
        else:
            inputs = map_tensors(
                torch.clone, as_inputs(call_inputs(self.loop.inner, args, kwargs))
            )
            rows = examples(inputs)
        if len(output) != rows:
            raise Mistake(
                f"step {step}: the model returns {len(output)} rows for {rows} "
                "examples; follow a module whose outputs have the examples as their "
                "first axis"
            )
        return inputs

    def names_of(
        self, inputs: Inputs
    ) -> tuple[tuple[str, ...] | None, Exception | None]:
        """Return the names that `ids` gives to the examples of a call, and the error if
        it fails. Raise this error if the call needs names now."""
        try:
            return names_of(inputs, self.ids), None
        except Exception as error:  # `ids` may be a function of the user
            if self.log is not None or self.pending.weighing is not None:
                raise
            return None, error

    def circumstances(self, modes: LayerModes) -> Circumstances:
        """Return the circumstances of the latest call, in which the layers had the
        modes `modes`.

        Only the states of the generators that the call used are included.
        """
        call = self.latest_call
        after = generator_states(self.loop.inner)
        used = {
            device: state
            for device, state in call.generators.items()
            if not torch.equal(state, after[device])
        }
        return Circumstances(modes, used, call.autocast, call.forbidden)


IN_AUTOCAST = (
    "trace.losses: losses under autocast cannot be followed; compute them inside "
    "torch.autocast(…, enabled=False)"
)


def refuse_unfollowed_losses(loop: RunningLoop, *, weighed: bool) -> None:
    """Raise if a call of `trace.losses` cannot be followed in this loop.

    `weighed` is True in a loop that runs again with weighted examples.
    """
    step = loop.store.count
    if is_transformed():
        raise Mistake(
            f"step {step}: trace.losses was called inside a transform of torch.func; "
            "call it outside, and take the derivatives inside its function"
        )
    if weighed:
        raise Mistake(
            "again=: examples cannot be left out of a loop that calls "
            "trace.losses; run the loop without them yourself"
        )
    if current_processes().world > 1:
        raise Mistake(
            f"step {step}: trace.losses cannot be followed in several processes; "
            "train in one process"
        )
    if couples(loop.inner):
        raise Mistake(
            f"step {step}: trace.losses cannot be followed with BatchNorm in training "
            "mode; put these layers in eval(), or use another norm"
        )
    weight = next(loop.inner.parameters())
    if torch.is_autocast_enabled(weight.device.type):
        raise Mistake(f"step {step}: {IN_AUTOCAST}")
    if shortest(loop.inner) is not None:
        raise Mistake(
            f"step {step}: trace.losses cannot be followed with frozen weights in half "
            "precision; convert them to the precision of the trained weights"
        )


def is_transformed() -> bool:
    """Return True inside a transform of torch.func, whose tensors cannot be recorded.

    >>> torch.func.vmap(lambda x: x * is_transformed())(torch.ones(1)), is_transformed()
    (tensor([1.]), False)
    """
    # torch.compile also traces hooks. While it traces, `peek_interpreter_stack` would
    # always return an object, so return before it is called.
    if torch.compiler.is_compiling():
        return False
    return torch._C._functorch.peek_interpreter_stack() is not None


def differentiable_outputs(answer: object, followed: Tensor) -> dict[str, Tensor]:
    """Return the tensors in the model's answer that require gradients, by name."""
    if isinstance(answer, Tensor):
        return {"": followed} if followed.requires_grad else {}
    return {
        name: tensor
        for name, tensor in named_outputs(answer).items()
        if tensor.requires_grad
    }
