"""Gradient blocks, the summands of a Jacobian: the gradients of a weight (and its bias) at some
examples.

Three forms hold the same gradients ∂f_c(x_n)/∂θ. Each is the smallest for its kind of use:

    Factored    Σ_u a_nu ⊗ β_ncu       a product z = a W with the uses u of example n
    Rows        the gradients, one number for each element of a parameter
    Copies      Σ_e gradient_nce · [place_ne = p] for element p of a table, from the elements that were read
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ntkexp.kernel.secant.uses import View
from ntkexp.shapes import Weights

Key: TypeAlias = tuple[View | str | None, View | None]
"""What two blocks of the same parameters and the same form share."""


@dataclass(frozen=True)
class Factored:
    """Σ_u inputs ⊗ outputs for the weight and, if there is a bias, `shift` Σ_u outputs for the
    bias.

    A plain layer has one use, a convolution one at each position. Factors are multiplied out only
    if they have to be.
    """

    inputs: Float[Tensor, "example use in_"]
    outputs: Float[Tensor, "example out use features"]
    weight: View | None
    bias: View | None
    shift: float | None

    @property
    def key(self) -> Key:
        return self.weight, self.bias

    @property
    def rows(self) -> int:
        """The number of inputs, and one for the bias."""
        return self.inputs.shape[2] + (self.shift is not None)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple({view.name: None for view in (self.weight, self.bias) if view is not None})

    @property
    def gradients(self) -> torch.Size:
        """The numbers of examples and outputs."""
        return self.outputs.shape[:2]

    @property
    def size(self) -> int:
        """The number of elements of a gradient."""
        return self.rows * self.outputs.shape[3]

    @property
    def numbers(self) -> Tensor:
        """A tensor with the dtype and device of the gradients."""
        return self.outputs

    @property
    def extents(self) -> dict[str, int]:
        """The number of elements of each parameter up to the last one that is used."""
        views = [view for view in (self.weight, self.bias) if view is not None]
        return {
            name: max(view.extent for view in views if view.name == name) for name in self.names
        }

    @property
    def line(self) -> int:
        """The number of neighbours in the weight that share one element of a factor."""
        if self.weight is None:
            return 1
        return self.weight.shape[0] if self.weight.stride[0] == 1 else self.weight.shape[1]

    def of_weight(self) -> Float[Tensor, "example out in_ features"]:
        """Return the gradients of the weight, multiplied out."""
        if self.inputs.shape[1] == 1:
            return self.inputs[:, :, :, None] * self.outputs
        return self.multiplied_out().view(*self.gradients, self.outputs.shape[3], -1).mT

    def of_bias(self) -> Float[Tensor, "example out features"]:
        total = self.outputs[:, :, 0] if self.outputs.shape[2] == 1 else self.outputs.sum(2)
        return total if self.shift in (None, 1) else self.shift * total

    def multiplied_out(self) -> Float[Tensor, "example out size"]:
        """Return the gradients of the weight, feature by feature, from one product of matrices for
        each example.
        """
        left = (
            self.outputs[:, 0].mT if self.outputs.shape[1] == 1 else self.outputs.mT.flatten(1, 2)
        )
        return (left @ self.inputs).view(*self.gradients, -1)

    def pieces(self) -> list[Factored | Rows]:
        """Return the gradients of the weight and of the bias as separate blocks."""
        if self.shift is None:
            return [self]
        name = "" if self.bias is None else self.bias.name
        return [replace(self, bias=None, shift=None), Rows(self.of_bias(), name)]

    def of(self, names: Collection[str]) -> list[Factored | Rows]:
        """Return the gradients of some of its parameters. A weight without its bias keeps its
        factors.
        """
        blocks: list[Factored | Rows] = []
        has_weight = self.weight is not None and self.weight.name in names
        has_bias = self.bias is not None and self.bias.name in names
        if has_weight and (has_bias or self.bias is None):
            return [self]
        if has_weight:
            blocks.append(replace(self, bias=None, shift=None))
        if has_bias and self.bias is not None:
            rows = spread(self.of_bias(), self.bias, self.bias.extent)
            blocks.append(Rows(rows, self.bias.name))
        return blocks

    def add_chunk(
        self, rows: Float[Tensor, "example out size"], name: str, elements: range
    ) -> None:
        """Add the gradients of some elements of a parameter. Only their outer products are
        multiplied out.
        """
        if self.bias is not None and self.bias.name == name:
            add_rows(rows, spread(self.of_bias(), self.bias, self.bias.extent), elements)
        view = self.weight
        if view is None or view.name != name:
            return
        count, features = view.shape
        if view.stride == (1, count):
            major = self.outputs
            minor = self.inputs[:, None]
        elif view.stride == (features, 1):
            major = self.inputs[:, None]
            minor = self.outputs
        else:
            add_rows(rows, spread(self.of_weight().flatten(2), view, view.extent), elements)
            return
        # The parameter is a matrix of lines. Each line belongs to one element of `major`, and runs
        # along `minor`
        width = minor.shape[3]
        first = max(elements.start - view.offset, 0)
        last = min(elements.stop - view.offset, count * features)
        if first >= last:
            return
        lines = slice(first // width, -(-last // width))
        at = first + view.offset - elements.start
        target = rows.flatten(0, 1)[:, at : at + last - first]
        left = major[..., lines].mT
        if first % width == 0 and last % width == 0:
            factors = (
                side.expand(*rows.shape[:2], *side.shape[2:]).flatten(0, 1)
                for side in (left, minor)
            )
            target.view(len(target), -1, width).baddbmm_(*factors)
        else:
            start = lines.start * width
            target += (left @ minor).flatten(2)[:, :, first - start : last - start].flatten(0, 1)

    def applied(self, weights: Weights) -> Float[Tensor, "example out"]:
        """Return J v for a vector v in the shape of the weights."""
        terms = []  # separate terms, since a bias and its weight are not neighbours in memory
        if self.bias is not None and self.shift is not None:
            row = self.shift * self.bias.of(weights[self.bias.name].contiguous()).reshape(-1)
            terms.append(row.expand(*self.inputs.shape[:2], -1))
        if self.weight is not None:
            matrix = self.weight.of(weights[self.weight.name].contiguous())
            if (
                not terms and self.outputs.shape[1] == 1 and matrix.shape[0] < matrix.shape[1]
            ):  # the order with fewer multiplications
                return inner_of_uses(self.outputs[:, 0] @ matrix.t(), self.inputs[:, None])
            terms.append(self.inputs @ matrix)
        return inner_of_uses(sum(terms[1:], start=terms[0]), self.outputs)

    def scaled(self, factors: Mapping[str, float]) -> Factored:
        """Multiply the gradients of each parameter by its factor."""
        inputs = self.inputs if self.weight is None else self.inputs * factors[self.weight.name]
        shift = (
            self.shift
            if self.shift is None or self.bias is None
            else self.shift * factors[self.bias.name]
        )
        return replace(self, inputs=inputs, shift=shift)

    def weighted(self, output_gradient: Float[Tensor, "example out"]) -> Factored:
        """Return Σ_c ℓ′_c J_c as a single output."""
        return replace(
            self, outputs=torch.einsum("nc,ncuo->nuo", output_gradient, self.outputs)[:, None]
        )

    def traced(self) -> Factored:
        """Return all outputs as one, whose inner products are sums over outputs."""
        return replace(self, outputs=self.outputs.permute(0, 2, 1, 3).flatten(2)[:, None])

    def total(self, weights: Weights) -> Weights:
        """Return the sum over examples and outputs, in the shapes of the parameters."""
        outputs = self.outputs[:, 0] if self.outputs.shape[1] == 1 else self.outputs.sum(1)
        total = {}
        if self.weight is not None:
            total[self.weight.name] = room = self.weight.room(weights[self.weight.name])
            if self.inputs.shape[1] < outputs.shape[2]:
                torch.mm(
                    self.inputs.flatten(0, 1).t(), outputs.flatten(0, 1), out=self.weight.of(room)
                )
            else:  # sum over examples, since copying the inputs would take more memory
                torch.sum(self.inputs.mT @ outputs, 0, out=self.weight.of(room))
        if self.bias is not None and self.shift is not None:
            name = self.bias.name
            room = total.setdefault(name, weights[name].new_zeros(weights[name].shape))
            self.bias.of(room).add_(outputs.sum((0, 1)), alpha=self.shift)
        return total


@dataclass(frozen=True)
class Rows:
    """Gradients with one number for each of the first elements of a parameter."""

    rows: Float[Tensor, "example out size"]
    name: str

    @property
    def key(self) -> Key:
        return self.name, None

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    @property
    def gradients(self) -> torch.Size:
        return self.rows.shape[:2]

    @property
    def numbers(self) -> Tensor:
        return self.rows

    @property
    def size(self) -> int:
        """The number of elements of the parameter."""
        return self.rows.shape[2]

    @property
    def extents(self) -> dict[str, int]:
        return {self.name: self.size}

    @property
    def line(self) -> int:
        return 1

    def multiplied_out(self) -> Float[Tensor, "example out size"]:
        return self.rows

    def pieces(self) -> list[Factored | Rows]:
        return [self]

    def of(self, names: Collection[str]) -> list[Rows]:
        return [self] if self.name in names else []

    def add_chunk(
        self, rows: Float[Tensor, "example out size"], name: str, elements: range
    ) -> None:
        if self.name == name:
            add_rows(rows, self.rows, elements)

    def applied(self, weights: Weights) -> Float[Tensor, "example out"]:
        return times_vector(self.rows, weights[self.name].reshape(-1)[: self.size])

    def scaled(self, factors: Mapping[str, float]) -> Rows:
        return Rows(self.rows * factors[self.name], self.name)

    def weighted(self, output_gradient: Float[Tensor, "example out"]) -> Rows:
        return Rows(torch.einsum("nc,ncp->np", output_gradient, self.rows)[:, None], self.name)

    def traced(self) -> Rows:
        return Rows(self.rows.flatten(1)[:, None], self.name)

    def total(self, weights: Weights) -> Weights:
        return {
            self.name: self.rows.sum((0, 1))
            .view(weights[self.name].shape)
            .to(weights[self.name].dtype)
        }


@dataclass(frozen=True)
class Copies:
    """Gradients of elements that were read of a parameter, and the place of each in it."""

    values: Float[Tensor, "example out copy"]
    places: Int[Tensor, "example copy"]
    name: str

    @property
    def key(self) -> Key:
        return self.name, None

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    @property
    def gradients(self) -> torch.Size:
        return self.values.shape[:2]

    @property
    def numbers(self) -> Tensor:
        return self.values

    @property
    def size(self) -> int:
        return int(self.places.max()) + 1 if self.places.numel() else 0

    @property
    def extents(self) -> dict[str, int]:
        return {self.name: self.size}

    @property
    def line(self) -> int:
        return 1

    def of(self, names: Collection[str]) -> list[Copies]:
        return [self] if self.name in names else []

    def add_chunk(
        self, rows: Float[Tensor, "example out size"], name: str, elements: range
    ) -> None:
        if self.name != name:
            return
        inside = (self.places >= elements.start) & (self.places < elements.stop)
        where = torch.where(
            inside, self.places - elements.start, len(elements)
        )  # all other places go into one extra element
        beside = rows.new_zeros(*rows.shape[:2], len(elements) + 1)
        rows += beside.scatter_add_(2, where[:, None].expand_as(self.numbers), self.numbers)[
            :, :, :-1
        ]

    def applied(self, weights: Weights) -> Float[Tensor, "example out"]:
        return torch.einsum("nce,ne->nc", self.numbers, weights[self.name].reshape(-1)[self.places])

    def scaled(self, factors: Mapping[str, float]) -> Copies:
        return replace(self, values=self.numbers * factors[self.name])

    def weighted(self, output_gradient: Float[Tensor, "example out"]) -> Copies:
        gradients = torch.einsum("nc,nce->ne", output_gradient, self.numbers)[:, None]
        return replace(self, values=gradients)

    def traced(self) -> Rows:
        rows = self.numbers.new_zeros(*self.gradients, self.size)
        self.add_chunk(rows, self.name, range(self.size))
        return Rows(rows, self.name).traced()

    def total(self, weights: Weights) -> Weights:
        total = zeros(
            weights[self.name]
        )  # the weight's dtype may be longer than that of its gradients
        total.view(-1).index_add_(
            0, self.places.reshape(-1), self.numbers.sum(1).flatten().to(total.dtype)
        )
        return {self.name: total}


Block: TypeAlias = Factored | Rows | Copies


def add_rows(
    rows: Float[Tensor, "example out size"],
    gradients: Float[Tensor, "example out size_"],
    elements: range,
) -> None:
    """Add the gradients of some elements."""
    some = gradients[:, :, elements.start : elements.stop]
    rows[:, :, : some.shape[2]] += some


def times_vector(
    rows: Float[Tensor, "example out size"], vector: Float[Tensor, " size"]
) -> Float[Tensor, "example out"]:
    """Return rows times a vector by one product. `@` may see a batch of products, which takes forty
    times as long.
    """
    return rows.flatten(0, 1).mv(vector).view(rows.shape[:2])


def inner_of_uses(
    left: Float[Tensor, "example use size"], right: Float[Tensor, "example out use size"]
) -> Float[Tensor, "example out"]:
    """Return Σ_u ⟨left, right⟩."""
    return torch.bmm(right.flatten(2), left.flatten(1)[:, :, None])[:, :, 0]


def bias_product(left: Factored, right: Factored) -> float:
    """Return the share of biases in every ⟨a, a′⟩. A bias is the weight of an input that is always
    `shift`.
    """
    return 0.0 if left.shift is None or right.shift is None else left.shift * right.shift


def spread(
    gradient: Float[Tensor, "example out size"], view: View, size: int
) -> Float[Tensor, "example out size_"]:
    """Return the gradient of a view as a gradient of the parameter's first elements, all that the
    view shows.
    """
    if view.turned().is_whole(size):
        return (
            gradient.view(*gradient.shape[:2], *view.shape)
            .permute(0, 1, *range(1 + len(view.shape), 1, -1))
            .flatten(2)
        )
    positions = view.of(torch.arange(size, device=gradient.device)).reshape(-1)
    return gradient.new_zeros(*gradient.shape[:2], size).index_add(2, positions, gradient)


def zeros(weight: Tensor) -> Tensor:
    """Return zeros in the shape of a weight, contiguous even if the weight is not, as in
    channels-last layout.

    >>> import torch
    >>> zeros(torch.ones(2, 3).t()).stride()
    (2, 1)
    """
    return weight.new_zeros(weight.shape)
