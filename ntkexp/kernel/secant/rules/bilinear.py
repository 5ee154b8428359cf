"""Products of two things that both change: Δ(ab) = Δa·b̄ + ā·Δb, a bar being the mean over both ends."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ntkexp.kernel.secant.rules.base import AbstractCall, Ends, NoRule, Rule, total
from ntkexp.kernel.secant.rules.elementwise import sigmoid
from ntkexp.kernel.secant.rules.fold import folded, last


def mul(call: AbstractCall) -> Tensor:
    """Elementwise, with broadcasting; either factor may be a number."""
    left, right = call.args
    return multiplied(call, left, right, call.start.shape)


def multiplied(call: AbstractCall, left: Ends | float, right: Ends | float, shape: torch.Size) -> Tensor:
    """The difference of a product of two values, or of a value and a number."""
    terms = []
    for value, other in ((left, right), (right, left)):
        if isinstance(value, Ends) and value.delta is not None:
            factor = call.mean(other) if isinstance(other, Ends) else other
            terms.append(call.delta(value, shape) * factor)
    return total(terms, shape)


def addcmul(call: AbstractCall) -> Tensor:
    """Δ(x + c·a·b)."""
    added, left, right = call.args
    shape = call.start.shape
    terms = [] if added.delta is None else [call.delta(added, shape)]
    if left.delta is not None or right.delta is not None:
        terms.append(call.kwargs.get("value", 1) * multiplied(call, left, right, shape))
    return total(terms, shape)


def addcdiv(call: AbstractCall) -> Tensor:
    """Δ(x + c·a/b)."""
    added, above, below = call.args
    shape = call.start.shape
    terms = [] if added.delta is None else [call.delta(added, shape)]
    if above.delta is not None or below.delta is not None:
        terms.append(call.kwargs.get("value", 1) * divided(call, above, below, shape))
    return total(terms, shape)


def prod(call: AbstractCall) -> Tensor:
    """Of all elements, or along an axis: pair by pair, so that zeros among them do no harm."""
    value, *dims = call.args
    known = Ends(value.start, value.end, call.delta(value), False, value.from_inputs)
    return required(folded(last(known, dims[0] if dims else []), partial(pair, call))).reshape(call.start.shape)


def pair(call: AbstractCall, left: Ends, right: Ends) -> Ends:
    """A product of two, and its difference."""
    delta = multiplied(call, left, right, left.start.shape)
    return Ends(left.start * right.start, left.end * right.end, delta, False, left.from_inputs)


def required(value: Ends) -> Tensor:
    """The difference of a value that changes."""
    assert value.delta is not None
    return value.delta


def glu(call: AbstractCall) -> Tensor:
    """One half, times the sigmoid of the other."""
    value, dim = call.args[0], call.args[1] if len(call.args) > 1 else -1
    known = Ends(value.start, value.end, call.delta(value), False, True)
    left, right = (known.view(lambda v, k=k: v.chunk(2, dim)[k]) for k in (0, 1))  # type: ignore[misc]
    moved = call.slope(right, partial(sigmoid, call)) * required(right)
    gate = Ends(right.start.sigmoid(), right.end.sigmoid(), moved, False, True)
    return multiplied(call, left, gate, call.start.shape)


def cross(call: AbstractCall) -> Tensor:
    """The product of two vectors of space that is orthogonal to both."""
    left, right = call.args
    op, how = call.entry.op, call.kwargs
    terms = [] if left.delta is None else [op(call.delta(left, call.start.shape), call.mean(right), **how)]
    terms += [] if right.delta is None else [op(call.mean(left), call.delta(right, call.start.shape), **how)]
    return total(terms, call.start.shape)


def div(call: AbstractCall) -> Tensor:
    """Elementwise, with broadcasting; either may be a number."""
    if call.kwargs.get("rounding_mode") is not None:
        raise NoRule(f"{call.entry.op} rounds, so its differences are no multiples of its arguments'")
    above, below = call.args
    return divided(call, above, below, call.start.shape)


def divided(call: AbstractCall, above: Ends | float, below: Ends | float, shape: torch.Size) -> Tensor:
    """Δ(a/b) = Δa·mean(1/b) − ā·Δb/(b₀b₁)."""
    if not isinstance(below, Ends) or below.delta is None:
        divisor = call.mean(below) if isinstance(below, Ends) else below
        assert isinstance(above, Ends)
        return call.delta(above, shape) / divisor
    terms = []
    if isinstance(above, Ends) and above.delta is not None:
        terms.append(call.delta(above, shape) * call.slope(below, lambda b0, b1: (1 / b0 + 1 / b1) / 2))
    factor = call.mean(above) if isinstance(above, Ends) else above
    terms.append(call.delta(below, shape) * (factor * call.slope(below, lambda b0, b1: -1 / (b0 * b1))))
    return total(terms, shape)


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
    return call.product(left, right, call.kwargs.get("alpha", 1.0), bias, call.kwargs.get("beta", 1.0))


def dot(call: AbstractCall) -> Tensor:
    """Two vectors."""
    left, right = call.args
    return call.product(left.view(lambda v: v[None]), right.view(lambda v: v[:, None]))[0, 0]


def bmm(call: AbstractCall) -> Tensor:
    """Batches of matrices; a weight among them is taken batch by batch, and one copied along the batch once."""
    left, right = call.args
    if not (call.is_cut(left) or call.is_cut(right)):
        terms = [] if left.delta is None else [torch.bmm(left.delta, call.mean(right))]
        terms += [] if right.delta is None else [torch.bmm(call.mean(left), right.delta)]
        return total(terms, call.start.shape)
    batch, rows, columns = call.start.shape
    if call.is_cut(right) and is_copied(right.start):
        folded = call.product(left.view(lambda v: v.reshape(batch * rows, -1)), right.view(lambda v: v[0]))
        return folded.view(batch, rows, columns)
    if call.is_cut(left) and is_copied(left.start):
        turned = right.view(lambda v: v.transpose(1, 2).reshape(batch * columns, -1))
        folded = call.product(turned, left.view(lambda v: v[0].t()))
        return folded.view(batch, columns, rows).transpose(1, 2)
    return torch.stack([call.product(*(side.view(picker(k)) for side in (left, right))) for k in range(batch)])


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
    gain, shift = call.kwargs.get("alpha", 1.0), call.kwargs.get("beta", 1.0)
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
    delta = multiplied(call, left, right, start.shape).flatten(1) if varies else None
    return Ends(start.flatten(1), end.flatten(1), delta, False, left.from_inputs or right.from_inputs)


RULES: dict[str, Rule] = {
    "_trilinear": trilinear,
    "mul": mul,
    "addcmul": addcmul,
    "div": div,
    "addcdiv": addcdiv,
    "prod": prod,
    "glu": glu,
    "linalg_cross": cross,
    "mm": mm,
    "mv": mv,
    **dict.fromkeys(("dot", "vdot"), dot),
    "addmm": addmm,
    "bmm": bmm,
    "baddbmm": baddbmm,
}
