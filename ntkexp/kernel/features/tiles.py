"""The kernel of layers that are used once per example, for many outputs, a tile that stays in the cache at a time.

    K[q, c, n, d] = Σ_l ⟨a_q, a′_n⟩ ⟨β_qc, β′_nd⟩        with a sum over layers l

Of ten outputs the products over β are a hundred times larger than those over a, and summing whole ones layer by layer
waits for memory: each tile is summed over all layers before it is written. The β of a readout are the same for all
examples, so theirs is one small product:

    K[q, c, n, d] += ⟨a_q, a′_n⟩ G[c, d]                 with G = ⟨β_c, β′_d⟩
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.kernel.features.blocks import Factored, of_biases

ROWS = 320  # of a tile: two tiles of float64 are 1.6 MB
WORTHWHILE = 1000  # rows of the kernel from which on whole products outgrow caches


@dataclass(frozen=True)
class Layer:
    """The products over the inputs of one layer, and the factors of those over its outputs; of a readout, G instead."""

    inputs: Float[Tensor, "probe train"]
    outputs: Float[Tensor, "probe_out features"]
    outputs_: Float[Tensor, "train_out features"]
    shared: Float[Tensor, "out out_"] | None


def pays(pairs: Sequence[tuple[Factored, Factored]]) -> bool:
    """Whether the kernel has several outputs, layers to be summed over, and is large, on a processor with caches."""
    if not pairs:
        return False
    left, right = pairs[0]
    probe, train = (side.outputs.shape[0] * side.outputs.shape[1] for side in (left, right))
    several = max(left.outputs.shape[1], right.outputs.shape[1]) > 1
    return len(pairs) > 1 and several and min(probe, train) > WORTHWHILE and left.inputs.device.type == "cpu"


def single_uses(pairs: Sequence[tuple[Factored, Factored]]) -> Float[Tensor, "probe out train out_"]:
    """The kernel of all pairs; of features with themselves, one half of it and its mirror image."""
    left, right = pairs[0]
    (probe, out), (train, out_) = left.gradients, right.gradients
    layers, same = [layer(*pair) for pair in pairs], all(one is other for one, other in pairs)
    kernel = left.outputs.new_empty(probe * out, train * out_)
    steps = max(1, ROWS // out), max(1, ROWS // out_)
    rooms = kernel.new_empty(2, steps[0] * out * steps[1] * out_)  # memory that is not asked for tile by tile
    for rows, columns in places(probe, train, steps, same):
        place, place_ = scaled(rows, out), scaled(columns, out_)
        part = tile(layers, rows, columns, (out, out_), rooms)
        if same and rows.start == columns.start:  # products of matrices need not be symmetric to the bit
            square = part[:, : len(part)]
            square.copy_(square.triu() + square.triu(1).t())
        kernel[place, place_] = part
        if same and columns.stop > rows.stop:
            behind = slice(max(place.stop, place_.start), place_.stop)
            kernel[behind, place] = part[:, behind.start - place_.start :].t()
    return kernel.view(probe, out, train, out_)


def places(probe: int, train: int, steps: tuple[int, int], same: bool) -> Iterator[tuple[slice, slice]]:
    """The examples of all tiles; of those on a diagonal whose halves are mirror images, three quarters.

    >>> list(places(4, 4, (4, 4), True))
    [(slice(0, 2, None), slice(0, 4, None)), (slice(2, 4, None), slice(2, 4, None))]
    """
    step, step_ = steps
    for at in range(0, probe, step):
        rows = slice(at, min(at + step, probe))
        if same:
            middle = (rows.start + rows.stop) // 2
            yield slice(at, middle), rows
            yield slice(middle, rows.stop), slice(middle, rows.stop)
        for at_ in range(rows.stop if same else 0, train, step_):
            yield rows, slice(at_, min(at_ + step_, train))


def layer(left: Factored, right: Factored) -> Layer:
    """The factors as matrices."""
    ones = left.outputs[:, :, 0]
    others = ones if right is left else right.outputs[:, :, 0]
    shared = ones[0] @ others[0].t() if is_shared(ones) and is_shared(others) else None
    rows = ones.flatten(0, 1)
    rows_ = rows if right is left else others.flatten(0, 1)
    inputs = torch.mm(left.inputs[:, 0], right.inputs[:, 0].t()).add_(of_biases(left, right))
    return Layer(inputs, rows, rows_, shared)


def is_shared(outputs: Float[Tensor, "example out features"]) -> bool:
    """Whether all examples have the same; most that do not already differ in the first and the last.

    >>> is_shared(torch.eye(2).expand(3, 2, 2)), is_shared(torch.arange(3.0).view(3, 1, 1))
    (True, False)
    """
    first = outputs[:1]
    return torch.equal(first, outputs[-1:]) and torch.equal(first.expand_as(outputs), outputs)


def tile(
    layers: Sequence[Layer], rows: slice, columns: slice, outs: tuple[int, int], rooms: Float[Tensor, "two size"]
) -> Float[Tensor, "row_out column_out"]:
    """The kernel of some examples with some others, of all layers, in the first of two rooms.

    Products over inputs are repeated along columns, so that what they are multiplied with is gone through row by row.
    """
    out, out_ = outs
    shape = (rows.stop - rows.start, out, (columns.stop - columns.start) * out_)
    total, products = rooms[0, : prod(shape)].view(shape), rooms[1, : prod(shape)].view(shape)
    for k, each in enumerate(layers):
        inputs = each.inputs[rows, columns, None].expand(-1, -1, out_).reshape(shape[0], 1, shape[2])
        if each.shared is None:
            factors = each.outputs[scaled(rows, out)], each.outputs_[scaled(columns, out_)].t()
            torch.mm(*factors, out=products.flatten(0, 1))
            part = products
        else:
            part = each.shared.repeat(1, columns.stop - columns.start)
        total.addcmul_(part, inputs) if k else torch.mul(part, inputs, out=total)
    return total.flatten(0, 1)


def scaled(examples: slice, outputs: int) -> slice:
    """The rows of these examples, so many of each.

    >>> scaled(slice(2, 4), 10)
    slice(20, 40, None)
    """
    return slice(examples.start * outputs, examples.stop * outputs)
