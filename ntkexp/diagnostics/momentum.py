"""A diagnostic of the momentum, as a velocity of the outputs."""

from __future__ import annotations

from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import vjp

from ntkexp.diagnostics.base import (
    AbstractDiagnostic,
    Measured,
    TrainingState,
    Value,
    refuse_missing_derivatives,
)
from ntkexp.kernel.record.taping import plain_kernels
from ntkexp.shapes import Function, Weights


class FunctionMomentum(AbstractDiagnostic):
    """The momentum in function space.

    Earlier gradients (through the momentum) and the present gradient both change the
    outputs in the next step. The diagnostic compares the two changes, to first order:

        θ′ − θ = Δ_m + Δ_g        Δ_m: by earlier gradients, Δ_g: by the present gradient
        SPLIT.ratio  = ‖J Δ_m‖ / ‖J Δ_g‖
        SPLIT.cosine = ⟨J Δ_m, J Δ_g⟩ / (‖J Δ_m‖ ‖J Δ_g‖)

    J is the Jacobian of the outputs at θ. SPLIT is `train` (the training examples) or
    `query` (all points of the other splits). If the cosine is negative, the momentum
    moves the outputs against the present gradient. Decoupled weight decay belongs to
    neither part.
    """

    needs_steps: ClassVar[bool] = True

    def measure(self, state: TrainingState) -> Measured:
        values: dict[str, Value] = {}
        for split in state.splits:
            values |= {f"{split}.ratio": None, f"{split}.cosine": None}
        if state.step_parts is None:
            return values

        parts = state.step_parts()
        by_momentum = change_of_outputs(state, parts.momentum)
        by_gradient = change_of_outputs(state, parts.gradient)
        for split, points in state.splits.items():
            left = by_momentum[points]
            right = by_gradient[points]
            if right.norm() == 0:
                continue
            values[f"{split}.ratio"] = float(left.norm() / right.norm())
            if left.norm() > 0:
                product = (left * right).sum()
                values[f"{split}.cosine"] = float(product / left.norm() / right.norm())
        return values


def change_of_outputs(
    state: TrainingState, direction: Weights
) -> Float[Tensor, "point out"]:
    """Return J v for all points, the derivative of the outputs along a direction v."""
    with refuse_missing_derivatives("function_momentum"), plain_kernels():
        return torch.cat(
            [
                push_forward(state.network, state.weights, direction, inputs)
                for inputs in state.input_blocks
            ]
        )


def push_forward(
    network: Function, weights: Weights, direction: Weights, inputs: Tensor
) -> Float[Tensor, "point out"]:
    """Return the product J v of the Jacobian of the outputs with a vector.

    >>> def product(weights, inputs):
    ...     return inputs * weights["a"] * weights["b"]
    >>> start = {"a": torch.tensor(3.0), "b": torch.tensor(1.0)}
    >>> step = {"a": torch.tensor(2.0), "b": torch.tensor(5.0)}
    >>> push_forward(product, start, step, torch.ones(1, 1))
    tensor([[17.]])
    """
    evaluated = vjp(lambda moved: network(moved, inputs), weights)
    outputs: Tensor = evaluated[0]
    pull_back = evaluated[1]

    # u ↦ Jᵀu is linear in u, and the transposed map is v ↦ Jv
    def transposed(cotangent: Tensor) -> Weights:
        pulled: Weights = pull_back(cotangent)[0]
        return pulled

    push = vjp(transposed, torch.zeros_like(outputs))[1]
    image: Tensor = push(direction)[0]
    return image
