"""Gradient blocks: what a Jacobian is made of, each the gradients of a weight (and its bias) at some examples.

Three forms hold the same gradients ∂f_c(x_n)/∂θ, whichever takes the least memory:

    Factored    Σ_u a_nu ⊗ β_ncu       a product z = a W, of which example n has the uses u
    Rows        the gradients as they are
    Copies      Σ_e gradient_nce · [place_ne = p] for the element p of a parameter: what was read of a table, and where
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
"""What two blocks of the same parameters, in the same form, have in common."""


@dataclass(frozen=True)
class Factored:
    """Σ_u inputs ⊗ outputs for the weight, and `shift` Σ_u outputs for the bias, if there is one.

    There is one use for a plain layer, one a position for a convolution. It is not multiplied out where the factors do.
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
    def biases(self) -> int:
        """How many rows a bias adds to those of the weight."""
        return 0 if self.shift is None else 1

    @property
    def rows(self) -> int:
        """Inputs, and one for the bias."""
        return self.biases + self.inputs.shape[2]

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters."""
        return tuple({view.name: None for view in (self.weight, self.bias) if view is not None})

    @property
    def gradients(self) -> torch.Size:
        """Examples and outputs of which there are gradients."""
        return self.outputs.shape[:2]

    @property
    def size(self) -> int:
        """How many numbers a gradient has."""
        return self.rows * self.outputs.shape[3]

    @property
    def numbers(self) -> Tensor:
        """Some of them, for their dtype and device."""
        return self.outputs

    @property
    def extents(self) -> dict[str, int]:
        """How many elements of each parameter lie up to the last that is used."""
        views = [view for view in (self.weight, self.bias) if view is not None]
        return {
            name: max(view.extent for view in views if view.name == name)
            for name in {v.name for v in views}
        }

    @property
    def line(self) -> int:
        """How many neighbours in the weight come from one element of a factor."""
        if self.weight is None:
            return 1
        return self.weight.shape[0] if self.weight.stride[0] == 1 else self.weight.shape[1]

    @property
    def shifted(self) -> Float[Tensor, "example use in_"]:
        """The inputs behind a column of `shift`, with which the bias is one more row of the weight."""
        if self.shift is None:
            return self.inputs
        return torch.cat([torch.full_like(self.inputs[..., :1], self.shift), self.inputs], dim=2)

    def dense(self) -> Float[Tensor, "example out in_ features"]:
        """The gradients, multiplied out: first that of the bias."""
        if self.shift is None:
            return self.of_weight()
        return torch.cat([self.of_bias()[:, :, None], self.of_weight()], dim=2)

    def of_weight(self) -> Float[Tensor, "example out in_ features"]:
        """The gradients of the weight, multiplied out."""
        if self.inputs.shape[1] == 1:
            return self.inputs[:, :, :, None] * self.outputs
        return self.multiplied_out().view(*self.gradients, self.outputs.shape[3], -1).mT

    def of_bias(self) -> Float[Tensor, "example out features"]:
        total = self.outputs[:, :, 0] if self.outputs.shape[2] == 1 else self.outputs.sum(2)
        return total if self.shift in (None, 1) else self.shift * total

    def multiplied_out(self) -> Float[Tensor, "example out size"]:
        """The weight’s gradients, feature by feature: one product of matrices for each example gives all outputs."""
        left = (
            self.outputs[:, 0].mT if self.outputs.shape[1] == 1 else self.outputs.mT.flatten(1, 2)
        )
        return (left @ self.inputs).view(*self.gradients, -1)

    def pieces(self) -> list[Factored | Rows]:
        """The gradients of the weight and those of the bias, each by itself."""
        if self.shift is None:
            return [self]
        name = "" if self.bias is None else self.bias.name
        return [replace(self, bias=None, shift=None), Rows(self.of_bias(), name)]

    def by_name(self) -> list[Rows]:
        """The gradients of each parameter by itself, multiplied out, up to the last element that is used."""
        return split_bias(self.dense(), self.weight, self.bias, self.biases)

    def of(self, names: Collection[str]) -> list[Factored | Rows]:
        """Those of its parameters that are among these: a weight whose bias is not keeps its factors."""
        found: list[Factored | Rows] = []
        has_weight = self.weight is not None and self.weight.name in names
        has_bias = self.bias is not None and self.bias.name in names
        if has_weight and (has_bias or self.bias is None):
            return [self]
        if has_weight:
            found.append(replace(self, bias=None, shift=None))
        if has_bias and self.bias is not None:
            found.append(Rows(spread(self.of_bias(), self.bias, self.bias.extent), self.bias.name))
        return found

    def add_chunk(
        self, rows: Float[Tensor, "example out size"], name: str, elements: range
    ) -> None:
        """Add the gradients of these elements of a parameter; outer products of them alone are multiplied out."""
        if self.bias is not None and self.bias.name == name:
            add_rows(rows, spread(self.of_bias(), self.bias, self.bias.extent), elements)
        view = self.weight
        if view is None or view.name != name:
            return
        count, features = view.shape
        if view.stride == (1, count):
            major, minor = self.outputs, self.inputs[:, None]
        elif view.stride == (features, 1):
            major, minor = self.inputs[:, None], self.outputs
        else:
            add_rows(rows, spread(self.of_weight().flatten(2), view, view.extent), elements)
            return
        # The parameter is a matrix of lines: an element of `major` each, along which those of `minor` follow each other
        width = minor.shape[3]
        first, last = (
            max(elements.start - view.offset, 0),
            min(elements.stop - view.offset, count * features),
        )
        if first >= last:
            return
        lines, at = slice(first // width, -(-last // width)), first + view.offset - elements.start
        target, left = rows.flatten(0, 1)[:, at : at + last - first], major[..., lines].mT
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
        """J v, for a v in the shape of the weights."""
        terms = []  # each by itself: a weight beside its bias would have to be copied
        if self.bias is not None and self.shift is not None:
            row = self.shift * self.bias.of(weights[self.bias.name].contiguous()).reshape(-1)
            terms.append(row.expand(*self.inputs.shape[:2], -1))
        if self.weight is not None:
            matrix = self.weight.of(weights[self.weight.name].contiguous())
            if (
                not terms and self.outputs.shape[1] == 1 and matrix.shape[0] < matrix.shape[1]
            ):  # the smaller product
                return inner_of_uses(self.outputs[:, 0] @ matrix.t(), self.inputs[:, None])
            terms.append(self.inputs @ matrix)
        return inner_of_uses(sum(terms[1:], start=terms[0]), self.outputs)

    def scaled(self, factors: Mapping[str, float]) -> Factored:
        """Each parameter's gradients times its factor."""
        inputs = self.inputs if self.weight is None else self.inputs * factors[self.weight.name]
        shift = (
            self.shift
            if self.shift is None or self.bias is None
            else self.shift * factors[self.bias.name]
        )
        return replace(self, inputs=inputs, shift=shift)

    def weighted(self, output_gradient: Float[Tensor, "example out"]) -> Factored:
        """Σ_c ℓ′_c of the gradients, as a single output."""
        return replace(
            self, outputs=torch.einsum("nc,ncuo->nuo", output_gradient, self.outputs)[:, None]
        )

    def traced(self) -> Factored:
        """All outputs as one, whose inner products are the sums over outputs."""
        return replace(self, outputs=self.outputs.permute(0, 2, 1, 3).flatten(2)[:, None])

    def total(self, weights: Weights) -> Weights:
        """The sum over examples and outputs, in the shapes of the parameters."""
        outputs = self.outputs[:, 0] if self.outputs.shape[1] == 1 else self.outputs.sum(1)
        found = {}
        if self.weight is not None:
            found[self.weight.name] = room = self.weight.room(weights[self.weight.name])
            if self.inputs.shape[1] < outputs.shape[2]:
                torch.mm(
                    self.inputs.flatten(0, 1).t(), outputs.flatten(0, 1), out=self.weight.of(room)
                )
            else:  # fewer numbers than in the inputs, which would have to be copied
                torch.sum(self.inputs.mT @ outputs, 0, out=self.weight.of(room))
        if self.bias is not None and self.shift is not None:
            name = self.bias.name
            room = found.setdefault(name, weights[name].new_zeros(weights[name].shape))
            self.bias.of(room).add_(outputs.sum((0, 1)), alpha=self.shift)
        return found


@dataclass(frozen=True)
class Rows:
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
        """How many elements of the parameter there are gradients of."""
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

    def by_name(self) -> list[Rows]:
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
    """The gradients of copies of a parameter's elements, and the element that each is a copy of."""

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

    def by_name(self) -> list[Rows]:
        rows = self.numbers.new_zeros(*self.gradients, self.size)
        self.add_chunk(rows, self.name, range(self.size))
        return [Rows(rows, self.name)]

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
        )  # the others fall behind the last
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
        return self.by_name()[0].traced()

    def total(self, weights: Weights) -> Weights:
        found = zeros(
            weights[self.name]
        )  # of numbers that may be longer than those that it was used with
        found.view(-1).index_add_(
            0, self.places.reshape(-1), self.numbers.sum(1).flatten().to(found.dtype)
        )
        return {self.name: found}


Block: TypeAlias = Factored | Rows | Copies


def add_rows(
    rows: Float[Tensor, "example out size"],
    whole: Float[Tensor, "example out size_"],
    elements: range,
) -> None:
    """Add some of the gradients of a parameter's first elements."""
    some = whole[:, :, elements.start : elements.stop]
    rows[:, :, : some.shape[2]] += some


def times_vector(
    rows: Float[Tensor, "example out size"], vector: Float[Tensor, " size"]
) -> Float[Tensor, "example out"]:
    """One product of a matrix and a vector, where `@` may see a batch of them, which takes forty times as long."""
    return rows.flatten(0, 1).mv(vector).view(rows.shape[:2])


def inner_of_uses(
    left: Float[Tensor, "example use size"], right: Float[Tensor, "example out use size"]
) -> Float[Tensor, "example out"]:
    """Σ_u ⟨left, right⟩."""
    return torch.bmm(right.flatten(2), left.flatten(1)[:, :, None])[:, :, 0]


def bias_product(left: Factored, right: Factored) -> float:
    """What biases add to every ⟨a, a′⟩: they are weights of an input that is always `shift`."""
    return 0.0 if left.shift is None or right.shift is None else left.shift * right.shift


def split_bias(
    gradients: Float[Tensor, "example out in_ features"],
    weight: View | None,
    bias: View | None,
    biases: int,
) -> list[Rows]:
    """The gradients of a weight and of its bias, each by itself, up to the last element that is used."""
    return [
        Rows(spread(part.flatten(2), view, view.extent), view.name)
        for part, view in zip(gradients.tensor_split([biases], dim=2), (bias, weight), strict=True)
        if view is not None
    ]


def spread(
    gradient: Float[Tensor, "example out size"], view: View, size: int
) -> Float[Tensor, "example out size_"]:
    """The gradient of a view of a parameter as that of the parameter's first elements, all that it shows."""
    if view.turned().is_whole(size):
        return (
            gradient.view(*gradient.shape[:2], *view.shape)
            .permute(0, 1, *range(1 + len(view.shape), 1, -1))
            .flatten(2)
        )
    positions = view.of(torch.arange(size, device=gradient.device)).reshape(-1)
    return gradient.new_zeros(*gradient.shape[:2], size).index_add(2, positions, gradient)


def zeros(weight: Tensor) -> Tensor:
    """Zeros in the shape of a weight, which lie in order even where that does not, as in channels-last layout.

    >>> import torch
    >>> zeros(torch.ones(2, 3).t()).stride()
    (2, 1)
    """
    return weight.new_zeros(weight.shape)
