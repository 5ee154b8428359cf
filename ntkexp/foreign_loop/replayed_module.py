"""The module of a loop as functions of its weights, replayed under the circumstances of each call; what casts cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from ntkexp.foreign_loop.calls import EVALUATION, Autocast, Circumstances, LayerModes, ModelCall, beginning_at
from ntkexp.foreign_loop.output_signatures import Replayed
from ntkexp.kernel.features.jacobian import Jacobian
from ntkexp.kernel.read.program_cache import ProgramCache
from ntkexp.kernel.read.reader import Reader
from ntkexp.kernel.record.casts import without_casts
from ntkexp.kernel.record.taping import columns
from ntkexp.model.functional import arguments, choose_output, function_as_it_is, function_of
from ntkexp.shapes import Function, Inputs, Weights
from ntkexp.text import short

if TYPE_CHECKING:
    import xarray as xr


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

    @cached_property
    def function(self) -> Function:
        """The module in evaluation."""
        function = function_of(self.twin(EVALUATION), self.output)
        return function if self.casts is None else without_casts(function)

    def room(self, how: Circumstances) -> float:
        """How far other kernels may take what a call cast, as an eps: by the same ones it is the same to the bit."""
        return 0.0 if how.autocast is None or self.same_kernels else how.autocast.eps

    def room_of(self, calls: Sequence[ModelCall]) -> float:
        """The most of that of any of these calls."""
        return max((self.room(call.how) for call in calls), default=0.0)

    @property
    def under_casts(self) -> Function:
        """The module in evaluation, under casts."""
        function, how = function_of(self.twin(EVALUATION), self.output), Circumstances(autocast=self.casts)

        def cast(weights: Weights, inputs: Inputs) -> Tensor:
            with how.again():
                return function(weights, inputs)

        return cast

    def at(self, how: Circumstances) -> Function:
        """The module as a call had it."""
        function = function_as_it_is(self.twin(how.modes), self.output)
        function = function if how.autocast is None else without_casts(function)

        def called(weights: Weights, inputs: Inputs) -> Tensor:
            with beginning_at(how.states):
                return function(weights, inputs)

        return called

    def outputs(self, how: Circumstances, inputs: Inputs) -> Tensor:
        """What the module gives as a call had it, at the weights that it holds."""
        placed, named = arguments(inputs)
        with how.again():
            return choose_output(self.twin(how.modes)(*placed, **named), self.output)

    def gradient(
        self,
        calls: Sequence[ModelCall],
        begun: Sequence[Weights],
        given: Callable[[Float[Tensor, "example ..."]], object] | None = None,
    ) -> Weights:
        """The gradient of some calls at their weights, as autograd adds it up; what each call gives is also `given`."""
        for parameter in self.module.parameters():
            parameter.grad = None
        parameters, held = dict(self.module.named_parameters()), None
        for call, weights in zip(calls, begun, strict=True):
            if weights is not held:  # most calls of a step are made at the same
                held = weights
                with torch.no_grad():
                    for name, weight in weights.items():
                        parameters[name].copy_(weight).requires_grad_()
            with torch.enable_grad():
                assert call.gradient is not None
                outputs = self.outputs(call.how, call.inputs)
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


# --- Readers of the calls of a loop, each under its circumstances; what was found out of the module stays known.


@dataclass(frozen=True)
class CallReaders:
    """One for the module in each of its modes."""

    called: CalledModule
    trained: frozenset[str]
    readers: dict[LayerModes, Reader] = field(default_factory=dict)

    def pulled(self, call: ModelCall, weights: Weights) -> tuple[Jacobian, Replayed]:
        """Jᵀℓ′ of every example of a call, at these weights; and the call as it was replayed for that."""
        if call.gradient is None:
            raise ValueError("a call without a gradient")
        reader = self.reader(call)
        tape = reader.record(weights, call.inputs)
        replayed = Replayed(reader.function, weights, call.inputs, tape.outputs)
        return reader.weighted(tape, call.gradient), replayed

    def reader(self, call: ModelCall) -> Reader:
        """The one of a call."""
        function, modes = self.called.at(call.how), call.how.modes
        if modes not in self.readers:
            self.readers[modes] = Reader(function, self.trained, programs=ProgramCache())
        return replace(self.readers[modes], function=function, known=bool(call.how.states))


# --- What the casts of a loop under autocast cost, told beside what was found in the precision of the weights.
#
#     f_T − f_0 = Σ contributions + decay + casts        f in the precision of the weights
#
# At each step `casts` is what the rounding of the gradient did: the consumed one less that of the examples
# without casts, to whose outputs the same came back. It is no example's. The loop's own outputs are those under
# casts; how far they are from f is a figure of its own.


def away(called: CalledModule, end: Weights, queries: Inputs, outputs: Float[Tensor, "probe out"]) -> float:
    """The distance of the outputs from those under casts."""
    with torch.no_grad():
        return float((columns(called.under_casts, end, queries) - outputs).norm())


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
