"""Convolutions, of any number of dimensions, stride, padding, dilation and groups.

A convolution is bilinear. To its weights it is a product of matrices, a row of patches for every output position times
the kernel: its uses are the positions. A transposed one convolves the input with its elements spread apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ntkexp.kernel.secant.convolve_back import CONVOLVE_BACK
from ntkexp.kernel.secant.linear_map import once, passed
from ntkexp.kernel.secant.patches import patches
from ntkexp.kernel.secant.rules.base import AbstractCall, Ends, Rule, total

Numbers = tuple[int, ...]


def convolution(call: AbstractCall) -> Tensor:
    """Δx ∗ W̄ + x̄ ∗ ΔW + Δb."""
    x, kernel, bias, *how = call.args
    terms = []
    if x.delta is not None:
        terms.append(convolved(call.delta(x), call.mean(kernel), call.start.shape if call.is_still else None, *how))
    if call.is_cut(kernel):
        added = bias if bias is not None and call.is_cut(bias) else None
        terms.append(used(call, x, kernel, added, *how))
        bias = None if added is not None else bias
    elif kernel.delta is not None:
        terms.append(torch.convolution(call.mean(x), kernel.delta, None, *how))
    if bias is not None and bias.delta is not None:
        along = [1, -1] + [1] * (call.start.dim() - 2)
        terms.append(call.delta(bias.view(lambda v: v.view(along)), call.start.shape))
    return total(terms, call.start.shape)


def convolved(delta: Tensor, kernel: Tensor, nothing: Sequence[int] | None, *how: Any) -> Tensor:
    """Δx ∗ W, or nothing. On the way back all vectors are the images of one batch."""
    lead, shape = 1 - delta.dim(), delta.shape[1:]

    def there(v: Tensor) -> Tensor:
        found = torch.convolution(v.flatten(0, lead - 1), kernel, None, *how)
        return found.view(*v.shape[:lead], *found.shape[1:])

    def back(w: Tensor) -> Tensor:
        found: Tensor = CONVOLVE_BACK(w.flatten(0, lead - 1), shape, kernel, *how)
        return found.view(*w.shape[:lead], *shape)

    return passed(delta, there, once(back, -delta.dim()), nothing)


def used(
    call: AbstractCall,
    x: Ends,
    kernel: Ends,
    bias: Ends | None,
    stride: Numbers,
    padding: Numbers,
    dilation: Numbers,
    transposed: bool,
    extra: Numbers,
    groups: int,
) -> Tensor:
    """x̄ ∗ ΔW + Δb as a use of the weights: a product of patches with kernels, or one in every group."""
    shown = call.mean(x)
    if transposed:
        shown = spread(shown, kernel.start.shape, stride, padding, dilation, extra)
        kernel = kernel.view(lambda v: turn(v, groups))
        stride, padding = (1,) * len(stride), (0,) * len(stride)
    how = (shown, kernel.start.shape[2:], stride, padding, dilation)
    if groups > 1:
        found = call.grouped_use(patches(*how), groups, kernel.view(lambda v: v.flatten(1)), bias)
    else:
        found = call.use(patches(*how), kernel.view(lambda v: v.flatten(1).t()), bias)
    return found.view(call.start.shape)


def spread(
    x: Tensor, kernel: torch.Size, stride: Numbers, padding: Numbers, dilation: Numbers, extra: Numbers
) -> Tensor:
    """The input of a transposed convolution as that of a plain one: zeros between the elements, and around them."""
    size = [(n - 1) * s + 1 for n, s in zip(x.shape[2:], stride, strict=True)]
    wide = x.new_zeros(*x.shape[:2], *size).index_put(indices(x, stride), x)
    reach = [d * (w - 1) for d, w in zip(dilation, kernel[2:], strict=True)]
    along = reversed(list(zip(reach, padding, extra, strict=True)))
    return torch.nn.functional.pad(wide, [side for r, p, e in along for side in (r - p, r - p + e)])


def turn(kernel: Tensor, groups: int) -> Tensor:
    """The kernel of a transposed convolution as that of a plain one: inputs and outputs exchanged, windows reversed."""
    grouped = kernel.view(groups, -1, *kernel.shape[1:]).transpose(1, 2).flatten(0, 1)
    return grouped.flip(tuple(range(2, kernel.dim())))


def indices(v: Tensor, stride: Numbers) -> tuple[Tensor, ...]:
    """Where the elements of an input lie when they are spread apart."""
    steps = (1, 1, *stride)
    axes = [torch.arange(n, device=v.device) * s for n, s in zip(v.shape, steps, strict=True)]
    return torch.meshgrid(*axes, indexing="ij")


RULES: dict[str, Rule] = {"convolution": convolution}
