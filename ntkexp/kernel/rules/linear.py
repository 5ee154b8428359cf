"""Linear operations: Δ(Av) = A Δv.

Linear in its first argument alone, an operation is applied to the difference; linear in several, it is applied to
all their differences at once, zero standing for what cannot change (`joined`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ntkexp.kernel.rules.base import AbstractCall, Ends, Rule, total


def first(call: AbstractCall) -> Tensor:
    """op(Δv, …): rearrangements, sums and means, padding."""
    value, *rest = call.args
    result: Tensor = call.entry.op(call.delta(value), *rest, **call.kwargs)
    return result


def reshaped(call: AbstractCall) -> Tensor:
    """As `first`, for differences that are not laid out in memory like the values."""
    return call.delta(call.args[0]).reshape(call.start.shape)


def padded(call: AbstractCall) -> Tensor:
    """A padded border does not change, whatever it is made of."""
    value, pad, *_ = call.args
    return torch.constant_pad_nd(call.delta(value), pad)


def replaced(call: AbstractCall) -> Tensor:
    """The second argument in the place and shape of the first."""
    value = call.args[1]
    varies = isinstance(value, Ends) and value.delta is not None
    return call.delta(value, call.start.shape) if varies else torch.zeros_like(call.start)


def unchanged(call: AbstractCall) -> Tensor:
    """A constant that takes only its shape from the argument."""
    return torch.zeros_like(call.start)


def joined(call: AbstractCall) -> Tensor:
    """op([Δa, Δb, …], …): concatenation and stacking."""

    def difference(value: Any) -> Any:
        if not isinstance(value, Ends):
            return value
        return torch.zeros_like(value.start) if value.delta is None else call.delta(value)

    result: Tensor = call.entry.op(*tree_map(difference, call.args), **call.kwargs)
    return result


def add(call: AbstractCall) -> Tensor:
    """Δ(a + αb) = Δa + αΔb."""
    return signed_sum(call, 1.0, call.kwargs.get("alpha", 1.0))


def sub(call: AbstractCall) -> Tensor:
    """Δ(a − αb) = Δa − αΔb."""
    return signed_sum(call, 1.0, -call.kwargs.get("alpha", 1.0))


def rsub(call: AbstractCall) -> Tensor:
    """Δ(b − αa) = Δb − αΔa."""
    return signed_sum(call, -call.kwargs.get("alpha", 1.0), 1.0)


def signed_sum(call: AbstractCall, *factors: float) -> Tensor:
    """The sum of the arguments' differences, each with its factor."""
    shape = call.start.shape
    terms = [
        call.delta(value, shape) if factor == 1 else factor * call.delta(value, shape)
        for value, factor in zip(call.args, factors, strict=False)
        if isinstance(value, Ends) and value.delta is not None
    ]
    return total(terms, shape)


RULES: dict[str, Rule] = {
    **dict.fromkeys(
        (
            "alias",
            "clone",
            "cumsum",
            "detach",
            "diagonal",
            "expand",
            "flip",
            "mean",
            "neg",
            "permute",
            "repeat",
            "roll",
            "select",
            "slice",
            "squeeze",
            "sum",
            "t",
            "transpose",
            "tril",
            "triu",
            "unsqueeze",
        ),
        first,
    ),
    **dict.fromkeys(("full_like", "new_full", "new_ones", "new_zeros", "ones_like", "zeros_like"), unchanged),
    "view": reshaped,
    "_unsafe_view": reshaped,
    "constant_pad_nd": padded,
    "copy": replaced,
    "fill": replaced,
    "cat": joined,
    "select_scatter": joined,
    "slice_scatter": joined,
    "stack": joined,
    "add": add,
    "sub": sub,
    "rsub": rsub,
}
