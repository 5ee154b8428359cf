"""The kernel of layers that are used once per example, for many outputs, a tile that stays in the cache at a time.

    K[q, c, n, d] = Σ_l ⟨a_q, a′_n⟩ ⟨β_qc, β′_nd⟩        with a sum over layers l

Of ten outputs the products over β are a hundred times larger than those over a, and summing whole ones layer by layer
waits for memory: each tile is summed over all layers before it is written. The β of a readout are the same for all
examples, so theirs is one small product:

    K[q, c, n, d] += ⟨a_q, a′_n⟩ G[c, d]                 with G = ⟨β_c, β′_d⟩
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.kernel.features.blocks import Factored, of_biases

ROWS = 320  # of a tile: two tiles of float64 are 1.6 MB
WORTHWHILE = 1000  # rows of the kernel from which on whole products outgrow caches


@dataclass(frozen=True)
class Layer:
    """The factors of one layer on both sides; of a readout, G in place of the outputs."""

    inputs: Float[Tensor, "probe in_"]
    inputs_: Float[Tensor, "train in_"]
    outputs: Float[Tensor, "probe_out features"]
    outputs_: Float[Tensor, "train_out features"]
    shared: Float[Tensor, "out out_"] | None
    shift: float


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
    shape = (*left.outputs.shape[:2], *right.outputs.shape[:2])
    layers, same = [layer(*pair) for pair in pairs], all(one is other for one, other in pairs)
    kernel = left.outputs.new_empty(shape[0] * shape[1], shape[2] * shape[3])
    step, step_ = (max(1, ROWS // count) for count in (shape[1], shape[3]))
    for at in range(0, shape[0], step):
        rows = slice(at, min(at + step, shape[0]))
        for at_ in range(at if same else 0, shape[2], step_):
            columns = slice(at_, min(at_ + step_, shape[2]))
            part = tile(layers, rows, columns, shape[1], shape[3])
            if same and at_ == at:  # products of matrices need not be symmetric to the bit
                part = part.triu() + part.triu(1).t()
            kernel[scaled(rows, shape[1]), scaled(columns, shape[3])] = part
            if same and at_ > at:
                kernel[scaled(columns, shape[3]), scaled(rows, shape[1])] = part.t()
    return kernel.view(shape)


def layer(left: Factored, right: Factored) -> Layer:
    """The factors as matrices."""
    ones = left.outputs[:, :, 0]
    others = ones if right is left else right.outputs[:, :, 0]
    shared = ones[0] @ others[0].t() if is_shared(ones) and is_shared(others) else None
    rows = ones.flatten(0, 1)
    rows_ = rows if right is left else others.flatten(0, 1)
    return Layer(left.inputs[:, 0], right.inputs[:, 0], rows, rows_, shared, of_biases(left, right))


def is_shared(outputs: Float[Tensor, "example out features"]) -> bool:
    """Whether all examples have the same; most that do not already differ in the first and the last.

    >>> is_shared(torch.eye(2).expand(3, 2, 2)), is_shared(torch.arange(3.0).view(3, 1, 1))
    (True, False)
    """
    first = outputs[:1]
    return torch.equal(first, outputs[-1:]) and torch.equal(first.expand_as(outputs), outputs)


def tile(
    layers: Sequence[Layer], rows: slice, columns: slice, out: int, out_: int
) -> Float[Tensor, "row_out column_out"]:
    """The kernel of some examples with some others, of all layers."""
    total: Tensor | None = None
    for each in layers:
        inputs = (each.inputs[rows] @ each.inputs_[columns].t()).add_(each.shift)[:, None, :, None]
        if each.shared is not None:
            part = each.shared[None, :, None, :]
        else:
            product = each.outputs[scaled(rows, out)] @ each.outputs_[scaled(columns, out_)].t()
            part = product.view(inputs.shape[0], out, inputs.shape[2], out_)
        total = part * inputs if total is None else total.addcmul_(part, inputs)
    if total is None:
        raise ValueError("a kernel of no layers")
    return total.flatten(2).flatten(0, 1)


def scaled(examples: slice, outputs: int) -> slice:
    """The rows of these examples, so many of each.

    >>> scaled(slice(2, 4), 10)
    slice(20, 40, None)
    """
    return slice(examples.start * outputs, examples.stop * outputs)
