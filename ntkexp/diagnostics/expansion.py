"""Diagnostics of the Taylor expansion of the network around its weights
before training."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import grad

from ntkexp.diagnostics.base import (
    AbstractDiagnostic,
    Measured,
    TrainingState,
    Value,
    refuse_missing_derivatives,
)
from ntkexp.kernel.record.taping import plain_kernels
from ntkexp.shapes import Function, Weights


class Taylor(AbstractDiagnostic):
    """The errors of the Taylor expansions of orders 1 and 2 around the weights θ_0 before
    training, at the trained weights θ = θ_0 + d.

        f̂_1 = f(θ_0) + J d               f̂_2 = f̂_1 + ½ dᵀ H d
        SPLIT.order_k = ‖f̂_k − f(θ)‖ / ‖f(θ) − f(θ_0)‖

    J and H are the first and second derivatives of the outputs at θ_0. The norms are
    over SPLIT, which is `train` (the training examples) or `query` (all points of the
    other splits). To expand around other weights, start the run from these weights
    (`init.parent`).
    """

    def measure(self, state: TrainingState) -> Measured:
        start = state.start_weights
        direction = {
            name: weight - start[name] for name, weight in state.weights.items()
        }
        with refuse_missing_derivatives("taylor"), plain_kernels():
            blocks = [
                taylor_terms(state.network, start, direction, inputs)
                for inputs in state.input_blocks
            ]
        constant, first, second = map(torch.cat, zip(*blocks, strict=True))
        outputs = torch.cat([state.outputs, state.query_outputs])

        values: dict[str, Value] = {}
        for split, points in state.splits.items():
            change = (outputs - constant)[points]
            scale = float(change.norm())
            gap = first[points] - change
            for order, error in ((1, gap), (2, gap + second[points])):
                relative = float(error.norm()) / scale if scale > 0 else None
                values[f"{split}.order_{order}"] = relative
        return values


def taylor_terms(
    network: Function, weights: Weights, direction: Weights, inputs: Tensor
) -> tuple[
    Float[Tensor, "point out"], Float[Tensor, "point out"], Float[Tensor, "point out"]
]:
    """Return the terms f, J d and ½ dᵀ H d of the outputs at θ + d.

    >>> def product(weights, inputs):
    ...     return inputs * weights["a"] * weights["b"]
    >>> start = {"a": torch.tensor(3.0), "b": torch.tensor(1.0)}
    >>> step = {"a": torch.tensor(2.0), "b": torch.tensor(5.0)}
    >>> [float(term) for term in taylor_terms(product, start, step, torch.ones(1, 1))]
    [3.0, 17.0, 10.0]
    """

    def along(distance: Tensor) -> Float[Tensor, "point out"]:
        moved = {
            name: weight + distance * direction[name]
            for name, weight in weights.items()
        }
        return network(moved, inputs)

    def contracted(distance: Tensor, cotangent: Tensor) -> Float[Tensor, ""]:
        return (along(distance) * cotangent).sum()

    # Let g(ε) = f(θ + εd). Then J d = g′(0) and dᵀ H d = g″(0). ⟨u, g′⟩ and ⟨u, g″⟩ are
    # linear in u, and their gradients by u are g′ and g″.
    slope = grad(contracted, argnums=0)
    curvature = grad(slope, argnums=0)
    with torch.no_grad():
        outputs = network(weights, inputs)
    origin = outputs.new_zeros(())
    cotangent = torch.zeros_like(outputs)
    first: Tensor = grad(slope, argnums=1)(origin, cotangent)
    second: Tensor = grad(curvature, argnums=1)(origin, cotangent)
    return outputs, first, second / 2
