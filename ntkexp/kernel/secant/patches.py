"""Convolution as a product of matrices: patches of the input times the kernel."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import torch
from jaxtyping import Float
from torch import Tensor, nn


def patches(
    x: Float[Tensor, "example channel *pixels"],
    window: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    shift: float | None = None,
) -> Float[Tensor, "example use size"]:
    """What the window of a convolution shows at each output pixel, channel by channel, and `shift` before it, if any.

    Pixels follow each other in memory, as they do in x: to bring a patch together takes longer than to multiply it.
    """
    x = nn.functional.pad(x, [width for width in reversed(padding) for _ in range(2)])
    reach = [d * (w - 1) for d, w in zip(dilation, window, strict=True)]
    shown = []
    for offset in product(*map(range, window)):
        corner = [d * o for d, o in zip(dilation, offset, strict=True)]
        places = [slice(c, n - r + c, s) for c, n, r, s in zip(corner, x.shape[2:], reach, stride, strict=True)]
        shown.append(x[(slice(None), slice(None), *places)])
    rows = torch.stack(shown, dim=2).flatten(3).flatten(1, 2)  # [example, (channel, offset), pixel]
    return with_shift(rows, shift).mT


def with_shift(factor: Float[Tensor, "row size *use"], shift: float | None) -> Float[Tensor, "row size_ *use"]:
    """The factor of a product, and before its columns one of `shift` for the bias, if there is one."""
    return factor if shift is None else torch.cat([torch.full_like(factor[:, :1], shift), factor], dim=1)
