"""What a sample is, and the shapes and ranges that samples share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

Sample: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""A function of two tensors [example, 6] that both change."""


def square(h: Tensor) -> Tensor:
    """A matrix for every example."""
    return h.reshape(len(h), 2, 3)


def image(h: Tensor) -> Tensor:
    """A picture of one channel for every example."""
    return h.reshape(len(h), 1, 2, 3)


def volume(h: Tensor) -> Tensor:
    """A picture in three dimensions for every example."""
    return h.reshape(len(h), 1, 1, 2, 3)


def positive(h: Tensor) -> Tensor:
    """Numbers from ½ on."""
    return 0.5 + h * h


def inside(h: Tensor) -> Tensor:
    """Numbers between −0.9 and 0.9."""
    return 0.9 * h.tanh()


def ranked(h: Tensor) -> Tensor:
    """Numbers whose order is the same wherever they move."""
    return h.tanh() + 3 * torch.tensor([2.0, 5.0, 0.0, 4.0, 1.0, 3.0], dtype=h.dtype)


def whole(*numbers: int) -> Tensor:
    """Indices."""
    return torch.tensor(numbers)


def each(h: Tensor) -> list[list[int]]:
    """The number of every example, as a column of indices."""
    return [[n] for n in range(len(h))]
