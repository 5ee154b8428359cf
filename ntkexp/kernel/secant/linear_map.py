"""Linear maps beside their transposes, where there is a shorter one than autograd finds operation by operation.

⟨w, there(v)⟩ = ⟨back(w), v⟩        both linear; each takes a single vector, or many along an axis before its own
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

Way: TypeAlias = Callable[[Tensor], Tensor]


def passed(delta: Tensor, there: Way, back: Way, nothing: Sequence[int] | None = None) -> Tensor:
    """there(delta), through which autograd goes back by `back`; a shape `nothing` stands for zeros, which need no map.

    >>> v = torch.ones(2, requires_grad=True)
    >>> total = passed(v, lambda v: v.sum(-1, keepdim=True), lambda w: w.expand(*w.shape[:-1], 2))
    >>> torch.autograd.grad(total, v, torch.tensor([3.0]))
    (tensor([3., 3.]),)
    >>> passed(0 * v, lambda v: v.sum(), lambda w: w.expand(2), nothing=[])
    tensor(0., grad_fn=<LinearMapBackward>)
    """
    result: Tensor = LinearMap.apply(delta, there, back, nothing)  # type: ignore[no-untyped-call]  # torch's own
    return result


def once(back: Way, axis: int) -> Way:
    """The same way back, taken once for all examples where they share one vector, as they do next to a readout.

    >>> once(lambda w: 2 * w, -2)(torch.ones(1, 3).expand(4, 3)).stride()
    (0, 1)
    """

    def found(w: Tensor) -> Tensor:
        if w.stride(axis) or w.shape[axis] < 2:
            return back(w)
        v = back(w.narrow(axis, 0, 1))
        return v.expand(*v.shape[:axis], w.shape[axis], *v.shape[v.dim() + axis + 1 :])

    return found


def inner_products(
    vectors: Float[Tensor, "vector *row size"], fixed: Float[Tensor, "count *row size"]
) -> Float[Tensor, "count vector *row 1"]:
    """⟨v, f⟩ of each row of many vectors with the same row of a few fixed ones: a product of matrices for each row."""
    size = fixed.shape[-1]
    rows = vectors.reshape(len(vectors), -1, size).permute(1, 2, 0)
    found = torch.bmm(fixed.reshape(len(fixed), -1, size).transpose(0, 1), rows)
    return found.permute(1, 2, 0).contiguous().view(len(fixed), *vectors.shape[:-1], 1)


class LinearMap(torch.autograd.Function):
    """The map for autograd; the transpose of the transpose is the map."""

    @staticmethod
    def forward(delta: Tensor, there: Way, back: Way, nothing: Sequence[int] | None) -> Tensor:
        return there(delta) if nothing is None else delta.new_zeros(nothing)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Way, Way, Any], output: Tensor) -> None:
        _, ctx.there, ctx.back, _ = inputs

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None, None, None]:
        return passed(cotangent, ctx.back, ctx.there), None, None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: Sequence[Any], delta: Tensor, there: Way, back: Way, nothing: Sequence[int] | None
    ) -> tuple[Tensor, int]:
        return passed(delta.movedim(in_dims[0], 0), there, back), 0
