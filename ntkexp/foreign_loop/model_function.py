"""The followed model as a function of its weights, for two uses:

    at the queries      in evaluation mode, followed by the user's measure if there is one
    at a recorded call  under the circumstances of the call: layer modes, random states (so that
                        dropout draws the same masks), running statistics, allowed kernels

Both functions compute without casts, in the precision of the trained weights. Casts
round to few digits, so the outputs change in jumps, which no secant explains. Frozen
weights of lower precision, as in a base model with adapters, are converted to the
precision of the trained weights.

Two other methods compute under the casts of the loop. `CalledModule.gradient` replays
the gradient of calls, which proof (a) compares with the gradient that the optimizer
used. `CalledModule.as_evaluated` repeats the user model's outputs at the queries.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ntkexp.foreign_loop.batch_norm import beginning_with, couples
from ntkexp.foreign_loop.call import (
    EVALUATION,
    Autocast,
    Circumstances,
    LayerModes,
    ModelCall,
    beginning_at,
    facts_of,
    generator_states,
    without_kernels,
)
from ntkexp.foreign_loop.clipping import StepFacts
from ntkexp.foreign_loop.cross_entropy import CrossEntropyGradient
from ntkexp.foreign_loop.example_losses import LossFunction, fresh, losses_function
from ntkexp.foreign_loop.fingerprints import (
    NOISE_REPEATS,
    fingerprint,
    relative_distance,
)
from ntkexp.foreign_loop.measure import MeasuredQueries
from ntkexp.kernel import Reader, Tape, plain_kernels
from ntkexp.kernel.record.casts import is_short, without_casts
from ntkexp.kernel.record.independence import refuse_dependence, with_noise
from ntkexp.kernel.record.tape import examples, map_tensors, part
from ntkexp.kernel.record.taping import record
from ntkexp.model.functional import (
    Output,
    arguments,
    choose_output,
    copy_module,
    function_of,
    named_layers,
)
from ntkexp.shapes import Function, Inputs, Weights
from ntkexp.stream import stream

LOG = logging.getLogger("ntkexp.follow")

QUERIES_PER_CALL = 256
# relative distance of outputs that rounding does not explain, for an error message
OTHER_OUTPUTS = 1e-3
# this number of queries suffices to check if a module mixes its examples
QUERIES_TO_CHECK = 2


@dataclass(frozen=True)
class CalledModule:
    """A copy of the followed module, and its outputs and gradients
    as functions of its weights."""

    module: nn.Module  # copy of the followed module, in evaluation mode
    output: Output  # name or index of the output
    casts: Autocast | None = None  # autocast of the loop
    # True if replays presumably use the same kernels (torch's implementations of
    # operations) as the loop
    same_kernels: bool = False
    # copies of the module in other layer modes, and with half-precision tensors
    # converted to a dtype (see `twin`)
    twins: dict[tuple[LayerModes, torch.dtype | None], nn.Module] = field(
        default_factory=dict
    )
    # the converted tensors, by the id of the half-precision tensor and the dtype
    long: dict[tuple[int, torch.dtype], Tensor] = field(default_factory=dict)
    measured: MeasuredQueries | None = None  # the measure of the outputs at the queries

    # --- Functions without casts

    @cached_property
    def function(self) -> Function:
        """The module in evaluation mode without casts, followed by the measure."""
        return self.with_measure(self.outputs)

    @cached_property
    def outputs(self) -> Function:
        """The module in evaluation mode without casts. The measure is not applied."""
        cast = self.casts is not None
        return self.without_casts(EVALUATION, self.output, cast=cast, any_mode=False)

    def with_measure(self, function: Function) -> Function:
        """Return the measure composed with a function. If
        there is no measure, return the function."""
        return function if self.measured is None else self.measured.of(function)

    def without_casts(
        self, modes: LayerModes, output: Output, *, cast: bool, any_mode: bool = True
    ) -> Function:
        """Return the module with its layers in `modes` as a function, computed in the
        precision of its trained weights.

        Args:
            modes: modes of the layers.
            output: name or index of the output.
            cast: True if the loop calls the module under autocast. Operations that cast
                tensors are then ignored.
            any_mode: allow layers that are random or couple the examples of a batch.
        """
        if self.short is None:
            function = function_of(self.twin(modes), output, any_mode=any_mode)
            return without_casts(function) if cast else function

        def in_long_numbers(weights: Weights, inputs: Inputs) -> Tensor:
            kinds = (
                weight.dtype for weight in weights.values() if not is_short(weight)
            )
            kind = next(kinds, torch.float32)
            twin = self.twin(modes, kind)
            function = without_casts(function_of(twin, output, any_mode=any_mode))
            weights = {
                name: lengthened(weight, kind) for name, weight in weights.items()
            }
            return function(
                weights, map_tensors(lambda tensor: lengthened(tensor, kind), inputs)
            )

        return in_long_numbers

    def at(self, call: ModelCall) -> Function:
        """Return a function of weights and inputs that repeats a recorded call: it runs
        the module under the circumstances of the call, and with the running statistics
        from before the call. For a call of `trace.losses`, it returns the losses."""
        if call.losses is not None:
            return self.losses_at(call, call.losses)
        before: Weights = {} if call.statistics is None else call.statistics[0]
        output = call.output(self.output)
        function = self.without_casts(
            call.circumstances.modes,
            output,
            cast=call.circumstances.autocast is not None,
        )

        def called(weights: Weights, inputs: Inputs) -> Tensor:
            statistics = {
                name: value.clone()
                for name, value in before.items()
                if name not in weights
            }
            with beginning_at(call.circumstances.states):
                return function({**weights, **statistics}, inputs)

        return called

    def losses_at(self, call: ModelCall, losses: LossFunction) -> Function:
        """Return the losses of a call of `trace.losses` as a function
        of weights and batch."""
        twin = self.twin(call.circumstances.modes)
        function = losses_function(twin, losses)

        def called(weights: Weights, batch: Inputs) -> Tensor:
            call.circumstances.modes.give(twin)  # the user's function may change them
            with beginning_at(call.circumstances.states):
                return function(weights, batch)

        return called

    def couples(self, call: ModelCall) -> bool:
        """Return True if the loss of an example may depend on other examples of the
        batch. This is possible in a call of `trace.losses`, and in a call in which
        BatchNorm normalised by the batch mean and variance."""
        if call.losses is not None:
            return True
        return call.statistics is not None and couples(
            self.twin(call.circumstances.modes)
        )

    def prove_measure(self, reader: Reader, tape: Tape) -> list[str] | list[int]:
        """Return the names of the measure's values. Raise if the value of a query
        depends on other queries.

        The module and the measure are checked separately, because a check of their
        composition would need many calls with all queries."""
        assert self.measured is not None
        weights = tape.recorded_weights
        queries = tape.given
        with torch.no_grad(), plain_kernels():
            outputs = self.outputs(weights, queries)
        names = self.measured.out_names(outputs, queries)
        self.measured.refuse_mixed(outputs, queries)
        few = record(self.outputs, weights, part(queries, slice(QUERIES_TO_CHECK)))
        refuse_dependence(self.outputs, few)
        reader.check_cache.independent.put(tape.operations, True)
        return names

    # --- Casts to lower precision, by autocast or by frozen weights in half precision

    @cached_property
    def short(self) -> torch.dtype | None:
        """The half-precision dtype of frozen weights or buffers,
        or None if there are none."""
        return shortest(self.module)

    def is_cast(self, circumstances: Circumstances) -> bool:
        """Return True if a call uses lower precision than the trained weights."""
        return circumstances.autocast is not None or self.short is not None

    @property
    def loop_is_cast(self) -> bool:
        """True if the loop uses lower precision than the trained weights."""
        return self.casts is not None or self.short is not None

    def cast_eps_of(self, circumstances: Circumstances, *, exact: bool = True) -> float:
        """Return the relative rounding error by which a replayed call may differ from the
        loop's call.

        The error is the eps of the lowest precision in the call, or 0 if the call has
        no casts. It is also 0 if the replay has the same weights (`exact`) and the same
        kernels as the loop, because the replay must then return the same bits."""
        if self.same_kernels and exact:
            return 0.0
        kinds = [
            None if circumstances.autocast is None else circumstances.autocast.dtype,
            self.short,
        ]
        return max((torch.finfo(kind).eps for kind in kinds if kind), default=0.0)

    def cast_eps(self, calls: Sequence[ModelCall], *, exact: bool = True) -> float:
        """Return the largest `cast_eps_of` of these calls."""
        return max(
            (self.cast_eps_of(call.circumstances, exact=exact) for call in calls),
            default=0.0,
        )

    def under(self, casts: Autocast | None) -> Function:
        """Return the module in evaluation mode under an autocast
        context, without the measure."""
        function = function_of(self.twin(EVALUATION), self.output)

        def cast(weights: Weights, inputs: Inputs) -> Tensor:
            with nullcontext() if casts is None else casts.again():
                return function(weights, inputs)

        return cast

    @property
    def as_evaluated(self) -> Iterator[Function]:
        """Yield candidates for the function that the user's model computed at the
        queries.

        The function depends on autocast: the user's model may run without it, under the
        loop's autocast, or under the autocast that its half-precision weights need."""
        candidates = [None, self.casts]
        if self.short is not None:
            device = next(self.module.parameters()).device.type
            short = str(self.short).removeprefix("torch.")
            candidates.append(Autocast(device, short, cached=True))
        for casts in dict.fromkeys(candidates):
            yield self.with_measure(in_chunks(self.under(casts)))

    # --- Gradients of calls, accumulated in autograd's order

    def gradient(
        self,
        calls: Sequence[ModelCall],
        begun: Sequence[Weights],
        on_outputs: Callable[[Float[Tensor, "example ..."]], object] | None = None,
    ) -> Weights:
        """Return the gradient Σ Jᵀℓ′ of some calls, by autograd.

        Args:
            calls: recorded calls, with the output gradients ℓ′ = ∂L/∂f.
            begun: weights at which each call was made.
            on_outputs: function that is called with the outputs of each replayed call.
        """
        parameters = self.parameters
        for parameter in parameters.values():
            parameter.grad = None
        for indices in passes(calls, begun):
            with torch.no_grad():
                for name, weight in begun[indices[0]].items():
                    parameters[name].copy_(weight).requires_grad_()
            self.pull_back([calls[index] for index in indices], on_outputs)
        gradients = {
            name: parameter.grad
            for name, parameter in parameters.items()
            if parameter.grad is not None
        }
        for parameter in parameters.values():
            parameter.grad = None
        return gradients

    def facts_of(
        self, calls: Sequence[ModelCall], begun: Sequence[Weights]
    ) -> StepFacts:
        """Return facts about the calls of a step, for the error message if proof (a)
        fails. `begun` are the weights at which each call was made."""
        return facts_of(calls, partial(self.outputs_missed, calls, begun))

    def outputs_missed(
        self, calls: Sequence[ModelCall], begun: Sequence[Weights]
    ) -> float:
        """Replay calls several times, and return the largest relative distance between
        their outputs and the outputs in the loop. Return 0 if rounding may explain
        it."""
        missed = 0.0
        for _ in range(NOISE_REPEATS):
            outputs = list[Tensor]()
            self.gradient(calls, begun, outputs.append)
            for call, output in zip(calls, outputs, strict=True):
                if call.fingerprint is not None:
                    shapes = tuple(call.joined.values())
                    distance = relative_distance(output, call.fingerprint, shapes)
                    missed = max(missed, distance)
        return missed if missed > OTHER_OUTPUTS else 0.0

    def pull_back(
        self,
        calls: Sequence[ModelCall],
        on_outputs: Callable[[Float[Tensor, "example ..."]], object] | None,
    ) -> None:
        """Replay calls at the present weights. Add the gradients of the calls to the
        `grad` of the parameters, in one backward pass.

        Each backward pass of the loop is replayed as one backward pass, so that
        gradients are summed in the same order. If gradients cancel, another order gives
        another rounding error, which Adam may turn into a step of the opposite sign."""
        outputs = list[Tensor]()
        gradients = list[Tensor]()
        with ExitStack() as contexts:
            contexts.enter_context(torch.enable_grad())
            for call in calls:
                assert call.gradient is not None
                twin = self.twin(call.circumstances.modes)
                args, kwargs = arguments(call.inputs)
                contexts.enter_context(without_kernels(call.circumstances.forbidden))
                running = beginning_with(
                    twin, call.statistics, call.at, self.cast_eps_of(call.circumstances)
                )
                contexts.enter_context(running)
                with call.circumstances.again():
                    if call.losses is None:
                        output = choose_output(
                            twin(*args, **kwargs), call.output(self.output)
                        )
                    else:
                        call.circumstances.modes.give(twin)
                        output = call.losses(twin, *fresh(args))
                if on_outputs is not None:
                    on_outputs(output.detach())
                outputs.append(output)
                gradients.append(call.gradient_at(output))
            # The function of `trace.losses` may also use parameters outside of the
            # module, which must get no gradient. So restrict `backward` to the
            # parameters of the module. Do not restrict it for other calls, because
            # checkpoints with use_reentrant=True do not allow `inputs`.
            leaves: list[nn.Parameter] | None = None
            if any(call.losses is not None for call in calls):
                leaves = [
                    leaf for leaf in self.module.parameters() if leaf.requires_grad
                ]
            torch.autograd.backward(outputs, gradients, inputs=leaves)

    def noise(self, calls: Sequence[ModelCall], begun: Sequence[Weights]) -> Weights:
        """Estimate the rounding error of a gradient whose terms cancel: return the
        change of the gradient if weights, inputs and ∂L/∂f receive relative noise of
        one eps.

        Return an empty dict under casts, because casts round in large steps. Also
        return an empty dict if repeated replays give different gradients."""
        if any(self.is_cast(call.circumstances) for call in calls):
            return {}
        noisy = partial(with_noise, stream("rounding", len(calls)), None)
        noisy_calls = list[ModelCall]()
        for call in calls:
            assert call.gradient is not None
            inputs = map_tensors(noisy, call.inputs)
            gradient = call.gradient
            if isinstance(gradient, CrossEntropyGradient):
                gradient = replace(gradient, weights=noisy(gradient.weights))
            else:
                gradient = noisy(gradient)
            # the perturbed outputs do not have the recorded fingerprint
            noisy_calls.append(
                replace(call, inputs=inputs, gradient=gradient, fingerprint=None)
            )
        noisy_weights = {
            id(weights): {name: noisy(weight) for name, weight in weights.items()}
            for weights in begun
        }

        here = self.gradient(calls, begun)
        for _ in range(NOISE_REPEATS):
            repeat = self.gradient(calls, begun)
            # random numbers outside torch may switch off a layer, which then has no
            # gradient
            if repeat.keys() != here.keys() or any(
                not torch.equal(repeat[name], part) for name, part in here.items()
            ):
                return {}
        there = self.gradient(
            noisy_calls, [noisy_weights[id(weights)] for weights in begun]
        )
        if there.keys() != here.keys():
            return {}
        return {name: there[name] - part for name, part in here.items()}

    # --- Copies in other modes

    @cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.module.named_parameters())

    @property
    def weights(self) -> Weights:
        """The present weights of the module."""
        return {name: weight.detach() for name, weight in self.parameters.items()}

    @cached_property
    def modes(self) -> LayerModes:
        """The mode of each layer, training or evaluation. Replays
        in other modes use a copy (`twin`)."""
        return LayerModes.of(named_layers(self.module))

    def twin(self, modes: LayerModes, kind: torch.dtype | None = None) -> nn.Module:
        """Return a copy of the module with its layers in these modes.

        The copy shares all tensors. If `kind` is given,
        half-precision tensors are converted to this dtype.

        >>> net = nn.Linear(1, 1).eval()
        >>> twin = CalledModule(net, None).twin(LayerModes(trains=True))
        >>> twin.training, net.training, twin.weight is net.weight
        (True, False, True)
        """
        if kind is None and modes == self.modes:
            return self.module
        if (modes, kind) not in self.twins:
            shared = {id(tensor): tensor for tensor in members(self.module)}
            if kind is not None:
                for tensor in filter(is_short, members(self.module)):
                    if (id(tensor), kind) not in self.long:
                        self.long[id(tensor), kind] = lengthened(tensor, kind)
                    shared[id(tensor)] = self.long[id(tensor), kind]
            self.twins[modes, kind] = copy_module(self.module, shared)
            modes.give(self.twins[modes, kind])
        return self.twins[modes, kind]


def members(module: nn.Module) -> Iterator[Tensor]:
    return chain(module.parameters(), module.buffers())


def lengthened(tensor: Tensor, kind: torch.dtype) -> Tensor:
    """Convert a half-precision tensor to a wider dtype.
    A parameter becomes a frozen parameter.

    >>> lengthened(torch.ones(1).half(), torch.float32)
    tensor([1.])
    >>> lengthened(torch.ones(1).double(), torch.float32)
    tensor([1.], dtype=torch.float64)
    """
    if not is_short(tensor):
        return tensor
    longer = tensor.detach().to(kind)
    return (
        nn.Parameter(longer, requires_grad=False)
        if isinstance(tensor, nn.Parameter)
        else longer
    )


def shortest(module: nn.Module) -> torch.dtype | None:
    """Return the half-precision dtype with the largest eps in a module,
    or None if there is none.

    >>> shortest(nn.Linear(1, 1)), shortest(nn.Linear(1, 1).half())
    (None, torch.float16)
    """
    kinds = {tensor.dtype for tensor in members(module) if is_short(tensor)}
    return max(kinds, key=lambda kind: torch.finfo(kind).eps, default=None)


def passes(calls: Sequence[ModelCall], begun: Sequence[Weights]) -> Iterator[list[int]]:
    """Split calls into the backward passes of a replay. For each pass, yield the
    indices of its calls.

    Consecutive calls share a pass if they did so in the loop, at the same weights and
    under the same kernels. A call that updates running statistics gets its own pass,
    because its replay writes to buffers that the backward pass reads."""
    indices = list[int]()
    for index, call in enumerate(calls):
        if indices:
            last = calls[indices[-1]]
            is_joined = (
                call.backward == last.backward
                and call.backward >= 0
                and call.statistics is None
                and begun[index] is begun[indices[-1]]
                and call.circumstances.forbidden == last.circumstances.forbidden
            )
            if not is_joined:
                yield indices
                indices = []
        indices.append(index)
    if indices:
        yield indices


# --- The user's model at the queries.


def evaluate_at_queries(
    model: nn.Module,
    output: Output,
    queries: Inputs,
    measured: MeasuredQueries | None,
) -> Tensor | None:
    """Evaluate the user's model at the queries, in evaluation mode. Return the
    fingerprint of the outputs, or of the measure's values if there is a measure.

    The model and the random states stay unchanged. If the model raises an error and has
    half-precision weights, try it again under autocast. If that fails too, log a
    warning and return None, so that the training continues."""
    device = next((weight.device for weight in model.parameters()), None)
    contexts = autocast_contexts(model, "cpu" if device is None else device.type)
    eager = nullcontext()
    if any(getattr(layer, "_compiled_call_impl", None) for layer in model.modules()):
        eager = torch.compiler.set_stance("force_eager")  # compiling would take minutes
    for casts in contexts:
        parts = list[Tensor]()
        try:
            states = beginning_at(generator_states(model))
            with (
                torch.no_grad(),
                casts,
                eager,
                plain_kernels(),
                states,
                left_alone(model),
            ):
                model.eval()
                for some in chunks(
                    map_tensors(lambda tensor: tensor.to(device), queries)
                ):
                    args, kwargs = arguments(some)
                    outputs = choose_output(model(*args, **kwargs), output)
                    parts.append(fingerprint(outputs) if measured is None else outputs)
            if measured is None:
                return torch.cat(parts)
            return fingerprint(measured.values(torch.cat(parts), queries))
        except Exception as error:  # any error of the user's model
            if casts is contexts[-1]:
                LOG.warning(
                    "ntkexp: the queries no longer fit the model (%s); its outputs there are not "
                    "proved",
                    error,
                )
    return None


def autocast_contexts(
    model: nn.Module, device: str
) -> list[AbstractContextManager[object]]:
    """Return the contexts to try at the queries: no autocast, and autocast to the dtype
    of half-precision weights, if there are any."""
    off: AbstractContextManager[object] = nullcontext()
    if torch.is_autocast_enabled(device):
        off = torch.autocast(device, enabled=False)
    short = shortest(model)
    return [off] if short is None else [off, torch.autocast(device, short)]


def chunks(queries: Inputs) -> Iterator[Inputs]:
    """Yield the queries in batches of at most `QUERIES_PER_CALL`."""
    for start in range(0, examples(queries), QUERIES_PER_CALL):
        yield part(queries, slice(start, start + QUERIES_PER_CALL))


def in_chunks(function: Function) -> Function:
    """Return a function that evaluates its queries in batches,
    and concatenates the outputs."""

    def chunked(weights: Weights, queries: Inputs) -> Tensor:
        return torch.cat([function(weights, some) for some in chunks(queries)])

    return chunked


@contextmanager
def left_alone(model: nn.Module) -> Iterator[None]:
    """On exit, restore the values of all buffers, and the attributes of all layers,
    such as modes and counters."""
    layers = [(layer, layer.training, dict(vars(layer))) for layer in model.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for layer, is_training, attributes in layers:
            vars(layer).clear()
            vars(layer).update(attributes)
            layer.training = is_training
        for buffer, value in buffers:
            if not torch.equal(buffer, value):
                buffer.copy_(value)
