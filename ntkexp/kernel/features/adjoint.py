"""The adjoint U of an optimizer's momentum, as a dense array: minus the derivative of
the outputs at the end of training with respect to the momentum at a step (see
`path.backward_sum`).

The backward sum over steps updates U with the Jacobian J of the queries at each step,

    U ← scale ⊙ J + decay · U

where `scale` has one number for each weight, and `decay` is the momentum decay of the
optimizer. The contribution of a training example is the inner product of U with the
example's gradient. A layer z = a W has the gradient Σ_u a_u ⊗ β_u, where a_u is the
input and β_u = ∂f/∂z_u the output gradient at use u of the weight W. Its inner product
with U is

    ⟨U, Σ_u a_u ⊗ β_u⟩ = Σ_u a_uᵀ U β_u

The right side avoids forming the gradient. This file computes the side that takes fewer
multiplications.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.kernel.features.blocks import Copies, Factored, times_vector
from ntkexp.kernel.features.gram import PIECE_BYTES, cut_parameter
from ntkexp.kernel.features.jacobian import Jacobian
from ntkexp.kernel.secant.uses import View
from ntkexp.shapes import Weights

# intermediate results with at most this many elements stay in the processor's cache
CACHED_NUMBERS = 2**18


@dataclass(frozen=True)
class Adjoint:
    """The adjoint U: for each parameter, an array [query, out, element]."""

    parts: Mapping[str, Float[Tensor, "query out _"]]

    def accumulate(self, jacobian: Jacobian, scale: Weights, decay: float) -> None:
        """Replace U by scale ⊙ J + decay · U."""
        if not jacobian.uses.keys() <= self.parts.keys():
            raise ValueError("Jacobians of different functions have no common adjoint")
        for name, part in self.parts.items():
            # the network did not use this parameter at this step
            if name not in jacobian.uses:
                part.mul_(decay)
                continue
            factor = scale[name].reshape(-1)
            match jacobian.uses[name]:
                case [(_, Copies() as block)] if jacobian.starts is None:
                    part.mul_(decay)
                    values = block.values * factor[block.places][:, None]
                    places = block.places[:, None].expand_as(values)
                    part.scatter_add_(2, places, values)
                case [(_, Factored() as block)] if is_outer_product(part, block, name):
                    accumulate_outer_product(part, block, factor, decay)
                case _:
                    rows = part.flatten(0, 1)
                    for chunk in cut_parameter(jacobian, name, range(rows.shape[1])):
                        gradients = jacobian.chunk(name, chunk.elements)
                        columns = rows[:, chunk.place]
                        columns.mul_(decay).addcmul_(gradients, factor[chunk.place])

    def extended_to(self, jacobian: Jacobian, weights: Weights) -> Adjoint:
        """Return U, extended by zeros for the parameters that only `jacobian` uses."""
        if jacobian.uses.keys() <= self.parts.keys():
            return self
        return Adjoint({**zero_adjoint(jacobian, weights).parts, **self.parts})

    def zeros(self) -> Adjoint:
        """Return U = 0 in the shape of this adjoint."""
        return Adjoint(
            {name: torch.zeros_like(part) for name, part in self.parts.items()}
        )

    def of(self, names: Collection[str] | None) -> Adjoint:
        """Restrict U to the parameters `names`. If `names` is None, return U itself."""
        if names is None:
            return self
        chosen = {name: part for name, part in self.parts.items() if name in names}
        return Adjoint(chosen)

    def shrink(self, factors: Mapping[str, float]) -> None:
        """Multiply U by a factor for each parameter."""
        for name, part in self.parts.items():
            part.mul_(factors[name])

    def scaled_part(
        self, name: str, factors: Weights
    ) -> Float[Tensor, "query out size"]:
        """Return factors ⊙ U for one parameter. Without factors, do not copy U."""
        part = self.parts[name]
        return part * factors[name].reshape(-1) if name in factors else part

    def add(self, other: Adjoint, factors: Weights) -> None:
        """Add factors ⊙ other to U in place. Copy only one parameter at a time."""
        for name, part in self.parts.items():
            part.add_(other.scaled_part(name, factors))

    def applied(self, weights: Weights) -> Float[Tensor, "query out"]:
        """Return ⟨U, v⟩ for a vector v in the shape of the weights."""
        terms = []
        for name, part in self.parts.items():
            terms.append(times_vector(part, weights[name].reshape(-1)))
        return sum(terms[1:], start=terms[0])

    def kernel(
        self, right: Jacobian, factors: Weights | None = None
    ) -> Float[Tensor, "query out train out_"]:
        """Return ⟨factors ⊙ U, J(x′)⟩, summed over the parameters that both U and
        `right` use. Parameters without factors have the factor 1.

        Only one layer of U is copied at a time, because U may be as large as the memory
        allows."""
        factors = factors or {}
        right = right.of(self.parts.keys())
        some = next(iter(self.parts.values()))
        kernel = some.new_zeros(*some.shape[:2], right.examples, right.outputs)

        # Multiply by the factors of a block if no other block uses its parameters, and
        # if this is cheaper. Collect all other parameters in `multiplied_out`. This
        # dict serves as an ordered set, because a fixed order of summation gives
        # bitwise equal results.
        multiplied_out: dict[str, None] = {}
        for place, block in right.blocks_with_examples():
            is_only_use = all(len(right.uses[name]) == 1 for name in block.names)
            columns = kernel[:, :, place]
            if is_only_use and isinstance(block, Copies):
                columns.add_(times_copies(self.scaled_part(block.name, factors), block))
            elif (
                is_only_use
                and isinstance(block, Factored)
                and self.left_first_is_cheaper(block)
            ):
                columns.add_(self.times_factors(block, factors))
            else:
                multiplied_out |= dict.fromkeys(block.names)

        # Multiply out the gradients of the parameters in `multiplied_out`, chunk by
        # chunk
        for name in multiplied_out:
            part = self.scaled_part(name, factors)
            for chunk in cut_parameter(right, name, range(right.extents[name])):
                gradients = right.chunk(name, chunk.elements)
                kernel += inner(
                    part[:, :, chunk.place],
                    gradients.view(right.examples, right.outputs, -1),
                )
            del part
        return kernel

    def left_first_is_cheaper(self, right: Factored) -> bool:
        """Return True if Σ_u a_uᵀ U β_u takes fewer multiplications from left to right
        than first forming the gradients Σ_u a_u ⊗ β_u."""
        some = next(iter(self.parts.values()))
        rows = some.shape[:2].numel()
        train, outputs, uses, features = right.outputs.shape
        left_first = rows * train * uses * features * (right.rows + outputs)
        multiplied_out = train * outputs * right.rows * features * (uses + rows)
        # factor 2: multiplied-out gradients must also be written to memory
        # and read again
        return left_first <= 2 * multiplied_out

    def times_factors(
        self, right: Factored, factors: Weights
    ) -> Float[Tensor, "query out train out_"]:
        """Return Σ_u (a_uᵀ (factors ⊙ U)) β_u. Take a few queries at a time, to keep
        a_uᵀ U in the cache."""
        queries, out, _ = next(iter(self.parts.values())).shape
        train, outputs, uses, features = right.outputs.shape
        assert right.weight is not None
        inputs = right.inputs.flatten(0, 1)  # [train·use, in]
        # [train, use·features, out_]
        beta = right.outputs.reshape(train, outputs, -1).mT
        # no example reached the layer, for example an expert in a mixture of experts
        if not beta.numel():
            return beta.new_zeros(queries, out, train, outputs)
        kernel = beta.new_empty(queries, out, train, outputs)
        weight = self.scaled_part(right.weight.name, factors)
        bias = None
        if right.bias is not None and right.shift is not None:
            bias = self.scaled_part(right.bias.name, factors)
        step = max(1, CACHED_NUMBERS // (out * train * uses * features))
        for start in range(0, queries, step):
            some = slice(start, start + step)

            # a_uᵀ U = a_uᵀ U_W + shift · U_b
            products = inputs @ shown(weight[some], right.weight)
            if bias is not None and right.bias is not None and right.shift is not None:
                shifts = shown(bias[some], right.bias).reshape(-1, 1, features)
                products.add_(shifts, alpha=right.shift)

            # Σ_u (a_uᵀ U) β_u
            rows = products.reshape(-1, train, uses * features)
            shares = torch.bmm(rows.transpose(0, 1), beta)
            kernel[some] = shares.transpose(0, 1).reshape(-1, out, train, outputs)
        return kernel


def zero_adjoint(jacobian: Jacobian, weights: Weights) -> Adjoint:
    """Return U = 0 for the parameters that a Jacobian uses."""
    parts = {}
    for name, uses in jacobian.uses.items():
        like = uses[-1][1].numbers
        size = weights[name].numel()
        parts[name] = like.new_zeros(jacobian.examples, jacobian.outputs, size)
    return Adjoint(parts)


def is_outer_product(
    part: Float[Tensor, "query out size"], block: Factored, name: str
) -> bool:
    """Return True if each gradient of the parameter `name` is a single product a ⊗ β,
    and if the weight of the block, or its transpose, covers the whole parameter."""
    view = block.weight
    if view is None or view.name != name:
        return False
    if block.bias is not None and block.bias.name == name:
        return False
    size = part.shape[2]
    is_complete = view.covers(size) or view.transposed().covers(size)
    return is_complete and block.outputs.shape[:3] == (*part.shape[:2], 1)


def accumulate_outer_product(
    part: Float[Tensor, "query out size"],
    block: Factored,
    scale: Float[Tensor, " size"],
    decay: float,
) -> None:
    """Replace U by (scale ⊙ a) ⊗ β + decay · U. All outputs of a query share scale ⊙ a."""
    assert block.weight is not None
    count, features = block.weight.shape
    queries, outs, size = part.shape
    if block.weight.transposed().covers(size):  # memory order [feature, input]
        lines, width = features, count
        inputs = block.inputs[:, :, None]
        outputs = block.outputs.mT
    else:
        lines, width = count, features
        inputs = block.inputs[:, :, :, None]
        outputs = block.outputs
    inputs = inputs.expand(-1, -1, lines, width)
    outputs = outputs.expand(-1, -1, lines, width)
    matrices = part.view(queries, outs, lines, width)
    scale = scale.view(lines, width)

    line_bytes = queries * outs * width * part.element_size()
    step = max(1, PIECE_BYTES // line_bytes)
    for start in range(0, lines, step):
        some = slice(start, start + step)
        scaled = scale[some] * inputs[:, :, some]
        matrices[:, :, some].mul_(decay).addcmul_(scaled, outputs[:, :, some])


def shown(
    part: Float[Tensor, "query out size"], view: View
) -> Float[Tensor, "row ..."]:
    """Return each row of U as a matrix, in the shape of a view of the parameter."""
    rows = part.flatten(0, 1)
    offset = rows.storage_offset() + view.offset
    return rows.as_strided(
        (len(rows), *view.shape), (rows.stride(0), *view.stride), offset
    )


def times_copies(
    part: Float[Tensor, "query out size"], right: Copies
) -> Float[Tensor, "query out train out_"]:
    """Return ⟨U, J(x′)⟩ for a lookup table, such as an embedding: Σ_e U[place_e] J_e,
    summed over the table elements e that each training example x′ read."""
    kernels = []
    for places, values in zip(right.places, right.values, strict=True):
        kernels.append(part[:, :, places] @ values.t())
    return torch.stack(kernels, dim=2)


def inner(
    left: Float[Tensor, "query out size"], right: Float[Tensor, "train out_ size"]
) -> Float[Tensor, "query out train out_"]:
    """Return ⟨left row, right row⟩ for all pairs of rows, by one matrix product."""
    products = left.flatten(0, 1) @ right.flatten(0, 1).t()
    return products.view(*left.shape[:2], *right.shape[:2])
