"""Pairs of pixels (p, p + o), stored by their offset o; linear maps of functions of them; operations on tiles.

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

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import floor, isfinite, log10, prod

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ntkexp.mistake import Mistake


@dataclass(frozen=True)
class Pairs:
    """Pairs of pixels in an image of these sizes: the offsets of each axis, in all combinations."""

    pixels: tuple[int, ...]
    offsets: tuple[tuple[int, ...], ...]

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
        return prod(n * len(offsets) for n, offsets in zip(self.pixels, self.offsets, strict=True))

    def union(self, other: Pairs) -> Pairs:
        """The pairs that are in either, and what lies in between: offsets are stored axis by axis."""
        both = zip(self.offsets, other.offsets, strict=True)
        return Pairs(self.pixels, tuple(tuple(sorted({*one, *two})) for one, two in both))

    def common(self, other: Pairs) -> Pairs:
        both = zip(self.offsets, other.offsets, strict=True)
        return Pairs(self.pixels, tuple(tuple(sorted({*one} & {*two})) for one, two in both))

    def second(self, axis: int) -> Int[Tensor, "offset pixel"]:
        """Find the position of the second pixel along an axis."""
        n = self.pixels[axis]
        return (torch.tensor(self.offsets[axis], dtype=torch.long)[:, None] + torch.arange(n)) % n

    def at_second(self, values: Float[Tensor, "*example"]) -> Float[Tensor, "*_"]:
        """Find the values [*example, *pixel] of the second pixel of each pair."""
        first = values.dim() - len(self.pixels)
        for axis in range(len(self.pixels)):
            index, dim = self.second(axis).to(values.device), first + 2 * axis
            picked = values.index_select(dim, index.flatten())
            values = picked.view(*values.shape[:dim], *index.shape, *values.shape[dim + 1 :])
        return values

    def diagonal(self, values: Float[Tensor, "*example"]) -> Float[Tensor, "*_"]:
        """Find the values of equal pixels, [*example, *pixel]."""
        first = values.dim() - 2 * len(self.pixels)
        for axis in range(len(self.pixels)):
            values = values.select(first + axis, self.offsets[axis].index(0))
        return values

    def with_diagonal(self, values: Tensor, diagonal: Tensor) -> Tensor:
        """These values, with others in the place of equal pixels."""
        if not self.pixels:
            return diagonal
        if all(offsets == (0,) for offsets in self.offsets):
            return diagonal.reshape(values.shape)
        equal = torch.ones((), dtype=torch.bool, device=values.device)
        for axis, offsets in enumerate(self.offsets):
            zero = torch.tensor(offsets, device=values.device) == 0
            equal = equal & zero.view(-1, *(1,) * (2 * (len(self.pixels) - axis) - 1))
        return torch.where(equal, self.spread(diagonal), values)

    def spread(self, diagonal: Tensor) -> Tensor:
        """Spread values [*example, *pixel] of the first pixel of each pair, to be broadcast over offsets."""
        first = diagonal.dim() - len(self.pixels)
        for axis in range(len(self.pixels)):
            diagonal = diagonal.unsqueeze(first + 2 * axis)
        return diagonal

    def places(self) -> Int[Tensor, "first second"]:
        """Find the place of each pair of pixels among those that are stored, which have to be all."""
        count = prod(self.pixels)
        if self.count != count**2:
            raise ValueError(f"these are {self.count} of {count**2} pairs")
        place = torch.zeros((), dtype=torch.long)
        for axis, n in enumerate(self.pixels):
            first, second = torch.arange(n)[:, None], torch.arange(n)
            here = (second - first) % n * n + first  # [p, q], by offset and pixel of this axis
            axes = [(n if k == axis else 1) for k in range(len(self.pixels))]
            place = place * n**2 + here.reshape(*axes, *axes)
        return place.reshape(count, count)

    def as_matrix(self, values: Tensor) -> Float[Tensor, "*example first second"]:
        """Values of all pairs as a matrix.

        >>> Pairs.all((2,)).as_matrix(torch.tensor([[1.0, 2.0], [3.0, 4.0]])).tolist()
        [[1.0, 3.0], [4.0, 2.0]]
        """
        first = values.dim() - 2 * len(self.pixels)
        return values.flatten(first)[..., self.places().to(values.device)]

    def from_matrix(self, matrix: Float[Tensor, "*example first second"]) -> Tensor:
        """The inverse of `as_matrix`."""
        order = self.places().flatten().argsort().to(matrix.device)
        stored = matrix.flatten(-2)[..., order]
        return stored.view(*stored.shape[:-1], *(size for n in self.pixels for size in (n, n)))

    def restrict(self, values: Tensor, wanted: Pairs) -> Tensor:
        """The part of values that belongs to some of the pairs."""
        first = values.dim() - 2 * len(self.pixels)
        for axis, (here, there) in enumerate(zip(self.offsets, wanted.offsets, strict=True)):
            if here != there:
                index = torch.tensor([here.index(o) for o in there], device=values.device)
                values = values.index_select(first + 2 * axis, index)
        return values


# --- Means over windows in which both pixels of a pair move together; pairs that leave the image count zero, or go
# around. A window moves along one axis after the other, and changes no offset.


def window_mean(values: Tensor, pairs: Pairs, windows: Iterable[int], circular: bool) -> Tensor:
    """The mean over a window at every pair.

    >>> import torch
    >>> pairs = Pairs.all((3,))
    >>> window_mean(torch.ones(3, 3), pairs, [3], circular=False) * 3
    tensor([[2., 3., 2.],
            [2., 2., 1.],
            [1., 2., 2.]])
    """
    windows = tuple(windows)
    first = values.dim() - 2 * len(windows)
    for axis, window in enumerate(windows):
        values = window_sum(values, pairs, axis, first + 2 * axis, window // 2, circular)
    return values / prod(windows)


def window_sum(
    values: Tensor, pairs: Pairs, axis: int, dim: int, reach: int, circular: bool
) -> Tensor:
    """Σ_δ value[p + δ, p + o + δ] along one axis, |δ| ≤ reach."""
    n = pairs.pixels[axis]
    if circular:
        return sum(
            (values.roll(-shift, dim + 1) for shift in range(-reach, reach + 1) if shift),
            start=values,
        )
    total = values.clone()
    second = None if pairs.offsets[axis] == (0,) else pairs.second(axis).to(values.device)
    for shift in range(-min(reach, n - 1), min(reach, n - 1) + 1):
        start, end, length = max(0, -shift), max(0, shift), n - abs(shift)
        here, there = total.narrow(dim + 1, start, length), values.narrow(dim + 1, end, length)
        if shift and second is None:  # equal pixels leave an image together
            here += there
        elif shift and second is not None:
            moved = second[:, start : start + length] + shift
            inside = ((moved >= 0) & (moved < n)).to(values.dtype)
            here.addcmul_(there, inside.view(*inside.shape, *(1,) * (values.dim() - dim - 2)))
    return total


# --- Linear maps without weights, from fine pixels to coarse ones: averages, samples, and a covariance's trace.


class AbstractPixelMap(ABC):
    """A linear map from functions of pairs of fine pixels to functions of other pairs, along one axis of an image."""

    members: tuple[tuple[int, ...], ...]
    """The fine pixels of each pixel after it."""

    @abstractmethod
    def fine(self, shift: int, pixels: int) -> set[int]:
        """The offsets of fine pixels that a coarse offset needs."""

    @abstractmethod
    def needed(self, offsets: Sequence[int], pixels: int) -> tuple[int, ...]:
        """The fine offsets that coarse ones need."""

    def reached(self, offsets: Sequence[int], pixels: int) -> tuple[int, ...]:
        """The coarse offsets that can be had from fine ones."""
        fine_offsets = set(offsets)
        return tuple(
            shift for shift in range(len(self.members)) if self.fine(shift, pixels) <= fine_offsets
        )


@dataclass(frozen=True)
class Coarse(AbstractPixelMap):
    """The members that each coarse pixel has among the fine ones, along one axis of an image.

    A function of pairs of fine pixels goes to pairs of coarse ones by a mean, either over all pairs of members
    (pooling, of which taking a sample is a case), or over pairs of `equal` members (what an affine layer makes of a
    flattened image):

        K′[p′, q′] = mean K[p, q],   p a member of p′, q of q′

    >>> Coarse(((0, 1), (2, 3))).table(Pairs.all((4,)), 0, shift=0).tolist()
    [[0, 4, 13, 1], [2, 6, 15, 3]]
    """

    members: tuple[tuple[int, ...], ...]
    equal: bool = False

    @classmethod
    def windows(cls, pixels: int, window: int) -> Coarse:
        """The windows that do not overlap; what does not fill one is left out."""
        return cls(
            tuple(tuple(range(p * window, (p + 1) * window)) for p in range(pixels // window))
        )

    @classmethod
    def every(cls, pixels: int, stride: int, margin: int = 0) -> Coarse:
        """Keep every `stride`-th pixel, from the first within margins on both sides."""
        return cls(tuple((p,) for p in range(margin, pixels - margin, stride)))

    @classmethod
    def one(cls, pixels: int, equal: bool) -> Coarse:
        """Make the single pixel of all."""
        return cls((tuple(range(pixels)),), equal)

    def trivial(self, pixels: int) -> bool:
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
        return {(q - p) % pixels for row in self.matched(shift) for p, q in row}

    def table(self, pairs: Pairs, axis: int, shift: int) -> Tensor:
        """Find the places of the averaged pairs among those stored along an axis, [coarse pixel, averaged]."""
        n, index = pairs.pixels[axis], {o: k for k, o in enumerate(pairs.offsets[axis])}
        rows = [[index[(q - p) % n] * n + p for p, q in row] for row in self.matched(shift)]
        return torch.tensor(rows)

    def needed(self, offsets: Sequence[int], pixels: int) -> tuple[int, ...]:
        if self.trivial(pixels):
            return tuple(offsets)
        return tuple(sorted(set().union(*(self.fine(shift, pixels) for shift in offsets))))


@dataclass(frozen=True)
class Taps(AbstractPixelMap):
    """The fine pixel that each weight of a window meets, for every pixel after it along one axis; −1 outside.

        K′[p′, q′] = Σ_k K[p_k(p′), p_k(q′)] / |window|,   k being the weights whose pixels are both in the image

    >>> Taps.convolution(4, window=3, stride=2, padding=1, dilation=1).members
    ((-1, 0, 1), (1, 2, 3))
    >>> Taps.transposed(2, window=3, stride=2, padding=1, dilation=1, output_padding=1).members
    ((-1, 0, -1), (1, -1, 0), (-1, 1, -1), (-1, -1, 1))
    """

    members: tuple[tuple[int, ...], ...]

    @classmethod
    def convolution(
        cls, pixels: int, *, window: int, stride: int, padding: int, dilation: int
    ) -> Taps:
        """Pixel p after a convolution meets, by weight k, p · stride + k · dilation − padding."""
        count = (pixels + 2 * padding - dilation * (window - 1) - 1) // stride + 1
        rows = ([p * stride + k * dilation - padding for k in range(window)] for p in range(count))
        return cls(
            tuple(tuple(place if 0 <= place < pixels else -1 for place in row) for row in rows)
        )

    @classmethod
    def transposed(
        cls,
        pixels: int,
        *,
        window: int,
        stride: int,
        padding: int,
        dilation: int,
        output_padding: int,
    ) -> Taps:
        """Pixel p after a transposed convolution meets, by weight k, (p + padding − k · dilation)/stride."""
        rows = list[tuple[int, ...]]()
        for p in range(
            (pixels - 1) * stride + dilation * (window - 1) + 1 - 2 * padding + output_padding
        ):
            places = (divmod(p + padding - k * dilation, stride) for k in range(window))
            rows.append(
                tuple(place if rest == 0 and 0 <= place < pixels else -1 for place, rest in places)
            )
        return cls(tuple(rows))

    def matched(self, shift: int) -> list[list[tuple[int, int]]]:
        """The pairs of fine pixels that each weight meets, for every first pixel and one offset of the second."""
        count = len(self.members)
        return [
            list(zip(own, self.members[(p + shift) % count], strict=True))
            for p, own in enumerate(self.members)
        ]

    def fine(self, shift: int, pixels: int) -> set[int]:
        return {
            (q - p) % pixels for row in self.matched(shift) for p, q in row if p >= 0 and q >= 0
        }

    def needed(self, offsets: Sequence[int], pixels: int) -> tuple[int, ...]:
        # an offset whose pixels share no weight needs none, so that there may be none at all: keep one
        return tuple(sorted({0}.union(*(self.fine(shift, pixels) for shift in offsets))))

    def table(self, pairs: Pairs, axis: int, shift: int) -> Tensor:
        """Find the places of the pairs among those stored along an axis, [pixel, weight]; the last one is outside."""
        n, index = pairs.pixels[axis], {o: k for k, o in enumerate(pairs.offsets[axis])}
        outside = n * len(index)
        return torch.tensor(
            [
                [index[(q - p) % n] * n + p if p >= 0 and q >= 0 else outside for p, q in row]
                for row in self.matched(shift)
            ]
        )


def tap_mean(values: Tensor, pairs: Pairs, taps: Sequence[Taps]) -> Tensor:
    """The mean over the weights of a window, axis by axis.

    >>> pairs = Pairs.all((2,))
    >>> tap_mean(torch.ones(2, 2), pairs, [Taps.convolution(2, window=2, stride=1, padding=1, dilation=1)]) * 2
    tensor([[1., 2., 1.],
            [1., 1., 0.],
            [0., 1., 1.]])
    """
    after = pairs_after(taps, pairs)
    for axis, one in enumerate(taps):
        dim = values.dim() - 2 * (
            len(taps) - axis
        )  # of the offsets of this axis; its pixels come after it
        lead, rest = values.shape[:dim], values.shape[dim + 2 :]
        flat = values.flatten(dim, dim + 1)
        flat = torch.cat(
            [flat, flat.new_zeros(*lead, 1, *rest)], dim
        )  # what lies outside the image
        tables = torch.stack([one.table(pairs, axis, shift) for shift in after.offsets[axis]]).to(
            values.device
        )
        columns = tables.flatten(0, 1).t()
        total = flat.index_select(dim, columns[0])
        for column in columns[1:]:
            total = total + flat.index_select(dim, column)
        values = (total / len(columns)).view(*lead, *tables.shape[:2], *rest)
    return values


def pairs_before(coarse: Sequence[AbstractPixelMap], wanted: Pairs, pixels: Sequence[int]) -> Pairs:
    """Find the pairs before a map, of those wanted after it."""
    offsets = (
        one.needed(after, n) for one, after, n in zip(coarse, wanted.offsets, pixels, strict=True)
    )
    return Pairs(tuple(pixels), tuple(offsets))


def pairs_after(coarse: Sequence[AbstractPixelMap], pairs: Pairs) -> Pairs:
    """Find the pairs after a map."""
    each = zip(coarse, pairs.offsets, pairs.pixels, strict=True)
    offsets = tuple(one.reached(before, n) for one, before, n in each)
    return Pairs(tuple(len(one.members) for one in coarse), offsets)


def keeps_pixels(coarse: Sequence[Coarse], pairs: Pairs) -> bool:
    return all(one.trivial(n) for one, n in zip(coarse, pairs.pixels, strict=True))


def average_pixels(values: Tensor, pairs: Pairs, coarse: Sequence[Coarse]) -> Tensor:
    """Apply the map, axis by axis."""
    after = pairs_after(coarse, pairs)
    for axis, one in enumerate(coarse):
        dim = values.dim() - 2 * (
            len(coarse) - axis
        )  # of the offsets of this axis; its pixels come after it
        lead, rest = values.shape[:dim], values.shape[dim + 2 :]
        if not after.offsets[axis]:  # nothing that is needed
            values = values.new_empty(*lead, 0, len(one.members), *rest)
            continue
        if one.trivial(pairs.pixels[axis]):
            continue
        # For every coarse offset and pixel, the places of the pairs that are averaged among those that are stored.
        tables = torch.stack([one.table(pairs, axis, shift) for shift in after.offsets[axis]]).to(
            values.device
        )
        flat, columns = values.flatten(dim, dim + 1), tables.flatten(0, 1).t()
        if len(columns) > columns.shape[1]:  # a few means over many
            picked = flat.index_select(dim, columns.t().flatten())
            mean = picked.view(*lead, columns.shape[1], len(columns), *rest).mean(dim + 1)
        else:
            mean = flat.index_select(dim, columns[0])
            for column in columns[1:]:
                mean = mean + flat.index_select(dim, column)
            mean = mean / len(columns)
        values = mean.view(*lead, *tables.shape[:2], *rest)
    return values


LARGEST_ERROR = {torch.float64: 1e-9, torch.float32: 1e-4}
"""The share of a kernel that rounding may change."""


class Unresolved(Mistake):
    """The digits of a kernel between near neighbours cancel."""


def require_resolved(
    layer: str, q: Float[Tensor, "..."], squared_frequency: float = 1.0
) -> Float[Tensor, "..."]:
    """The variances at which a layer's kernel is known in their precision; others are refused.

    Of erf, GELU and waves, nearly equal inputs give what q₁q₂ − c² or (q₁ + q₂)/2 − c says beside 1 + 2q, 1 + q or
    1/b². The difference is known up to the rounding of q or q² itself: b²q eps is the error of a kernel between near
    neighbours whose distance is not known.

    >>> require_resolved("Erf", torch.tensor([1e12], dtype=torch.float64))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ntkexp.covariance.pairs.Unresolved: Erf: variance 1e+12 is too large for float64 to tell near neighbours apart...
    """
    largest = float(q.detach().max()) if q.numel() else 0.0
    error = squared_frequency * largest * torch.finfo(q.dtype).eps
    if not error <= LARGEST_ERROR.get(q.dtype, LARGEST_ERROR[torch.float32]):
        kind = str(q.dtype).removeprefix("torch.")
        longer = "; or compute in float64" if q.dtype != torch.float64 else ""
        digits = max(0, floor(-log10(error))) if isfinite(error) else 0
        raise Unresolved(
            f"{layer}: variance {largest:.3g} is too large for {kind} to tell near neighbours apart: {digits} digits "
            f"of their kernel are left; lower W_std, or scale the inputs down{longer}"
        )
    return q


# --- What can be done to a tile, K and Θ at all pixels for one offset: the words in which a layer says its fused form.
#
#     weigh    K′ = s Σ K + b,  Θ′ = s Σ Θ + α Σ K + β    Σ over a window; weights s, b, α, β; clear or wrap before it
#     bend     κ and κ̇ of a bent line                     constants k, h              ends √q, 1/√q
#     arc      κ and κ̇ of erf                                                         ends 1/√(1 + 2q)
#     gate     κ and κ̇ of GELU                                                        ends 1/√(1 + q), q
#     wave     κ and κ̇ of a sine a sin(bz + c₀)           constants a²/2, b², cos 2c₀  ends b²q/2
#     series   κ and κ̇ by powers of the correlation       constants first, step       ends 1/√q, E σ, those of σ′
#     norm     both divided by √((q₁ + ε)(q₂ + ε))                                    ends 1/√(q + ε)
#     copy     a register into another                    add      another register to this one
#     clear    zeros outside the image, for a window that looks there
#     wrap     the image itself, which goes around, outside of it
#     coarsen  means over the pixels that make up a coarse one, or samples of them: a register of fewer pixels
#
# Those that meet variances say what is to be laid out beside a tile for them: `ends`, functions of the variance at
# either end.


BEND, WEIGH, COPY, ADD, CLEAR, ARC, GATE, WAVE, NORM, WRAP, SERIES, COARSEN = range(12)
KINDS = (
    "bend",
    "weigh",
    "copy",
    "add",
    "clear",
    "arc",
    "gate",
    "wave",
    "norm",
    "wrap",
    "series",
    "coarsen",
)
CLEANING = frozenset({BEND, CLEAR, ARC, NORM, SERIES})
"""Those that leave zeros outside the image, whatever was there."""


@dataclass(frozen=True)
class Operation:
    """An operation on a register; `reach` is that of a window, deep, down and across, `weights` are s, b, α and β."""

    kind: int
    register: int
    other: int = 0
    reach: tuple[int, int, int] = (0, 0, 0)
    weights: tuple[float, float, float, float] = (1.0, 0.0, 0.0, 0.0)
    constants: tuple[float, ...] = ()  # at most three
    ends: Callable[[Tensor], tuple[Tensor, ...]] | None = (
        None  # q ↦ what is laid out, zero outside the image
    )
    met: int = 0  # how many that meet variances come before it
    coarse: tuple[Coarse, ...] = ()  # along each axis, deep, down and across


Operations = tuple[Operation, ...]


class NoFusedForm(Exception):
    """A layer has none, for examples of this shape; the message says which."""


def weigh(
    register: int,
    scale: float,
    shift: float = 0.0,
    learned: tuple[float, float] = (0.0, 0.0),
    reach: tuple[int, int, int] = (0, 0, 0),
) -> Operation:
    """Weights s and b, of which α and β are learned.

    >>> weigh(0, scale=0.25).weights
    (0.25, 0.0, 0.0, 0.0)
    """
    return Operation(WEIGH, register, reach=reach, weights=(scale, shift, *learned))


def coarsen(register: int, coarse: Sequence[Coarse]) -> Operation:
    """Another map of pixels along each of up to three axes; each pixel belongs to one coarse pixel at most."""
    if not all(one.disjoint for one in coarse):
        raise NoFusedForm("a mean over windows that overlap")
    missing = (Coarse.every(1, 1),) * (3 - len(coarse))
    return Operation(COARSEN, register, coarse=(*missing, *coarse))


def root_and_inverse(q: Tensor) -> tuple[Tensor, Tensor]:
    """The roots √q and 1/√q, zero where q is."""
    root = q.sqrt()
    return root, torch.where(root > 0, 1 / root, 0.0)
