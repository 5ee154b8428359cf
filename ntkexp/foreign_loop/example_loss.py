"""The loss of a loop, as its user gives it: one number for each example of a call, up to one factor for each call.

∂L/∂fᵢ = κ ∂ℓᵢ/∂fᵢ        κ is found, and the rest held against the gradient that came back to the call's outputs
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.foreign_loop.clipping import factor_between
from ntkexp.foreign_loop.model_call import ModelCall
from ntkexp.foreign_loop.seen_call import SeenCall
from ntkexp.kernel.record.taping import plain_kernels
from ntkexp.mistake import Mistake
from ntkexp.shapes import Function, Weights

AGREES = 1e4  # eps: a loss written in other words, relative to its gradient
SPREAD = 4  # times what rounding does to a few multiples of a gradient: to that with the factor of the loop
MULTIPLES = (1 / 3, 3 / 7, 1 / 11)


ExampleLoss: TypeAlias = Callable[[Tensor, SeenCall], Tensor]
"""Outputs of a call and the call ↦ one loss for each example."""


@dataclass(frozen=True)
class CallLoss:
    """The losses of the examples of one call."""

    loss: ExampleLoss
    function: Function
    call: ModelCall
    step: int

    def losses(self, outputs: Tensor) -> Float[Tensor, " row"]:
        """One for each example."""
        found = self.loss(outputs, SeenCall.of(self.call.inputs, self.call.names))
        if not isinstance(found, Tensor):
            raise Mistake(f"loss=: it gives a {type(found).__name__}; give a tensor with one loss for each example")
        if found.shape != (len(self.call.names),):
            raise Mistake(
                f"loss=: it gives a tensor of shape {list(found.shape)} for {len(self.call.names)} examples; give one "
                "loss for each, such as cross_entropy(outputs, labels, reduction='none')"
            )
        return found

    def at(self, weights: Weights) -> Float[Tensor, " row"]:
        """The losses at these weights."""
        return self.losses(self.function(weights, self.call.inputs))

    def share(self, weights: Weights, factors: Float[Tensor, " row"] | None = None) -> float:
        """The κ of the call; or a mistake, if this is not the loss that was trained with. What came back to its rows
        had been multiplied with `factors`."""
        with torch.no_grad(), plain_kernels():
            outputs = self.function(weights, self.call.inputs)
        outputs = outputs.detach().requires_grad_()

        def slope(multiple: float) -> Tensor:
            (found,) = torch.autograd.grad(multiple * self.losses(outputs).sum(), outputs)
            return (found if factors is None else found * factors.to(found).view(-1, *[1] * (found.dim() - 1))).view(-1)

        assert self.call.gradient is not None
        ours, theirs = slope(1.0), self.call.gradient.reshape(-1)
        factor, missed = factor_between(ours, theirs)
        bound = AGREES * torch.finfo(theirs.dtype).eps
        if not (missed <= bound or missed <= bound + SPREAD * cancelled(slope)):
            raise Mistake(
                f"step {self.step}: loss= is not the loss that was trained with: its gradient in the outputs is off by "
                f"{missed:.2g} of itself, whatever factor it has; give the loss of each example, as the loop has it"
            )
        return factor


def cancelled(gradient: Callable[[float], Tensor]) -> float:
    """What rounding does to a gradient of a multiple of a loss, relative to it. Terms may cancel: class weights of very
    different sizes leave far more than eps of what an example that is all but learned gives.

    >>> cancelled(lambda multiple: torch.tensor([multiple]))
    0.0
    """
    once = gradient(1.0)
    size = float(once.norm())
    return max(float((gradient(c) / c - once).norm()) for c in MULTIPLES) / size if size else 0.0
