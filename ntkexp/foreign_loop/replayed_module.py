"""Whether a model that is replayed is the one that was called: signatures of its outputs are held against its replay.

    σ_im = Σ_k r_k f_imk,   r_k ~ N(0, 1) drawn once          a number for each row of the last axis, of each example

A model may hang on what is no tensor (a number in a dict, a class or a global, a hook, a forward that was replaced).
When that changes, so do outputs, and gradients often by one factor alone, as if they had been clipped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from math import isfinite
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from ntkexp.foreign_loop.calls import (
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
from ntkexp.kernel.features.jacobian import Jacobian
from ntkexp.kernel.read.program_cache import ProgramCache
from ntkexp.kernel.read.reader import Reader
from ntkexp.kernel.record.casts import without_casts
from ntkexp.kernel.record.tape import examples, map_tensors, part
from ntkexp.kernel.record.taping import columns, plain_kernels
from ntkexp.mistake import Mistake
from ntkexp.model.functional import arguments, choose_output, function_as_it_is, function_of
from ntkexp.shapes import Function, Inputs, Weights
from ntkexp.stream import stream
from ntkexp.text import short

if TYPE_CHECKING:
    import xarray as xr

LOG = logging.getLogger("ntkexp.follow")

AGREES = 1e3  # eps: of outputs by other kernels, relative to their size
OF_NOISE = 64.0  # times what a relative noise of eps in weights and inputs does to outputs
OF_CASTS = 8  # eps of the shorter numbers
NOISE_OF_CASTS = 2.0  # times what noise of that size does
AT_ONCE = 256  # queries
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
            NUMBERS[key] = torch.randn(count, generator=stream("outputs", count), dtype=torch.float64).to(found)
        return found.reshape(len(found), -1, count) @ NUMBERS[key]


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
        outputs, missed, size = self.outputs, float("inf"), float(self.outputs.norm())
        if outputs.numel() % max(1, signed.numel()) == 0 and len(outputs) == len(signed):
            ours = signature(outputs.reshape(*signed.shape, -1))
            missed = float((ours - signed.to(ours)).norm())
            missed = missed if isfinite(missed) else float("inf")
        eps = torch.finfo(self.outputs.dtype).eps
        if missed <= max(AGREES * eps, OF_CASTS * self.cast_eps) * size or missed <= self.noise(eps):
            return 0.0
        return missed / size if size else missed

    def noise(self, eps: float) -> float:
        """How far outputs may be moved by relative noise of this size; not at all, where they are others at every call.

        Under casts the same kernels cast alike, and there is little room for more.
        """
        generator, by = stream("outputs", 0), max(eps, self.cast_eps)

        def noisy(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point():
                return tensor
            drawn = torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor)
            return tensor * (1 + by * drawn)

        near = {name: noisy(weight) for name, weight in self.weights.items()}, map_tensors(noisy, self.inputs)
        with torch.no_grad(), plain_kernels():
            here, there, again = (
                columns(self.function, *at) for at in ((self.weights, self.inputs), near, (self.weights, self.inputs))
            )
        moved, by_itself = float((there - here).norm()), float((again - here).norm())
        times = NOISE_OF_CASTS if self.cast_eps else OF_NOISE
        return times * moved if isfinite(moved) and by_itself <= moved / OF_NOISE else 0.0


CHANGED = (
    "something changed that is no tensor (a number in a dict, a class or a global, a hook, a 'forward' that was "
    "replaced?); let it be an input of the model, or follow from there on"
)


@dataclass
class OutputsAtEnds:
    """Signatures of what the model itself gave at the queries, or a measure of it, in evaluation, when following began,
    and after the last of so many `steps`, if it was evaluated then: f_0 and f_T have to be that."""

    start: Tensor | None = None
    end: Tensor | None = None
    steps: int = -1

    def hold(self, began: Sequence[Replayed], ended: Sequence[Replayed], steps: int, *, measured: bool = False) -> None:
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
    model: nn.Module, output: str | int | None, queries: Inputs, measured: MeasuredQueries | None = None
) -> Tensor | None:
    """The signature of what a model gives now in evaluation, or of a measure of it; the model is left as it was, and so
    are generators."""
    device = next((weight.device for weight in model.parameters()), None)
    found, kind = list[Tensor](), "cpu" if device is None else device.type
    casts = torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()
    compiled = any(getattr(layer, "_compiled_call_impl", None) for layer in model.modules())
    eager = torch.compiler.set_stance("force_eager") if compiled else nullcontext()  # to compile for it takes minutes
    try:
        with torch.no_grad(), casts, eager, plain_kernels(), beginning_at(generator_states(model)), left_alone(model):
            model.eval()
            for begun in range(0, examples(queries), AT_ONCE):
                some = map_tensors(lambda tensor: tensor.to(device), part(queries, slice(begun, begun + AT_ONCE)))
                placed, named = arguments(some)
                given = choose_output(model(*placed, **named), output)
                found.append(signature(given) if measured is None else given)
            return torch.cat(found) if measured is None else signature(measured.values(torch.cat(found), queries))
    except Exception as error:  # the model's own, and no reason to lose a training
        LOG.warning(
            "ntkexp: the model does not take the queries any more (%s); what it is at them is not proved", error
        )
        return None


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
# What the loop did under casts is replayed by autograd, as a whole.
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
    twins: dict[LayerModes, nn.Module] = field(default_factory=dict)
    measured: MeasuredQueries | None = None  # what is asked of its outputs at the queries

    @cached_property
    def function(self) -> Function:
        """The module in evaluation, and what is asked of its outputs."""
        return self.asked(self.outputs)

    @cached_property
    def outputs(self) -> Function:
        """The module in evaluation."""
        function = function_of(self.twin(EVALUATION), self.output)
        return function if self.casts is None else without_casts(function)

    def asked(self, function: Function) -> Function:
        """What is asked of the outputs that a function gives at the queries: themselves, or a measure of them."""
        return function if self.measured is None else self.measured.of(function)

    def room(self, how: Circumstances) -> float:
        """How far other kernels may take what a call cast, as an eps: by the same ones it is the same to the bit."""
        return 0.0 if how.autocast is None or self.same_kernels else torch.finfo(how.autocast.dtype).eps

    def room_of(self, calls: Sequence[ModelCall]) -> float:
        """The most of that of any of these calls."""
        return max((self.room(call.how) for call in calls), default=0.0)

    @property
    def under_casts(self) -> Function:
        """The module in evaluation, under casts."""
        function = function_of(self.twin(EVALUATION), self.output)

        def cast(weights: Weights, inputs: Inputs) -> Tensor:
            with nullcontext() if self.casts is None else self.casts.again():
                return function(weights, inputs)

        return self.asked(cast)

    def at(self, how: Circumstances) -> Function:
        """The module as a call had it."""
        function = function_as_it_is(self.twin(how.modes), self.output)
        function = function if how.autocast is None else without_casts(function)

        def called(weights: Weights, inputs: Inputs) -> Tensor:
            with beginning_at(how.states):
                return function(weights, inputs)

        return called

    def gradient(
        self,
        calls: Sequence[ModelCall],
        begun: Sequence[Weights],
        given: Callable[[Float[Tensor, "example ..."]], object] | None = None,
    ) -> Weights:
        """Σ Jᵀℓ′ of some calls at their weights, as autograd adds it up; what each call gives is also `given`."""
        for parameter in self.module.parameters():
            parameter.grad = None
        parameters, held = dict(self.module.named_parameters()), None
        for call, weights in zip(calls, begun, strict=True):
            if weights is not held:  # most calls of a step are made at the same
                held = weights
                with torch.no_grad():
                    for name, weight in weights.items():
                        parameters[name].copy_(weight).requires_grad_()

            # the call under its circumstances, and back from its outputs by the same kernels
            assert call.gradient is not None
            placed, named = arguments(call.inputs)
            with torch.enable_grad(), without_kernels(call.how.forbidden):
                with call.how.again():
                    outputs = choose_output(self.twin(call.how.modes)(*placed, **named), self.output)
                if given is not None:
                    given(outputs.detach())
                outputs.backward(call.gradient.reshape(outputs.shape).to(outputs.dtype))  # type: ignore[no-untyped-call]  # torch's own
        return {name: each.grad for name, each in parameters.items() if each.grad is not None}

    def twin(self, modes: LayerModes) -> nn.Module:
        """The module in these modes.

        >>> net = nn.Linear(1, 1).eval()
        >>> twin = CalledModule(net, None).twin(LayerModes(trains=True))
        >>> twin.training, net.training, twin.weight is net.weight
        (True, False, True)
        """
        if modes == LayerModes.of(self.module):
            return self.module
        if modes not in self.twins:
            shared = {id(each): each for each in chain(self.module.parameters(), self.module.buffers())}
            self.twins[modes] = deepcopy(self.module, shared)
            modes.give(self.twins[modes])
        return self.twins[modes]


@dataclass(frozen=True)
class CallReaders:
    """Readers of the calls of a loop, one for the module in each of its modes: what was found out of it stays known."""

    called: CalledModule
    trained: frozenset[str]
    readers: dict[LayerModes, Reader] = field(default_factory=dict)

    def pulled(self, call: ModelCall, weights: Weights) -> tuple[Jacobian, Replayed]:
        """Jᵀℓ′ of every example of a call, at these weights; and the call as it was replayed for that."""
        if call.gradient is None:
            raise ValueError("a call without a gradient")
        function, modes = self.called.at(call.how), call.how.modes
        if modes not in self.readers:
            self.readers[modes] = Reader(function, self.trained, programs=ProgramCache())
        reader = replace(self.readers[modes], function=function, known=bool(call.how.states))
        tape = reader.record(weights, call.inputs)
        return reader.weighted(tape, call.gradient), Replayed(function, weights, call.inputs, tape.outputs)


# --- What the casts of a loop under autocast cost, told beside what was found in the precision of the weights.
#
#     f_T − f_0 = Σ contributions + decay + casts        f in the precision of the weights
#
# At each step `casts` is what the rounding of the gradient did: the consumed one less that of the examples
# without casts, to whose outputs the same came back. It is no example's. The loop's own outputs are those under
# casts; how far they are from f is a figure of its own.


def casts_sentence(found: xr.Dataset) -> str:
    """The sentence on casts; none, if there were none."""
    if "casts" not in found:
        return ""
    kind, moved = found.attrs["autocast"], float(((found["change"]) ** 2).sum() ** 0.5)
    ours, theirs = float((found["casts"] ** 2).sum() ** 0.5), float(found.attrs["away"])
    shares = [short(each / moved) if moved else short(each) for each in (ours, theirs)]
    return (
        f"autocast to {kind} moved gradients by up to {short(float(found['casts_error'].max()))} of themselves, and so "
        f"the outputs by {shares[0]} of what training changed, which no example added; outputs are read without casts, "
        f"{shares[1]} of that change away from those with them"
    )


def rounding_sentence(found: xr.Dataset) -> str:
    """The sentence on rounding without casts, where it did more than half of the digits can hide."""
    share = float(found.attrs.get("rounding", 0.0))
    if share <= float(np.finfo(found["change"].dtype).eps) ** 0.5:
        return ""
    return (
        f"rounding did {short(share)} of what training changed: gradients that cancel were divided by their own size, "
        "which no example added; a larger eps of the optimizer mends it"
    )
