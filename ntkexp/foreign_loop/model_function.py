"""The followed module as a function of its weights: in evaluation mode for the queries, and as each
call had it.

These functions leave casts out. In the precision of the weights that move, each of them is smooth,
so secants explain its change to rounding. Short frozen weights, as under adapters, are converted to
that precision. A loop under casts is also replayed with them, by autograd
(`CalledModule.gradient`).

Under the circumstances of a call, the module is a function of the batch. Generators begin in their
recorded states, so dropout draws the same masks, which are constants of the step.
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
    generator_states,
    without_kernels,
)
from ntkexp.foreign_loop.measure import MeasuredQueries
from ntkexp.foreign_loop.signatures import NOISE_REPEATS, signature, with_noise
from ntkexp.kernel import Reader, Tape, plain_kernels
from ntkexp.kernel.record.casts import is_short, without_casts
from ntkexp.kernel.record.independence import refuse_dependence
from ntkexp.kernel.record.tape import examples, map_tensors, part
from ntkexp.kernel.record.taping import record
from ntkexp.model.functional import Output, arguments, choose_output, copied, function_of
from ntkexp.shapes import Function, Inputs, Weights
from ntkexp.stream import stream

LOG = logging.getLogger("ntkexp.follow")

QUERIES_PER_CALL = 256
QUERIES_TO_CHECK = 2  # enough to see whether a module mixes its examples


@dataclass(frozen=True)
class CalledModule:
    """A copy of the followed module in evaluation mode, and the functions of its weights."""

    module: nn.Module
    output: Output
    casts: Autocast | None = None  # of the loop
    same_kernels: bool = False  # as far as is known, replays use the kernels of the loop
    twins: dict[tuple[LayerModes, torch.dtype | None], nn.Module] = field(default_factory=dict)
    long: dict[tuple[int, torch.dtype], Tensor] = field(default_factory=dict)
    measured: MeasuredQueries | None = None  # the measure of the outputs at the queries

    # --- Functions without casts

    @cached_property
    def function(self) -> Function:
        """The module in evaluation mode, followed by the measure."""
        return self.asked(self.outputs)

    @cached_property
    def outputs(self) -> Function:
        """The module in evaluation mode."""
        cast = self.casts is not None
        return self.without_casts(EVALUATION, self.output, cast=cast, any_mode=False)

    def asked(self, function: Function) -> Function:
        """Compose the measure with a function, unless the outputs are explained."""
        return function if self.measured is None else self.measured.of(function)

    def without_casts(
        self, modes: LayerModes, output: Output, *, cast: bool, any_mode: bool = True
    ) -> Function:
        """Return the module in these modes, in the precision of its weights. `cast` calls were
        under autocast."""
        if self.short is None:
            function = function_of(self.twin(modes), output, any_mode=any_mode)
            return without_casts(function) if cast else function

        def in_long_numbers(weights: Weights, inputs: Inputs) -> Tensor:
            kinds = (weight.dtype for weight in weights.values() if not is_short(weight))
            kind = next(kinds, torch.float32)
            twin = self.twin(modes, kind)
            function = without_casts(function_of(twin, output, any_mode=any_mode))
            weights = {name: lengthened(weight, kind) for name, weight in weights.items()}
            return function(weights, map_tensors(lambda tensor: lengthened(tensor, kind), inputs))

        return in_long_numbers

    def at(self, call: ModelCall) -> Function:
        """Return the module as a call had it, with the running statistics from before the call."""
        before: Weights = {} if call.statistics is None else call.statistics[0]
        output = call.output(self.output)
        function = self.without_casts(call.how.modes, output, cast=call.how.autocast is not None)

        def called(weights: Weights, inputs: Inputs) -> Tensor:
            statistics = {
                name: value.clone() for name, value in before.items() if name not in weights
            }
            with beginning_at(call.how.states):
                return function({**weights, **statistics}, inputs)

        return called

    def couples(self, call: ModelCall) -> bool:
        """Return True if norms took their statistics from the batch of a call."""
        return call.statistics is not None and couples(self.twin(call.how.modes))

    def prove_measure(self, reader: Reader, tape: Tape) -> list[str] | list[int]:
        """Check that the measure couples no queries, and return the names of its numbers.

        The module and the measure are checked one after the other, because a check of both together
        would need many calls with all queries.
        """
        assert self.measured is not None
        weights = {name: tape[slot].detach() for slot, name in tape.weights.items()}
        queries = tape.given
        with torch.no_grad(), plain_kernels():
            outputs = self.outputs(weights, queries)
        names = self.measured.out_names(outputs, queries)
        self.measured.refuse_mixed(outputs, queries)
        few = record(self.outputs, weights, part(queries, slice(QUERIES_TO_CHECK)))
        refuse_dependence(self.outputs, few)
        reader.findings.independent.keep(tape.operations, True)
        return names

    # --- Casts: autocast, and frozen weights that are shorter than those that move

    @cached_property
    def short(self) -> torch.dtype | None:
        """The dtype of frozen weights or buffers that are shorter than the weights that move."""
        return shortest(self.module)

    def is_cast(self, how: Circumstances) -> bool:
        """Return True if a call rounds to shorter numbers than the moving weights have."""
        return how.autocast is not None or self.short is not None

    def cast_eps_of(self, how: Circumstances, *, exact: bool = True) -> float:
        """Return the precision, as an eps, of a replay under casts.

        At the exact weights and by the same kernels, the replay has the same bits. Otherwise a
        number may round to the next short number.
        """
        if self.same_kernels and exact:
            return 0.0
        kinds = [None if how.autocast is None else how.autocast.dtype, self.short]
        return max((torch.finfo(kind).eps for kind in kinds if kind), default=0.0)

    def cast_eps(self, calls: Sequence[ModelCall], *, exact: bool = True) -> float:
        """Return the largest such precision of some calls."""
        return max((self.cast_eps_of(call.how, exact=exact) for call in calls), default=0.0)

    def under(self, casts: Autocast | None) -> Function:
        """Return the module in evaluation mode under an autocast context, without the measure."""
        function = function_of(self.twin(EVALUATION), self.output)

        def cast(weights: Weights, inputs: Inputs) -> Tensor:
            with nullcontext() if casts is None else casts.again():
                return function(weights, inputs)

        return cast

    @property
    def under_casts(self) -> Function:
        """The module in evaluation mode under the casts of the loop, followed by the measure."""
        return self.asked(self.under(self.casts))

    @property
    def as_evaluated(self) -> Iterator[Function]:
        """The functions that the live model may have computed at the queries.

        It runs without autocast, under the loop's autocast, or under the autocast that its short
        weights need.
        """
        candidates = [None, self.casts]
        if self.short is not None:
            device = next(self.module.parameters()).device.type
            short = str(self.short).removeprefix("torch.")
            candidates.append(Autocast(device, short, cached=True))
        for casts in dict.fromkeys(candidates):
            yield self.asked(in_chunks(self.under(casts)))

    # --- Gradients of calls, as autograd adds them up

    def gradient(
        self,
        calls: Sequence[ModelCall],
        begun: Sequence[Weights],
        on_outputs: Callable[[Float[Tensor, "example ..."]], object] | None = None,
    ) -> Weights:
        """Return Σ Jᵀℓ′ of calls, each at its weights. `on_outputs` receives the outputs of each
        replayed call."""
        parameters = dict(self.module.named_parameters())
        for parameter in parameters.values():
            parameter.grad = None
        for places in passes(calls, begun):
            with torch.no_grad():
                for name, weight in begun[places[0]].items():
                    parameters[name].copy_(weight).requires_grad_()
            self.pull_back([calls[place] for place in places], on_outputs)
        gradients = {
            name: parameter.grad
            for name, parameter in parameters.items()
            if parameter.grad is not None
        }
        for parameter in parameters.values():
            parameter.grad = None
        return gradients

    def pull_back(
        self,
        calls: Sequence[ModelCall],
        on_outputs: Callable[[Float[Tensor, "example ..."]], object] | None,
    ) -> None:
        """Replay calls at the present weights, and add their gradients in one backward pass.

        Autograd adds the gradients of a pass in its own order. If they cancel, another order leaves
        another remainder, and Adam turns it into a step of another sign. So one pass of the loop is
        replayed as one pass.
        """
        outputs = list[Tensor]()
        gradients = list[Tensor]()
        with ExitStack() as circumstances:
            circumstances.enter_context(torch.enable_grad())
            for call in calls:
                assert call.gradient is not None
                twin = self.twin(call.how.modes)
                args, kwargs = arguments(call.inputs)
                circumstances.enter_context(without_kernels(call.how.forbidden))
                running = beginning_with(twin, call.statistics, call.at, self.cast_eps_of(call.how))
                circumstances.enter_context(running)
                with call.how.again():
                    output = choose_output(twin(*args, **kwargs), call.output(self.output))
                if on_outputs is not None:
                    on_outputs(output.detach())
                outputs.append(output)
                gradients.append(call.gradient.reshape(output.shape).to(output.dtype))
            torch.autograd.backward(outputs, gradients)  # by the kernels of the calls

    def noise(self, calls: Sequence[ModelCall], begun: Sequence[Weights]) -> Weights:
        """Return the change of the gradient under relative noise of one eps in weights, inputs and
        ℓ′.

        It bounds the rounding of a gradient whose terms cancel, within a call or between calls. The
        result is empty if this bound means nothing: casts round in steps, and a random function
        differs at every call.
        """
        if any(self.is_cast(call.how) for call in calls):
            return {}
        noisy = partial(with_noise, stream("rounding", len(calls)), None)
        noisy_calls = list[ModelCall]()
        for call in calls:
            assert call.gradient is not None
            inputs = map_tensors(noisy, call.inputs)
            noisy_calls.append(replace(call, inputs=inputs, gradient=noisy(call.gradient)))
        noisy_weights = {
            id(weights): {name: noisy(weight) for name, weight in weights.items()}
            for weights in begun
        }

        here = self.gradient(calls, begun)
        for _ in range(NOISE_REPEATS):
            repeat = self.gradient(calls, begun)
            if any(not torch.equal(repeat[name], part) for name, part in here.items()):
                return {}
        there = self.gradient(noisy_calls, [noisy_weights[id(weights)] for weights in begun])
        return {name: there[name] - part for name, part in here.items()}

    # --- Copies in other modes

    def twin(self, modes: LayerModes, kind: torch.dtype | None = None) -> nn.Module:
        """Return the module in these modes. A twin shares all tensors, except that short ones are
        converted to `kind`.

        >>> net = nn.Linear(1, 1).eval()
        >>> twin = CalledModule(net, None).twin(LayerModes(trains=True))
        >>> twin.training, net.training, twin.weight is net.weight
        (True, False, True)
        """
        if kind is None and modes == LayerModes.of(self.module):
            return self.module
        if (modes, kind) not in self.twins:
            shared = {id(tensor): tensor for tensor in members(self.module)}
            if kind is not None:
                for tensor in filter(is_short, members(self.module)):
                    if (id(tensor), kind) not in self.long:
                        self.long[id(tensor), kind] = lengthened(tensor, kind)
                    shared[id(tensor)] = self.long[id(tensor), kind]
            self.twins[modes, kind] = copied(self.module, shared)
            modes.give(self.twins[modes, kind])
        return self.twins[modes, kind]


def members(module: nn.Module) -> Iterator[Tensor]:
    """Yield parameters and buffers."""
    return chain(module.parameters(), module.buffers())


def lengthened(tensor: Tensor, kind: torch.dtype) -> Tensor:
    """Convert a short tensor to a longer dtype. A parameter becomes a frozen parameter.

    >>> lengthened(torch.ones(1).half(), torch.float32)
    tensor([1.])
    >>> lengthened(torch.ones(1).double(), torch.float32)
    tensor([1.], dtype=torch.float64)
    """
    if not is_short(tensor):
        return tensor
    longer = tensor.detach().to(kind)
    return nn.Parameter(longer, requires_grad=False) if isinstance(tensor, nn.Parameter) else longer


def shortest(module: nn.Module) -> torch.dtype | None:
    """Return the short dtype with the largest eps in a module, or None if nothing is short.

    >>> shortest(nn.Linear(1, 1)), shortest(nn.Linear(1, 1).half())
    (None, torch.float16)
    """
    kinds = {tensor.dtype for tensor in members(module) if is_short(tensor)}
    return max(kinds, key=lambda kind: torch.finfo(kind).eps, default=None)


def passes(calls: Sequence[ModelCall], begun: Sequence[Weights]) -> Iterator[list[int]]:
    """Yield the places of the calls of each backward pass.

    Calls share a pass if they are neighbours in the same pass of the loop, at the same weights,
    under the same kernels. A call that moves running statistics is a pass alone, because its replay
    writes to buffers that the pass reads.
    """
    places = list[int]()
    for place, call in enumerate(calls):
        if places:
            last = calls[places[-1]]
            is_joined = (
                call.backward == last.backward
                and call.backward >= 0
                and call.statistics is None
                and begun[place] is begun[places[-1]]
                and call.how.forbidden == last.how.forbidden
            )
            if not is_joined:
                yield places
                places = []
        places.append(place)
    if places:
        yield places


# --- The live model at the queries.


def evaluate_at_queries(
    model: nn.Module,
    output: Output,
    queries: Inputs,
    measured: MeasuredQueries | None = None,
) -> Tensor | None:
    """Return the signature of the live model's outputs, or of their measure, in evaluation mode.

    The model and the generators stay unchanged. A model with short frozen weights may need
    autocast. An error of the model is no reason to lose a training: it is logged, and the result is
    None.
    """
    device = next((weight.device for weight in model.parameters()), None)
    contexts = autocast_contexts(model, "cpu" if device is None else device.type)
    eager = nullcontext()
    if any(getattr(layer, "_compiled_call_impl", None) for layer in model.modules()):
        eager = torch.compiler.set_stance("force_eager")  # a compilation would take minutes
    for casts in contexts:
        parts = list[Tensor]()
        try:
            states = beginning_at(generator_states(model))
            with torch.no_grad(), casts, eager, plain_kernels(), states, left_alone(model):
                model.eval()
                for some in chunks(map_tensors(lambda tensor: tensor.to(device), queries)):
                    args, kwargs = arguments(some)
                    outputs = choose_output(model(*args, **kwargs), output)
                    parts.append(signature(outputs) if measured is None else outputs)
            if measured is None:
                return torch.cat(parts)
            return signature(measured.values(torch.cat(parts), queries))
        except Exception as error:  # any error of the user's model
            if casts is contexts[-1]:
                LOG.warning(
                    "ntkexp: the queries no longer fit the model (%s); its outputs there are not "
                    "proved",
                    error,
                )
    return None


def autocast_contexts(model: nn.Module, device: str) -> list[AbstractContextManager[object]]:
    """Return candidate contexts for the queries: no autocast, and the dtype of short weights."""
    off: AbstractContextManager[object] = nullcontext()
    if torch.is_autocast_enabled(device):
        off = torch.autocast(device, enabled=False)
    short = shortest(model)
    return [off] if short is None else [off, torch.autocast(device, short)]


def chunks(queries: Inputs) -> Iterator[Inputs]:
    """Split queries into the batches of one call each."""
    for start in range(0, examples(queries), QUERIES_PER_CALL):
        yield part(queries, slice(start, start + QUERIES_PER_CALL))


def in_chunks(function: Function) -> Function:
    """Return a function that evaluates its queries in chunks."""

    def chunked(weights: Weights, queries: Inputs) -> Tensor:
        return torch.cat([function(weights, some) for some in chunks(queries)])

    return chunked


@contextmanager
def left_alone(model: nn.Module) -> Iterator[None]:
    """Restore the attributes of all layers at the end, such as modes and counters, and the values
    of all buffers."""
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
