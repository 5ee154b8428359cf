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
        rows = next(iter(adjoint.parts.values()))
        directions: Weights = {}
        for name in adjoint.parts:
            if name not in self.weights:
                continue
            direction = adjoint.scaled_part(name, factors or {}).flatten(0, 1)
            if self.factors is not None:
                direction = self.factors[name] * direction
            directions[name] = direction.view(-1, *self.weights[name].shape)
        if not directions:
            return rows.new_zeros(*rows.shape[:2], self.examples, 1)
        kernel = self.products(directions)
        return kernel.view(*rows.shape[:2], self.examples, 1)

    def multiplied_out(self, jacobian: Jacobian) -> Adjoint:
        """Return the rows of a Jacobian as a dense array."""
        jacobian = jacobian.of(self.weights.keys() & jacobian.uses.keys())
        adjoint = zero_adjoint(jacobian, self.weights)
        ones = {name: torch.ones_like(part) for name, part in self.weights.items()}
        adjoint.accumulate(jacobian, ones, 0.0)
        return adjoint
