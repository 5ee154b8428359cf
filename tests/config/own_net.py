"""A module as a user would write it: nothing in it knows of this program."""

from __future__ import annotations

from math import prod

from torch import nn


def build(shape: tuple[int, ...], outputs: int, width: int) -> nn.Module:
    """Norm by batch statistics and dropout; evaluation turns both off."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(prod(shape), width),
        nn.BatchNorm1d(width),
        nn.GELU(),
        nn.Dropout(0.5),
        nn.Linear(width, outputs),
    )
