"""Convolutions of many examples, a few at a time.

In double precision torch multiplies a kernel with patches of the input, which it first brings together for all examples
that it is given: nine times the input of a 3×3 kernel, in memory that the system clears first, every time. Those of a
few examples stay in the cache from when they are written to when they are multiplied. The bits are the same, for torch
multiplies one example after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from jaxtyping import Float
from torch import Tensor

AT_ONCE = 2**20  # bytes of patches or copies, for every thread: about half of its cache


def convolve(
    x: Float[Tensor, "example channel *pixels"],
    kernel: Float[Tensor, "_ _ *window"],
    bias: Float[Tensor, " features"] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    extra: Sequence[int],
    groups: int,
) -> Float[Tensor, "example features *pixels_"]:
    """What `torch.convolution` gives for these arguments.

    >>> x, kernel = torch.randn(9, 8, 32, 32, dtype=torch.float64), torch.randn(4, 8, 5, 5, dtype=torch.float64)
    >>> how = ([1, 1], [2, 2], [1, 1], False, [0, 0], 1)
    >>> torch.equal(convolve(x, kernel, None, *how), torch.convolution(x, kernel, None, *how))
    True
    """
    how = (kernel, bias, stride, padding, dilation, transposed, extra, groups)
    by_patches = x.dtype == torch.float64 and x.device.type == "cpu" and prod(kernel.shape[2:]) > 1
    if transposed or groups > 1 or not by_patches or x.dim() != kernel.dim() or not len(x):
        return torch.convolution(x, *how)
    patches = x.nbytes * prod(kernel.shape[2:]) // (len(x) * prod(stride))
    step = max(1, AT_ONCE // max(1, patches)) * torch.get_num_threads()
    if len(x) <= step:
        return torch.convolution(x, *how)
    first = torch.convolution(x[:step], *how)
    whole = first.new_empty(len(x), *first.shape[1:])
    whole[:step] = first
    for at in range(step, len(x), step):
        whole[at : at + step] = torch.convolution(x[at : at + step], *how)
    return whole
