"""Convolutions, of any number of dimensions, stride, padding, dilation and groups.

A convolution is a product of matrices: each output position is a row of patches times the kernel. So it shares the
product's rule, and its uses are the positions. A transposed one convolves the input with its elements spread apart.
"""

from __future__ import annotations

from itertools import product
from math import prod

import torch
from torch import Tensor

from ntkexp.kernel.rules.base import AbstractCall, Ends, Rule

Numbers = tuple[int, ...]


def convolution(call: AbstractCall) -> Tensor:
    """Group by group, a product of patches with kernels."""
    x, kernel, bias, stride, padding, dilation, transposed, output_padding, groups = call.args
    if transposed:
        x, kernel, padding = spread(x, kernel, stride, padding, dilation, output_padding, groups)
        stride = [1] * len(stride)
    window = tuple(kernel.start.shape[2:])
    channels, features = x.start.shape[1] // groups, kernel.start.shape[0] // groups
    parts = []
    for group in range(groups):
        inside, mine = picked(group, channels), picked(group, features)
        left = x.view(lambda v, inside=inside: patches(v[:, inside], window, stride, padding, dilation))
        right = kernel.view(lambda v, mine=mine: v[mine].flatten(1).t())
        added = None if bias is None else bias.view(lambda v, mine=mine: v[mine])
        parts.append(call.product(left, right, bias=added))
    examples, _, *space = call.start.shape
    joined = parts[0] if groups == 1 else torch.cat(parts, dim=1)
    return joined.view(examples, *space, -1).movedim(-1, 1)


def picked(group: int, size: int) -> slice:
    """The channels of a group."""
    return slice(group * size, (group + 1) * size)


def patches(x: Tensor, window: Numbers, stride: Numbers, padding: Numbers, dilation: Numbers) -> Tensor:
    """A row for every example and output position: what the window shows there, channel by channel."""
    borders = [width for width in reversed(padding) for _ in range(2)]
    x = torch.nn.functional.pad(x, borders)
    reach = [d * (w - 1) for d, w in zip(dilation, window, strict=True)]
    shown = []
    for offset in product(*map(range, window)):
        corner = [d * o for d, o in zip(dilation, offset, strict=True)]
        places = [slice(c, size - r + c, s) for c, size, r, s in zip(corner, x.shape[2:], reach, stride, strict=True)]
        shown.append(x[(slice(None), slice(None), *places)])
    stacked = torch.stack(shown, dim=2)  # [example, channel, offset, *space]
    return stacked.movedim((1, 2), (-2, -1)).reshape(-1, x.shape[1] * prod(window))


def spread(
    x: Ends, kernel: Ends, stride: Numbers, padding: Numbers, dilation: Numbers, extra: Numbers, groups: int
) -> tuple[Ends, Ends, Numbers]:
    """A transposed convolution as a plain one: zeros between the inputs, the kernel turned around."""
    space = tuple(range(2, x.start.dim()))
    reach = [d * (w - 1) for d, w in zip(dilation, kernel.start.shape[2:], strict=True)]
    borders = [
        side for r, p, e in reversed(list(zip(reach, padding, extra, strict=True))) for side in (r - p, r - p + e)
    ]

    def widened(v: Tensor) -> Tensor:
        size = [(n - 1) * s + 1 for n, s in zip(v.shape[2:], stride, strict=True)]
        wide = v.new_zeros(*v.shape[:2], *size)
        wide = wide.index_put(indices(v, stride), v)
        return torch.nn.functional.pad(wide, borders)

    def turned(v: Tensor) -> Tensor:
        grouped = v.view(groups, -1, *v.shape[1:]).transpose(1, 2).flatten(0, 1)  # [features, channels of a group, …]
        return grouped.flip(space)

    return x.view(widened), kernel.view(turned), (0,) * len(space)


def indices(v: Tensor, stride: Numbers) -> tuple[Tensor, ...]:
    """Where the elements of an input lie when they are spread apart."""
    steps = (1, 1, *stride)
    axes = [torch.arange(n, device=v.device) * s for n, s in zip(v.shape, steps, strict=True)]
    return torch.meshgrid(*axes, indexing="ij")


RULES: dict[str, Rule] = {"convolution": convolution}
