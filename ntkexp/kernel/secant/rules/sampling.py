"""Difference rules for sampling a picture x at the places of a grid
(`torch.nn.functional.grid_sample`). Both the picture and the places may change in the
step.

With linear interpolation, the number sampled at a place p is a weighted sum over pixels
j. The weight w_j is a product of hat functions h, one for each axis k:

    y = Σ_j w_j x_j        w_j = Π_k h(p_k − j_k)        h(u) = max(0, 1 − |u|)

The difference follows from the product rule, and from the slope of relu:

    Δy = Σ_j w̄_j Δx_j + Σ_j x̄_j Δw_j
    h(u) = relu(u + 1) − 2 relu(u) + relu(u − 1)

Sampling the nearest pixel is a choice: the rule raises ChoiceChanged if the step changes
this pixel.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from itertools import product

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ntkexp.kernel.secant.call import (
    Call,
    ChoiceChanged,
    Ends,
    NoRule,
    Result,
    Rule,
    sum_terms,
)
from ntkexp.kernel.secant.rules.elementwise import quotient, relu

LINEAR_MODE = 0
NEAREST_MODE = 1
BORDER_PADDING = 1
REFLECTION_PADDING = 2


def sampled(call: Call) -> Result:
    picture, grid, mode, padding, corners = call.args
    if mode not in (LINEAR_MODE, NEAREST_MODE):
        return cubic(call)
    # the last axis of the picture is the first coordinate of the grid
    sizes = picture.start.shape[2:]
    places = [grid[..., k] for k in reversed(range(len(sizes)))]
    scales = [PixelScale(call, size, padding, corners) for size in sizes]
    pixels = [
        Ends(scale.pixel(place.start), scale.pixel(place.end), None)
        for scale, place in zip(scales, places, strict=True)
    ]
    if mode == NEAREST_MODE:
        return interpolated(call, [[nearest(pixel)] for pixel in pixels], [])
    changes = []
    if grid.delta is not None:
        change = call.delta(grid).unbind(-1)[::-1]
        changes = [
            call.slope(place, scale.slope) * delta
            for place, scale, delta in zip(places, scales, change, strict=True)
        ]
    return interpolated(call, [hats(pixel) for pixel in pixels], changes)


def cubic(call: Call) -> Result:
    """Return the difference of a picture that is sampled at fixed places
    by cubic interpolation."""
    picture, grid, *how = call.args
    if grid.delta is not None:
        raise NoRule(
            "cubic interpolation at places that change has no difference rule; use mode='bilinear'"
        )
    delta = call.delta(picture)
    result: Tensor = call.entry.op(delta, grid.start.to(delta.dtype), *how)
    return result


@dataclass(frozen=True)
class PixelScale:
    """The map from a coordinate in [−1, 1] to a place in pixels,
    along one axis of a picture."""

    call: Call
    size: int
    padding: int
    # True if ±1 are the centres of the outer pixels, False if they are the edges
    corners: bool

    def pixel(self, z: Tensor) -> Tensor:
        """Return the place of a coordinate in pixels. With border or reflection
        padding, move the place into the picture."""
        p = self.unpadded(z)
        if self.padding == REFLECTION_PADDING:
            p = self.reflected(p)[0]
        if self.padding in (BORDER_PADDING, REFLECTION_PADDING):
            p = p.clamp(0, self.size - 1)
        return p

    def slope(self, z0: Tensor, z1: Tensor) -> Tensor:
        """Return the slope of `pixel`, by the chain rule."""
        scale = torch.full_like(z0, (self.size - 1 if self.corners else self.size) / 2)
        if self.padding not in (BORDER_PADDING, REFLECTION_PADDING):
            return scale
        if self.size == 1:
            return torch.zeros_like(z0)
        p0 = self.unpadded(z0)
        p1 = self.unpadded(z1)
        if self.padding == REFLECTION_PADDING:
            r0, sign, piece = self.reflected(p0)
            r1, _, other_piece = self.reflected(p1)
            scale = scale * torch.where(
                piece == other_piece, sign, quotient(r1 - r0, p1 - p0, sign)
            )
            p0 = r0
            p1 = r1
        # clamp(p, 0, n) = relu(p) − relu(p − n). As in torch, the derivative is 0 at
        # both bounds.
        last = self.size - 1
        return scale * (relu(p0, p1) - right(p0 - last, p1 - last))

    def unpadded(self, z: Tensor) -> Tensor:
        """Return the place of a coordinate. Round as torch does, because rounding
        decides the side of the kink at the centre of a pixel."""
        is_vectorized = (
            z.device.type == "cpu" and self.call.entry.name == "grid_sampler_2d"
        )
        if self.corners:
            factor = (self.size - 1) / 2
            return (z + 1) * factor if is_vectorized else (z + 1) / 2 * (self.size - 1)
        if is_vectorized:
            return (z + 1) * (self.size / 2) - 0.5
        return ((z + 1) * self.size - 1) / 2

    def reflected(self, p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return a coordinate after reflection at the borders of the picture.

        Also return the slope of the reflection at p (1 or −1), and the index of the
        linear piece that contains the coordinate."""
        low = 0.0 if self.corners else -0.5
        span = float(self.size - 1 if self.corners else self.size)
        if span == 0:
            return torch.zeros_like(p), torch.zeros_like(p), torch.zeros_like(p)
        distance = (p - low).abs()
        turns = (distance / span).floor()
        rest = distance.fmod(span)
        is_even = turns % 2 == 0
        is_left = p < low
        place = torch.where(is_even, rest, span - rest) + low
        sign = torch.where(is_even == is_left, -1.0, 1.0).to(p.dtype)
        return place, sign, torch.where(is_left, -1 - turns, turns)


def right(z0: Tensor, z1: Tensor) -> Tensor:
    """Return the slope of relu, and 1 if both ends are zero."""
    return torch.where((z0 == 0) & (z1 == 0), 1.0, relu(z0, z1))


@dataclass(frozen=True)
class PixelWeight:
    """The weight w_j of a pixel at both ends of the step, and its slope in each
    coordinate of the place."""

    # the index of the pixel along each axis
    pixels: tuple[Int[Tensor, " example *places"], ...]
    start: Float[Tensor, " example *places"]
    end: Float[Tensor, " example *places"]
    slopes: tuple[Float[Tensor, " example *places"], ...]

    def times(self, other: PixelWeight) -> PixelWeight:
        """Return the product, by the product rule Δ(ab) = Δa·b̄ + ā·Δb."""
        mean = (self.start + self.end) / 2
        other_mean = (other.start + other.end) / 2
        return PixelWeight(
            self.pixels + other.pixels,
            self.start * other.start,
            self.end * other.end,
            (
                *(slope * other_mean for slope in self.slopes),
                *(mean * slope for slope in other.slopes),
            ),
        )


def hats(place: Ends) -> list[PixelWeight]:
    """Return the pixels around a place at both ends, along one axis,
    and their weights."""
    p0 = place.start
    p1 = place.end
    before = p0.floor()
    after = p1.floor()
    neighbours = [before, before + 1]
    counted = [torch.ones_like(before, dtype=torch.bool)] * 2
    if not torch.equal(before, after):
        for pixel in (after, after + 1):
            neighbours.append(pixel)
            counted.append((pixel != before) & (pixel != before + 1))
    weights = []
    for pixel, is_new in zip(neighbours, counted, strict=True):
        u0 = p0 - pixel
        u1 = p1 - pixel
        # A pixel at distance u has the weight max(0, 1 − |u|), which is
        # relu(u + 1) − 2 relu(u) + relu(u − 1)
        slope = right(u0 + 1, u1 + 1) - 2 * right(u0, u1) + right(u0 - 1, u1 - 1)
        start, end = (torch.relu(1 - u.abs()) for u in (u0, u1))
        weights.append(
            PixelWeight(
                (pixel.long(),), start * is_new, end * is_new, (slope * is_new,)
            )
        )
    return weights


def nearest(place: Ends) -> PixelWeight:
    """Return the pixel nearest to a place, along one axis.
    Raise ChoiceChanged if it changes."""
    pixel = place.start.round()
    if not torch.equal(pixel, place.end.round()):
        raise ChoiceChanged("the nearest pixel changes between the ends of a step")
    whole = torch.ones_like(pixel)
    return PixelWeight((pixel.long(),), whole, whole, ())


def interpolated(
    call: Call, axes: list[list[PixelWeight]], changes: list[Tensor]
) -> Tensor:
    """Return Σ_j w̄_j Δx_j + Σ_j x̄_j Δw_j. `changes` are the differences of the place
    along each axis, or empty if places do not change."""
    picture = call.args[0]
    sizes = picture.start.shape[2:]
    shape = call.start.shape
    mean = call.mean(picture).flatten(2)
    delta = None if picture.delta is None else call.delta(picture).flatten(2)
    terms = []
    # in the search for owners, connect all pixels, because a changed place may read
    # other pixels
    if delta is not None and call.state.coefficient_noise is not None:
        connected = (call.coefficient(delta.detach()) * delta).sum(2)
        terms.append(connected.view(*shape[:2], *[1] * (len(shape) - 2)).expand(shape))
    gains = [mean.new_zeros(shape) for _ in changes]
    for corner in product(*axes):
        weight = reduce(PixelWeight.times, corner)
        # pixels outside of the picture are zero
        inside = torch.ones_like(weight.start, dtype=torch.bool)
        index = torch.zeros_like(weight.pixels[0])
        for pixel, size in zip(weight.pixels, sizes, strict=True):
            inside = inside & (pixel >= 0) & (pixel < size)
            index = index * size + pixel.clamp(0, size - 1)
        places = index.flatten(1)[:, None].expand(-1, shape[1], -1)
        if delta is not None:
            share = call.slope(
                Ends(weight.start, weight.end, None),
                lambda w0, w1: torch.lerp(w0, w1, 0.5),
            )
            terms.append(
                (share * inside)[:, None] * delta.gather(2, places).view(shape)
            )
        for axis in range(len(changes)):
            slope = (weight.slopes[axis] * inside)[:, None]
            gains[axis] = gains[axis] + slope * mean.gather(2, places).view(shape)
    for gain, change in zip(gains, changes, strict=True):
        terms.append(call.coefficient(gain) * change[:, None])
    return sum_terms(terms, shape) if terms else torch.zeros_like(call.start)


SAMPLING: dict[str, Rule] = dict.fromkeys(
    ("grid_sampler_2d", "grid_sampler_3d"), sampled
)
