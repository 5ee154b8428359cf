"""The calls of a running loop whose gradients a later step may use, and their ∂L/∂f.

A hook on the outputs f of a call receives ∂L/∂f of each example. This gradient includes
the mean over the batch, gradient accumulation and the loss scale, so the loss function
itself need not be known.

A call is pending from its backward pass until a step has used its gradient. If the loop
discards the gradient before this step, by `zero_grad` or by new `grad` tensors, the
call is dropped."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from ntkexp.foreign_loop.call import ModelCall
from ntkexp.foreign_loop.running_loop import RunningLoop
from ntkexp.foreign_loop.user_loss import Weighing


@dataclass
class PendingCalls:
    """The recorded calls whose gradients a later step may use."""

    loop: RunningLoop
    weighing: Weighing | None  # weights of examples in a loop that runs again
    calls: list[ModelCall] = field(default_factory=list)
    # True if a backward pass since the latest step had create_graph=True
    is_differentiated: bool = False
    # calls used by the latest step
    consumed_calls: list[ModelCall] = field(default_factory=list)
    # `grad` tensors used by the latest step
    consumed_tensors: list[ReferenceType[Tensor]] = field(default_factory=list)

    @property
    def have_gradients(self) -> bool:
        """True if a backward pass since the latest step has reached a call."""
        step = self.loop.store.count
        return any(call.at == step and call.has_gradient for call in self.calls)

    def clear(self) -> None:
        self.calls = []
        self.consumed_calls = []
        self.consumed_tensors = []

    def consume(self, parameters: Iterable[Tensor]) -> tuple[ModelCall, ...]:
        """Return the calls whose gradients a step has used.
        `parameters` are the parameters of the step's optimizer."""
        weights = list(parameters)
        if len(self.loop.optimizers) == 1:
            self.drop_replaced(weights)
        self.consumed_calls = [call for call in self.calls if call.has_gradient]
        for call in self.consumed_calls:
            if call.naming_error is not None:
                raise call.naming_error
            call.is_differentiated |= self.is_differentiated
        self.is_differentiated = False
        self.consumed_tensors = [
            ref(weight.grad) for weight in weights if weight.grad is not None
        ]
        return tuple(call.consumed() for call in self.consumed_calls)

    def on_gradient(
        self, call: ModelCall, counts: Tensor | None, gradient: Tensor | None
    ) -> Tensor | None:
        """Add the gradient of one backward pass to ∂L/∂f of a call.

        In a loop that runs again, return the gradient times the weights of the
        examples (`counts`: their weights in the mean, see `user_loss`). Otherwise
        return None, which leaves the gradient unchanged."""
        # It is None if f is a part of a split tensor, and the loss uses other parts.
        if gradient is None:
            return None
        backward = self.begin_backward(call)
        weighed = None
        if call.several is None or call.several.has_inner_loss:
            weighed = self.weighed(call, counts, gradient)
        call.add_gradient(gradient if weighed is None else weighed, backward)
        return weighed

    def on_direct_gradient(
        self, call: ModelCall, counts: Tensor | None, name: str, gradient: Tensor | None
    ) -> Tensor | None:
        """Record the gradient of output `name` of a call with several outputs. It
        reached the output's alias, which the loop received. See `on_gradient`."""
        if gradient is None or call.several is None:
            return None
        call.backward = self.begin_backward(call)
        weighed = None
        if not call.several.has_inner_loss:
            weighed = self.weighed(call, counts, gradient)
        call.several.add_gradient(name, gradient if weighed is None else weighed)
        return weighed

    def on_inner_loss(
        self, call: ModelCall, name: str, gradient: Tensor | None
    ) -> None:
        """Record that a gradient reached a tensor without a row for each example, such
        as a loss that the model computes itself."""
        if gradient is None or not bool(gradient.any()):
            return
        if call.several is not None:
            call.several.has_inner_loss = True
        if repr(name) not in call.other_outputs:
            call.other_outputs.append(repr(name))

    def begin_backward(self, call: ModelCall) -> int:
        """Drop gradients that the loop has zeroed.
        Return the id of the backward pass that is running."""
        backward = torch._C._current_graph_task_id()
        self.is_differentiated |= torch.is_grad_enabled()
        if all(
            weight.grad is None or not weight.grad.any()
            for _, weight in self.loop.parameters
        ):
            self.drop_zeroed(call, backward)
        return backward

    def weighed(
        self, call: ModelCall, counts: Tensor | None, gradient: Tensor
    ) -> Tensor | None:
        """Return the gradient times the weights of the examples, or None if examples
        have no weights."""
        if self.weighing is None:
            return None
        factors = self.weighing.factors(call.names, counts).to(gradient)
        return gradient * factors.view(-1, *[1] * (gradient.dim() - 1))

    def drop_zeroed(self, latest: ModelCall, backward: int) -> None:
        """Drop the gradients that the loop has discarded by `zero_grad`. Call this if
        all `grad` tensors are zero.

        Keep the gradients of the present backward pass, and of calls whose examples all
        have weight 0. Keep the call `latest`, which this backward pass has reached."""
        for call in self.calls:
            has_no_weight = (
                self.weighing is not None
                and call.at == self.loop.store.count
                and self.weighing.silences(call.names)
            )
            if call.backward != backward and not has_no_weight:
                call.drop_gradient()
        self.calls = [
            call
            for call in self.calls
            if call.has_gradient or call.backward < 0 or call is latest
        ]

    def drop_replaced(self, parameters: Iterable[Tensor]) -> None:
        """Drop the calls that the previous step used,
        if all of its `grad` tensors were replaced.

        Autograd adds to existing `grad` tensors in place, so they contain earlier
        gradients. New tensors (`p.grad = …`) contain no earlier gradients."""
        now = [weight.grad for weight in parameters if weight.grad is not None]
        consumed = {
            id(tensor()) for tensor in self.consumed_tensors if tensor() is not None
        }
        if any(grad.requires_grad or id(grad) in consumed for grad in now):
            return  # with create_graph=True, accumulation also creates new tensors
        for call in self.consumed_calls:
            call.drop_gradient()
        dropped = {id(call) for call in self.consumed_calls}
        self.calls = [call for call in self.calls if id(call) not in dropped]
