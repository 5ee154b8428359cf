"""A module of a user, which does not use this package."""

from __future__ import annotations

from math import prod

from torch import nn


def build(shape: tuple[int, ...], outputs: int, width: int) -> nn.Module:
    """Return a module whose batch statistics and dropout are disabled in evaluation mode."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(prod(shape), width),
        nn.BatchNorm1d(width),
        nn.GELU(),
        nn.Dropout(0.5),
        nn.Linear(width, outputs),
    )
