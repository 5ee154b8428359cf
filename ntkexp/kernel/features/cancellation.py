"""Detect gradients that consist only of rounding error, so that the changes of the
weights that they cause are credited to no example.

The gradient of an element is a sum of terms, one for each example and each use of the
weight. The rounding error of the sum is up to a few eps of Σ |terms|. If the gradient
is not larger than this error,

    |g| ≤ c · eps · Σ |terms|,        c = 64

then all of its digits are rounding error. This happens, for example, if the loss
depends only on differences of outputs. The exact gradient of the last bias is then
zero, and the computed gradient is only rounding error. Adam and similar optimizers
divide a gradient by its own magnitude, so they move this bias by a full step. But the
contributions of single examples to this step are about 1/eps times larger than the
step, and cancel. So these contributions carry no information.

Terms may also cancel inside the network, for example before a norm. The sizes of these
terms are not available. In this case, sum the same terms in two different orders: if
the two results differ by about as much as the gradient, the gradient is rounding error.

Vectors, such as biases, are tested element by element. Matrices are tested as a whole,
by their norms."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.kernel.features.blocks import Copies, Factored, Rows
from ntkexp.kernel.features.jacobian import Jacobian
from ntkexp.shapes import Weights

# the constant c covers the rounding of each term, and of the sum in any order
ROUNDING_EPS = 64
# a gradient counts as rounding error if it is at most this multiple of the difference
# of two summation orders
UNKNOWN_DIFFERENCES = 8


def term_sizes(jacobians: Iterable[Jacobian], weights: Weights) -> Weights:
    """Return Σ|terms| of the gradient of each parameter, from Jacobians that hold the
    gradients of the loss, one for each example.

    A vector gets one number for each element. Any other parameter gets a single number,
    the sum of the terms' norms.

    >>> rows = Rows(torch.tensor([[[1.0, -2.0]], [[-1.0, 2.0]]]), "bias")
    >>> term_sizes([Jacobian((rows,), 2, 1)], {"bias": torch.zeros(2)})
    {'bias': tensor([2., 4.])}
    """
    sizes = {name: zero_sizes(weight) for name, weight in weights.items()}
    for jacobian in jacobians:
        for block in jacobian.blocks:
            match block:
                case Factored():
                    add_products(sizes, block)
                case Rows():
                    add_rows(sizes[block.name], block)
                case Copies():
                    add_copies(sizes[block.name], block)
    return sizes


def zero_sizes(weight: Tensor) -> Tensor:
    """Return the initial value 0 of Σ|terms|: one number for each element of a vector,
    and a single number for other parameters."""
    return weight.new_zeros(weight.shape if weight.dim() <= 1 else ())


def add_products(sizes: Weights, block: Factored) -> None:
    """Add the sizes of the terms a ⊗ β in the gradient of a weight (a: inputs, β:
    gradients at the outputs of the layer), and of the terms β in the gradient of its
    bias."""
    inputs = block.inputs
    outputs = block.outputs[:, 0]
    if block.weight is not None:
        size = sizes[block.weight.name]
        if size.dim():
            terms = inputs.abs().flatten(0, 1).t() @ outputs.abs().flatten(0, 1)
            block.weight.of(size).add_(terms)
        else:
            size += (row_norms(inputs) * row_norms(outputs)).sum()
    if block.bias is not None and block.shift is not None:
        size = sizes[block.bias.name]
        terms = outputs.abs().sum((0, 1)) * abs(block.shift)
        if size.dim():
            block.bias.of(size).add_(terms)
        else:
            size += terms.norm()


def row_norms(rows: Float[Tensor, "*several number"]) -> Float[Tensor, "*several"]:
    """Return the norms along the last axis.

    If that axis is not contiguous, as in the patches of a convolution, use products,
    because `norm` takes ten times as long."""
    if rows.stride(-1) == 1:
        norms: Tensor = torch.linalg.vector_norm(rows, dim=-1)
        return norms
    squares: Tensor = torch.linalg.vecdot(rows, rows)
    return squares.sqrt()


def add_rows(size: Tensor, block: Rows) -> None:
    """Add the sizes of gradients that are stored as rows."""
    if size.dim():
        size[: block.size] += block.rows.abs().sum((0, 1))
    else:
        size += block.rows.norm(dim=2).sum()


def add_copies(size: Tensor, block: Copies) -> None:
    """Add the sizes of the gradients of table elements that examples read."""
    if size.dim():
        size.index_add_(0, block.places.flatten(), block.values.abs().sum(1).flatten())
    else:
        size += block.values.norm(dim=2).sum()


def credit(gradient: Weights, sizes: Weights, other: Weights | None = None) -> Weights:
    """Return the credit of each element: 0 if its gradient is only rounding error,
    else 1. Omit parameters whose credit is 1 everywhere.

    Contributions of examples are multiplied by the credit.

    `other` is the same gradient, summed in another order. A gradient also counts as
    rounding error if it is at most `UNKNOWN_DIFFERENCES` times the difference of the
    two sums.

    >>> credit({"b": torch.tensor([1.0, 1e-9])}, {"b": torch.tensor([3.0, 3.0])})
    {'b': tensor([1., 0.])}
    """
    names_of = defaultdict[tuple[torch.dtype, torch.device], list[str]](list)
    for name, part in gradient.items():
        names_of[part.dtype, part.device].append(name)
    masks: Weights = {}
    for names in names_of.values():
        masks |= masks_of_rounding(
            {name: gradient[name] for name in names}, sizes, other or {}
        )
    return {
        name: (~mask).to(gradient[name].dtype).expand_as(gradient[name])
        for name, mask in masks.items()
    }


def masks_of_rounding(gradient: Weights, sizes: Weights, other: Weights) -> Weights:
    """Return a mask for each parameter, True where the gradient is only rounding error.
    Omit parameters whose masks are False everywhere. All parameters have the same dtype
    and device.

    The parameters are tested together, as one vector of elements and norms."""
    # |g| ≤ c · eps · Σ|terms|
    magnitude = torch.cat(
        [absolute_of(part, sizes[name]) for name, part in gradient.items()]
    )
    size = torch.cat([sizes[name].reshape(-1) for name in gradient])
    bound = ROUNDING_EPS * torch.finfo(magnitude.dtype).eps * size
    is_rounding = (magnitude <= bound) & (size > 0)

    # |g| ≤ 8 |g − other|: rounding error too
    if other:
        difference = torch.cat(
            [
                absolute_of(part - other.get(name, part), sizes[name])
                for name, part in gradient.items()
            ]
        )
        is_unknown = magnitude <= UNKNOWN_DIFFERENCES * difference
        is_rounding |= is_unknown & (difference > 0)

    # one transfer from the device for all parameters
    masks = torch.split(is_rounding, [sizes[name].numel() for name in gradient])
    has_rounding = torch.stack([mask.any() for mask in masks]).tolist()
    return {
        name: mask.view(sizes[name].shape)
        for name, mask, has in zip(gradient, masks, has_rounding, strict=True)
        if has
    }


def absolute_of(part: Tensor, size: Tensor) -> Float[Tensor, " number"]:
    """Return the absolute values of the elements of a vector, or the norm of a
    matrix."""
    if size.dim():
        return part.abs()
    norm: Tensor = torch.linalg.vector_norm(part)
    return norm.reshape(1)
