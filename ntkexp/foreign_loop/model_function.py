"""Whether a model that is replayed is the one that was called: signatures of its outputs are compared with its replay.

    σ_im = Σ_k r_k f_imk,   r_k ~ N(0, 1) drawn once          a number for each row of the last axis, of each example

A model may hang on what is not a tensor (a number in a dict, a class or a global, a hook, a forward that was replaced).
When that changes, so do outputs, and gradients often by one factor alone, as if they had been clipped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from math import isfinite
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ntkexp.foreign_loop.batch_norm import (
    beginning_with,
    couples,
)
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
from ntkexp.foreign_loop.host_reads import read_numbers
from ntkexp.foreign_loop.measure import MeasuredQueries
from ntkexp.kernel.read.reader import Reader
from ntkexp.kernel.record.casts import is_short, without_casts
from ntkexp.kernel.record.independence import refuse_dependence
from ntkexp.kernel.record.tape import Tape, examples, map_tensors, part
from ntkexp.kernel.record.taping import columns, plain_kernels, record
from ntkexp.mistake import Mistake
from ntkexp.model.functional import arguments, choose_output, copied, function_as_it_is, function_of
from ntkexp.shapes import Function, Inputs, Weights
from ntkexp.stream import stream

if TYPE_CHECKING:
    pass

LOG = logging.getLogger("ntkexp.follow")

AGREES = 1e3  # eps: of outputs by other kernels, relative to their size
OF_NOISE = 64.0  # times what a relative noise of eps in weights and inputs does to outputs
REPEATS = 4  # calls, which hardly give the same by chance where the function is another each time
OF_CASTS = 8  # eps of the shorter numbers
NOISE_OF_CASTS = 2.0  # times what noise of that size does
AT_ONCE = 256  # queries
FEW = 2  # queries of which it is seen whether a module mixes them
NUMBERS: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}
"""The numbers r that were drawn so far, by how many they are."""


def signature(outputs: Tensor) -> Float[Tensor, "example row"]:
    """σ of some outputs.

    >>> signature(torch.ones(2, 3, 5)).shape, signature(torch.ones(2)).shape
    (torch.Size([2, 3]), torch.Size([2, 1]))
    """
    found = outputs.detach()
    found = torch.view_as_real(found) if found.is_complex() else found
    found = found[:, None] if found.dim() == 1 else found
    found = found.float() if found.element_size() < torch.float32.itemsize else found
    kind = found.device.type
    with torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext():
        count = found.shape[-1]
        key = (count, found.dtype, found.device)
        if key not in NUMBERS:
            NUMBERS[key] = torch.randn(
                count, generator=stream("outputs", count), dtype=torch.float64
            ).to(found)
        return found.reshape(len(found), -1, count) @ NUMBERS[key]


def with_noise(generator: torch.Generator, size: float | None, tensor: Tensor) -> Tensor:
    """Return a tensor with relative noise of this size, by default its eps; whole numbers stay as they are."""
    if not tensor.is_floating_point():
        return tensor
    drawn = torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor)
    return tensor * (1 + (torch.finfo(tensor.dtype).eps if size is None else size) * drawn)


@dataclass(frozen=True)
class Replayed:
    """A function, and its `outputs` at some weights and inputs, which were formed in numbers of this precision, under
    `casts` or without."""

    function: Function
    weights: Weights
    inputs: Inputs
    outputs: Float[Tensor, "example ..."]
    cast_eps: float = 0.0

    def other(self, signed: Float[Tensor, "example row"]) -> float:
        """How far they are from those with a signature, relative to their size, where rounding does not explain it.

        Rounding is small beside the outputs, or where these cancel, beside what noise in weights and inputs does.
        """
        outputs, norms = self.outputs, [self.outputs.norm()]
        if outputs.numel() % max(1, signed.numel()) == 0 and len(outputs) == len(signed):
            ours = signature(outputs.reshape(*signed.shape, -1))
            norms.append((ours - signed.to(ours)).norm())
        size, *gaps = read_numbers(norms)
        missed = gaps[0] if gaps and isfinite(gaps[0]) else float("inf")
        eps = torch.finfo(self.outputs.dtype).eps
        if missed <= max(AGREES * eps, OF_CASTS * self.cast_eps) * size or missed <= self.noise(
            eps
        ):
            return 0.0
        return missed / size if size else missed

    def noise(self, eps: float) -> float:
        """How far outputs may be moved by relative noise of this size; not at all, where they are others at every call.

        Under casts the same kernels cast alike, and there is little room for more.
        """
        noisy = partial(with_noise, stream("outputs", 0), max(eps, self.cast_eps))
        near = (
            {name: noisy(weight) for name, weight in self.weights.items()},
            map_tensors(noisy, self.inputs),
        )
        with torch.no_grad(), plain_kernels():
            here, there = (
                columns(self.function, *at) for at in ((self.weights, self.inputs), near)
            )
            again = [columns(self.function, self.weights, self.inputs) for _ in range(REPEATS)]
        moved, by_itself = (
            float((there - here).norm()),
            max(float((each - here).norm()) for each in again),
        )
        times = NOISE_OF_CASTS if self.cast_eps else OF_NOISE
        return times * moved if isfinite(moved) and by_itself <= moved / OF_NOISE else 0.0


CHANGED = (
    "something changed that is not a tensor (a number in a dict, a class or a global, a hook, a 'forward' that was "
    "replaced?); let it be an input of the model, or follow from there on"
)


@dataclass
class OutputsAtEnds:
    """Signatures of what the model itself gave at the queries, or a measure of it, in evaluation, when following began,
    and after the last of `steps` steps, if it was evaluated then: f_0 and f_T have to be that."""

    start: Tensor | None = None
    end: Tensor | None = None
    steps: int = -1

    def hold(
        self,
        began: Sequence[Replayed],
        ended: Sequence[Replayed],
        steps: int,
        *,
        measured: bool = False,
    ) -> None:
        """Refuse outputs at the queries, or a measure of them, that are none of those that the model may have given."""
        perhaps = "is measure= the one that was followed? Or " if measured else ""
        for when, signed, found in (("began", self.start, began), ("ended", self.end, ended)):
            if signed is None or (signed is self.end and steps != self.steps):
                continue
            if missed := min(each.other(signed) for each in found):
                raise Mistake(
                    f"when following {when}, the model gave other outputs at the queries than it does now at the same "
                    f"weights, off by {missed:.2g} of them; {perhaps}{CHANGED}"
                )


def evaluate_at_queries(
    model: nn.Module,
    output: str | int | None,
    queries: Inputs,
    measured: MeasuredQueries | None = None,
) -> Tensor | None:
    """The signature of what a model gives now in evaluation, or of a measure of it; the model is left as it was, and so
    are generators. A model with short frozen weights may need autocast to take them."""
    device = next((weight.device for weight in model.parameters()), None)
    kind, short = "cpu" if device is None else device.type, shortest(model)
    off = torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()
    ways = (off,) if short is None else (off, torch.autocast(kind, short))
    compiled = any(getattr(layer, "_compiled_call_impl", None) for layer in model.modules())
    eager = (
        torch.compiler.set_stance("force_eager") if compiled else nullcontext()
    )  # to compile for it takes minutes
    for casts in ways:
        found = list[Tensor]()
        try:
            states = generator_states(model)
            with (
                torch.no_grad(),
                casts,
                eager,
                plain_kernels(),
                beginning_at(states),
                left_alone(model),
            ):
                model.eval()
                for some in chunks(map_tensors(lambda tensor: tensor.to(device), queries)):
                    placed, named = arguments(some)
                    given = choose_output(model(*placed, **named), output)
                    found.append(signature(given) if measured is None else given)
            return (
                torch.cat(found)
                if measured is None
                else signature(measured.values(torch.cat(found), queries))
            )
        except Exception as error:  # the model's own, and no reason to lose a training
            if casts is ways[-1]:
                LOG.warning(
                    "ntkexp: the queries no longer fit the model (%s); its outputs there are not proved",
                    error,
                )
    return None


def chunks(queries: Inputs) -> Iterator[Inputs]:
    """As many queries at a time as a model is asked."""
    for begun in range(0, examples(queries), AT_ONCE):
        yield part(queries, slice(begun, begun + AT_ONCE))


def in_chunks(function: Function) -> Function:
    """A function that takes queries a few at a time."""

    def asked(weights: Weights, queries: Inputs) -> Tensor:
        return torch.cat([function(weights, some) for some in chunks(queries)])

    return asked


@contextmanager
def left_alone(model: nn.Module) -> Iterator[None]:
    """What modules hold under their names is afterwards what it was, such as their modes, or a counter."""
    before = [(layer, layer.training, dict(vars(layer))) for layer in model.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for layer, trains, held in before:
            vars(layer).clear()
            vars(layer).update(held)
            layer.training = trains
        for buffer, kept in buffers:
            if not torch.equal(buffer, kept):
                buffer.copy_(kept)


# --- The module of a loop as functions of its weights: in evaluation for the queries, and as each call had it.
#
# Casts are left out of these functions: in the precision of the weights each is smooth and explained to rounding.
# What the loop did under casts is replayed by autograd, as a whole. Frozen weights in shorter numbers than those that
# move, as under adapters, are casts too: what is read are the same numbers in the precision of the adapters.
#
# Under the circumstances of a call it is a function too, of the batch as a whole: generators begin where they
# did, so that masks are those that were drawn. They are constants of the step.


@dataclass(frozen=True)
class CalledModule:
    """A module in evaluation, and its `twins` in other modes, which hold the same tensors; the `casts` of its loop, and
    whether that ran by the `same_kernels`, for all that is known."""

    module: nn.Module
    output: str | int | None
    casts: Autocast | None = None
    same_kernels: bool = False
    twins: dict[tuple[LayerModes, torch.dtype | None], nn.Module] = field(default_factory=dict)
    long: dict[tuple[int, torch.dtype], Tensor] = field(
        default_factory=dict
    )  # short tensors in longer numbers
    measured: MeasuredQueries | None = None  # what is asked of its outputs at the queries

    @cached_property
    def short(self) -> torch.dtype | None:
        """The numbers of frozen weights, or buffers, that are shorter than those of any weight that moves."""
        return shortest(self.module)

    @cached_property
    def function(self) -> Function:
        """The module in evaluation, and what is asked of its outputs."""
        return self.asked(self.outputs)

    @cached_property
    def outputs(self) -> Function:
        """The module in evaluation."""
        return self.without_casts(EVALUATION, self.casts is not None, function_of)

    def without_casts(
        self,
        modes: LayerModes,
        cast: bool,
        function_from: Callable[[nn.Module, str | int | None], Function] = function_as_it_is,
    ) -> Function:
        """The module in these modes, in the precision of its weights; its calls were `cast`, or not."""
        if self.short is None:
            function = function_from(self.twin(modes), self.output)
            return without_casts(function) if cast else function

        def longer(weights: Weights, inputs: Inputs) -> Tensor:
            kind = next(
                (weight.dtype for weight in weights.values() if not is_short(weight)), torch.float32
            )
            function = without_casts(function_from(self.twin(modes, kind), self.output))
            weights = {name: lengthened(weight, kind) for name, weight in weights.items()}
            return function(weights, map_tensors(lambda tensor: lengthened(tensor, kind), inputs))

        return longer

    def is_cast(self, how: Circumstances) -> bool:
        """Whether a call rounds to shorter numbers than those of the weights that move."""
        return how.autocast is not None or self.short is not None

    def asked(self, function: Function) -> Function:
        """What is asked of the outputs that a function gives at the queries: themselves, or a measure of them."""
        return function if self.measured is None else self.measured.of(function)

    def prove_measure(self, reader: Reader, tape: Tape) -> list[str] | list[int]:
        """The names of what is asked. A measure by itself couples no queries, nor does the module by itself; so less is
        checked of both together, which takes as long as many calls of all queries."""
        assert self.measured is not None
        weights, queries = (
            {name: tape[slot].detach() for slot, name in tape.weights.items()},
            tape.given,
        )
        with torch.no_grad(), plain_kernels():
            outputs = self.outputs(weights, queries)
        names = self.measured.out_names(outputs, queries)
        self.measured.refuse_mixed(outputs, queries)
        few = record(self.outputs, weights, part(queries, slice(FEW)))
        refuse_dependence(self.outputs, few)
        reader.findings.independent.keep(tape.operations, True)
        return names

    def room(self, how: Circumstances, *, exact: bool = True) -> float:
        """How far what a call cast may be off, as an eps: at the exact weights and by the same kernels it is the same
        to the bit; others may round to the next short number."""
        kinds = (None if how.autocast is None else how.autocast.dtype, self.short)
        if self.same_kernels and exact:
            return 0.0
        return max((torch.finfo(kind).eps for kind in kinds if kind), default=0.0)

    def room_of(self, calls: Sequence[ModelCall], *, exact: bool = True) -> float:
        """The most of that of any of these calls."""
        return max((self.room(call.how, exact=exact) for call in calls), default=0.0)

    @property
    def under_casts(self) -> Function:
        """The module in evaluation, under casts."""
        function = function_of(self.twin(EVALUATION), self.output)

        def cast(weights: Weights, inputs: Inputs) -> Tensor:
            with nullcontext() if self.casts is None else self.casts.again():
                return function(weights, inputs)

        return self.asked(cast)

    @property
    def as_evaluated(self) -> Iterator[Function]:
        """The module in evaluation, with whatever casts it may have been evaluated with by itself: none but its own,
        those of the loop, those that its short weights need."""
        ways = [None, self.casts]
        if self.short is not None:
            device = next(self.module.parameters()).device.type
            ways.append(Autocast(device, str(self.short).removeprefix("torch."), cached=True))
        for casts in dict.fromkeys(ways):
            yield self.asked(in_chunks(replace(self, casts=casts, measured=None).under_casts))

    def at(self, call: ModelCall) -> Function:
        """The module as a call had it, with the running statistics that it began with."""
        how, before = call.how, {} if call.statistics is None else call.statistics[0]
        function = self.without_casts(how.modes, how.autocast is not None)

        def called(weights: Weights, inputs: Inputs) -> Tensor:
            statistics = {
                name: each.clone() for name, each in before.items() if name not in weights
            }
            with beginning_at(how.states):
                return function({**weights, **statistics}, inputs)

        return called

    def couples(self, call: ModelCall) -> bool:
        """Whether norms took their statistics from the batch of a call."""
        return call.statistics is not None and couples(self.twin(call.how.modes))

    def gradient(
        self,
        calls: Sequence[ModelCall],
        begun: Sequence[Weights],
        given: Callable[[Float[Tensor, "example ..."]], object] | None = None,
    ) -> Weights:
        """Σ Jᵀℓ′ of some calls at their weights, as autograd adds it up; what each call gives is also `given`."""
        for parameter in self.module.parameters():
            parameter.grad = None
        parameters = dict(self.module.named_parameters())
        for together in passes(calls, begun):
            weights = begun[together[0]]
            with torch.no_grad():
                for name, weight in weights.items():
                    parameters[name].copy_(weight).requires_grad_()
            self.pull_back([calls[place] for place in together], given)
        found = {name: each.grad for name, each in parameters.items() if each.grad is not None}
        for parameter in parameters.values():
            parameter.grad = None
        return found

    def noise(self, calls: Sequence[ModelCall], begun: Sequence[Weights]) -> Weights:
        """Return how far relative noise of eps in weights, inputs and ℓ′ moves the gradient.

        It shows what rounding may do to a gradient whose terms cancel, inside of a call or between calls. Casts round
        by steps, and a function may be another one at every call: both move gradients by more than noise, and nothing
        is returned.
        """
        if any(self.is_cast(call.how) for call in calls):
            return {}
        noisy = partial(with_noise, stream("rounding", len(calls)), None)
        near = list[ModelCall]()
        for call in calls:
            assert call.gradient is not None
            near.append(
                replace(call, inputs=map_tensors(noisy, call.inputs), gradient=noisy(call.gradient))
            )
        moved = {
            id(weights): {name: noisy(weight) for name, weight in weights.items()}
            for weights in begun
        }
        here = self.gradient(calls, begun)
        again = [self.gradient(calls, begun) for _ in range(REPEATS)]
        if any(
            not torch.equal(other[name], part) for other in again for name, part in here.items()
        ):
            return {}
        there = self.gradient(near, [moved[id(weights)] for weights in begun])
        return {name: there[name] - part for name, part in here.items()}

    def pull_back(
        self,
        calls: Sequence[ModelCall],
        given: Callable[[Float[Tensor, "example ..."]], object] | None,
    ) -> None:
        """Replay calls at the present weights, and add the gradients of one pass back through all of them.

        Autograd adds the gradients of a pass in an order of its own. Where they cancel, another order leaves another
        remainder, which Adam turns into a step of another sign. So a pass of the loop is replayed as one pass.
        """
        outputs, gradients = list[Tensor](), list[Tensor]()
        with ExitStack() as circumstances:
            circumstances.enter_context(torch.enable_grad())
            for call in calls:
                assert call.gradient is not None
                (placed, named), twin = arguments(call.inputs), self.twin(call.how.modes)
                circumstances.enter_context(without_kernels(call.how.forbidden))
                running = beginning_with(twin, call.statistics, call.at, self.room(call.how))
                circumstances.enter_context(running)
                with call.how.again():
                    output = choose_output(twin(*placed, **named), self.output)
                if given is not None:
                    given(output.detach())
                outputs.append(output)
                gradients.append(call.gradient.reshape(output.shape).to(output.dtype))
            torch.autograd.backward(outputs, gradients)  # by the kernels of the calls

    def twin(self, modes: LayerModes, kind: torch.dtype | None = None) -> nn.Module:
        """The module in these modes; what it holds in short numbers, in those of this kind.

        >>> net = nn.Linear(1, 1).eval()
        >>> twin = CalledModule(net, None).twin(LayerModes(trains=True))
        >>> twin.training, net.training, twin.weight is net.weight
        (True, False, True)
        """
        if kind is None and modes == LayerModes.of(self.module):
            return self.module
        if (modes, kind) not in self.twins:
            shared = {
                id(each): each for each in chain(self.module.parameters(), self.module.buffers())
            }
            for each in list(shared.values()):
                if kind is not None and is_short(each):
                    if (id(each), kind) not in self.long:
                        self.long[id(each), kind] = lengthened(each, kind)
                    shared[id(each)] = self.long[id(each), kind]
            self.twins[modes, kind] = copied(self.module, shared)
            modes.give(self.twins[modes, kind])
        return self.twins[modes, kind]


def lengthened(tensor: Tensor, kind: torch.dtype) -> Tensor:
    """The same numbers in longer ones, if they are short; a parameter stays one, which is frozen.

    >>> lengthened(torch.ones(1).half(), torch.float32), lengthened(torch.ones(1).double(), torch.float32)
    (tensor([1.]), tensor([1.], dtype=torch.float64))
    """
    if not is_short(tensor):
        return tensor
    longer = tensor.detach().to(kind)
    return nn.Parameter(longer, requires_grad=False) if isinstance(tensor, nn.Parameter) else longer


def shortest(module: nn.Module) -> torch.dtype | None:
    """The numbers with the largest eps among the short ones that a module holds; none, if it holds none.

    >>> shortest(nn.Linear(1, 1)), shortest(nn.Linear(1, 1).half())
    (None, torch.float16)
    """
    kinds = {
        tensor.dtype for tensor in chain(module.parameters(), module.buffers()) if is_short(tensor)
    }
    return max(kinds, key=lambda kind: torch.finfo(kind).eps, default=None)


def passes(calls: Sequence[ModelCall], begun: Sequence[Weights]) -> Iterator[list[int]]:
    """Yield the places of the calls of each pass back: neighbours at the same weights, under the same kernels.

    A call that moves running statistics is a pass of its own, as its replay writes to buffers that the pass reads.
    """
    together = list[int]()
    for place, call in enumerate(calls):
        if together:
            last = calls[together[-1]]
            same_pass = (
                call.backward == last.backward and call.backward >= 0 and call.statistics is None
            )
            same_weights = begun[place] is begun[together[-1]]
            if not (same_pass and same_weights and call.how.forbidden == last.how.forbidden):
                yield together
                together = []
        together.append(place)
    if together:
        yield together
