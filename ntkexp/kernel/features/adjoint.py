"""The adjoint U of the backward sum: for each output, how the end of training responds to the
weights at a step.

U has one number for each weight, so it is stored densely, parameter by parameter. A step adds its
Jacobian, scaled weight by weight, U ← scale ⊙ J + carry · U. Then U is multiplied with the
gradients of examples. A product layer gives

    ⟨U, Σ_u a_u ⊗ β_u⟩ = Σ_u a_uᵀ U β_u

either in this form or with the gradients multiplied out, whichever takes fewer operations.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.kernel.features.blocks import Copies, Factored, times_vector
from ntkexp.kernel.features.gram import cut
from ntkexp.kernel.features.jacobian import Jacobian
from ntkexp.kernel.secant.uses import View
from ntkexp.shapes import Weights

CACHED_NUMBERS = 2**18  # numbers of an intermediate result that stay in the processor's cache


@dataclass(frozen=True)
class Adjoint:
    """U by parameter, each a row for each output of each query, with a number for each element of
    the parameter.
    """

    parts: Mapping[str, Float[Tensor, "query out _"]]

    def accumulate(self, jacobian: Jacobian, scale: Weights, carry: float) -> None:
        """U ← scale ⊙ J + carry · U."""
        if not jacobian.uses.keys() <= self.parts.keys():
            raise ValueError("Jacobians of different functions have no common adjoint")
        for name, part in self.parts.items():
            if name not in jacobian.uses:  # the step took a way without this parameter
                part.mul_(carry)
                continue
            factor = scale[name].reshape(-1)
            match jacobian.uses[name]:
                case [(_, Copies() as block)] if jacobian.starts is None:
                    part.mul_(carry)
                    values = block.values * factor[block.places][:, None]
                    places = block.places[:, None].expand_as(values)
                    part.scatter_add_(2, places, values)
                case _:
                    rows = part.flatten(0, 1)
                    for chunk in cut(jacobian, name, range(rows.shape[1])):
                        gradients = jacobian.chunk(name, chunk.elements)
                        columns = rows[:, chunk.place]
                        columns.mul_(carry).addcmul_(gradients, factor[chunk.place])

    def covering(self, jacobian: Jacobian, weights: Weights) -> Adjoint:
        """Return U with zeros for parameters that only this Jacobian uses."""
        if jacobian.uses.keys() <= self.parts.keys():
            return self
        return Adjoint({**zero_adjoint(jacobian, weights).parts, **self.parts})

    def zeros(self) -> Adjoint:
        """Return zeros for the same parameters."""
        return Adjoint({name: torch.zeros_like(part) for name, part in self.parts.items()})

    def of(self, names: Collection[str] | None) -> Adjoint:
        """Return U for these parameters alone, or for all of them if `names` is None."""
        if names is None:
            return self
        chosen = {name: part for name, part in self.parts.items() if name in names}
        return Adjoint(chosen)

    def shrink(self, factors: Mapping[str, float]) -> None:
        """U ← factor · U, with a factor for each parameter."""
        for name, part in self.parts.items():
            part.mul_(factors[name])

    def scaled(self, factors: Weights) -> Adjoint:
        """Return factors ⊙ U. Parameters without factors are shared, not copied."""
        scaled = dict(self.parts)
        for name, part in self.parts.items():
            if name in factors:
                scaled[name] = part * factors[name].reshape(-1)
        return Adjoint(scaled)

    def add(self, other: Adjoint) -> None:
        """U ← U + U′."""
        for name, part in self.parts.items():
            part.add_(other.parts[name])

    def applied(self, weights: Weights) -> Float[Tensor, "query out"]:
        """Return ⟨U, v⟩ for a vector v in the shape of the weights."""
        terms = []
        for name, part in self.parts.items():
            terms.append(times_vector(part, weights[name].reshape(-1)))
        return sum(terms[1:], start=terms[0])

    def kernel(self, right: Jacobian) -> Float[Tensor, "query out train out_"]:
        """Return ⟨U, J(x′)⟩. Parameters that one side lacks add nothing."""
        right = right.of(self.parts.keys())
        some = next(iter(self.parts.values()))
        kernel = some.new_zeros(*some.shape[:2], right.examples, right.outputs)

        # Blocks that are the only use of their parameters keep their form
        multiplied_out: dict[str, None] = {}  # in the order of the blocks, so that bits repeat
        for place, block in right.placed():
            is_only_use = all(len(right.uses[name]) == 1 for name in block.names)
            columns = kernel[:, :, place]
            if is_only_use and isinstance(block, Copies):
                columns.add_(times_copies(self.parts[block.name], block))
            elif is_only_use and isinstance(block, Factored) and self.left_first_is_cheaper(block):
                columns.add_(self.times_factors(block))
            else:
                multiplied_out |= dict.fromkeys(block.names)

        # All others are multiplied out
        for name in multiplied_out:
            for chunk in cut(right, name, range(right.extents[name])):
                part = self.parts[name][:, :, chunk.place]
                gradients = right.chunk(name, chunk.elements)
                kernel += inner(part, gradients.view(right.examples, right.outputs, -1))
        return kernel

    def left_first_is_cheaper(self, right: Factored) -> bool:
        """Compare the multiplications of both forms of the product with a layer's gradients."""
        some = next(iter(self.parts.values()))
        rows = some.shape[:2].numel()
        train, outputs, uses, features = right.outputs.shape
        left_first = rows * train * uses * features * (right.rows + outputs)
        multiplied_out = train * outputs * right.rows * features * (uses + rows)
        # twice, since gradients that are multiplied out have to be written and read as well
        return left_first <= 2 * multiplied_out

    def times_factors(self, right: Factored) -> Float[Tensor, "query out train out_"]:
        """Return Σ_u (a_uᵀ U) β_u, for a few queries at a time."""
        queries, out, _ = next(iter(self.parts.values())).shape
        train, outputs, uses, features = right.outputs.shape
        assert right.weight is not None
        inputs = right.inputs.flatten(0, 1)  # [train·use, in]
        beta = right.outputs.reshape(train, outputs, -1).mT  # [train, use·features, out_]
        if not beta.numel():  # no example reached the layer, such as an expert
            return beta.new_zeros(queries, out, train, outputs)
        kernel = beta.new_empty(queries, out, train, outputs)
        step = max(1, CACHED_NUMBERS // (out * train * uses * features))
        for start in range(0, queries, step):
            some = slice(start, start + step)

            # a_uᵀ U = a_uᵀ U_W + shift · U_b
            products = inputs @ shown(self.parts[right.weight.name][some], right.weight)
            if right.bias is not None and right.shift is not None:
                bias = shown(self.parts[right.bias.name][some], right.bias)
                products.add_(bias.reshape(-1, 1, features), alpha=right.shift)

            # Σ_u (a_uᵀ U) β_u
            rows = products.reshape(-1, train, uses, features)
            shares = rows.transpose(0, 1).flatten(2) @ beta
            kernel[some] = shares.transpose(0, 1).reshape(-1, out, train, outputs)
        return kernel


def zero_adjoint(jacobian: Jacobian, weights: Weights) -> Adjoint:
    """Return U = 0 for the parameters of a Jacobian."""
    parts = {}
    for name, uses in jacobian.uses.items():
        like = uses[-1][1].numbers
        size = weights[name].numel()
        parts[name] = like.new_zeros(jacobian.examples, jacobian.outputs, size)
    return Adjoint(parts)


def shown(part: Float[Tensor, "query out size"], view: View) -> Float[Tensor, "row ..."]:
    """Return what a view of a parameter shows of each row of U."""
    rows = part.flatten(0, 1)
    offset = rows.storage_offset() + view.offset
    return rows.as_strided((len(rows), *view.shape), (rows.stride(0), *view.stride), offset)


def times_copies(
    part: Float[Tensor, "query out size"], right: Copies
) -> Float[Tensor, "query out train out_"]:
    """Return ⟨U, J(x′)⟩ = Σ_e U[place_e] gradient_e from the elements of a table that each example
    read.
    """
    kernels = []
    for places, values in zip(right.places, right.values, strict=True):
        kernels.append(part[:, :, places] @ values.t())
    return torch.stack(kernels, dim=2)


def inner(
    left: Float[Tensor, "query out size"], right: Float[Tensor, "train out_ size"]
) -> Float[Tensor, "query out train out_"]:
    """Return all inner products, as one product of matrices."""
    products = left.flatten(0, 1) @ right.flatten(0, 1).t()
    return products.view(*left.shape[:2], *right.shape[:2])
