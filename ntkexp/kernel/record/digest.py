"""Digests: what tensors hold, in so few bytes that it can be kept and compared for as long as anybody asks."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256

import torch
from torch import Tensor


def digest(values: Iterable[Tensor], about: str = "") -> bytes:
    """The sha256 of the elements of some tensors, and of what is said about them.

    >>> ones = torch.ones(2)
    >>> digest([ones]) == digest([ones.clone()]), digest([ones]) == digest([2 * ones])
    (True, False)
    """
    found = sha256(about.encode())
    for value in values:
        flat = (
            value.detach().reshape(-1).cpu().clone(memory_format=torch.contiguous_format)
        )  # one element may have no step
        found.update(flat.view(torch.uint8).numpy().tobytes())
    return found.digest()
