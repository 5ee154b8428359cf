"""The module of a loop as functions of its weights: in evaluation for the queries, and as each call had it.

Casts are left out of these functions: in the precision of the weights each is smooth and explained to rounding. What
the loop did under casts is replayed by autograd, as a whole.

Under the circumstances of a call it is a function too, of the batch as a whole: generators begin where they did, so
that masks are those that were drawn. They are constants of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ntkexp.foreign_loop.autocast import Autocast
from ntkexp.foreign_loop.circumstances import EVALUATION, Circumstances, LayerModes
from ntkexp.foreign_loop.generators import beginning_at
from ntkexp.foreign_loop.model_call import ModelCall
from ntkexp.kernel.record.casts import without_casts
from ntkexp.model.foreign.chosen_output import choose_output
from ntkexp.model.functional import arguments, function_as_it_is, function_of
from ntkexp.shapes import Function, Inputs, Weights


@dataclass(frozen=True)
class CalledModule:
    """A module in evaluation, and its `twins` in other modes, which hold the same tensors; the `casts` of its loop."""

    module: nn.Module
    output: str | int | None
    casts: Autocast | None = None
    twins: dict[LayerModes, nn.Module] = field(default_factory=dict)

    @cached_property
    def function(self) -> Function:
        """The module in evaluation."""
        return self.uncast(function_of(self.twin(EVALUATION), self.output), self.casts)

    @property
    def under_casts(self) -> Function:
        """The module in evaluation, under casts."""
        function, how = function_of(self.twin(EVALUATION), self.output), Circumstances(autocast=self.casts)

        def cast(weights: Weights, inputs: Inputs) -> Tensor:
            with how.again():
                return function(weights, inputs)

        return cast

    def uncast(self, function: Function, casts: Autocast | None) -> Function:
        """A function without casts, if there are some."""
        return function if casts is None else without_casts(function)

    def at(self, how: Circumstances) -> Function:
        """The module as a call had it."""
        function = self.uncast(function_as_it_is(self.twin(how.modes), self.output), how.autocast)

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
