"""Convolution as a product of matrices: patches of the input times the kernel."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod

import torch
from jaxtyping import Float
from torch import Tensor, nn


def patches(
    x: Float[Tensor, "example channel *pixels"],
    window: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Float[Tensor, "row size"]:
    """A row for every example and output pixel of a convolution: what the window shows there, channel by channel."""
    x = nn.functional.pad(x, [width for width in reversed(padding) for _ in range(2)])
    reach = [d * (w - 1) for d, w in zip(dilation, window, strict=True)]
    shown = []
    for offset in product(*map(range, window)):
        corner = [d * o for d, o in zip(dilation, offset, strict=True)]
        places = [slice(c, n - r + c, s) for c, n, r, s in zip(corner, x.shape[2:], reach, stride, strict=True)]
        shown.append(x[(slice(None), slice(None), *places)])
    stacked = torch.stack(shown, dim=2)  # [example, channel, offset, *pixels]
    return stacked.movedim((1, 2), (-2, -1)).reshape(-1, x.shape[1] * prod(window))
