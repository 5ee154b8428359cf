"""The sketch of a Jacobian: J S, [example, out, k], whose inner products are those of J without bias.

    K̂ = (J S)(J′ S)ᵀ,        E K̂ = J J′ᵀ,        ‖K̂ − K‖ ∝ 1/√k

What operations gave to a gradient is sketched as it stands. A sum of outer products needs no rows: the count sketch of
a ⊗ β is the circular convolution of those of a and of β, so in Fourier space

    sketch(Σ_u a_u ⊗ β_u) = F⁻¹ Σ_u F(sketch a_u) ∘ F(sketch β_u).

Where factors are short and uses many (convolutions), outer products are multiplied out first, which is the same number
by another order of additions; operations are counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import log2

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.kernel.features.blocks import Factored, Rows
from ntkexp.kernel.features.use_by_use import Copies, Part, places_in
from ntkexp.kernel.secant.uses import View
from ntkexp.kernel.sketch.table import Draw, SketchTable, draw_table, scattered
from ntkexp.shapes import Weights

AT_ONCE = 2**22  # numbers in Fourier space
SLOWER = 8  # than a multiplication in a product of matrices: a number of a transform or of a scatter


@dataclass(frozen=True)
class Sketch:
    """A random projection of weight space to k = `size` dimensions, by parameters of these shapes."""

    size: int
    seed: int
    shapes: Mapping[str, torch.Size]
    tables: dict[str, SketchTable] = field(default_factory=dict, repr=False)

    def of(self, parts: Iterable[Part]) -> Float[Tensor, "example out size"]:
        """J S, of a Jacobian that is the sum of these parts."""
        first, *rest = map(self.of_part, parts)
        return sum(rest, start=first)

    def of_weights(self, weights: Weights) -> Float[Tensor, " size"]:
        """Sᵀ v, for a v in the shape of the weights."""
        rows = (Rows(weights[name].reshape(1, 1, -1), name) for name in self.shapes)
        return self.of(rows)[0, 0]

    def of_part(self, part: Part) -> Float[Tensor, "example out size"]:
        """The sketch of what one use, or some, gave."""
        match part:
            case Factored():
                return self.of_factors(part)
            case Copies():
                return self.of_copies(part)
            case Rows():
                places = torch.arange(part.size, device=part.rows.device)
                return scattered(part.rows, self.table(part.name, part.rows).at(places), self.size)

    def of_copies(self, part: Copies) -> Float[Tensor, "example out size"]:
        """The sketch of elements, each by its place."""
        where = self.table(part.name, part.gradients).at(part.places)
        nothing = part.gradients.new_zeros(*part.gradients.shape[:2], self.size)
        buckets = where.bucket[:, None].expand_as(part.gradients)
        return nothing.scatter_add(2, buckets, part.gradients * where.sign[:, None])

    def of_factors(self, part: Factored) -> Float[Tensor, "example out size"]:
        """The sketch of outer products, of a weight and of its bias."""
        factor, found = part.inputs, []
        if part.bias is not None:
            found.append(self.of_view(part.of_bias(), part.bias))
        if part.weight is not None:
            factors = self.table(part.weight.name, factor).factors(part.weight)
            if factors is None or multiplied_out_is_cheaper(factor, part.outputs, self.size):
                found.append(self.of_view(part.of_weight().flatten(2), part.weight))
            else:
                found.append(convolved(factor, part.outputs, factors, self.size))
        return sum(found[1:], start=found[0])

    def of_view(self, gradients: Float[Tensor, "example out size"], view: View) -> Float[Tensor, "example out size_"]:
        """The sketch of the gradients of all elements that a view of a parameter shows, in their order."""
        places = places_in(view, torch.arange(gradients.shape[2], device=gradients.device))
        return scattered(gradients, self.table(view.name, gradients).at(places), self.size)

    def table(self, name: str, like: Tensor) -> SketchTable:
        """The table of a parameter, drawn when it is first asked for."""
        if name not in self.tables:
            self.tables[name] = draw_table(name, self.shapes[name], self.size, self.seed, like.device)
        return self.tables[name]


def multiplied_out_is_cheaper(
    inputs: Float[Tensor, "example use in_"], outputs: Float[Tensor, "example out use features"], size: int
) -> bool:
    """Whether outer products are multiplied out before they are sketched."""
    together, apart = operations(inputs, outputs, size)
    return together <= apart


def operations(
    inputs: Float[Tensor, "example use in_"], outputs: Float[Tensor, "example out use features"], size: int
) -> tuple[float, float]:
    """Operations of products of matrices and one scatter, against those of a scatter and a transform for each use."""
    (_, uses, count), (_, out, _, features) = inputs.shape, outputs.shape
    together = out * count * features * (uses + SLOWER)
    apart = uses * SLOWER * (count + out * features + (1 + out) * size * log2(size + 1)) + out * uses * size
    return together, apart


def convolved(
    inputs: Float[Tensor, "example use in_"],
    outputs: Float[Tensor, "example out use features"],
    factors: tuple[Draw, Draw],
    size: int,
) -> Float[Tensor, "example out size"]:
    """The sketch of sums of outer products from the sketches of their factors, some examples at a time."""
    left, right = factors
    step = max(1, AT_ONCE // (inputs.shape[1] * (1 + outputs.shape[1]) * size))
    found = []
    for some, others in zip(torch.split(inputs, step), torch.split(outputs, step), strict=True):
        one, other = (torch.fft.rfft(scattered(v, d, size)) for v, d in ((some, left), (others, right)))
        found.append(torch.fft.irfft(torch.einsum("nuf,ncuf->ncf", one, other), n=size))
    return torch.cat(found)
