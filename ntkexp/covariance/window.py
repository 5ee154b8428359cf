"""Means over windows in which both pixels of a pair move together; pairs that leave the image count zero, or go around.

A window moves along one axis after the other, and changes no offset.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from torch import Tensor

from ntkexp.covariance.pairs import Pairs


def box(values: Tensor, pairs: Pairs, windows: Iterable[int], circular: bool) -> Tensor:
    """The mean over a window at every pair.

    >>> import torch
    >>> pairs = Pairs.all((3,))
    >>> box(torch.ones(3, 3), pairs, [3], circular=False) * 3
    tensor([[2., 3., 2.],
            [2., 2., 1.],
            [1., 2., 2.]])
    """
    windows = tuple(windows)
    first = values.dim() - 2 * len(windows)
    for axis, window in enumerate(windows):
        values = moved_sum(values, pairs, axis, first + 2 * axis, window // 2, circular)
    return values / prod(windows)


def moved_sum(values: Tensor, pairs: Pairs, axis: int, place: int, reach: int, circular: bool) -> Tensor:
    """Σ_δ value[p + δ, p + o + δ] along one axis, |δ| ≤ reach."""
    n = pairs.pixels[axis]
    if circular:
        return sum((values.roll(-shift, place + 1) for shift in moves(reach)), start=values)
    total = values.clone()
    second = None if pairs.offsets[axis] == (0,) else pairs.second(axis).to(values.device)
    for shift in moves(min(reach, n - 1)):
        start, end, length = max(0, -shift), max(0, shift), n - abs(shift)
        here, there = total.narrow(place + 1, start, length), values.narrow(place + 1, end, length)
        if second is None:  # equal pixels leave an image together
            here += there
            continue
        moved = second[:, start : start + length] + shift
        inside = ((moved >= 0) & (moved < n)).to(values.dtype)
        here.addcmul_(there, inside.view(*inside.shape, *(1,) * (values.dim() - place - 2)))
    return total


def moves(reach: int) -> list[int]:
    """The moves of a window but for staying.

    >>> moves(2)
    [-2, -1, 1, 2]
    """
    return [shift for shift in range(-reach, reach + 1) if shift]
