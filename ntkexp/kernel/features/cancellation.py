"""Gradients that are nothing but rounding, and whose movement therefore belongs to no example.

The gradient of an element is a sum of terms, one for each example and each use of the weight. In
floating point a sum is off by up to a few eps of the sum of the sizes of its terms. If the gradient
itself is no larger,

    |g| ≤ c · eps · Σ |terms|,        c = 64

then nothing of it is known. This happens if a loss does not change when all outputs shift, as a
loss of differences: the gradient of the last bias is zero, and rounding leaves a remainder. Adam
and its relatives divide a gradient by its own size, so they move the bias by a full step. The
movement is real, but the parts that single examples seem to have in it are about 1/eps times larger
than the movement and cancel: they say nothing.

Terms may also cancel inside of a call, as before a norm, where their sizes are not seen. There two
sums of the same terms in different orders differ by as much as the gradient itself.

Vectors are compared element by element, as every bias has a sum of its own. Matrices are compared
as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ntkexp.kernel.features.blocks import Copies, Factored, Rows
from ntkexp.kernel.features.jacobian import Jacobian
from ntkexp.shapes import Weights

ROUNDING_EPS = 64  # c, in eps: of sums over a batch in any order, and of the terms themselves
UNKNOWN_DIFFERENCES = 8  # differences between two sums of the same terms


def term_sizes(jacobians: Iterable[Jacobian], weights: Weights) -> Weights:
    """Return Σ|terms| of the gradient of each parameter, from the gradients Jᵀℓ′ of examples.

    A vector has one number for each element, any other parameter one number in all.

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
    """Return zeros for the sizes of the terms of one parameter."""
    return weight.new_zeros(weight.shape if weight.dim() <= 1 else ())


def add_products(sizes: Weights, block: Factored) -> None:
    """Add the sizes of the products a ⊗ β of a weight, and of the terms β of its bias."""
    inputs = block.inputs
    outputs = block.outputs[:, 0]
    if block.weight is not None:
        size = sizes[block.weight.name]
        if size.dim():
            terms = inputs.abs().flatten(0, 1).t() @ outputs.abs().flatten(0, 1)
            block.weight.of(size).add_(terms)
        else:
            size += (inputs.norm(dim=2) * outputs.norm(dim=2)).sum()
    if block.bias is not None and block.shift is not None:
        size = sizes[block.bias.name]
        terms = outputs.abs().sum((0, 1)) * abs(block.shift)
        if size.dim():
            block.bias.of(size).add_(terms)
        else:
            size += terms.norm()


def add_rows(size: Tensor, block: Rows) -> None:
    """Add the sizes of gradients that are multiplied out."""
    if size.dim():
        size[: block.size] += block.rows.abs().sum((0, 1))
    else:
        size += block.rows.norm(dim=2).sum()


def add_copies(size: Tensor, block: Copies) -> None:
    """Add the sizes of what examples read of a table."""
    if size.dim():
        size.index_add_(0, block.places.flatten(), block.values.abs().sum(1).flatten())
    else:
        size += block.values.norm(dim=2).sum()


def credit(gradient: Weights, sizes: Weights, other: Weights | None = None) -> Weights:
    """Return 1 where a gradient is that of examples and 0 where it is rounding, for each parameter
    with any rounding.

    `other` is the same gradient, summed in another order. Where the two differ by an eighth or
    more, nothing is known.

    >>> credit({"b": torch.tensor([1.0, 1e-9])}, {"b": torch.tensor([3.0, 3.0])})
    {'b': tensor([1., 0.])}
    """
    masks = dict[str, Tensor]()
    for name, part in gradient.items():
        size = sizes[name]
        absolute = torch.abs if size.dim() else torch.norm

        # |g| ≤ c · eps · Σ|terms|
        magnitude = absolute(part)
        bound = ROUNDING_EPS * torch.finfo(part.dtype).eps * size
        masks[name] = (magnitude <= bound) & (size > 0)

        # |g| ≤ 8 |g − other|
        if other and name in other:
            difference = absolute(part - other[name])
            is_unknown = magnitude <= UNKNOWN_DIFFERENCES * difference
            masks[name] |= is_unknown & (difference > 0)
    if not masks:
        return {}

    # one transfer from the device for all parameters
    has_rounding = torch.stack([mask.any() for mask in masks.values()]).tolist()
    credit_of = {}
    for name, is_rounded in zip(masks, has_rounding, strict=True):
        if is_rounded:
            part = gradient[name]
            credit_of[name] = (~masks[name]).to(part.dtype).expand_as(part)
    return credit_of
