"""The module of a loop as functions of its weights: in evaluation for the queries, and as each call had it.

Under the circumstances of a call it is a function too, of the batch as a whole: generators begin where they did, so
that masks are those that were drawn. They are constants of the step.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

from torch import Tensor, nn

from ntkexp.foreign_loop.circumstances import EVALUATION, Circumstances, LayerModes
from ntkexp.foreign_loop.generators import beginning_at
from ntkexp.model.foreign.chosen_output import choose_output
from ntkexp.model.functional import arguments, function_as_it_is, function_of
from ntkexp.shapes import Function, Inputs, Weights


@dataclass(frozen=True)
class CalledModule:
    """A module in evaluation, and its `twins` in other modes, which hold the same tensors."""

    module: nn.Module
    output: str | int | None
    twins: dict[LayerModes, nn.Module] = field(default_factory=dict)

    @cached_property
    def function(self) -> Function:
        """The module in evaluation."""
        return function_of(self.twin(EVALUATION), self.output)

    def at(self, how: Circumstances) -> Function:
        """The module as a call had it."""
        function = function_as_it_is(self.twin(how.modes), self.output)

        def called(weights: Weights, inputs: Inputs) -> Tensor:
            with beginning_at(how.states):
                return function(weights, inputs)

        return called

    def outputs(self, how: Circumstances, inputs: Inputs) -> Tensor:
        """What the module gives as a call had it, at the weights that it holds."""
        placed, named = arguments(inputs)
        with beginning_at(how.states):
            return choose_output(self.twin(how.modes)(*placed, **named), self.output)

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
