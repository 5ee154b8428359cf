"""Linear maps without weights, from fine pixels to coarse ones: averages, samples, and a covariance's trace.

Every coarse pixel has members among the fine ones. A map carries a function of pairs of fine pixels to pairs of coarse
ones by a mean, either over all pairs of members (pooling, of which taking a sample is a case), or over pairs of equal
members (what an affine layer makes of a flattened image):

    K′[p′, q′] = mean K[p, q],   p a member of p′, q of q′

>>> Coarse(((0, 1), (2, 3))).table(Pairs.all((4,)), 0, shift=0).tolist()
[[0, 4, 13, 1], [2, 6, 15, 3]]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ntkexp.covariance.pairs import Pairs


@dataclass(frozen=True)
class Coarse:
    """Each coarse pixel has these members, along one axis of an image."""

    members: tuple[tuple[int, ...], ...]
    equal: bool = False

    @classmethod
    def windows(cls, pixels: int, window: int) -> Coarse:
        """The windows that do not overlap; what does not fill one is left out."""
        return cls(tuple(tuple(range(p * window, (p + 1) * window)) for p in range(pixels // window)))

    @classmethod
    def every(cls, pixels: int, stride: int) -> Coarse:
        """Keep the pixels at every so many, from the first."""
        return cls(tuple((p,) for p in range(0, pixels, stride)))

    @classmethod
    def one(cls, pixels: int, equal: bool) -> Coarse:
        """Make the single pixel of all."""
        return cls((tuple(range(pixels)),), equal)

    def trivial(self, pixels: int) -> bool:
        """Whether nothing is done to so many pixels."""
        return self.members == tuple((p,) for p in range(pixels))

    @property
    def disjoint(self) -> bool:
        """Whether it averages over all pairs of members, and no fine pixel is a member twice."""
        pixels = [p for members in self.members for p in members]
        return not self.equal and len(set(pixels)) == len(pixels)

    def matched(self, shift: int) -> list[list[tuple[int, int]]]:
        """The pairs of fine pixels that are averaged, for every first coarse pixel and one offset of the second."""
        count = len(self.members)
        ends = ((own, self.members[(p + shift) % count]) for p, own in enumerate(self.members))
        if self.equal:
            return [list(zip(*end, strict=True)) for end in ends]
        return [[(p, q) for p in first for q in second] for first, second in ends]

    def fine(self, shift: int, pixels: int) -> set[int]:
        """The offsets of fine pixels that a coarse offset needs."""
        return {(q - p) % pixels for row in self.matched(shift) for p, q in row}

    def table(self, pairs: Pairs, axis: int, shift: int) -> Tensor:
        """Find the places of the averaged pairs among those stored along an axis, [coarse pixel, averaged]."""
        n, place = pairs.pixels[axis], {o: k for k, o in enumerate(pairs.offsets[axis])}
        rows = [[place[(q - p) % n] * n + p for p, q in row] for row in self.matched(shift)]
        return torch.tensor(rows)

    def needed(self, offsets: Sequence[int], pixels: int) -> tuple[int, ...]:
        """The fine offsets that coarse ones need."""
        if self.trivial(pixels):
            return tuple(offsets)
        return tuple(sorted(set().union(*(self.fine(shift, pixels) for shift in offsets))))

    def reached(self, offsets: Sequence[int], pixels: int) -> tuple[int, ...]:
        """The coarse offsets that can be had from fine ones."""
        known = set(offsets)
        return tuple(shift for shift in range(len(self.members)) if self.fine(shift, pixels) <= known)


def needed(coarse: Sequence[Coarse], wanted: Pairs, pixels: Sequence[int]) -> Pairs:
    """Find the pairs before a map, of those wanted after it."""
    offsets = (one.needed(kept, n) for one, kept, n in zip(coarse, wanted.offsets, pixels, strict=True))
    return Pairs(tuple(pixels), tuple(offsets))


def reached(coarse: Sequence[Coarse], pairs: Pairs) -> Pairs:
    """Find the pairs after a map."""
    each = zip(coarse, pairs.offsets, pairs.pixels, strict=True)
    offsets = tuple(one.reached(kept, n) for one, kept, n in each)
    return Pairs(tuple(len(one.members) for one in coarse), offsets)


def trivial(coarse: Sequence[Coarse], pairs: Pairs) -> bool:
    """Whether no axis is changed."""
    return all(one.trivial(n) for one, n in zip(coarse, pairs.pixels, strict=True))


def averaged(values: Tensor, pairs: Pairs, coarse: Sequence[Coarse]) -> Tensor:
    """Apply the map, axis by axis."""
    first = values.dim() - 2 * len(coarse)
    after = reached(coarse, pairs)
    for axis, one in enumerate(coarse):
        if not after.offsets[axis]:  # nothing that is needed
            place = first + 2 * axis
            values = values.new_empty(*values.shape[:place], 0, len(one.members), *values.shape[place + 2 :])
        elif not one.trivial(pairs.pixels[axis]):
            tables = torch.stack([one.table(pairs, axis, shift) for shift in after.offsets[axis]])
            values = gathered(values, tables.to(values.device), first + 2 * axis)
    return values


def gathered(values: Tensor, tables: Tensor, place: int) -> Tensor:
    """The means over the last axis of tables of places, which count an offset and a pixel as one."""
    flat = values.flatten(place, place + 1)
    columns = tables.flatten(0, 1).t()
    before, after = values.shape[:place], values.shape[place + 2 :]
    if len(columns) > columns.shape[1]:  # a few means over many
        picked = flat.index_select(place, columns.t().flatten())
        mean = picked.view(*before, columns.shape[1], len(columns), *after).mean(place + 1)
    else:
        mean = flat.index_select(place, columns[0])
        for column in columns[1:]:
            mean = mean + flat.index_select(place, column)
        mean = mean / len(columns)
    return mean.view(*before, *tables.shape[:2], *after)
