"""Numbers of float32 are multiplied as such. Torch may multiply them in shorter ones (TF32, by default in convolutions
on a GPU, or bfloat16), which keep three of their seven digits: a secant could not close, and nothing would tell why.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter

import torch

NAMES = ("cudnn.conv", "cudnn.rnn", "cuda.matmul", "mkldnn.conv", "mkldnn.rnn", "mkldnn.matmul")
MULTIPLYING = [attrgetter(name)(torch.backends) for name in NAMES]


def keep_full_precision() -> list[str]:
    """Let every product be one of full numbers from now on; the precisions that were chosen before are given back.

    >>> with full_precision():
    ...     torch.backends.cudnn.conv.fp32_precision
    'ieee'
    """
    return choose(["ieee"] * len(MULTIPLYING))


@contextmanager
def full_precision() -> Iterator[None]:
    """Products of full numbers for a while; what was chosen before is chosen again afterwards."""
    before = keep_full_precision()
    try:
        yield
    finally:
        choose(before)


def choose(precisions: list[str]) -> list[str]:
    """Choose a precision for each kind of product; those that were chosen before."""
    found = [kind.fp32_precision for kind in MULTIPLYING]
    for kind, before, precision in zip(MULTIPLYING, found, precisions, strict=True):
        if before != precision:
            kind.fp32_precision = precision
    return found
