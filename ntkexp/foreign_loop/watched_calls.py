"""Watching the calls of a model: what goes in, under which circumstances, and what comes back.

forward     the inputs of a call, the weights' step at which it was made, and from where its random numbers come
backward    ∂L/∂f of its outputs; calls whose gradients were thrown away before are forgotten
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from ntkexp.foreign_loop.asked import ONE_NUMBER
from ntkexp.foreign_loop.autocast import Autocast
from ntkexp.foreign_loop.circumstances import Circumstances
from ntkexp.foreign_loop.generators import states_for
from ntkexp.foreign_loop.keeper import AbstractKeeper
from ntkexp.foreign_loop.listen import listen
from ntkexp.foreign_loop.members import Members
from ntkexp.foreign_loop.model_call import Ids, ModelCall, given, names_of
from ntkexp.foreign_loop.signed_outputs import signature
from ntkexp.foreign_loop.unwrapped import called_model, unwrapped_model
from ntkexp.foreign_loop.weighing import Weighing
from ntkexp.kernel.record.inputs import as_inputs, examples, map_tensors
from ntkexp.mistake import Mistake
from ntkexp.model.foreign.chosen_output import choose_output


@dataclass
class WatchedCalls:
    """The calls whose gradients may still be consumed."""

    model: nn.Module
    output: str | int | None
    ids: Ids
    members: Members
    keeper: AbstractKeeper
    refuse_writes: Callable[[], None]  # refuses a model that is not as the step under way began with it
    weighing: Weighing | None = None  # of examples of a loop that is carried out again
    calls: list[ModelCall] = field(default_factory=list)
    seen: int = 0  # calls
    begun: list[int] = field(default_factory=list)  # how many had been seen when those began that are under way
    generators: Mapping[str, Tensor] = field(default_factory=dict)  # their states before the latest call
    autocast: Autocast | None = None  # in which the latest call was made
    taken: list[ModelCall] = field(default_factory=list)  # the calls whose gradients the latest step consumed
    gradients: list[ReferenceType[Tensor]] = field(default_factory=list)  # as tensors, that it consumed

    def hooks(self) -> Iterator[Any]:
        """Put up what hears of calls."""
        self.inner = unwrapped_model(self.model)
        yield called_model(self.model).register_forward_pre_hook(self.on_begin)
        yield called_model(self.model).register_forward_hook(self.on_call, with_kwargs=True)
        inside = [layer for layer in self.model.modules() if list(layer.parameters(recurse=False))]
        for layer in inside:  # libraries put autocast between a model and its layers
            yield layer.register_forward_pre_hook(partial(self.on_casts, layer is inside[0]))

    @property
    def consumed(self) -> tuple[ModelCall, ...]:
        """Those whose gradients a step consumes now."""
        return tuple(copy(call) for call in self.calls if call.gradient is not None)

    def remember(self, moved: Iterable[Tensor]) -> None:
        """A step was taken by these parameters."""
        self.taken = [call for call in self.calls if call.gradient is not None]
        self.gradients = [ref(weight.grad) for weight in moved if weight.grad is not None]

    def forget_replaced(self, moved: Iterable[Tensor]) -> None:
        """Forget calls whose gradients an earlier step consumed, if none of the tensors is left that it did it from:
        autograd adds to them in place, and whoever assigns others (`p.grad = …`) adds nothing."""
        now = [weight.grad for weight in moved if weight.grad is not None]
        left = {id(known) for each in self.gradients if (known := each()) is not None}
        if any(here.requires_grad or id(here) in left for here in now):  # with create_graph=True sums are new tensors
            return
        for call in self.taken:
            call.forget()
        self.calls = [call for call in self.calls if all(call is not each for each in self.taken)]

    def on_begin(self, *_: object) -> None:
        """A call begins, which may draw random numbers."""
        self.begun.append(self.seen)
        if torch.is_grad_enabled():
            self.generators, self.autocast = states_for(self.inner), None

    def on_casts(self, first: bool, layer: nn.Module, *_: object) -> None:
        """Note the casts of a call, in its first layer or a later one."""
        if torch.is_grad_enabled() and self.autocast is None:
            self.autocast = Autocast.now(next(layer.parameters()).device.type, whole=first)

    def on_call(self, _: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], answer: object) -> None:
        """Note a call that may be differentiated; one around others is a library's, with the loop's code in it."""
        if self.begun.pop() < self.seen or not torch.is_grad_enabled():
            return
        output = choose_output(answer, self.output)
        if not output.requires_grad or not output.numel():  # of no examples
            return
        self.refuse_writes()
        if not output.dim():
            raise Mistake(f"step {self.keeper.count}: {ONE_NUMBER}")
        inputs = map_tensors(torch.clone, as_inputs(given(args, kwargs)))
        if len(output) != examples(inputs):
            raise Mistake(
                f"step {self.keeper.count}: the model gives {len(output)} rows for {examples(inputs)} examples; follow "
                "one whose outputs have the examples as their first axis"
            )
        how = Circumstances.of(self.inner, self.generators, self.autocast)
        call = ModelCall(self.keeper.count, inputs, names_of(inputs, self.ids), how, signed=signature(output))
        listen(output, partial(self.on_gradient, call), past_casts=self.autocast is not None)
        self.calls.append(call)
        self.seen += 1

    def on_gradient(self, call: ModelCall, gradient: Tensor) -> Tensor | None:
        """Note what comes back to the outputs of a call, and weigh it; gradients that are zero now were not
        accumulated, but for calls of which nothing was left."""
        way = torch._C._current_graph_task_id()
        if all(weight.grad is None or not weight.grad.any() for _, weight in self.members):
            for each in self.calls:
                if each.way != way and not self.silenced(each):
                    each.forget()
            self.calls = [each for each in self.calls if each.gradient is not None or each.way < 0 or each is call]
        if self.weighing is None:
            call.receive(gradient, way)
            return None
        factors = self.weighing.factors(call.names).to(gradient)
        weighed = gradient * factors.view(-1, *[1] * (gradient.dim() - 1))
        call.receive(weighed, way)
        return weighed

    def silenced(self, call: ModelCall) -> bool:
        """Whether a call of this step adds zero, as nothing is left of it."""
        return self.weighing is not None and call.at == self.keeper.count and self.weighing.silences(call.names)
