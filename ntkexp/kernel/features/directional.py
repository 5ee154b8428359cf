"""Per-example gradients that are only known by their inner products with directions.

If the gradients gᵢ are expensive, and few directions v are needed, a forward-mode
derivative gives ⟨v, gᵢ⟩ for all examples i at once (see
`foreign_loop.batch_gradients`)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.kernel.features.adjoint import Adjoint, zero_adjoint
from ntkexp.kernel.features.jacobian import Jacobian
from ntkexp.shapes import Weights


@dataclass(frozen=True)
class DirectionalGradients:
    """The gradients gᵢ of some examples, as a function v → ⟨v, gᵢ⟩."""

    # maps directions to products [direction, example]. The directions of a parameter
    # have the shape [direction, *parameter]; the directions of omitted parameters are 0
    products: Callable[[Weights], Float[Tensor, "direction example"]]
    weights: Weights  # the weights θ at which the gradients are taken
    examples: int
    directions_at_once: int  # largest number of directions in a call of `products`
    factors: Mapping[str, float] | None = None  # one for each parameter's gradients
    outputs: int = 1

    def of(self, names: Collection[str] | None) -> DirectionalGradients:
        """Restrict the gradients to the parameters `names`.
        If `names` is None, return them unchanged."""
        if names is None:
            return self
        chosen = {name: part for name, part in self.weights.items() if name in names}
        return replace(self, weights=chosen)

    def scaled(self, factors: Mapping[str, float]) -> DirectionalGradients:
        """Multiply the gradients of each parameter by its factor."""
        before = self.factors or dict.fromkeys(factors, 1.0)
        product = {name: before[name] * factor for name, factor in factors.items()}
        return replace(self, factors=product)

    def kernel(
        self, left: Adjoint | Jacobian, factors: Weights | None = None
    ) -> Float[Tensor, "query out train out_"]:
        """Return ⟨factors ⊙ left, gᵢ⟩, summed over the parameters that both sides use.
        Parameters without factors have the factor 1."""
        adjoint = left if isinstance(left, Adjoint) else self.multiplied_out(left)
        shape = next(iter(adjoint.parts.values())).shape[:2]
        kernels = list[Tensor]()
        for start in range(0, shape.numel(), self.directions_at_once):
            some = slice(start, start + self.directions_at_once)
            directions = self.directions(adjoint, factors or {}, some)
            if not directions:
                like = next(iter(adjoint.parts.values()))
                return like.new_zeros(*shape, self.examples, 1)
            kernels.append(self.products(directions))
        return torch.cat(kernels).view(*shape, self.examples, 1)

    def directions(self, adjoint: Adjoint, factors: Weights, some: slice) -> Weights:
        """Return the rows `some` of the adjoint, multiplied by `factors` and by
        `self.factors`. Only these rows are copied, because the adjoint may be large."""
        directions: Weights = {}
        for name, part in adjoint.parts.items():
            if name not in self.weights:
                continue
            direction = part.flatten(0, 1)[some]
            if name in factors:
                direction = direction * factors[name].reshape(-1)
            if self.factors is not None:
                direction = self.factors[name] * direction
            directions[name] = direction.view(-1, *self.weights[name].shape)
        return directions

    def multiplied_out(self, jacobian: Jacobian) -> Adjoint:
        """Return the rows of a Jacobian as a dense array."""
        jacobian = jacobian.of(self.weights.keys() & jacobian.uses.keys())
        adjoint = zero_adjoint(jacobian, self.weights)
        ones = {name: torch.ones_like(part) for name, part in self.weights.items()}
        adjoint.accumulate(jacobian, ones, 0.0)
        return adjoint
