"""Pairs of pixels (p, p + o) stored by offset o, linear maps between pairs, and the
operations of the fused engine.

A tensor over pairs has the axes [*example, o₁, p₁, o₂, p₂, …], with an offset and a
pixel for each axis of the image. The second pixel of a pair is (p + o) mod n, so that n
offsets give all n² pairs of an axis with n pixels. A convolution shifts both pixels of
a pair by the same amount, so it never changes the offset. After the last layer with
pixels, a tensor has only the axes of the examples.

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
    """Pixel pairs of an image: all pixels, with all combinations
    of the offsets along each axis."""

    pixels: tuple[int, ...]
    offsets: tuple[tuple[int, ...], ...]

    @classmethod
    def all(cls, pixels: Sequence[int]) -> Pairs:
        """Pair every pixel with every pixel."""
        return cls(tuple(pixels), tuple(tuple(range(n)) for n in pixels))

    @classmethod
    def equal(cls, pixels: Sequence[int]) -> Pairs:
        """Pair every pixel with itself."""
        return cls(tuple(pixels), ((0,),) * len(pixels))

    @property
    def count(self) -> int:
        return prod(self.pixels) * prod(map(len, self.offsets))

    def union(self, other: Pairs) -> Pairs:
        """Return pairs with the union of the offsets along each axis."""
        both = zip(self.offsets, other.offsets, strict=True)
        offsets = tuple(tuple(sorted({*one, *two})) for one, two in both)
        return Pairs(self.pixels, offsets)

    def common(self, other: Pairs) -> Pairs:
        both = zip(self.offsets, other.offsets, strict=True)
        offsets = tuple(tuple(sorted({*one} & {*two})) for one, two in both)
        return Pairs(self.pixels, offsets)

    def second(self, axis: int) -> Int[Tensor, "offset pixel"]:
        """Return the index of the second pixel of each pair along an axis."""
        n = self.pixels[axis]
        offsets = torch.tensor(self.offsets[axis], dtype=torch.long)
        return (offsets[:, None] + torch.arange(n)) % n

    def at_second(self, values: Float[Tensor, "*example"]) -> Float[Tensor, "*_"]:
        """Return the values [*example, *pixel] at the second pixel of each pair."""
        first = values.dim() - len(self.pixels)
        for axis in range(len(self.pixels)):
            dim = first + 2 * axis
            index = self.second(axis).to(values.device)
            picked = values.index_select(dim, index.flatten())
            values = torch.unflatten(picked, dim, index.shape)
        return values

    def diagonal(self, values: Float[Tensor, "*example"]) -> Float[Tensor, "*_"]:
        """Return the values of the pairs of equal pixels, [*example, *pixel]."""
        first = values.dim() - 2 * len(self.pixels)
        for axis in range(len(self.pixels)):
            values = values.select(first + axis, self.offsets[axis].index(0))
        return values

    def with_diagonal(self, values: Tensor, diagonal: Tensor) -> Tensor:
        """Replace the values of the pairs of equal pixels."""
        if not self.pixels:
            return diagonal
        if all(offsets == (0,) for offsets in self.offsets):
            return diagonal.reshape(values.shape)
        is_equal = torch.ones((), dtype=torch.bool, device=values.device)
        for axis, offsets in enumerate(self.offsets):
            is_zero = torch.tensor(offsets, device=values.device) == 0
            later_axes = 2 * (len(self.pixels) - axis) - 1
            is_equal = is_equal & is_zero.view(-1, *(1,) * later_axes)
        return torch.where(is_equal, self.at_first(diagonal), values)

    def at_first(self, diagonal: Tensor) -> Tensor:
        """Return the values [*example, *pixel] at the first pixel of each pair,
        broadcastable over offsets."""
        first = diagonal.dim() - len(self.pixels)
        for axis in range(len(self.pixels)):
            diagonal = diagonal.unsqueeze(first + 2 * axis)
        return diagonal

    def matrix_indices(self) -> Int[Tensor, "first second"]:
        """Return the index of each pair (p, q) in the flattened axes of pairs. Raise
        unless all pairs are present."""
        count = prod(self.pixels)
        if self.count != count**2:
            raise ValueError(f"these are {self.count} of {count**2} pairs")
        index = torch.zeros((), dtype=torch.long)
        for axis, n in enumerate(self.pixels):
            first = torch.arange(n)[:, None]
            second = torch.arange(n)
            index_on_axis = (second - first) % n * n + first  # [p, q]
            shape = [1] * len(self.pixels)
            shape[axis] = n
            index = index * n**2 + index_on_axis.reshape(*shape, *shape)
        return index.reshape(count, count)

    def as_matrix(self, values: Tensor) -> Float[Tensor, "*example first second"]:
        """Return the values of all pairs as a matrix.

        >>> Pairs.all((2,)).as_matrix(torch.tensor([[1.0, 2.0], [3.0, 4.0]])).tolist()
        [[1.0, 3.0], [4.0, 2.0]]
        """
        first = values.dim() - 2 * len(self.pixels)
        return values.flatten(first)[..., self.matrix_indices().to(values.device)]

    def from_matrix(self, matrix: Float[Tensor, "*example first second"]) -> Tensor:
        """Invert `as_matrix`."""
        order = self.matrix_indices().flatten().argsort().to(matrix.device)
        stored = matrix.flatten(-2)[..., order]
        shape = list(stored.shape[:-1])
        for n in self.pixels:
            shape += [n, n]
        return stored.view(shape)

    def restrict(self, values: Tensor, wanted: Pairs) -> Tensor:
        """Select the values of the pairs `wanted`, a subset of the pairs."""
        first = values.dim() - 2 * len(self.pixels)
        for axis, stored in enumerate(self.offsets):
            if stored != wanted.offsets[axis]:
                index = [stored.index(offset) for offset in wanted.offsets[axis]]
                places = torch.tensor(index, device=values.device)
                values = values.index_select(first + 2 * axis, places)
        return values


# --- Means over windows
#
# A window shifts both pixels of a pair equally. Outside the image, values are zero, or
# repeat periodically if `circular`.


def window_mean(
    values: Tensor, pairs: Pairs, windows: Iterable[int], circular: bool
) -> Tensor:
    """Return the mean over a window, mean_δ value[p + δ, q + δ], for every pair (p, q).

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
        dim = first + 2 * axis
        values = window_sum(values, pairs, axis, dim, window // 2, circular)
    return values / prod(windows)


def window_sum(
    values: Tensor, pairs: Pairs, axis: int, dim: int, reach: int, circular: bool
) -> Tensor:
    """Return Σ_δ value[p + δ, p + o + δ] over |δ| ≤ reach, along one axis."""
    n = pairs.pixels[axis]
    if circular:
        shifts = [shift for shift in range(-reach, reach + 1) if shift]
        return sum((values.roll(-shift, dim + 1) for shift in shifts), start=values)
    total = values.clone()
    second = pairs.second(axis).to(values.device)
    reach = min(reach, n - 1)
    for shift in range(-reach, reach + 1):
        if not shift:
            continue
        start = max(0, -shift)
        length = n - abs(shift)
        target = total.narrow(dim + 1, start, length)
        shifted = values.narrow(dim + 1, max(0, shift), length)
        if pairs.offsets[axis] == (0,):  # both pixels are inside the image
            target += shifted
            continue
        shifted_second = second.narrow(1, start, length) + shift
        is_inside = (shifted_second >= 0) & (shifted_second < n)
        inside = is_inside.to(values.dtype)
        later_axes = values.dim() - dim - 2
        target.addcmul_(shifted, inside.view(*inside.shape, *(1,) * later_axes))
    return total


# --- Linear maps between pixels: averages, samples, and the trace of a covariance


class AbstractPixelMap(ABC):
    """A linear map along one image axis. It maps values at pairs of input pixels (fine)
    to values at pairs of output pixels (new)."""

    members: tuple[tuple[int, ...], ...]
    """The input (fine) pixels of each output (new) pixel."""

    @abstractmethod
    def matched(self, shift: int) -> list[list[tuple[int, int]]]:
        """Return, for each new pixel p, the pairs of fine pixels that contribute to the
        pair (p, q), where q is `shift` pixels after p in periodic order.

        Pixels outside the image are −1.
        """

    def fine(self, shift: int, pixels: int) -> set[int]:
        """Return the fine offsets of all fine pairs that contribute
        at the new offset `shift`."""
        offsets: set[int] = set()
        for row in self.matched(shift):
            offsets |= {(q - p) % pixels for p, q in row if p >= 0 and q >= 0}
        return offsets

    def needed(self, offsets: Sequence[int], pixels: int) -> tuple[int, ...]:
        """Return the fine offsets that are needed for these new offsets."""
        needed: set[int] = set()
        for shift in offsets:
            needed |= self.fine(shift, pixels)
        return tuple(sorted(needed))

    def table(self, pairs: Pairs, axis: int, shift: int) -> Tensor:
        """Return, for each new pixel, the indices of the fine pairs that contribute at
        the new offset `shift`, as an array [new pixel, fine pair].

        An index counts along the flattened axes (offset, pixel). A pair outside the
        image gets the index after the last pair.
        """
        n = pairs.pixels[axis]
        index = {offset: k for k, offset in enumerate(pairs.offsets[axis])}
        outside = n * len(index)
        rows: list[list[int]] = []
        for row in self.matched(shift):
            places = [outside] * len(row)
            for k, (p, q) in enumerate(row):
                if p >= 0 and q >= 0:
                    places[k] = index[(q - p) % n] * n + p
            rows.append(places)
        return torch.tensor(rows)

    def reached(self, offsets: Sequence[int], pixels: int) -> tuple[int, ...]:
        """Return the new offsets that can be computed from these fine offsets."""
        available = set(offsets)
        shifts = range(len(self.members))
        return tuple(shift for shift in shifts if self.fine(shift, pixels) <= available)


@dataclass(frozen=True)
class Coarse(AbstractPixelMap):
    """A map that averages the fine pixels `members` of each coarse pixel along one
    axis.

    For pooling and strides, the mean is over all pairs (p, q) of members. For
    flattening (`equal`), it is only over pairs at equal positions in the window.

        K′[p′, q′] = mean K[p, q],   p a member of p′, q of q′

    >>> Coarse(((0, 1), (2, 3))).table(Pairs.all((4,)), 0, shift=0).tolist()
    [[0, 4, 13, 1], [2, 6, 15, 3]]
    """

    members: tuple[tuple[int, ...], ...]
    equal: bool = False

    @classmethod
    def windows(cls, pixels: int, window: int) -> Coarse:
        """Average over consecutive windows. Pixels
        that do not fill the last window are dropped."""
        starts = range(0, pixels - window + 1, window)
        return cls(tuple(tuple(range(start, start + window)) for start in starts))

    @classmethod
    def strided(cls, pixels: int, stride: int, margin: int = 0) -> Coarse:
        """Select every `stride`-th pixel between the margins."""
        return cls(tuple((p,) for p in range(margin, pixels - margin, stride)))

    @classmethod
    def one(cls, pixels: int, equal: bool) -> Coarse:
        """Average all pixels."""
        return cls((tuple(range(pixels)),), equal)

    def is_identity(self, pixels: int) -> bool:
        return self.members == tuple((p,) for p in range(pixels))

    @property
    def is_disjoint(self) -> bool:
        """True if the pooling windows do not overlap, and the map averages all pairs
        (p, q), not only pairs at equal window positions."""
        pixels = [p for members in self.members for p in members]
        return not self.equal and len(set(pixels)) == len(pixels)

    def matched(self, shift: int) -> list[list[tuple[int, int]]]:
        """Return, for each coarse pixel p, the pairs of fine pixels over which the
        kernel of (p, q) is averaged. The coarse pixel q is `shift` pixels after p, in
        periodic order."""
        count = len(self.members)
        matches: list[list[tuple[int, int]]] = []
        for pixel, first in enumerate(self.members):
            second = self.members[(pixel + shift) % count]
            if self.equal:
                matches.append(list(zip(first, second, strict=True)))
            else:
                matches.append([(p, q) for p in first for q in second])
        return matches

    def needed(self, offsets: Sequence[int], pixels: int) -> tuple[int, ...]:
        if self.is_identity(pixels):
            return tuple(offsets)
        return super().needed(offsets, pixels)


@dataclass(frozen=True)
class Taps(AbstractPixelMap):
    """A map that sums over the weights k of a window. For every output pixel, `members`
    lists the input (fine) pixel p_k that each weight k multiplies, or −1 if p_k is
    outside the image.

        K′[p′, q′] = Σ_k K[p_k(p′), p_k(q′)] / |window|

    The sum omits weights k where p_k(p′) or p_k(q′) is outside the image.

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
        """Return the taps of a convolution: p_k = p · stride + k · dilation − padding
        for output pixel p and weight k."""
        count = (pixels + 2 * padding - dilation * (window - 1) - 1) // stride + 1
        rows: list[tuple[int, ...]] = []
        for p in range(count):
            fine = [p * stride + k * dilation - padding for k in range(window)]
            rows.append(tuple(pixel if 0 <= pixel < pixels else -1 for pixel in fine))
        return cls(tuple(rows))

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
        """Return the taps of a transposed convolution: p_k = (p + padding − k ·
        dilation)/stride for output pixel p and weight k."""
        count = (
            (pixels - 1) * stride
            + dilation * (window - 1)
            + 1
            - 2 * padding
            + output_padding
        )
        rows: list[tuple[int, ...]] = []
        for p in range(count):
            row = [-1] * window
            for k in range(window):
                pixel, remainder = divmod(p + padding - k * dilation, stride)
                if remainder == 0 and 0 <= pixel < pixels:
                    row[k] = pixel
            rows.append(tuple(row))
        return cls(tuple(rows))

    def matched(self, shift: int) -> list[list[tuple[int, int]]]:
        """Return, for each output pixel p and weight k, the input pixels (p_k, q_k).
        The output pixel q is `shift` pixels after p, in periodic order."""
        count = len(self.members)
        return [
            list(zip(first, self.members[(pixel + shift) % count], strict=True))
            for pixel, first in enumerate(self.members)
        ]

    def needed(self, offsets: Sequence[int], pixels: int) -> tuple[int, ...]:
        # Always include offset 0. Otherwise,
        # no offset would be left if no fine pairs contribute.
        return tuple(sorted({0, *super().needed(offsets, pixels)}))


def tap_mean(values: Tensor, pairs: Pairs, taps: Sequence[Taps]) -> Tensor:
    """Apply `Taps` axis by axis: sum over the weights of a window,
    and divide by their number.

    >>> pairs = Pairs.all((2,))
    >>> taps = Taps.convolution(2, window=2, stride=1, padding=1, dilation=1)
    >>> tap_mean(torch.ones(2, 2), pairs, [taps]) * 2
    tensor([[1., 2., 1.],
            [1., 1., 0.],
            [0., 1., 1.]])
    """
    after = pairs_after(taps, pairs)
    for axis, one in enumerate(taps):
        # axis of the offsets; pixels follow
        dim = values.dim() - 2 * (len(taps) - axis)
        lead = values.shape[:dim]
        rest = values.shape[dim + 2 :]
        # Append a zero, which is the value of pairs outside the image.
        flat = values.flatten(dim, dim + 1)
        flat = torch.cat([flat, flat.new_zeros(*lead, 1, *rest)], dim)
        tables = stacked_tables(one, pairs, axis, after).to(values.device)
        columns = tables.flatten(0, 1).t()
        total = flat.index_select(dim, columns[0])
        for column in columns[1:]:
            total = total + flat.index_select(dim, column)
        values = (total / len(columns)).view(*lead, *tables.shape[:2], *rest)
    return values


def stacked_tables(
    one: AbstractPixelMap, pairs: Pairs, axis: int, after: Pairs
) -> Tensor:
    """Stack the tables (`AbstractPixelMap.table`) of all new offsets along an axis,
    [new offset, new pixel, pair].

    They hold the indices of the old pairs over which each new pair is averaged."""
    return torch.stack([one.table(pairs, axis, shift) for shift in after.offsets[axis]])


def pairs_before(
    coarse: Sequence[AbstractPixelMap], wanted: Pairs, pixels: Sequence[int]
) -> Pairs:
    """Return the input pairs that a map needs in order
    to compute the pairs `wanted`."""
    axes = zip(coarse, wanted.offsets, pixels, strict=True)
    offsets = tuple(one.needed(wanted_offsets, n) for one, wanted_offsets, n in axes)
    return Pairs(tuple(pixels), offsets)


def pairs_after(coarse: Sequence[AbstractPixelMap], pairs: Pairs) -> Pairs:
    """Return the pairs that a map can compute from the given pairs."""
    axes = zip(coarse, pairs.offsets, pairs.pixels, strict=True)
    offsets = tuple(one.reached(before, n) for one, before, n in axes)
    pixels = tuple(len(one.members) for one in coarse)
    return Pairs(pixels, offsets)


def average_pixels(values: Tensor, pairs: Pairs, coarse: Sequence[Coarse]) -> Tensor:
    """Average over the pixels that each coarse pixel covers (see `Coarse`),
    axis by axis."""
    after = pairs_after(coarse, pairs)
    for axis, one in enumerate(coarse):
        # axis of the offsets; pixels follow
        dim = values.dim() - 2 * (len(coarse) - axis)
        lead = values.shape[:dim]
        rest = values.shape[dim + 2 :]
        # without offsets, no later layer needs a pair of pixels on this axis
        if not after.offsets[axis]:
            values = values.new_empty(*lead, 0, len(one.members), *rest)
            continue
        if one.is_identity(pairs.pixels[axis]):
            continue
        tables = stacked_tables(one, pairs, axis, after).to(values.device)
        flat = values.flatten(dim, dim + 1)
        columns = tables.flatten(0, 1).t()  # [averaged pair, coarse offset and pixel]
        if len(columns) > columns.shape[1]:  # few means over many pairs of pixels
            picked = flat.index_select(dim, columns.t().flatten())
            mean = torch.unflatten(picked, dim, (-1, len(columns))).mean(dim + 1)
        else:
            mean = flat.index_select(dim, columns[0])
            for column in columns[1:]:
                mean = mean + flat.index_select(dim, column)
            mean = mean / len(columns)
        values = mean.view(*lead, *tables.shape[:2], *rest)
    return values


MAX_KERNEL_ERROR = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Largest accepted relative error of a kernel due to rounding."""


class Unresolved(Mistake):
    """Raised if cancellation leaves too few digits
    of the kernel between nearly equal inputs."""


def require_resolved(
    layer: str, q: Float[Tensor, "..."], squared_frequency: float = 1.0
) -> Float[Tensor, "..."]:
    """Return the variances, or raise `Unresolved` if they are too large
    for an accurate kernel.

    Let q₁ and q₂ be the variances, and c the covariance. The kernels of erf and GELU
    depend on q₁q₂ − c², relative to 1 + 2q or 1 + q. The kernel of a wave depends on
    (q₁ + q₂)/2 − c, relative to 1/b². For nearly equal inputs, the rounding error of
    these differences is about q² eps or q eps. So the relative error of the kernel is
    about b²q eps, with b = 1 for erf and GELU. A kernel that is computed from distances
    does not have this error.

    >>> require_resolved("Erf", torch.tensor([1e12], dtype=torch.float64))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ntkexp.covariance.pairs.Unresolved: Erf: variance 1e+12 is too large for float64 to tell near neighbours apart...
    """
    largest = float(q.detach().max()) if q.numel() else 0.0
    error = squared_frequency * largest * torch.finfo(q.dtype).eps
    if not error <= MAX_KERNEL_ERROR.get(q.dtype, MAX_KERNEL_ERROR[torch.float32]):
        dtype = str(q.dtype).removeprefix("torch.")
        advice = "; or compute in float64" if q.dtype != torch.float64 else ""
        digits = max(0, floor(-log10(error))) if isfinite(error) else 0
        raise Unresolved(
            f"{layer}: variance {largest:.3g} is too large for {dtype} to tell near neighbours "
            f"apart: {digits} digits of their kernel are left; lower W_std, or scale the inputs "
            f"down{advice}"
        )
    return q


# --- Operations of the fused engine (`limit.fused`). A *band* holds K and Θ of two
# examples for one offset between their pixels. A *register* is a buffer for one band. A
# layer is a sequence of operations that transform K and Θ in a register to K′ and Θ′:
#
#     weigh    K′ = s Σ K + b,  Θ′ = s Σ Θ + α Σ K + β, Σ over a window; weights s, b, α, β
#     bend     κ and κ̇ of a bent line; constants k, h; fields √q, 1/√q
#     arc      κ and κ̇ of erf; fields 1/√(1 + 2q)
#     gate     κ and κ̇ of GELU; fields 1/√(1 + q), q
#     wave     κ and κ̇ of a sine a sin(bz + c₀); constants a²/2, b², cos 2c₀; fields b²q/2
#     series   κ and κ̇ as power series in the correlation; constants: lowest power, increment;
#              fields 1/√q, E σ, coefficients of σ′
#     norm     division by √((q₁ + ε)(q₂ + ε)); fields 1/√(q + ε)
#     copy     copy a register into another
#     add      add another register to this one
#     clear    set pixels outside the image to zero, before a window reads them
#     wrap     fill pixels outside the image with copies from its other side
#     coarsen  average or sample pixels, which leaves a smaller image
#
# κ and κ̇ are the kernels of an activation (see `AbstractPointwise`), with K′ = κ and
# Θ′ = κ̇Θ. A *field* is a function of the variance q at each pixel of an example. Fields
# are computed once per example, before the loops over pairs.


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
"""Operations that leave zeros at all pixels outside the image."""


@dataclass(frozen=True)
class Operation:
    """An operation on the band in a register (see the list above)."""

    kind: int
    register: int
    other: int = 0
    reach: tuple[int, int, int] = (0, 0, 0)
    """Reach of the window along planes, rows and columns."""
    weights: tuple[float, float, float, float] = (1.0, 0.0, 0.0, 0.0)
    """s, b, α and β, for K′ = s Σ K + b and Θ′ = s Σ Θ + α Σ K + β."""
    constants: tuple[float, ...] = ()
    """At most three constants of the operation, as listed above."""
    fields_of: Callable[[Tensor], tuple[Tensor, ...]] | None = None
    """The function from the variance q to the fields. Outside the image, the fields are
    set to zero."""
    variance_index: int = 0
    """The index into the variances: the number of earlier operations with
    `fields_of`."""
    coarse: tuple[Coarse, ...] = ()
    """The averages of COARSEN along planes, rows and columns."""


Operations = tuple[Operation, ...]


class NoFusedForm(Exception):
    """Raised if a layer has no fused form for this shape of examples.
    The message names the layer."""


def weigh(
    register: int,
    scale: float,
    shift: float = 0.0,
    learned: tuple[float, float] = (0.0, 0.0),
    reach: tuple[int, int, int] = (0, 0, 0),
) -> Operation:
    """Return the operation WEIGH of an affine layer:

        K′ = s Σ K + b,    Θ′ = s Σ Θ + α Σ K + β

    Σ sums over a window. `scale` is s, `shift` is b, and `learned` is (α, β).

    >>> weigh(0, scale=0.25).weights
    (0.25, 0.0, 0.0, 0.0)
    """
    return Operation(WEIGH, register, reach=reach, weights=(scale, shift, *learned))


def coarsen(register: int, coarse: Sequence[Coarse]) -> Operation:
    """Return an operation that averages or samples pixels along at most three axes
    (COARSEN). Raise `NoFusedForm` if windows overlap."""
    if not all(one.is_disjoint for one in coarse):
        raise NoFusedForm("a mean over windows that overlap")
    missing = (Coarse.strided(1, 1),) * (3 - len(coarse))
    return Operation(COARSEN, register, coarse=(*missing, *coarse))


def root_and_inverse(q: Tensor) -> tuple[Tensor, Tensor]:
    """Return √q and 1/√q. Both are 0 for q = 0."""
    root = q.sqrt()
    return root, torch.where(root > 0, 1 / root, 0.0)
