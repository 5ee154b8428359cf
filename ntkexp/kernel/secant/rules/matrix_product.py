"""Products of matrices that both change: Δ(AB) = ΔA·B̄ + Ā·ΔB. One of weights with inputs is a use of the weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ntkexp.kernel.secant.rules.base import AbstractCall, Ends, NoRule, Rule, total
from ntkexp.kernel.secant.rules.bilinear import multiply


def mm(call: AbstractCall) -> Tensor:
    """Two matrices."""
    left, right = call.args
    return call.product(left, right)


def mv(call: AbstractCall) -> Tensor:
    """A matrix and a vector, as a matrix of one column."""
    left, right = call.args
    return call.product(left, right.view(lambda vector: vector[:, None]))[:, 0]


def addmm(call: AbstractCall) -> Tensor:
    """shift · bias + gain · left @ right."""
    bias, left, right = call.args
    return call.product(left, right, call.given["alpha"], bias, call.given["beta"])


def dot(call: AbstractCall) -> Tensor:
    """Two vectors."""
    left, right = call.args
    return call.product(left.view(lambda v: v[None]), right.view(lambda v: v[:, None]))[0, 0]


def bmm(call: AbstractCall) -> Tensor:
    """Batches of matrices."""
    left, right = call.args
    return in_batches(call, left, right, call.start.shape)


def in_batches(call: AbstractCall, left: Ends, right: Ends, shape: torch.Size) -> Tensor:
    """The same of known matrices; a weight among them is taken batch by batch, and one copied along the batch once."""
    if not (call.is_cut(left) or call.is_cut(right)):
        terms = [] if left.delta is None else [torch.bmm(left.delta, call.mean(right))]
        terms += [] if right.delta is None else [torch.bmm(call.mean(left), right.delta)]
        return total(terms, shape)
    batch, rows, columns = shape
    if call.is_cut(right) and is_copied(right.start):
        folded = call.product(left.view(lambda v: v.reshape(batch * rows, -1)), right.view(lambda v: v[0]))
        return folded.view(batch, rows, columns)
    if call.is_cut(left) and is_copied(left.start):
        turned = right.view(lambda v: v.transpose(1, 2).reshape(batch * columns, -1))
        folded = call.product(turned, left.view(lambda v: v[0].t()))
        return folded.view(batch, columns, rows).transpose(1, 2)
    return torch.stack([call.product(left.view(picker(k)), right.view(picker(k))) for k in range(batch)])


def is_copied(value: Tensor) -> bool:
    """Whether a batch of matrices is one matrix, expanded."""
    return value.shape[0] == 1 or value.stride(0) == 0


def picker(k: int) -> Callable[[Tensor], Tensor]:
    """The k-th matrix of a batch."""
    return lambda v: v[k]


def baddbmm(call: AbstractCall) -> Tensor:
    """shift · added + gain · left @ right, in batches."""
    added, left, right = call.args
    if call.is_cut(left) or call.is_cut(right):
        raise NoRule("baddbmm multiplies a batch with a weight, which has no factors")
    gain, shift = call.given["alpha"], call.given["beta"]
    terms = [] if added.delta is None else [shift * call.delta(added, call.start.shape)]
    terms += [] if left.delta is None else [gain * torch.bmm(left.delta, call.mean(right))]
    terms += [] if right.delta is None else [gain * torch.bmm(call.mean(left), right.delta)]
    return total(terms, call.start.shape)


def trilinear(call: AbstractCall) -> Tensor:
    """Σ_ij a_i W_oij c_j, as `nn.Bilinear` asks for it: a product of the pairs a_i c_j with W as a matrix."""
    left, weight, right, *layout = call.args
    if layout[:4] != [[1, 3], [0], [1, 2], [2, 3]]:
        raise NoRule("a sum of products of three tensors that is not that of nn.Bilinear")
    pairs = outer(call, left, right)
    return call.product(pairs, weight.view(lambda v: v.reshape(len(v), -1).t()))


def outer(call: AbstractCall, left: Ends, right: Ends) -> Ends:
    """All products of an element of one row with one of the other, row by row."""
    left, right = left.view(lambda v: v[:, :, None]), right.view(lambda v: v[:, None, :])
    start, end = left.start * right.start, left.end * right.end
    varies = left.delta is not None or right.delta is not None
    delta = multiply(call, left, right, start.shape).flatten(1) if varies else None
    return Ends(start.flatten(1), end.flatten(1), delta, from_inputs=left.from_inputs or right.from_inputs)


RULES: dict[str, Rule] = {
    "_trilinear": trilinear,
    "mm": mm,
    "mv": mv,
    **dict.fromkeys(("dot", "vdot"), dot),
    "addmm": addmm,
    "bmm": bmm,
    "baddbmm": baddbmm,
}
