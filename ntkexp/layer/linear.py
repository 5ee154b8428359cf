"""Layers without weights: flattening, dropout, pooling over windows,
and normalisation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Annotated, Any, ClassVar

import torch
from jaxtyping import Float
from pydantic import BeforeValidator, Field
from torch import Tensor, nn

from ntkexp.component import Count, Depth
from ntkexp.covariance.covariance import Covariance, Distances, Signal, unequal_roots
from ntkexp.covariance.pairs import (
    NORM,
    Coarse,
    Operation,
    Operations,
    Pairs,
    coarsen,
    pairs_before,
)
from ntkexp.layer.base import AbstractLayer, name_validator
from ntkexp.mistake import Mistake
from ntkexp.shapes import Shape

# --- Flattening, and the mean over an image


class Flatten(AbstractLayer):
    """A layer that flattens all axes of an example.

    At infinite width, K′ = mean_p K[p, p], and Θ′ has the same form. (The next affine
    layer computes this mean.) No activation may follow directly, because pixels may
    have different variances.

    >>> Flatten().shape((1, 8, 8))
    (64,)
    """

    averages = True

    def shape(self, shape: Shape) -> Shape:
        return (prod(shape),)

    def build(self, shape: Shape, generator: torch.Generator) -> nn.Module:
        return nn.Flatten()

    def carry(self, signal: Signal) -> Signal:
        return replace(signal, gaussian=False)

    def input_pairs(self, output_pairs: Pairs, shape: Shape) -> Pairs:
        return Pairs.equal(shape[1:])

    def push(self, covariance: Covariance, shape: Shape) -> Covariance:
        return covariance.coarse(
            [Coarse.one(n, equal=True) for n in shape[1:]]
        ).without_pixels()


class GlobalAvgPool(AbstractLayer):
    """The mean over all pixels. At infinite width, K′ = mean_pq K[p, q], and Θ′ has the
    same form.

    >>> GlobalAvgPool().shape((3, 8, 8))
    (3,)
    """

    averages = True

    def shape(self, shape: Shape) -> Shape:
        if len(shape) == 1:
            raise Mistake(
                f"GlobalAvgPool takes [channels, *pixels], and was given {list(shape)}; leave it out"
            )
        return shape[:1]

    def build(self, shape: Shape, generator: torch.Generator) -> nn.Module:
        return MeanOverPixels()

    def carry(self, signal: Signal) -> Signal:
        return signal

    def input_pairs(self, output_pairs: Pairs, shape: Shape) -> Pairs:
        return Pairs.all(shape[1:])

    def push(self, covariance: Covariance, shape: Shape) -> Covariance:
        return covariance.coarse(
            [Coarse.one(n, equal=False) for n in shape[1:]]
        ).without_pixels()


class MeanOverPixels(nn.Module):
    """A module that maps [example, channel, *pixels] to [example, channel]."""

    def forward(
        self, x: Float[Tensor, "example channel *pixels"]
    ) -> Float[Tensor, "example channel"]:
        return x.flatten(2).mean(2)


# --- Dropout


class Dropout(AbstractLayer):
    """Dropout in training mode: each element is 0 with probability `rate`,
    else divided by 1 − `rate`.

    Each example has its own random mask. At infinite width, K and Θ between a pixel of
    an example and itself are divided by 1 − `rate`. Other pairs have independent masks,
    so their kernels do not change. An example that occurs in both x₁ and x₂ counts as
    two examples with independent masks.

    >>> Dropout(rate=0.1).shape((3, 8, 8))
    (3, 8, 8)
    """

    rate: float = Field(0.5, ge=0, lt=1)

    def shape(self, shape: Shape) -> Shape:
        return shape

    def build(self, shape: Shape, generator: torch.Generator) -> nn.Module:
        return nn.Dropout(self.rate)

    def carry(self, signal: Signal) -> Signal:
        if not signal.wide:
            raise Mistake(
                "Dropout of the inputs themselves has no limit of infinite width: their channels "
                "are few, so that the random mask does not average out; put a Dense or Conv layer "
                "before it"
            )
        return replace(signal, gaussian=False)

    def push(self, covariance: Covariance, shape: Shape) -> Covariance:
        pairs = covariance.pairs
        keep = 1 - self.rate
        if any(0 not in offsets for offsets in pairs.offsets):
            # no pixel is paired with itself
            return covariance
        if covariance.ntk is not None and not covariance.same:
            # the kernels between different examples do not change, but the distances
            # do, because the variances change
            return covariance.with_distances(None)

        def divide_diagonal(values: Tensor) -> Tensor:
            if covariance.ntk is None:
                return pairs.with_diagonal(values, pairs.diagonal(values) / keep)
            of_same = values.diagonal(dim1=0, dim2=1).movedim(-1, 0)
            return covariance.replace_self_pairs(values, pairs.diagonal(of_same) / keep)

        return covariance.map(divide_diagonal)


# --- Pooling over windows. Max pooling has no known limit of infinite width.


class AbstractPool(AbstractLayer):
    """Pooling over consecutive windows that do not overlap. Pixels that do not fill a
    window are dropped."""

    modules: ClassVar[Sequence[Callable[[Any], nn.Module]]]
    """Torch's pooling modules for one, two and three axes of pixels."""
    window: Depth | tuple[Depth, ...] = 2

    def windows(self, shape: Shape) -> tuple[int, ...]:
        if isinstance(self.window, int):
            return (self.window,) * (len(shape) - 1)
        return self.window

    def shape(self, shape: Shape) -> Shape:
        windows = self.windows(shape)
        if len(shape) == 1:
            raise Mistake(
                f"a pool takes [channels, *pixels], and was given {list(shape)}; put it before "
                "the Flatten"
            )
        if len(windows) != len(shape) - 1 or not 1 <= len(windows) <= len(self.modules):
            raise Mistake(
                f"a pooling window {list(windows)} does not fit examples of shape {list(shape)}"
            )
        pixels = tuple(
            n // window for n, window in zip(shape[1:], windows, strict=True)
        )
        if 0 in pixels:
            raise Mistake(
                f"a pooling window of {self.window} does not fit into examples of shape "
                f"{list(shape)}"
            )
        return (shape[0], *pixels)

    def build(self, shape: Shape, generator: torch.Generator) -> nn.Module:
        dimensions = len(self.shape(shape)) - 1
        return self.modules[dimensions - 1](self.windows(shape))


class AvgPool(AbstractPool):
    """The mean of each window: K′[p′, q′] = mean K[p, q]
    over p in window p′ and q in window q′.

    Θ′ has the same form.

    >>> AvgPool(window=2).shape((3, 8, 7))
    (3, 4, 3)
    """

    modules = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)

    def carry(self, signal: Signal) -> Signal:
        return signal

    def coarse(self, shape: Shape) -> list[Coarse]:
        sizes = zip(shape[1:], self.windows(shape), strict=True)
        return [Coarse.windows(n, window) for n, window in sizes]

    def input_pairs(self, output_pairs: Pairs, shape: Shape) -> Pairs:
        return pairs_before(self.coarse(shape), output_pairs, shape[1:])

    def push(self, covariance: Covariance, shape: Shape) -> Covariance:
        return covariance.coarse(self.coarse(shape))

    def fused(self, shape: Shape, register: int, free: int) -> Operations:
        return (coarsen(register, self.coarse(shape)),)


class MaxPool(AbstractPool):
    """The maximum of each window.

    >>> MaxPool(window=2).shape((3, 8, 7))
    (3, 4, 3)
    """

    modules = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)


POOLINGS: dict[str, AvgPool | MaxPool | None] = {
    "none": None,
    "average": AvgPool(),
    "max": MaxPool(),
}

Pooling = Annotated[
    AvgPool | MaxPool | None, BeforeValidator(name_validator("pooling", POOLINGS))
]
"""A pooling layer, its name, or None."""


# --- Normalisation: y = c/√(mean c² + ε) with c = x − mean x,
# then a gain (initially 1) and a bias (0)
#
# Layer norm averages over the channels of each pixel; group norm averages over a group
# of channels and all pixels. Batch norm is in evaluation mode with its initial
# statistics, so that examples do not interact.


BATCH_NORMS = {
    1: nn.BatchNorm1d,
    2: nn.BatchNorm1d,
    3: nn.BatchNorm2d,
    4: nn.BatchNorm3d,
}


class AbstractNorm(AbstractLayer):
    def shape(self, shape: Shape) -> Shape:
        return shape


class LayerNorm(AbstractNorm):
    """Layer norm over channels; with `affine`, a trained gain and bias follow.

    Without gain and bias, and directly after weights, it has a limit at infinite width.
    The mean over channels vanishes, and K′ = K/√((q₁ + ε)(q₂ + ε)) with the variances
    q₁ and q₂ at the two pixels. Θ′ has the same form."""

    eps: float = Field(1e-12, gt=0)
    affine: bool = False

    def build(self, shape: Shape, generator: torch.Generator) -> nn.Module:
        return ChannelNorm(shape[0], self.eps, self.affine)

    def carry(self, signal: Signal) -> Signal:
        signal.refuse_unmixed("LayerNorm")
        if self.affine:
            raise Mistake(
                "a layer norm whose gain is trained has no known limit of infinite width; choose "
                "affine=false (norm=layer_plain in a model)"
            )
        return signal

    def input_self_pairs(self, output_pairs: Pairs | None, shape: Shape) -> Pairs:
        return output_pairs or Pairs.equal(shape[1:])

    def push(self, covariance: Covariance, shape: Shape) -> Covariance:
        entered, left, right = covariance.enter_nonlinear()
        # 1/√(q + ε) at both pixels
        first = left.broadcast((left.variance + self.eps).rsqrt())
        second = right.broadcast((right.variance + self.eps).rsqrt())
        if covariance.ntk is None:
            return replace(entered, nngp=covariance.nngp * first * second)
        factor = first * second
        after = entered.map(lambda values: values * factor)
        if covariance.distances is None:
            return after

        # Distances of u/√(q₁ + ε) and v/√(q₂ + ε)
        q1 = left.broadcast(left.variance)
        q2 = right.broadcast(right.variance)
        before = covariance.distances.at(q1, q2)
        excess = self.eps * before.excess * factor.square()  # q₁/(q₁ + ε) − q₂/(q₂ + ε)
        slack = unequal_roots(q1 * first.square(), q2 * second.square(), excess)
        near = before.near * factor
        far = before.far * factor
        return after.with_distances(Distances(near, far, slack, excess))

    def fused(self, shape: Shape, register: int, free: int) -> Operations:
        return (
            Operation(NORM, register, fields_of=lambda q: ((q + self.eps).rsqrt(),)),
        )


class ChannelNorm(nn.LayerNorm):
    """Layer norm over the channels, the first axis of an example."""

    def __init__(self, channels: int, eps: float, affine: bool) -> None:
        super().__init__(channels, eps, affine, dtype=torch.float64)

    def forward(
        self, x: Float[Tensor, "example channel *pixels"]
    ) -> Float[Tensor, "example channel *pixels"]:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class GroupNorm(AbstractNorm):
    """Group norm. The number of groups is the largest number ≤ `groups`
    that divides the channels."""

    groups: Count = 8
    eps: float = Field(1e-5, gt=0)

    def build(self, shape: Shape, generator: torch.Generator) -> nn.Module:
        channels = shape[0]
        groups = min(self.groups, channels)
        while channels % groups:
            groups -= 1
        return nn.GroupNorm(groups, channels, self.eps, dtype=torch.float64)


class BatchNorm(AbstractNorm):
    """Batch norm in evaluation mode: an affine map of each channel."""

    eps: float = Field(1e-5, gt=0)

    def build(self, shape: Shape, generator: torch.Generator) -> nn.Module:
        return BATCH_NORMS[len(shape)](shape[0], self.eps, dtype=torch.float64).eval()


NORMS: dict[str, LayerNorm | GroupNorm | BatchNorm | None] = {
    "none": None,
    "layer": LayerNorm(eps=1e-5, affine=True),
    "layer_plain": LayerNorm(eps=1e-5),
    "group": GroupNorm(),
    "batch": BatchNorm(),
}

Norm = Annotated[
    LayerNorm | GroupNorm | BatchNorm | None,
    BeforeValidator(name_validator("norm", NORMS)),
]
"""A normalisation, its name, or None."""
