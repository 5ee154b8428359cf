"""Numbers of float32 are multiplied as such. Torch may multiply them in shorter ones (TF32, by default in convolutions
on a GPU, or bfloat16), which keep three of their seven digits: a secant could not close, and nothing would tell why.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter

import torch

MULTIPLYING = ("cudnn.conv", "cudnn.rnn", "cuda.matmul", "mkldnn.conv", "mkldnn.rnn", "mkldnn.matmul")


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
    found = []
    for path, precision in zip(MULTIPLYING, precisions, strict=True):
        kind = attrgetter(path)(torch.backends)
        found.append(kind.fp32_precision)
        kind.fp32_precision = precision
    return found
