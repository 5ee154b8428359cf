"""Memories: the bytes that tensors look at. Several may look at the same, as a matrix and its transpose do.

Copied with its memory, a tensor lies as it lay, beside the same others: an operation on the copy takes the same way
through torch, and gives the same bits.

>>> x = torch.arange(6.0).view(2, 3)
>>> memories, places = taken_apart([x, x.t(), x[1]])
>>> len(memories), [value.tolist() for value in put_together([memories[0].clone()], places[1:])]
(1, [[[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]], [3.0, 4.0, 5.0]])
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ntkexp.kernel.record.tape import storage

ALIGNED = 16  # bytes: a memory begins at a multiple, so that no operation finds a copy aligned otherwise


class Place(NamedTuple):
    """Where a tensor is: in which memory, from which byte, and how it goes on from there."""

    memory: int
    first: int
    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]


def taken_apart(values: Sequence[Tensor]) -> tuple[list[Tensor], list[Place]]:
    """The memories of tensors, as bytes, in the order in which they come; and where in them each tensor is."""
    homes, extents = [storage(value) for value in values], [extent(value) for value in values]
    begins: dict[int, int] = {}
    ends: dict[int, int] = {}
    for home, (first, last) in zip(homes, extents, strict=True):
        begins[home] = min(begins.get(home, first), first - first % ALIGNED)
        ends[home] = max(ends.get(home, last), last)
    holders, order = dict(zip(homes, values, strict=True)), {home: k for k, home in enumerate(begins)}
    memories = [bytes_of(holders[home], begin, ends[home] - begin) for home, begin in begins.items()]
    places = [
        Place(order[home], first - begins[home], value.dtype, value.shape, value.stride())
        for home, (first, _), value in zip(homes, extents, values, strict=True)
    ]
    return memories, places


def extent(value: Tensor) -> tuple[int, int]:
    """The bytes of its storage between which a tensor's elements are."""
    first = int(value.storage_offset())
    reach = sum((n - 1) * stride for n, stride in zip(value.shape, value.stride(), strict=True))
    return first * value.itemsize, (first + (1 + reach) * (value.numel() > 0)) * value.itemsize


def bytes_of(holder: Tensor, begin: int, size: int) -> Tensor:
    """So many bytes of the storage of a tensor."""
    return looking_at(holder, Place(0, begin, torch.uint8, torch.Size([size]), (1,)))


def put_together(memories: Sequence[Tensor], places: Sequence[Place]) -> list[Tensor]:
    """The tensors at these places."""
    begins = [int(memory.storage_offset()) for memory in memories]
    return [looking_at(memories[place.memory], place, begins[place.memory]) for place in places]


def looking_at(holder: Tensor, place: Place, begin: int = 0) -> Tensor:
    """A tensor at a place in the same storage, which begins at this byte."""
    value, first = holder.new_empty(0, dtype=place.dtype), (begin + place.first) // place.dtype.itemsize
    return value.set_(holder.untyped_storage(), first, place.shape, place.strides)
