"""Blocks: the gradients ∂f_c(x_n)/∂θ of one weight (and its bias), for all outputs c and
examples n of a batch. A Jacobian is a sum of blocks.

A block has one of three formats, each the most compact one for a kind of operation:

    Factored    Σ_u a_nu ⊗ β_ncu    a product z = a W, applied at the uses u of example n
    Rows        one number for each element of a parameter
    Copies      the gradients of the elements that each example read from a lookup table, such as
                an embedding, and the indices of these elements

A linear layer has one use for each example, and a convolution has one for each output
position. a is the input of the layer, and β = ∂f/∂z its output gradient. *Multiplying
out* means computing all elements of Σ_u a_u ⊗ β_u from the factors a and β."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Self, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ntkexp.kernel.secant.uses import View
from ntkexp.shapes import Weights

Key: TypeAlias = tuple[View | str | None, View | None]
"""The key of a block, which names its parameters: two views for `Factored` (weight and
bias), and the parameter's name for other blocks."""

Gradients: TypeAlias = Float[Tensor, "example out size"]
"""∂f_c(x_n)/∂θ_p for each element p of a parameter."""

Outputs: TypeAlias = Float[Tensor, "example out"]
"""A number for each output c of each example n."""


@dataclass(frozen=True)
class Factored:
    """Gradients of a product layer in factored form.

    The gradient of the weight is Σ_u inputs ⊗ outputs. The gradient of the bias, if
    there is one, is `shift` · Σ_u outputs."""

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
        """The number of inputs of the layer, plus one if there is a bias."""
        return self.inputs.shape[2] + (self.shift is not None)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(
            {view.name: None for view in (self.weight, self.bias) if view is not None}
        )

    @property
    def gradients(self) -> torch.Size:
        """The shape (examples, outputs)."""
        return self.outputs.shape[:2]

    @property
    def size(self) -> int:
        """The number of elements of the layer's gradient,
        for one example and output."""
        return self.rows * self.outputs.shape[3]

    @property
    def numbers(self) -> Tensor:
        """A tensor of the block, with the dtype and device of the gradients."""
        return self.outputs

    @property
    def extents(self) -> dict[str, int]:
        """For each parameter, the number of leading elements that include all elements
        with a gradient."""
        views = [view for view in (self.weight, self.bias) if view is not None]
        return {
            name: max(view.extent for view in views if view.name == name)
            for name in self.names
        }

    @property
    def line(self) -> int:
        """The length of a line. A line is a range of consecutive weight elements whose
        gradients share an element of one factor."""
        if self.weight is None:
            return 1
        axis = 0 if self.weight.stride[0] == 1 else 1
        return self.weight.shape[axis]

    def of_weight(self) -> Float[Tensor, "example out in_ features"]:
        """Return the gradients of the weight, multiplied out."""
        if self.inputs.shape[1] == 1:
            return self.inputs[:, :, :, None] * self.outputs
        by_feature = self.multiplied_out().view(
            *self.gradients, self.outputs.shape[3], -1
        )
        return by_feature.mT

    def of_bias(self) -> Float[Tensor, "example out features"]:
        total = only_or_sum(self.outputs, 2)
        if self.shift in (None, 1):
            return total
        return self.shift * total

    def multiplied_out(self) -> Gradients:
        """Return the gradients of the weight in the order [feature, input], by one
        matrix product for each example."""
        if self.outputs.shape[1] == 1:
            left = self.outputs[:, 0].mT
        else:
            left = self.outputs.mT.flatten(1, 2)
        return (left @ self.inputs).view(*self.gradients, -1)

    def pieces(self) -> list[Factored | Rows]:
        """Return the gradients of the weight and of the bias as separate blocks."""
        if self.shift is None:
            return [self]
        name = "" if self.bias is None else self.bias.name
        return [self.without_bias(), Rows(self.of_bias(), name)]

    def without_bias(self) -> Factored:
        return replace(self, bias=None, shift=None)

    def of(self, names: Collection[str]) -> list[Factored | Rows]:
        """Return the blocks of the parameters in `names`. The weight stays factored if
        its bias is dropped."""
        blocks: list[Factored | Rows] = []
        bias = self.bias if self.bias is not None and self.bias.name in names else None
        if self.weight is not None and self.weight.name in names:
            if bias is self.bias:
                return [self]
            blocks.append(self.without_bias())
        if bias is not None:
            blocks.append(Rows(to_parameter(self.of_bias(), bias), bias.name))
        return blocks

    def add_chunk(self, rows: Gradients, name: str, elements: range) -> None:
        """Add the gradients of some elements of a parameter to `rows`. Compute only
        these elements of the outer products."""
        if self.bias is not None and self.bias.name == name:
            add_rows(rows, to_parameter(self.of_bias(), self.bias), elements)
        view = self.weight
        if view is None or view.name != name:
            return
        count, features = view.shape
        inputs = self.inputs[:, None]
        if view.stride == (1, count):
            add_lines(rows, self.outputs, inputs, view.offset, elements)
        elif view.stride == (features, 1):
            add_lines(rows, inputs, self.outputs, view.offset, elements)
        else:
            add_rows(rows, to_parameter(self.of_weight().flatten(2), view), elements)

    def applied(self, weights: Weights) -> Outputs:
        """Return J v for a vector v in the shape of the weights."""
        # z = s v_b + a V_W, where v_b and V_W are the parts of v for bias and weight,
        # and s is `shift`
        terms = []
        if self.bias is not None and self.shift is not None:
            bias = self.bias.of(weights[self.bias.name].contiguous())
            row = self.shift * bias.reshape(-1)
            terms.append(row.expand(*self.inputs.shape[:2], -1))
        if self.weight is not None:
            matrix = self.weight.of(weights[self.weight.name].contiguous())
            is_wide = matrix.shape[0] < matrix.shape[1]
            if not terms and self.outputs.shape[1] == 1 and is_wide:
                # Σ_u ⟨β V_Wᵀ, a⟩ takes fewer multiplications
                return inner_of_uses(
                    self.outputs[:, 0] @ matrix.t(), self.inputs[:, None]
                )
            terms.append(self.inputs @ matrix)

        # Σ_u ⟨z, β⟩
        return inner_of_uses(sum(terms[1:], start=terms[0]), self.outputs)

    def scaled(self, factors: Mapping[str, float]) -> Factored:
        """Multiply the gradients of each parameter by its factor."""
        inputs = self.inputs
        shift = self.shift
        if self.weight is not None:
            inputs = inputs * factors[self.weight.name]
        if shift is not None and self.bias is not None:
            shift *= factors[self.bias.name]
        return replace(self, inputs=inputs, shift=shift)

    def weighted(self, output_gradient: Outputs) -> Factored:
        """Return Σ_c ℓ′_c J_c (ℓ′: `output_gradient`), a block with a single output."""
        outputs = torch.einsum("nc,ncuo->nuo", output_gradient, self.outputs)
        return replace(self, outputs=outputs[:, None])

    def traced(self) -> Factored:
        """Concatenate the gradients of all outputs,
        so that inner products sum over outputs."""
        features_of_all = self.outputs.permute(0, 2, 1, 3).flatten(2)
        return replace(self, outputs=features_of_all[:, None])

    def total(self, weights: Weights) -> Weights:
        """Return the sum over examples and outputs, in the shapes of the parameters."""
        outputs = only_or_sum(self.outputs, 1)
        total = {}

        # Σ_nu a ⊗ β
        if self.weight is not None:
            name = self.weight.name
            total[name] = self.weight.empty_like(weights[name])
            gradient = self.weight.of(total[name])
            if self.inputs.shape[1] < outputs.shape[2]:
                torch.mm(
                    self.inputs.flatten(0, 1).t(), outputs.flatten(0, 1), out=gradient
                )
            else:
                # First multiply for each example, then sum. Flattening may copy the
                # inputs, which are larger than the products here.
                torch.sum(self.inputs.mT @ outputs, 0, out=gradient)

        # s Σ_nu β
        if self.bias is not None and self.shift is not None:
            name = self.bias.name
            buffer = total.setdefault(name, zeros(weights[name]))
            self.bias.of(buffer).add_(outputs.sum((0, 1)), alpha=self.shift)
        return total


class OneParameter(ABC):
    """The base class of blocks with the gradients of a single parameter."""

    name: str
    line = 1

    @property
    def key(self) -> Key:
        return self.name, None

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    @property
    def gradients(self) -> torch.Size:
        """The shape (examples, outputs)."""
        return self.numbers.shape[:2]

    @property
    @abstractmethod
    def numbers(self) -> Tensor:
        """The stored gradients. Results get their dtype and device."""

    @property
    @abstractmethod
    def size(self) -> int:
        """The number of leading elements of the parameter that include all elements with
        a gradient."""

    @property
    def extents(self) -> dict[str, int]:
        return {self.name: self.size}

    def of(self, names: Collection[str]) -> list[Self]:
        if self.name in names:
            return [self]
        return []


@dataclass(frozen=True)
class Rows(OneParameter):
    """Gradients of the first `size` elements of a parameter,
    with one number for each element."""

    rows: Gradients
    name: str

    @property
    def numbers(self) -> Tensor:
        return self.rows

    @property
    def size(self) -> int:
        return self.rows.shape[2]

    def multiplied_out(self) -> Gradients:
        return self.rows

    def pieces(self) -> list[Factored | Rows]:
        return [self]

    def add_chunk(self, rows: Gradients, name: str, elements: range) -> None:
        if self.name == name:
            add_rows(rows, self.rows, elements)

    def applied(self, weights: Weights) -> Outputs:
        return times_vector(self.rows, weights[self.name].reshape(-1)[: self.size])

    def scaled(self, factors: Mapping[str, float]) -> Rows:
        return Rows(self.rows * factors[self.name], self.name)

    def weighted(self, output_gradient: Outputs) -> Rows:
        rows = torch.einsum("nc,ncp->np", output_gradient, self.rows)
        return Rows(rows[:, None], self.name)

    def traced(self) -> Rows:
        return Rows(self.rows.flatten(1)[:, None], self.name)

    def total(self, weights: Weights) -> Weights:
        weight = weights[self.name]
        total = self.rows.sum((0, 1)).view(weight.shape)
        return {self.name: total.to(weight.dtype)}


@dataclass(frozen=True)
class Copies(OneParameter):
    """Gradients of the table elements that each example read, such as rows of an
    embedding. `places` holds the flat index of each element in the parameter."""

    values: Float[Tensor, "example out copy"]
    places: Int[Tensor, "example copy"]
    name: str

    @property
    def numbers(self) -> Tensor:
        return self.values

    @property
    def size(self) -> int:
        if not self.places.numel():
            return 0
        return int(self.places.max()) + 1

    def add_chunk(self, rows: Gradients, name: str, elements: range) -> None:
        if self.name != name:
            return
        inside = (self.places >= elements.start) & (self.places < elements.stop)
        # gradients outside of `elements` go to an extra column, which is dropped
        target = torch.where(inside, self.places - elements.start, len(elements))
        chunk = rows.new_zeros(*rows.shape[:2], len(elements) + 1)
        chunk.scatter_add_(2, target[:, None].expand_as(self.values), self.values)
        rows += chunk[:, :, :-1]

    def applied(self, weights: Weights) -> Outputs:
        read = weights[self.name].reshape(-1)[self.places]
        return torch.einsum("nce,ne->nc", self.values, read)

    def scaled(self, factors: Mapping[str, float]) -> Copies:
        return replace(self, values=self.values * factors[self.name])

    def weighted(self, output_gradient: Outputs) -> Copies:
        values = torch.einsum("nc,nce->ne", output_gradient, self.values)
        return replace(self, values=values[:, None])

    def traced(self) -> Rows:
        rows = self.values.new_zeros(*self.gradients, self.size)
        self.add_chunk(rows, self.name, range(self.size))
        return Rows(rows, self.name).traced()

    def total(self, weights: Weights) -> Weights:
        total = zeros(weights[self.name])
        # add in the dtype of the weight, which may have higher precision
        # than its gradients
        values = self.values.sum(1).flatten().to(total.dtype)
        total.view(-1).index_add_(0, self.places.reshape(-1), values)
        return {self.name: total}


Block: TypeAlias = Factored | Rows | Copies


def add_rows(
    rows: Gradients,
    gradients: Float[Tensor, "example out size_"],
    elements: range,
) -> None:
    """Add the gradients of some elements to `rows`. Elements that `gradients` does not
    contain have zero gradient."""
    chunk = gradients[:, :, elements.start : elements.stop]
    rows[:, :, : chunk.shape[2]] += chunk


def add_lines(
    rows: Gradients,
    major: Float[Tensor, "example _ use line"],
    minor: Float[Tensor, "example _ use width"],
    offset: int,
    elements: range,
) -> None:
    """Add some elements of Σ_u major_u ⊗ minor_u to `rows`. Line i of this matrix is
    Σ_u major_u[i] minor_u, and its first element has the index `offset` in the
    parameter. Compute only the lines that overlap with `elements`."""
    width = minor.shape[3]
    first = max(elements.start - offset, 0)
    last = min(elements.stop - offset, major.shape[3] * width)
    if first >= last:
        return
    lines = slice(first // width, -(-last // width))
    start = first + offset - elements.start
    target = rows.flatten(0, 1)[:, start : start + last - first]
    left = major[..., lines].mT

    # if all lines are complete, add in place
    if first % width == 0 and last % width == 0:
        left = left.expand(*rows.shape[:2], *left.shape[2:])
        minor = minor.expand(*rows.shape[:2], *minor.shape[2:])
        matrices = target.view(len(target), -1, width)
        matrices.baddbmm_(left.flatten(0, 1), minor.flatten(0, 1))
    else:
        products = (left @ minor).flatten(2)
        skipped = first - lines.start * width
        target += products[:, :, skipped : skipped + last - first].flatten(0, 1)


def only_or_sum(values: Float[Tensor, "..."], axis: int) -> Float[Tensor, "..."]:
    """Sum over an axis. If its length is 1, return a view instead of a copy."""
    if values.shape[axis] == 1:
        return values.select(axis, 0)
    return values.sum(axis)


def times_vector(rows: Gradients, vector: Float[Tensor, " size"]) -> Outputs:
    """Multiply rows by a vector, with `mv`. The operator `@` may choose a batched
    product, which takes forty times as long."""
    return rows.flatten(0, 1).mv(vector).view(rows.shape[:2])


def inner_of_uses(
    left: Float[Tensor, "example use size"],
    right: Float[Tensor, "example out use size"],
) -> Outputs:
    """Return Σ_u ⟨left_u, right_u⟩, a sum over the uses u of a weight."""
    return torch.bmm(right.flatten(2), left.flatten(1)[:, :, None])[:, :, 0]


def bias_product(left: Factored, right: Factored) -> float:
    """Return s s′, the product of two shifts. A bias adds it to every ⟨a, a′⟩, because
    a bias is the weight of an extra input with the constant value `shift`."""
    if left.shift is None or right.shift is None:
        return 0.0
    return left.shift * right.shift


def to_parameter(
    gradient: Gradients, view: View, size: int | None = None
) -> Float[Tensor, "example out size_"]:
    """Convert the gradient of a view to the gradient of the parameter's first `size`
    elements. The default size is the view's extent."""
    if size is None:
        size = view.extent
    if view.transposed().covers(size):
        reversed_axes = range(1 + len(view.shape), 1, -1)
        array = gradient.view(*gradient.shape[:2], *view.shape)
        return array.permute(0, 1, *reversed_axes).flatten(2)
    positions = view.of(torch.arange(size, device=gradient.device)).reshape(-1)
    zero = gradient.new_zeros(*gradient.shape[:2], size)
    return zero.index_add(2, positions, gradient)


def zeros(weight: Tensor) -> Tensor:
    """Return contiguous zeros in the shape of a weight. `zeros_like` would keep the
    weight's memory format, such as channels-last.

    >>> import torch
    >>> zeros(torch.ones(2, 3).t()).stride()
    (2, 1)
    """
    return weight.new_zeros(weight.shape)
