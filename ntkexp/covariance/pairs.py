"""Pairs of pixels (p, p + o), stored by their offset o, and linear maps of functions of them.

A tensor over pairs has the axes [*example, o₁, p₁, o₂, p₂, …], an offset and a pixel for each axis of the image. Along
an axis of n pixels an offset is a number modulo n: the second pixel is (p + o) mod n. So n offsets hold all n² pairs
once, and a window that moves both pixels together changes no offset, whether images end or go around. Layers without
pixels leave no axes, and only the examples are paired.

>>> pairs = Pairs.all((3,))
>>> pairs.second(0).tolist()
[[0, 1, 2], [1, 2, 0], [2, 0, 1]]
>>> Pairs.equal((3,)).offsets
((0,),)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from jaxtyping import Float, Int
from torch import Tensor

Offsets = tuple[tuple[int, ...], ...]
"""The offsets that are stored, axis by axis; all combinations of them are."""


@dataclass(frozen=True)
class Pairs:
    """Pixels pair in an image of these sizes."""

    pixels: tuple[int, ...]
    offsets: Offsets

    @classmethod
    def all(cls, pixels: Sequence[int]) -> Pairs:
        """Pair every pixel with every other."""
        return cls(tuple(pixels), tuple(tuple(range(n)) for n in pixels))

    @classmethod
    def equal(cls, pixels: Sequence[int]) -> Pairs:
        """Pair every pixel with itself."""
        return cls(tuple(pixels), ((0,),) * len(pixels))

    @property
    def count(self) -> int:
        """How many pairs are stored."""
        return prod(n * len(kept) for n, kept in zip(self.pixels, self.offsets, strict=True))

    @property
    def axes(self) -> range:
        """The image has these axes."""
        return range(len(self.pixels))

    def union(self, other: Pairs) -> Pairs:
        """The pairs that are in either, and what lies in between: offsets are stored axis by axis."""
        both = zip(self.offsets, other.offsets, strict=True)
        return Pairs(self.pixels, tuple(tuple(sorted({*one, *two})) for one, two in both))

    def common(self, other: Pairs) -> Pairs:
        """The pairs that are in both."""
        both = zip(self.offsets, other.offsets, strict=True)
        return Pairs(self.pixels, tuple(tuple(sorted({*one} & {*two})) for one, two in both))

    def second(self, axis: int) -> Int[Tensor, "offset pixel"]:
        """Find the position of the second pixel along an axis."""
        n = self.pixels[axis]
        return (torch.tensor(self.offsets[axis], dtype=torch.long)[:, None] + torch.arange(n)) % n

    def at_second(self, values: Float[Tensor, "*example"]) -> Float[Tensor, "*_"]:
        """Find the values [*example, *pixel] of the second pixel of each pair."""
        first = values.dim() - len(self.pixels)
        for axis in self.axes:
            index, place = self.second(axis).to(values.device), first + 2 * axis
            picked = values.index_select(place, index.flatten())
            values = picked.view(*values.shape[:place], *index.shape, *values.shape[place + 1 :])
        return values

    def diagonal(self, values: Float[Tensor, "*example"]) -> Float[Tensor, "*_"]:
        """Find the values of equal pixels, [*example, *pixel]."""
        first = values.dim() - 2 * len(self.pixels)
        for axis in self.axes:
            values = values.select(first + axis, self.offsets[axis].index(0))
        return values

    def with_diagonal(self, values: Tensor, diagonal: Tensor) -> Tensor:
        """These values, with others in the place of equal pixels."""
        if not self.axes:
            return diagonal
        if all(kept == (0,) for kept in self.offsets):
            return diagonal.reshape(values.shape)
        equal = torch.ones((), dtype=torch.bool, device=values.device)
        for axis, kept in enumerate(self.offsets):
            zero = torch.tensor(kept, device=values.device) == 0
            equal = equal & zero.view(-1, *(1,) * (2 * (len(self.pixels) - axis) - 1))
        return torch.where(equal, self.spread(diagonal), values)

    def spread(self, diagonal: Tensor) -> Tensor:
        """Spread values [*example, *pixel] of the first pixel of each pair, to be broadcast over offsets."""
        first = diagonal.dim() - len(self.pixels)
        for axis in self.axes:
            diagonal = diagonal.unsqueeze(first + 2 * axis)
        return diagonal

    def kept(self, values: Tensor, wanted: Pairs) -> Tensor:
        """Keep the part of values that belongs to some of the pairs."""
        first = values.dim() - 2 * len(self.pixels)
        for axis, (here, there) in enumerate(zip(self.offsets, wanted.offsets, strict=True)):
            if here != there:
                index = torch.tensor([here.index(o) for o in there], device=values.device)
                values = values.index_select(first + 2 * axis, index)
        return values
