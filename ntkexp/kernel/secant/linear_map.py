"""Linear maps beside their transposes, where there is a shorter one than autograd finds, and the way back through a
convolution.

A linear map beside its transpose, where there is a shorter one than autograd finds operation by operation.

    ⟨w, there(v)⟩ = ⟨back(w), v⟩        both linear; each takes a single vector, or many along an axis before its own

>>> import torch
>>> v = torch.ones(2, requires_grad=True)
>>> total = passed(v, lambda v: v.sum(-1, keepdim=True), lambda w: w.expand(*w.shape[:-1], 2))
>>> torch.autograd.grad(total, v, torch.tensor([3.0]))
(tensor([3., 3.]),)
>>> passed(0 * v, lambda v: v.sum(), lambda w: w.expand(2), nothing=[])
tensor(0., grad_fn=<LinearMapBackward>)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.kernel.record.recorder import AT_ONCE

Way: TypeAlias = Callable[[Tensor], Tensor]


def passed(delta: Tensor, there: Way, back: Way, nothing: Sequence[int] | None = None) -> Tensor:
    """there(delta), through which autograd goes by `back`; of zeros it is `nothing`, of this shape."""
    result: Tensor = LinearMap.apply(delta, there, back, nothing)  # type: ignore[no-untyped-call]  # torch's own
    return result


def once(back: Way, axis: int) -> Way:
    """The same way back, which goes for all examples at once where they have one vector in common, as they have from a
    readout on.

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
    """Those of each row of many vectors with the same row of a few that are fixed: a product of matrices for each."""
    size = fixed.shape[-1]
    rows = vectors.reshape(len(vectors), -1, size).permute(1, 2, 0)
    found = torch.bmm(fixed.reshape(len(fixed), -1, size).transpose(0, 1), rows)
    return found.permute(1, 2, 0).contiguous().view(len(fixed), *vectors.shape[:-1], 1)


class LinearMap(torch.autograd.Function):
    """What torch knows of a map and its transpose."""

    @staticmethod
    def forward(delta: Tensor, there: Way, back: Way, nothing: Sequence[int] | None) -> Tensor:
        """The map itself."""
        return there(delta) if nothing is None else delta.new_zeros(nothing)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Way, Way, Any], output: Tensor) -> None:
        """Keep both ways: the transpose of the transpose is the map."""
        _, ctx.there, ctx.back, _ = inputs

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None, None, None]:
        """The transpose."""
        return passed(cotangent, ctx.back, ctx.there), None, None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: Sequence[Any], delta: Tensor, there: Way, back: Way, nothing: Sequence[int] | None
    ) -> tuple[Tensor, int]:
        """All vectors at once."""
        return passed(delta.movedim(in_dims[0], 0), there, back), 0


# --- The way back through a convolution: a few images at a time, from rows of pixels.
#
# In double precision torch multiplies the kernel with every pixel, and adds what patches share number by number,
# which takes two to three times as long as the products. The way back through a convolution that goes from pixel
# to pixel is one again, with the kernel turned around:
#
#     x[i, p] = Σ_or k[o, i, r] w[o, p − r]        over features o and offsets r in the window, the border of w is
#                                                  zero
#
# Copies of w moved along the last axis, while they are in the cache, are all that it takes: in each of them an
# offset along the axis before is another place to begin at. A window of one pixel needs no copies. Other
# convolutions go torch's way, and so do those that several threads share, which would wait for each other at
# every small product. To programs this is one operation, for it writes where nobody else looks.


def convolve_back(
    w: Float[Tensor, "image feature *pixels_"],
    shape: Sequence[int],
    kernel: Float[Tensor, "_ _ *window"],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    extra: Sequence[int],
    groups: int,
) -> Float[Tensor, "image channel *pixels"]:
    """What the cotangents of a convolution give for its input, whose images have this shape.

    >>> w, kernel = torch.ones(1, 1, 1, 2, dtype=torch.float64), torch.tensor([[[[1.0, 2.0]]]], dtype=torch.float64)
    >>> convolve_back(w, [1, 1, 3], kernel, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    tensor([[[[1., 3., 2.]]]], dtype=torch.float64)
    """
    border = [d * (size - 1) - p for d, size, p in zip(dilation, kernel.shape[2:], padding, strict=True)]
    if set(stride) == {1} and groups == 1 and not transposed and len(w):
        if prod(kernel.shape[2:]) == 1 and not any(padding):
            found = torch.bmm(kernel.flatten(1).t().expand(len(w), -1, -1), w.flatten(2))
            return found.view(len(w), *shape)
        alone = w.device.type == "cpu" and torch.get_num_threads() == 1
        if alone and w.dim() <= 4 and w.dtype == torch.float64 and min(border) >= 0:
            plane, window = (each if each.dim() == 4 else each.unsqueeze(2) for each in (w, kernel))
            return from_rows(plane, window, (0, *border)[-2:], (1, *dilation)[-2:]).view(len(w), *shape)
    blank = w.new_empty(len(w), *shape)  # which nobody reads
    how = (stride, padding, dilation, transposed, extra, groups)
    result: Tensor = torch.ops.aten.convolution_backward(w, blank, kernel, None, *how, [True, False, False])[0]
    return result


def from_rows(
    w: Float[Tensor, "image feature height_ width_"],
    kernel: Float[Tensor, "feature channel rows columns"],
    border: Sequence[int],
    dilation: Sequence[int],
) -> Float[Tensor, "image channel height width"]:
    """The convolution of w, with a border of zeros around it, with the kernel turned around."""
    features, channels, rows, columns = kernel.shape
    (before, side), (down, across), (high, wide) = border, dilation, w.shape[2:]
    height, width = high + 2 * before - down * (rows - 1), wide + 2 * side - across * (columns - 1)
    turned = kernel.flip(2, 3).permute(2, 1, 0, 3).reshape(rows, channels, features * columns)
    each = features * columns * (high + 2 * before) * width
    step = min(len(w), max(1, AT_ONCE // (each * w.element_size())))
    room = w.new_zeros(step, features, columns, high + 2 * before, width)
    found = w.new_empty(len(w), channels, height * width)
    for at in range(0, len(w), step):
        part, place = w[at : at + step], found[at : at + step]
        for column in range(columns):
            moved = column * across - side  # a pixel of the copy shows one of w so many places on
            seen = slice(max(0, -moved), max(0, -moved, min(width, wide - moved)))
            copy = room[: len(part), :, column, before : before + high, seen]
            copy.copy_(part[..., seen.start + moved : seen.stop + moved])
        shown = room[: len(part)].view(len(part), features * columns, -1)
        for row, factor in enumerate(turned):
            pixels = shown.narrow(2, row * down * width, height * width)
            factors = factor.expand(len(part), -1, -1), pixels
            place.baddbmm_(*factors) if row else torch.bmm(*factors, out=place)
    return found.view(len(w), channels, height, width)


LIBRARY = torch.library.Library("ntkexp", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch's own
LIBRARY.define(  # type: ignore[no-untyped-call]  # torch's own
    "convolve_back(Tensor w, int[] shape, Tensor kernel, int[] stride, int[] padding, int[] dilation, "
    "bool transposed, int[] extra, int groups) -> Tensor"
)
LIBRARY.impl("convolve_back", convolve_back, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]  # torch's own
CONVOLVE_BACK = torch.ops.ntkexp.convolve_back.default
